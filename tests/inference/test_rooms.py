"""The texts that a stage remembers: bounded, and shared fairly."""

from hypothesis import given
from hypothesis import strategies as st

from blocktrain.inference.rooms import STALE, Room, Rooms
from blocktrain.inference.turns import Path


def take(rooms: Rooms[str], path: Path, now: float = 0.0) -> Room[str] | None:
    """What a stage does when a new text comes."""
    if not rooms.free and (other := rooms.give_way(path, now)):
        rooms.end(other.path)
    return rooms.open(path, lambda: "memory", now)


def test_a_text_is_found_where_it_was_left_and_nowhere_else() -> None:
    rooms: Rooms[str] = Rooms(4)
    room = take(rooms, ("a", "1", "x"))
    assert rooms.use(("a", "1", "x"), 1.0) is room
    assert room
    assert room.used == 1.0
    for path in (("a", "2", "x"), ("b", "1", "x"), ("a", "1", "y")):
        assert rooms.use(path, 1.0) is None


def test_whoever_has_the_most_is_refused() -> None:
    rooms: Rooms[str] = Rooms(3)
    for text in "xyz":
        assert take(rooms, ("a", "1", text))
    assert take(rooms, ("a", "1", "more")) is None
    assert len(rooms) == 3


def test_a_flood_gives_way_to_somebody_who_has_fewer() -> None:
    rooms: Rooms[str] = Rooms(6)
    for text in range(6):
        assert take(rooms, ("flood", "1", str(text)), now=0.1 * text)
    for text in range(3):
        assert take(rooms, ("good", "1", str(text)), now=1.0)
    assert take(rooms, ("good", "1", "4"), now=1.0) is None  # half is enough
    assert [room.path[-1] for room in rooms.under(("flood",))] == ["3", "4", "5"]  # the oldest went
    for text in range(10):
        take(rooms, ("flood", "2", str(text)), now=1.0)
    assert len(rooms.under(("good",))) == len(rooms.under(("flood",))) == 3


def test_the_links_of_one_peer_share_too() -> None:
    """A stage brings the texts of many gateways, each over a link of its own."""
    rooms: Rooms[str] = Rooms(4)
    for text in range(4):
        assert take(rooms, ("stage", "flood", str(text)))
    assert take(rooms, ("stage", "good", "x"))
    assert take(rooms, ("stage", "good", "y"))
    assert take(rooms, ("stage", "good", "z")) is None
    assert len(rooms.under(("stage", "flood"))) == len(rooms.under(("stage", "good"))) == 2


def test_a_text_in_hand_never_gives_way() -> None:
    rooms: Rooms[str] = Rooms(2)
    for text in "xy":
        room = take(rooms, ("flood", "1", text))
        assert room
        room.in_hand = 1
    assert take(rooms, ("good", "1", "x"), now=2 * STALE) is None
    assert rooms.unused(2 * STALE, STALE) == []


def test_a_stale_text_gives_way_whosever_it_is() -> None:
    rooms: Rooms[str] = Rooms(2)
    take(rooms, ("a", "1", "old"), now=0.0)
    take(rooms, ("b", "1", "new"), now=STALE - 1)
    assert take(rooms, ("b", "1", "more"), now=STALE)
    assert rooms.use(("a", "1", "old"), STALE) is None
    assert rooms.use(("b", "1", "new"), STALE)


def test_those_unused_for_long_are_known() -> None:
    rooms: Rooms[str] = Rooms(3)
    take(rooms, ("a", "1", "x"), now=0.0)
    take(rooms, ("a", "1", "y"), now=5.0)
    rooms.use(("a", "1", "x"), now=6.0)
    assert [room.path[-1] for room in rooms.unused(15.0, 10.0)] == ["y"]


paths = st.tuples(st.sampled_from("abc"), st.sampled_from("12"), st.sampled_from("vwxyz"))


@given(st.integers(1, 5), st.lists(st.tuples(paths, st.booleans()), max_size=60))
def test_there_are_never_more_and_a_newcomer_with_nothing_gets_in(
    most: int, told: list[tuple[Path, bool]]
) -> None:
    rooms: Rooms[str] = Rooms(most)
    for path, leaves in told:
        if leaves:
            rooms.end(path)
        elif rooms.use(path, 0.0) is None:
            alone = not rooms.under(path[:1])
            others = max((len(rooms.under((p,))) for p in "abc"), default=0)
            found = take(rooms, path)
            assert found or not alone or others < 2
        assert len(rooms) <= most
