"""A stage that says where it is: with the word of the moment, and through troubles."""

import asyncio
import threading
from pathlib import Path

import pytest

from blocktrain.errors import BadInput, Unreachable
from blocktrain.services import announcing
from blocktrain.services.announcing import Voice, announced
from blocktrain.services.membership import Membership, become_member
from blocktrain.terms import Digest
from blocktrain.wire import messages, owner
from blocktrain.wire.registry import Registry
from blocktrain.wire.serving import Announce, Heard, Holding, Place

from .conftest import Coordinate

SAID = Announce(
    Place("ab" * 32, "stage.example", 4000), Holding(Digest("0f" * 32), 0, 0, "fp32", "cpu"), 0, 8
)
GOOD_BYE = Announce(SAID.place, SAID.holding, 0, 8, leaving=True)


def test_who_was_silent_for_long_is_heard_again() -> None:
    registry, now = Registry(), [100.0]
    voice = Voice(lambda said: registry.hear(said, now[0]))
    for seconds in (0.0, 1.0, 60.0, 1.0):
        now[0] += seconds
        voice(SAID)
        assert registry.present(now[0]) == [SAID]
    registry = Registry()  # a coordinator that was started again
    voice(SAID)
    assert registry.present(now[0]) == [SAID]


def test_a_list_that_takes_no_word_is_no_list() -> None:
    voice = Voice(lambda said: Heard("ab" * 16, taken=False))
    with pytest.raises(Unreachable, match="takes no word"):
        voice(SAID)


def test_good_bye_is_the_last_word_though_another_is_under_way() -> None:
    registry, said, slow, go_on = Registry(), list[Announce](), threading.Event(), threading.Event()

    def say(announce: Announce) -> Heard:
        said.append(announce)
        if len(said) == 3:
            slow.set()
            assert go_on.wait(10)
        return registry.hear(announce, 100.0)

    voice = Voice(say)
    voice(SAID)
    threads = [threading.Thread(target=voice, args=[SAID])]
    threads[0].start()
    assert slow.wait(10)
    threads += [threading.Thread(target=voice, args=[each]) for each in (GOOD_BYE, SAID)]
    threads[1].start()
    go_on.set()
    threads[0].join()
    threads[1].join()
    threads[2].start()
    threads[2].join()
    assert [each.leaving for each in said] == [False, False, False, True]
    assert registry.present(100.0) == []


def of(member: Membership) -> Announce:
    return Announce(Place(member.id, "10.0.0.7", 9000), SAID.holding, 0, 8)


def test_one_token_has_so_many_stages_and_no_more(coordinate: Coordinate, tmp_path: Path) -> None:
    place = coordinate()
    place.coordinator.serving.registry.most_of_one = 2
    tokens = [place.token] * 3
    tokens += [place.link().say("v1/tokens", owner.Issue("other"), owner.Issued).token]
    a, b, c, other = (
        become_member(place.link(), token, tmp_path / str(number))
        for number, token in enumerate(tokens)
    )
    for each in (a, b):
        each.announce(of(each))
    with pytest.raises(BadInput, match="2 stages of this token"):
        c.announce(of(c))
    other.announce(of(other))
    assert {each.place.stage for each in other.stages()} == {a.id, b.id, other.id}


def test_who_serves_is_not_among_the_workers(coordinate: Coordinate, tmp_path: Path) -> None:
    place = coordinate()
    ann = become_member(place.link(), place.token, tmp_path / "ann")
    ann.announce(of(ann))
    assert place.link().ask("v1/status", owner.Status).workers == []
    ann.link.say("v1/ask", messages.Ask(ann.id, [], None), messages.Wait, messages.Assignment)
    (worker,) = place.link().ask("v1/status", owner.Status).workers
    assert worker.worker == ann.id  # it is a worker, too


def test_a_trouble_is_told_once_and_its_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcing, "EVERY", 0.001)
    told, heard, troubles = list[str](), list[Announce](), [False, True, True, True, False]

    def tell(said: Announce) -> None:
        if troubles and troubles.pop(0):
            raise Unreachable(f"Gone ({len(troubles)}); wait.")
        heard.append(said)

    leaving = False

    async def test() -> None:
        nonlocal leaving
        async with announced(tell, lambda: GOOD_BYE if leaving else SAID, told.append):
            while len(heard) < 3:
                await asyncio.sleep(0.01)
            leaving = True

    asyncio.run(test())
    assert [line.partition(":")[0] for line in told] == [
        "Not on the list of stages now, but trying again and again",
        "On the list of stages again.",
    ]
    assert heard[-1] == GOOD_BYE
