"""Whose turn it is: whoever has had the least."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from blocktrain.inference.turns import Path, Turns


def served(turns: Turns[Path], count: int, seconds: float = 1.0) -> list[Path]:
    """Who is served next, each for so long."""
    order = []
    for _ in range(count):
        path = turns.pop()
        turns.spend(path, seconds)
        order.append(path)
    return order


def test_a_flood_waits_behind_itself() -> None:
    turns: Turns[Path] = Turns()
    for _ in range(100):
        turns.push(("flood", "link", "text"), ("flood", "link", "text"))
    served(turns, 10)
    turns.push(("good", "link", "text"), ("good", "link", "text"))
    assert served(turns, 2).count(("good", "link", "text")) == 1
    assert len(turns) == 89


def test_neither_many_links_nor_many_texts_give_a_larger_part() -> None:
    """One peer with four links of four texts each, and one with one of one."""
    turns: Turns[Path] = Turns()
    many = [("many", str(link), str(text)) for link in range(4) for text in range(4)]
    for path in [*many * 10, *[("one", "0", "0")] * 100]:
        turns.push(path, path)
    order = served(turns, 80)
    assert Counter(path[0] for path in order) == {"many": 40, "one": 40}
    links = Counter(path[1] for path in order if path[0] == "many")
    assert set(links.values()) == {10}
    assert max(Counter(order).values()) == 40
    texts = Counter(path for path in order if path[0] == "many")
    assert set(texts.values()) <= {2, 3}


def test_who_takes_long_comes_less_often() -> None:
    turns: Turns[str] = Turns()
    for _ in range(60):
        turns.push(("slow",), "slow")
        turns.push(("quick",), "quick")
    order = []
    for _ in range(40):
        who = turns.pop()
        turns.spend((who,), 3.0 if who == "slow" else 1.0)
        order.append(who)
    assert Counter(order) == {"quick": 30, "slow": 10}


def test_who_was_away_does_not_get_the_past_back() -> None:
    turns: Turns[Path] = Turns()
    turns.push(("late",), ("late",))
    served(turns, 1)
    for _ in range(50):
        turns.push(("busy",), ("busy",))
    served(turns, 30)
    for _ in range(50):
        turns.push(("late",), ("late",))
    assert Counter(served(turns, 20))[("late",)] in (10, 11)


def test_what_waits_for_somebody_who_is_gone_goes_with_him() -> None:
    turns: Turns[str] = Turns()
    turns.push(("a", "1", "x"), "a1x")
    turns.push(("a", "1", "y"), "a1y")
    turns.push(("a", "2", "x"), "a2x")
    turns.push(("b", "1", "x"), "b1x")
    assert sorted(turns.end(("a", "1"))) == ["a1x", "a1y"]
    assert turns.end(("a", "1")) == []
    assert turns.end(("c", "1")) == []
    assert len(turns) == 2
    assert sorted([turns.pop(), turns.pop()]) == ["a2x", "b1x"]
    turns.spend(("a", "1"), 1.0)  # a job may end after its guest
    assert not turns


paths = st.tuples(st.sampled_from("ab"), st.sampled_from("12"), st.sampled_from("xyz"))


@given(st.lists(st.one_of(paths, st.just("pop"), st.sampled_from("ab").map(lambda p: (p,)))))
def test_nothing_is_lost_and_each_text_keeps_its_order(told: list[Path | str]) -> None:
    turns, waiting = Turns[tuple[Path, int]](), dict[Path, list[int]]()
    for number, what in enumerate(told):
        if what == "pop":
            if len(turns):
                path, found = turns.pop()
                turns.spend(path, 0.5)
                assert waiting[path].pop(0) == found
        elif len(what) == 1:
            gone = turns.end(tuple(what))
            lost = [(p, n) for p, ns in waiting.items() if p[:1] == tuple(what) for n in ns]
            assert sorted(gone) == sorted(lost)
            waiting = {p: ns for p, ns in waiting.items() if p[:1] != tuple(what)}
        else:
            path = tuple(what)
            turns.push(path, (path, number))
            waiting.setdefault(path, []).append(number)
        assert len(turns) == sum(map(len, waiting.values()))
