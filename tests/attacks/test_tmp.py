import time
from tests.attacks.siege import Siege
from blocktrain.wire import messages
def test_pace(siege: Siege) -> None:
    liar = siege.peer()
    for _ in range(2):
        task = liar.assignment()
        r = liar.submit(liar.update(task, seconds=5e-324, steps=2))
        print(r)
        t=time.monotonic()
        a = liar.say("ask", messages.Ask(liar.id))
        print(a.status_code, a.text[:300], time.monotonic()-t)
    t=time.monotonic()
    siege.serves_honest_workers()
    print("honest", time.monotonic()-t)

def test_traffic(siege: Siege) -> None:
    liar = siege.peer()
    liar.say("alive", messages.Alive(liar.id, messages.Traffic(2**53, 2**53)))
    from blocktrain.wire import owner
    s = siege.client().get("/v1/status")
    print(messages.decode(s.content, owner.Status).bytes_moved, len(s.content))

def test_newline(siege: Siege) -> None:
    from tests.attacks.siege import Peer
    from blocktrain.wire.signing import new_key
    p = Peer(siege, new_key())
    print(siege.client(siege.token).post("/v1/join", content=p.join_body(name="evil\n")).status_code)
