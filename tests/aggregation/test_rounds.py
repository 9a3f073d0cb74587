"""The rounds of a run: each rule as a short play, then anything that hypothesis can think of."""

import math
from collections import Counter
from dataclasses import asdict
from typing import Any, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blocktrain.aggregation.deadlines import (
    LEAST_SPREAD,
    Rules,
    allowance,
    full_duration,
    steps_within,
)
from blocktrain.aggregation.events import (
    Asked,
    Assigned,
    Banned,
    Combine,
    Combined,
    Dropped,
    Effect,
    Effects,
    Ended,
    Event,
    Extended,
    Freed,
    Heard,
    Idle,
    Left,
    Opened,
    Part,
    Pause,
    Reason,
    Receipt,
    Refused,
    Resume,
    Salvaged,
    Stop,
    Submitted,
    Taken,
    Tick,
    Verdict,
    Why,
)
from blocktrain.aggregation.rounds import begin, next_wake, pending, step
from blocktrain.aggregation.state import (
    Combining,
    Counted,
    Finished,
    Open,
    Phase,
    State,
    Version,
    Waiting,
    decode,
    encode,
    rebase,
)
from blocktrain.errors import BadConfig
from blocktrain.terms import Digest

SIMPLE: dict[str, Any] = {
    "rounds": 3,
    "blocks": 1,
    "replicas": 2,
    "quorum": 2,
    "local_steps": 10,
    "bytes_per_step": 100,
    "grace": 5,
    "first_allowance": 100,
    "floor": 1,
    "ceiling": 1000,
    "lease": 30,
}


def rules_of(**changes: Any) -> Rules:
    return Rules(**{**SIMPLE, **changes})


def first_versions(blocks: int) -> list[Version]:
    return [Version(0, Digest(f"snap-{b}-0"), Digest(f"steady-{b}-0")) for b in range(blocks)]


def told(state: State, event: Event, now: float) -> tuple[State, Effects]:
    """`step`, proven on the way to be the same from a state that went through JSON."""
    data = encode(state)
    again = decode(data)
    assert again == state
    assert encode(again) == data
    after, effects = step(state, event, now)
    other, same = step(again, event, now)
    assert encode(other) == encode(after)
    assert same == effects
    assert encode(state) == data, "step must not touch what it was given"
    return after, effects


class Play:
    """A run as a script: `play.at(3).ask("ann")`, `play.submit("ann")`, `play.combined(0)`."""

    def __init__(self, **changes: Any) -> None:
        rules = rules_of(**changes)
        self.now = 0.0
        self.state, self.effects = begin(rules, first_versions(rules.blocks), 0)
        self.jobs: dict[str, Assigned] = {}
        self.updates = 0

    def at(self, now: float) -> "Play":
        """Time passes, with a tick."""
        self.now = now
        self.say(Tick())
        return self

    def say(self, event: Event) -> Effects:
        self.state, self.effects = told(self.state, event, self.now)
        return self.effects

    def ask(self, worker: str, *blocks: int, pace: float | None = None) -> Assigned | Idle:
        effects = self.say(Asked(worker, blocks or None, pace))
        (answer,) = [it for it in effects if isinstance(it, Assigned | Idle)]
        if isinstance(answer, Assigned):
            self.jobs[worker] = answer
        return answer

    def job(self, worker: str, *blocks: int, pace: float | None = None) -> Assigned:
        answer = self.ask(worker, *blocks, pace=pace)
        assert isinstance(answer, Assigned), answer
        return answer

    def why(self, worker: str, *blocks: int) -> Why:
        answer = self.ask(worker, *blocks)
        assert isinstance(answer, Idle), answer
        return answer.why

    def submit(self, name: str, job: Assigned | None = None, **changes: Any) -> Verdict:
        """Submits for a job (the worker's last one), with an update of its own."""
        job = job or self.jobs[name]
        self.updates += 1
        fields: dict[str, Any] = {
            "worker": name,
            "block": job.block,
            "round": job.round,
            "slot": job.slot,
            "update": Digest(f"update-{self.updates}"),
            "steps": job.steps,
            "bytes_trained": job.steps * SIMPLE["bytes_per_step"],
            "seconds": 1.0,
        }
        effects = self.say(Submitted(**{**fields, **changes}))
        (receipt,) = [it for it in effects if isinstance(it, Receipt)]
        return receipt.verdict

    def reason(self, name: str, job: Assigned | None = None, **changes: Any) -> Reason:
        verdict = self.submit(name, job, **changes)
        assert isinstance(verdict, Refused), verdict
        assert verdict.sentence.endswith(".")
        assert "{" not in verdict.sentence
        return verdict.reason

    def combined(self, block: int = 0) -> Effects:
        round = self.state.blocks[block].round
        made = Digest(f"snap-{block}-{round}"), Digest(f"steady-{block}-{round}")
        return self.say(Combined(block, round, *made))

    def whole_round(self, *workers: str) -> None:
        """Everybody asks, everybody submits, and what was closed is combined."""
        for worker in workers:
            self.job(worker)
        for worker in workers:
            assert self.submit(worker) == Taken(self.jobs[worker].round)
        for block, it in enumerate(self.state.blocks):
            if isinstance(it.phase, Combining):
                self.combined(block)

    def phase(self, block: int = 0) -> Phase:
        return self.state.blocks[block].phase

    def open_round(self, block: int = 0) -> Open:
        phase = self.phase(block)
        assert isinstance(phase, Open), phase
        return phase

    def only(self, kind: type[Effect]) -> list[Any]:
        """The last effects of one kind."""
        return [it for it in self.effects if isinstance(it, kind)]

    def parts(self) -> list[str]:
        """The updates of the Combine that was said last."""
        (combine,) = self.only(Combine)
        return [part.update for part in combine.parts]


def kinds(effects: Effects) -> list[str]:
    return [type(effect).__name__ for effect in effects]


# --- a run from beginning to end -----------------------------------------------------------------


def test_a_run_goes_from_the_owners_snapshots_to_its_last_round() -> None:
    play = Play(rounds=2, replicas=2)
    assert list(play.effects) == [Opened(0, 1, 100)]
    play.job("ann")
    play.job("bob")
    assert play.submit("bob") == Taken(1)
    assert play.submit("ann") == Taken(1)
    assert play.only(Combine) == [
        Combine(0, 1, (Part(Digest("update-2"), 1000, 1), Part(Digest("update-1"), 1000, 1)))
    ]
    assert kinds(play.combined()) == ["Opened"]
    play.whole_round("ann", "bob")
    assert list(play.effects) == [Ended()]
    assert play.state.ended
    assert [version.round for version in play.state.blocks[0].versions] == [1, 2]
    assert next_wake(play.state, play.now) is None
    assert play.why("ann") == Why.ENDED


def test_a_run_needs_one_first_snapshot_for_each_block() -> None:
    for wrong in (first_versions(1), [Version(1, Digest("x"), Digest("y"))] * 2):
        with pytest.raises(BadConfig, match="each of the 2 blocks"):
            begin(rules_of(blocks=2), wrong, 0)


def test_one_worker_alone_can_fill_every_slot_of_every_block_in_turn() -> None:
    play = Play(blocks=2, rounds=1)
    places = []
    while isinstance(play.ask("ann"), Assigned):
        places.append((play.jobs["ann"].block, play.jobs["ann"].slot))
        play.submit("ann")
    assert places == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert play.phase(0) == play.phase(1) == Combining()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rounds": 0}, "rounds is 0; set it to 1"),
        ({"blocks": 0}, "blocks is 0"),
        ({"replicas": 0}, "replicas is 0"),
        ({"local_steps": 0}, "local_steps is 0"),
        ({"bytes_per_step": 0}, "bytes_per_step is 0"),
        ({"history": 0}, "history is 0"),
        ({"ahead": -1}, "ahead is -1; set it to 0 or more"),
        ({"spare_slots": -1}, "spare_slots is -1"),
        ({"quorum": 0}, "from 1 to replicas"),
        ({"quorum": 3}, "from 1 to replicas"),
        ({"grace": -1}, "grace is -1"),
        ({"grace": math.nan}, "grace is nan"),
        ({"k": math.inf}, "k is inf"),
        ({"floor": 0}, "floor is 0.0 s; set it above 0"),
        ({"lease": 0}, "lease is 0.0 s"),
        ({"floor": 101}, "rising order"),
        ({"ceiling": 99}, "rising order"),
        ({"ceiling": math.inf}, "rising order"),
        ({"discount": 0}, "discount is 0"),
        ({"discount": 1.1}, "discount is 1.1"),
    ],
)
def test_rules_that_cannot_be_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        rules_of(**change)


def test_every_rule_of_a_run_has_a_word_about_it() -> None:
    assert set(asdict(rules_of())) >= {"rounds", "ahead", "quorum", "discount", "spare_slots"}
    for said in (*get_args(Event), *get_args(Effect), *get_args(Verdict)):
        assert said.__doc__
        assert said.__doc__.rstrip().endswith((".", "?"))


# --- assignments ---------------------------------------------------------------------------------


def test_the_least_served_block_comes_first_then_the_lowest_then_the_lowest_slot() -> None:
    play = Play(blocks=3, replicas=2)
    places = [(play.job(worker).block, play.job(worker).slot) for worker in "abcdef"]
    assert places == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert play.why("g") == Why.NOTHING_FREE


def test_a_filled_slot_counts_as_served() -> None:
    play = Play(blocks=2, replicas=2)
    play.job("ann")
    play.submit("ann")
    assert play.job("bob").block == 1


def test_among_equally_served_blocks_the_one_that_is_behind_comes_first() -> None:
    play = Play(blocks=2, replicas=1, quorum=1, ahead=2)
    play.job("ann", 0)
    play.submit("ann")
    play.combined(0)
    assert play.state.blocks[0].round == 2
    assert play.job("bob").block == 1


def test_a_worker_gets_only_blocks_that_it_can_train() -> None:
    play = Play(blocks=3, replicas=1, quorum=1)
    assert play.job("ann", 2).block == 2
    assert play.why("bob", 2) == Why.NOTHING_FREE
    assert play.job("bob", 2, 1, 77).block == 1


def test_asking_again_gives_the_same_slot_with_the_time_that_is_left() -> None:
    play = Play()
    first = play.job("ann", pace=3.0)
    again = play.at(20).job("ann", pace=0.1)
    assert again == Assigned("ann", 0, 1, 0, first.seconds_left - 20, first.steps)
    assert len(play.state.blocks[0].seats) == 1


def test_a_worker_that_comes_back_for_another_block_leaves_the_first() -> None:
    play = Play(blocks=2)
    play.job("ann", 0)
    assert play.job("ann", 1).block == 1
    assert play.only(Freed) == [Freed("ann", 0, 1, 0)]
    assert play.job("bob", 0).slot == 0


def test_spare_slots_are_given_only_when_no_wanted_slot_is_free_anywhere() -> None:
    play = Play(blocks=2, replicas=1, quorum=1, spare_slots=1)
    assert [(play.job(w).block, play.job(w).slot) for w in "abcd"] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
    ]
    assert play.why("e") == Why.NOTHING_FREE
    assert Play(replicas=1, quorum=1).job("a").slot == 0


def test_a_round_does_not_wait_for_spare_slots() -> None:
    play = Play(replicas=1, quorum=1, spare_slots=1)
    play.job("ann")
    assert play.job("bob").slot == 1
    play.submit("ann")
    assert play.phase() == Combining()


def test_an_idle_worker_comes_back_at_the_pace_of_the_rounds() -> None:
    for first, seconds in ((1, 0.2), (100, 5), (1000, 10)):
        play = Play(replicas=1, quorum=1, first_allowance=first)
        play.job("ann")
        assert play.ask("bob") == Idle("bob", seconds, Why.NOTHING_FREE)


def test_the_first_worker_in_an_empty_round_gets_all_its_time() -> None:
    play = Play(replicas=2, lease=1000)
    assert play.at(90).job("ann").seconds_left == 100
    assert play.at(150).job("bob").seconds_left == 40


def test_who_comes_and_goes_cannot_put_off_a_round_that_has_something() -> None:
    play = Play(quorum=1, lease=1000)
    play.job("ann")
    play.job("bob")
    play.at(10).submit("ann")
    play.at(15)
    play.submit("bob")
    play.combined()
    deadline = play.open_round().deadline
    assert play.at(20).job("cat").seconds_left == deadline - 20
    assert len(play.state.blocks[0].entering(2)) == 1


def test_a_silent_worker_loses_its_slot_and_a_speaking_one_does_not() -> None:
    play = Play(replicas=2)
    play.job("ann")
    play.job("bob")
    play.at(20).say(Heard("bob"))
    assert next_wake(play.state, 20) == 30
    assert play.at(29.5).effects == ()
    assert play.at(30).effects == (Freed("ann", 0, 1, 0),)
    assert list(play.state.workers) == ["bob"]
    assert play.job("cat").slot == 0


def test_the_first_update_for_a_slot_wins_whoever_holds_it_now() -> None:
    play = Play(quorum=1)
    play.job("ann")
    play.at(30).job("bob")
    assert play.jobs["bob"].slot == play.jobs["ann"].slot == 0
    play.job("cat")
    assert play.submit("ann") == Taken(1)
    assert play.reason("bob") == Reason.DUPLICATE_SLOT
    assert play.why("bob") == Why.NOTHING_FREE
    assert play.submit("cat") == Taken(1)
    assert play.phase() == Combining()


def test_the_other_way_round_the_silent_one_is_refused() -> None:
    play = Play()
    play.job("ann")
    play.at(30).job("bob")
    assert play.submit("bob") == Taken(1)
    assert play.reason("ann") == Reason.DUPLICATE_SLOT


@pytest.mark.parametrize("sign_of_life", [Heard("ann"), Asked("ann")])
def test_who_speaks_again_gets_its_slot_back_if_nobody_took_it(sign_of_life: Event) -> None:
    play = Play()
    first = play.job("ann", pace=3.0)
    play.at(40).say(sign_of_life)
    assert play.job("bob").slot == 1
    assert play.job("ann") == Assigned("ann", 0, 1, 0, 60, first.steps)


def test_who_speaks_again_too_late_gets_another_slot() -> None:
    play = Play()
    play.job("ann")
    play.at(30).job("bob")
    play.say(Heard("ann"))
    assert play.job("ann").slot == 1


def test_of_two_lost_slots_the_last_one_is_given_back_and_only_that() -> None:
    play = Play(replicas=2)
    play.job("ann")
    play.at(30).job("bob")
    assert play.job("ann").slot == 1
    play.say(Left("bob"))
    assert play.job("ann").slot == 1
    play.at(70)
    assert play.job("ann").slot == 1
    assert [seat.held for seat in play.state.blocks[0].seats] == [False, False, True]


def test_who_leaves_frees_its_slot_at_once() -> None:
    play = Play()
    play.job("ann")
    assert play.say(Left("ann")) == (Freed("ann", 0, 1, 0),)
    assert play.state.workers == {}
    assert play.job("bob").slot == 0
    assert play.say(Left("nobody")) == ()


# --- steps by speed ------------------------------------------------------------------------------


def test_a_worker_gets_the_steps_that_fit_before_the_deadline() -> None:
    play = Play(blocks=1, replicas=3)
    assert play.job("unknown").steps == 10
    assert play.job("fast", pace=1.0).steps == 10
    assert play.job("slow", pace=20.0).steps == 4  # 90 of 100 s for steps
    for guess, steps in ((1e9, 1), (1e-320, 10), (0, 10), (-1, 10), (math.nan, 10), (math.inf, 10)):
        assert Play().job("odd", pace=guess).steps == steps


def test_measured_pace_beats_guesses_and_one_hiccup_changes_nothing() -> None:
    play = Play(rounds=9, replicas=1, quorum=1, floor=100)
    for seconds in (300.0, 300.0, 1.0):
        play.job("ann", pace=0.001)
        play.submit("ann", steps=10, bytes_trained=1000, seconds=seconds)
        play.combined()
    assert play.job("ann", pace=0.001).steps == 3  # 30 s a step, 90 s
    assert steps_within(100, 30, play.state.rules) == 3


def test_only_the_last_few_paces_are_remembered() -> None:
    play = Play(rounds=9, replicas=1, quorum=1, floor=100)
    for seconds in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        play.job("ann")
        play.submit("ann", steps=1, bytes_trained=100, seconds=seconds)
        play.combined()
    assert play.state.workers["ann"].paces == (2.0, 3.0, 4.0, 5.0, 6.0)


def test_who_is_refused_as_too_old_still_teaches_its_pace() -> None:
    play = Play(rounds=9, replicas=1, quorum=1, floor=100)
    play.job("ann")
    play.say(Left("ann"))
    for _ in range(3):
        play.whole_round("bob")
    assert play.reason("ann", seconds=300.0) == Reason.TOO_OLD
    assert play.job("ann").steps == 3


# --- updates -------------------------------------------------------------------------------------


def test_the_same_update_gets_the_same_receipt_and_counts_once() -> None:
    play = Play()
    play.job("ann")
    play.job("bob")
    assert play.submit("ann", update="same") == Taken(1)
    before = play.state
    assert play.submit("ann", update="same") == Taken(1)
    assert play.state == before
    play.submit("bob")
    assert play.parts() == ["same", "update-3"]
    assert play.submit("ann", update="same") == Taken(1)
    play.combined()
    assert play.submit("ann", update="same") == Taken(1)
    assert play.state.blocks[0].entering(2) == []


def test_a_salvaged_update_gets_the_same_receipt_again_too() -> None:
    play = Play(quorum=1, ahead=1)
    play.job("slow")
    play.whole_round("ann")
    play.at(40)  # the grace, and slow's lease
    play.combined()
    for _ in range(2):
        assert play.submit("slow", update="late") == Salvaged(2, 0.5)
    assert len(play.state.blocks[0].entering(2)) == 1


def test_a_known_digest_in_another_guise_is_refused() -> None:
    play = Play(blocks=2)
    play.job("ann", 0)
    play.job("bob", 1)
    play.submit("ann", update="same")
    assert play.reason("bob", update="same") == Reason.OTHER_UPDATE
    assert play.reason("ann", slot=1, update="same") == Reason.OTHER_UPDATE
    assert play.reason("ann", round=2, update="same") == Reason.OTHER_UPDATE
    assert play.reason("ann", block=7, update="same") == Reason.OTHER_UPDATE


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({"block": 1}, Reason.UNKNOWN_BLOCK),
        ({"block": -1}, Reason.UNKNOWN_BLOCK),
        ({"round": 2}, Reason.NOT_OPEN),
        ({"round": 0}, Reason.NOT_OPEN),
        ({"slot": 1}, Reason.NOT_ASSIGNED),
        ({"worker": "bob"}, Reason.NOT_ASSIGNED),
        ({"bytes_trained": 0}, Reason.IMPLAUSIBLE),
        ({"bytes_trained": 1001}, Reason.IMPLAUSIBLE),
        ({"steps": 9}, Reason.IMPLAUSIBLE),
        ({"steps": 0, "bytes_trained": 1}, Reason.IMPLAUSIBLE),
        ({"steps": 11, "bytes_trained": 1100}, Reason.IMPLAUSIBLE),
        ({"seconds": 0}, Reason.IMPLAUSIBLE),
        ({"seconds": math.nan}, Reason.IMPLAUSIBLE),
        ({"seconds": math.inf}, Reason.IMPLAUSIBLE),
    ],
)
def test_lies_are_refused_with_a_reason_each(lie: dict[str, Any], reason: Reason) -> None:
    play = Play(replicas=1, quorum=1)
    play.job("ann")
    assert play.reason("ann", **lie) == reason
    assert play.state.blocks[0].counted == ()
    assert play.submit("ann") == Taken(1)


def test_a_slot_takes_one_update_even_from_its_own_worker() -> None:
    play = Play()
    play.job("ann")
    play.submit("ann")
    assert play.reason("ann") == Reason.DUPLICATE_SLOT


# --- late updates --------------------------------------------------------------------------------


def late_play(rounds_late: int, ahead: int) -> Play:
    """Somebody holds a slot of round 1, and the block has moved on."""
    play = Play(rounds=9, replicas=2, quorum=1, ahead=ahead, discount=0.5)
    play.job("slow")
    play.say(Left("slow"))
    for _ in range(rounds_late):
        play.whole_round("ann", "bob")
    return play


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_late_update_is_salvaged_while_its_base_is_remembered(ahead: int) -> None:
    for late in range(1, ahead + 2):
        play = late_play(0, ahead)
        play.job("ann")
        play.jobs["ann"] = play.job("bob")  # ann's slot 0 was slow's: leave it to slow
        for _ in range(late):
            play.submit("bob")
            play.at(play.now + 50)
            play.combined()
            if play.state.blocks[0].round <= late:
                play.job("bob")
        play.jobs["slow"] = Assigned("slow", 0, 1, 0, 0, 10)
        assert play.state.blocks[0].round == 1 + late
        assert play.submit("slow") == Salvaged(1 + late, 0.5**late)
    play = late_play(ahead + 2, ahead)
    assert play.reason("slow") == Reason.TOO_OLD


def test_a_late_update_for_a_filled_slot_is_refused() -> None:
    play = late_play(1, ahead=1)
    assert play.reason("slow") == Reason.DUPLICATE_SLOT


def test_what_comes_while_combining_is_late_for_that_round() -> None:
    play = Play(quorum=1)
    play.job("ann")
    play.job("bob")
    play.submit("ann")
    assert play.at(5).phase() == Combining()
    assert play.submit("bob") == Salvaged(2, 0.5)
    assert play.state.blocks[0].entering(1) != play.state.blocks[0].entering(2)
    play.combined()
    play.job("ann")
    play.submit("ann")
    assert [(p.update, p.factor) for p in play.only(Combine)[0].parts] == [
        ("update-3", 1.0),
        ("update-2", 0.5),
    ]


def test_what_comes_late_for_the_last_round_is_refused() -> None:
    play = Play(quorum=1, rounds=1)
    play.job("ann")
    play.job("bob")
    play.submit("ann")
    play.at(5)
    assert play.reason("bob") == Reason.ENDED
    play.combined()
    assert play.reason("bob") == Reason.ENDED


def test_salvaged_updates_count_as_something_but_not_for_the_quorum() -> None:
    play = Play(quorum=1)
    play.job("ann")
    play.job("bob")
    play.submit("ann")
    play.at(5)
    play.combined()
    play.submit("bob")
    assert play.open_round().quorum_since is None
    deadline = play.open_round().deadline
    play.at(deadline - 0.1)
    assert isinstance(play.phase(), Open)
    play.at(deadline)
    assert play.parts() == ["update-2"]


def test_the_order_is_by_slot_and_then_the_late_ones_by_worker_and_digest() -> None:
    play = Play(replicas=3, quorum=3)
    for worker in "cba":
        play.job(worker)
    play.at(29)
    for worker in "ab":
        play.say(Heard(worker))
    play.submit("c", update="c1")
    play.at(100)
    assert play.parts() == ["c1"]
    play.submit("b", update="b1")
    play.combined()
    play.submit("a", update="a1")
    for worker in "zyx":
        play.job(worker)
    for worker in "xzy":
        play.submit(worker, update=f"{worker}2")
    assert play.parts() == ["z2", "y2", "x2", "a1", "b1"]


# --- closing -------------------------------------------------------------------------------------


def test_with_a_quorum_a_round_waits_for_its_grace() -> None:
    play = Play(replicas=3, quorum=2)
    for worker in "abc":
        play.job(worker)
    play.at(10).submit("a")
    assert next_wake(play.state, 10) == 30
    play.at(12).submit("b")
    assert next_wake(play.state, 12) == 17
    assert isinstance(play.at(16.9).phase(), Open)
    assert play.at(17).parts() == ["update-1", "update-2"]


def test_with_a_quorum_and_nobody_to_wait_for_it_closes_at_once() -> None:
    play = Play(replicas=3, quorum=2)
    for worker in "abc":
        play.job(worker)
    play.submit("a")
    play.submit("b")
    play.say(Left("c"))
    assert play.phase() == Combining()


def test_without_a_quorum_it_waits_though_everybody_has_submitted() -> None:
    play = Play(replicas=3, quorum=2)
    play.job("a")
    play.submit("a")
    assert isinstance(play.at(99).phase(), Open)
    assert play.at(100).parts() == ["update-1"]


def test_with_nothing_at_the_deadline_it_is_extended() -> None:
    play = Play(lease=1000)
    play.job("ann")
    assert next_wake(play.state, 0) == 100
    assert play.at(101).only(Extended) == [Extended(0, 1, 100)]
    assert next_wake(play.state, 101) == 201
    assert play.job("ann") == Assigned("ann", 0, 1, 0, 100, 10)
    assert play.submit("ann") == Taken(1)


def test_who_speaks_for_ever_but_never_submits_does_not_hold_up_the_run() -> None:
    play = Play(replicas=2, quorum=1, lease=1000)
    play.job("stuck")
    play.at(60).job("new")
    assert play.at(100).effects == (Extended(0, 1, 100),)  # it may only be a little late
    assert play.at(200).effects == (Freed("stuck", 0, 1, 0), Extended(0, 1, 100))
    play.say(Heard("stuck"))
    assert play.job("cat").slot == 0
    assert play.submit("stuck") == Taken(1)  # it was the first, after all
    assert play.reason("cat") == Reason.DUPLICATE_SLOT


def test_the_stuck_one_gets_its_slot_back_if_it_asks_and_nobody_wants_it() -> None:
    play = Play(lease=1000)
    play.job("stuck")
    assert Freed("stuck", 0, 1, 0) in play.at(100).at(200).effects
    assert play.job("stuck").slot == 0


def test_an_update_at_the_deadline_is_late_even_if_the_tick_is_late() -> None:
    play = Play(lease=1000)
    play.job("ann")
    play.job("bob")
    play.submit("ann")
    play.now = 100
    assert play.submit("bob") == Salvaged(2, 0.5)
    assert play.phase() == Combining()


def test_time_never_runs_back() -> None:
    play = Play(lease=1000)
    play.at(50).job("ann")
    assert play.at(10).state.clock == 50
    assert play.job("ann").seconds_left == 100


def test_only_what_is_being_combined_can_have_been_combined() -> None:
    play = Play(replicas=1, quorum=1)
    made = Digest("a"), Digest("b")
    wrong = [Combined(0, 1, *made), Combined(5, 1, *made), Combined(-1, 1, *made)]
    for event in wrong:
        with pytest.raises(ValueError, match="is not being combined"):
            play.say(event)
    play.job("ann")
    play.submit("ann")
    for event in (Combined(0, 2, *made), Combined(0, 0, *made)):
        with pytest.raises(ValueError, match=r"Round . of block 0 is not being combined"):
            play.say(event)
    play.combined()
    with pytest.raises(ValueError, match="is not being combined"):
        play.say(Combined(0, 1, *made))


def test_what_was_being_combined_is_said_again_after_a_restart() -> None:
    play = Play(replicas=1, quorum=1)
    assert pending(play.state) == ()
    play.job("ann")
    play.submit("ann")
    assert pending(play.state) == tuple(play.only(Combine))


# --- blocks that run ahead -----------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_no_block_opens_a_round_too_far_ahead(ahead: int) -> None:
    play = Play(rounds=9, blocks=2, replicas=1, quorum=1, ahead=ahead)
    while isinstance(play.phase(0), Open):
        play.job("ann", 0)
        play.submit("ann")
        play.combined(0)
    assert play.state.blocks[0].round == 1 + ahead
    assert play.phase(0) == Waiting()
    assert play.why("ann", 0) == Why.NOTHING_FREE
    play.job("bob", 1)
    play.submit("bob")
    assert play.phase(0) == Waiting()
    assert play.combined(1) == (Opened(0, 2 + ahead, play.open_round(0).allowance), play.effects[1])
    assert play.state.blocks[0].round == 2 + ahead


def test_a_round_pins_the_neighbours_round_before_it_or_their_newest() -> None:
    play = Play(rounds=9, blocks=2, replicas=1, quorum=1, ahead=2)
    for _ in range(2):
        play.job("ann", 0)
        play.submit("ann")
        play.combined(0)
    assert play.open_round(0).pins == ("steady-0-2", "steady-1-0")
    play.job("bob", 1)
    play.submit("bob")
    play.combined(1)
    assert play.open_round(1).pins == ("steady-0-1", "steady-1-1")
    assert play.open_round(0).pins == ("steady-0-2", "steady-1-0")  # fixed when it opened


def test_only_the_versions_that_can_be_built_on_are_kept() -> None:
    play = Play(rounds=9, replicas=1, quorum=1, ahead=1)
    for _ in range(5):
        play.whole_round("ann")
    block = play.state.blocks[0]
    assert [it.round for it in block.versions] == [3, 4, 5]
    assert {it.round for it in block.counted} == {it.round for it in block.seats} == {4, 5}


def test_pins_stay_when_their_block_has_moved_on() -> None:
    play = Play(rounds=9, blocks=2, replicas=1, quorum=1, ahead=2)
    for _ in range(2):
        play.job("ann", 0)
        play.submit("ann")
        play.combined(0)
    for _ in range(4):
        play.job("bob", 1)
        play.submit("bob")
        play.combined(1)
    assert play.state.blocks[1].versions[0].round == 1
    phase = play.state.blocks[0].phase
    assert isinstance(phase, Open)
    assert phase.pins[1] == "steady-1-0"


# --- deadlines that adapt ------------------------------------------------------------------------


def test_the_allowance_is_the_median_and_k_deviations_within_bounds() -> None:
    rules = rules_of(k=3, floor=10, first_allowance=50, ceiling=200)
    assert allowance([], rules) == 50
    assert allowance([20, 30, 40, 50, 60], rules) == 40 + 3 * 10
    assert allowance([20, 30, 40, 50, 9999], rules) == 40 + 3 * 10
    assert allowance([1, 1, 1], rules) == 10
    assert allowance([150, 180, 210], rules) == 200
    assert allowance([40], rules) == 40 + 3 * LEAST_SPREAD * 40


def test_a_duration_is_scaled_to_all_local_steps_without_the_moving_of_bytes() -> None:
    rules = rules_of()
    assert full_duration(8, 8, 10, rules) == 8
    assert full_duration(8, 6, 5, rules) == 14
    assert full_duration(8, 1e9, 1, rules) == 80  # nobody trains longer than was measured


def test_deadlines_follow_the_blocks_own_updates_late_ones_included() -> None:
    play = Play(rounds=9, replicas=2, quorum=1, history=3, k=2, blocks=2, ahead=8, lease=500)
    play.job("slow", 0)
    play.job("fast", 0)
    play.at(10).submit("fast", seconds=10.0)
    play.at(15)
    play.combined(0)
    assert play.open_round(0).allowance == 10 + 2 * 1
    assert play.open_round(1).allowance == 100
    play.at(16).submit("slow", seconds=16.0)
    play.job("fast", 0)
    play.at(20).submit("fast", seconds=4.0, steps=5, bytes_trained=500)
    assert list(play.state.blocks[0].durations) == [10, 16, 8]
    play.combined(0)
    assert play.open_round(0).allowance == 10 + 2 * 2
    play.job("fast", 0)
    play.at(28).submit("fast")
    assert list(play.state.blocks[0].durations) == [16, 8, 8]


def test_an_extension_uses_what_has_been_learnt_since() -> None:
    play = Play(rounds=9, replicas=1, quorum=1, lease=1000)
    play.job("ann")
    play.at(10).submit("ann")
    play.combined()
    assert play.open_round().deadline == 24
    assert play.at(24).effects == (Extended(0, 2, 14),)
    play.job("ann")
    play.at(40)
    assert play.only(Extended) == [Extended(0, 2, 14)]


# --- pause, stop, ban ----------------------------------------------------------------------------


def test_a_pause_closes_nothing_opens_nothing_and_does_not_count() -> None:
    play = Play(rounds=9, blocks=2, replicas=1, quorum=1, ahead=1, lease=10_000)
    play.job("ann", 0)
    play.job("bob", 1)
    play.at(10).submit("bob")
    play.at(40).say(Pause())
    assert play.combined(1) == ()
    assert play.phase(1) == Waiting()
    assert play.at(5000).job("ann").seconds_left == 60
    assert play.why("cat") == Why.PAUSED
    assert next_wake(play.state, 5000) == 15_000
    assert play.submit("ann") == Taken(1)
    assert isinstance(play.phase(0), Open)
    play.say(Pause())
    assert play.state.paused_since == 40
    assert kinds(play.at(6000).say(Resume())) == ["Combine", "Opened"]
    assert play.say(Resume()) == ()


def test_a_pause_at_the_first_instant_is_a_pause_too() -> None:
    play = Play()
    play.say(Pause())
    assert play.state.paused_since == 0
    assert play.why("ann") == Why.PAUSED


def test_a_quorum_met_in_a_pause_has_its_grace_afterwards() -> None:
    play = Play(replicas=2, quorum=1, lease=10_000)
    play.job("ann")
    play.job("bob")
    play.at(20).say(Pause())
    play.at(70).submit("ann")
    assert next_wake(play.state, 70) == 10_000
    play.at(120).say(Resume())
    assert play.open_round().deadline == 200
    assert next_wake(play.state, 120) == 125


def test_silent_workers_lose_their_slots_in_a_pause_too() -> None:
    play = Play()
    play.job("ann")
    play.say(Pause())
    assert play.at(30).effects == (Freed("ann", 0, 1, 0),)


def test_a_stop_waits_for_work_under_way_and_gives_out_no_more() -> None:
    play = Play(replicas=3, quorum=3, lease=1000)
    play.job("ann")
    play.job("bob")
    assert play.say(Stop()) == ()
    assert play.why("cat") == Why.ENDED
    assert play.submit("ann") == Taken(1)
    assert play.submit("bob") == Taken(1)  # nobody is left to wait for: no quorum is needed
    assert play.parts() == ["update-1", "update-2"]
    assert play.combined() == (Ended(),)
    assert play.reason("bob") == Reason.ENDED


def test_a_stop_ends_at_once_when_nobody_is_at_work() -> None:
    play = Play(blocks=2)
    assert play.say(Stop()) == (Ended(),)
    assert play.phase(0) == play.phase(1) == Finished()


def test_a_stop_ends_at_the_deadline_though_nothing_comes() -> None:
    play = Play(lease=1000)
    play.job("ann")
    play.say(Stop())
    assert play.at(100).effects == (Ended(),)


def test_a_stop_closes_at_the_deadline_what_has_come() -> None:
    play = Play(lease=1000)
    play.job("ann")
    play.job("bob")
    play.submit("ann")
    play.say(Stop())
    assert play.at(100).parts() == ["update-1"]


def test_a_stop_ends_a_pause_and_cannot_be_taken_back() -> None:
    play = Play(lease=1000)
    play.job("ann")
    play.at(50).say(Pause())
    play.at(500).say(Stop())
    assert play.state.paused_since is None
    play.say(Pause())
    assert play.at(520).job("ann").seconds_left == 30
    play.say(Resume())
    assert play.why("bob") == Why.ENDED
    assert play.at(550).effects == (Ended(),)


@pytest.mark.parametrize("stop_while", ["combining", "waiting"])
def test_updates_salvaged_before_a_stop_are_combined_all_the_same(stop_while: str) -> None:
    play = Play(blocks=2, replicas=2, quorum=1)
    play.job("ann", 0)
    play.job("bob", 0)
    play.submit("ann")
    play.at(5)
    assert play.submit("bob") == Salvaged(2, 0.5)
    if stop_while == "waiting":
        play.combined(0)
        assert play.phase(0) == Waiting()
        play.say(Stop())
    else:
        play.say(Stop())
        assert play.only(Combine) == []
        assert play.reason("cat", play.jobs["bob"]) == Reason.ENDED
        play.combined(0)
    assert play.parts() == ["update-2"]
    assert play.combined(0) == (Ended(),)
    assert play.state.blocks[0].versions[-1].round == 2


def test_a_banned_worker_is_dropped_wherever_it_is_not_yet_combined() -> None:
    play = Play(blocks=2, replicas=2, quorum=2, lease=1000)
    play.job("bad", 0)
    play.submit("bad", update="in-0")
    play.job("bad", 1)
    assert play.say(Banned("bad")) == (Freed("bad", 1, 1, 0), Dropped(Digest("in-0"), 0, 1))
    assert play.why("bad") == Why.BANNED
    assert play.reason("bad") == Reason.BANNED
    assert play.reason("bad", update="in-0", slot=0, block=0) == Reason.BANNED
    assert play.say(Heard("bad")) == ()
    assert "bad" not in play.state.workers
    assert play.job("ann", 0).slot == 0
    assert play.say(Banned("bad")) == ()
    assert play.state.banned == ("bad",)


def test_a_ban_takes_back_the_quorum() -> None:
    play = Play(replicas=3, quorum=2, lease=1000)
    for worker in ("ann", "bad", "cat"):
        play.job(worker)
    play.submit("ann")
    play.submit("bad")
    assert play.open_round().quorum_since == 0
    play.say(Banned("bad"))
    assert play.open_round().quorum_since is None
    assert isinstance(play.at(50).phase(), Open)
    play.submit("cat")
    assert play.parts() == ["update-1", "update-3"]


def test_a_ban_spares_what_is_being_combined_but_not_what_waits_for_the_next_round() -> None:
    play = Play(replicas=2, quorum=1)
    first = play.job("bad")
    play.at(30)
    second = play.job("ann")
    assert second.slot == first.slot == 0
    third = play.job("bad")
    play.submit("bad", third, update="combining")
    play.at(36)
    assert play.submit("bad", first, update="promised") == Salvaged(2, 0.5)
    assert play.say(Banned("bad")) == (Dropped(Digest("promised"), 0, 2),)
    assert play.submit("bad", third, update="combining") == Taken(1)
    play.effects = pending(play.state)
    assert play.parts() == ["combining"]


# --- a coordinator that comes back ---------------------------------------------------------------


@pytest.mark.parametrize("restart_at", [7.0, 1e6, -1e6])
def test_the_time_a_coordinator_was_away_does_not_count(restart_at: float) -> None:
    play = Play(replicas=3, quorum=1, lease=60)
    play.job("ann")
    play.job("bob")
    play.at(20).submit("ann")
    wake = next_wake(play.state, 20)
    assert wake == 25
    left = play.job("bob").seconds_left
    play.state = rebase(decode(encode(play.state)), restart_at)
    play.now = restart_at
    assert next_wake(play.state, restart_at) == restart_at + 5
    assert play.job("bob").seconds_left == left
    play.submit("bob", seconds=20.0)
    assert play.state.blocks[0].durations == (20, 20)


def test_a_pause_survives_a_restart() -> None:
    play = Play(lease=1000)
    play.job("ann")
    play.at(30).say(Pause())
    play.now = 40
    play.say(Tick())
    play.state = rebase(play.state, 1000)
    play.at(1010).say(Resume())
    assert play.open_round().deadline == 1010 + 70


# --- everything else that could happen -----------------------------------------------------------

WORKERS = ("ann", "bob", "cat", "dan", "eve")
names = st.sampled_from(WORKERS)
MINE = Refused(
    Reason.OTHER_UPDATE, "This very update came before, but as another; make one of your own."
)


class AnyRun(RuleBasedStateMachine):
    """Any events in any order; a model on the side keeps account of every receipt."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        replicas = data.draw(st.integers(1, 3), "replicas")
        self.how = rules_of(
            rounds=data.draw(st.integers(1, 8), "rounds"),
            blocks=data.draw(st.integers(1, 3), "blocks"),
            replicas=replicas,
            quorum=data.draw(st.integers(1, replicas), "quorum"),
            ahead=data.draw(st.integers(0, 2), "ahead"),
            spare_slots=data.draw(st.integers(0, 1), "spare_slots"),
            grace=data.draw(st.sampled_from([0, 2]), "grace"),
            first_allowance=20,
            history=4,
            lease=data.draw(st.sampled_from([8, 1000]), "lease"),
        )
        self.now = 0.0
        self.log: list[tuple[Event | None, float]] = []
        self.jobs: list[Assigned] = []
        self.sent: dict[str, Submitted] = {}
        self.promised: dict[str, tuple[int, Verdict]] = {}
        self.combined: Counter[str] = Counter()
        self.dropped: set[str] = set()
        self.seen: Counter[str] = Counter()
        self.opened: dict[int, int] = {}
        self.state, effects = begin(self.how, first_versions(self.how.blocks), 0)
        self.check(effects)

    def say(self, event: Event) -> Effects:
        paused = self.state.paused_since is not None and not isinstance(event, Resume | Stop)
        self.log.append((event, self.now))
        before = [block.round for block in self.state.blocks]
        self.state, effects = told(self.state, event, self.now)
        assert all(old <= new.round for old, new in zip(before, self.state.blocks, strict=True))
        assert not paused or not any(isinstance(it, Opened | Extended | Combine) for it in effects)
        self.check(effects)
        return effects

    def check(self, effects: Effects) -> None:
        """What must hold of everything that is said."""
        for effect in effects:
            self.seen[type(effect).__name__] += 1
            match effect:
                case Receipt(update=update, verdict=verdict):
                    self.check_receipt(update, verdict)
                case Combine():
                    self.check_combine(effect)
                case Opened(block=block, round=round, seconds_left=left):
                    assert round == self.opened.get(block, 0) + 1 <= self.how.rounds
                    assert left > 0
                    assert not self.state.stopping
                    self.opened[block] = round
                    self.check_pins(block, round)
                case Extended(seconds_left=left):
                    assert left > 0
                case Assigned(block=block, round=round, slot=slot):
                    assert effect.seconds_left > 0
                    assert 1 <= effect.steps <= self.how.local_steps
                    assert 0 <= slot < self.how.replicas + self.how.spare_slots
                    assert isinstance(self.state.blocks[block].phase, Open)
                    assert self.state.blocks[block].round == round
                    if effect not in self.jobs:
                        self.jobs.append(effect)
                case Idle(retry_in=retry_in):
                    assert retry_in > 0
                case Dropped(update=update):
                    assert update not in self.combined
                    self.dropped.add(update)
        assert self.seen["Ended"] == self.state.ended

    def check_pins(self, block: int, round: int) -> None:
        """It builds on everybody's round before, or on the newest of those who are slower."""
        phase = self.state.blocks[block].phase
        assert isinstance(phase, Open)
        for other, it in enumerate(self.state.blocks):
            pinned = min(round - 1, it.versions[-1].round)
            assert phase.pins[other] == f"steady-{other}-{pinned}"

    def check_receipt(self, update: str, verdict: Verdict) -> None:
        self.seen[type(verdict).__name__] += 1
        sent = self.sent[update]
        if isinstance(verdict, Refused):
            self.seen[verdict.reason] += 1
            if verdict.reason == Reason.TOO_OLD:
                late = self.state.blocks[sent.block].welcoming - sent.round
                assert late > self.how.ahead + 1
            return
        assert update not in self.dropped
        late = verdict.round - sent.round
        assert verdict.factor == self.how.discount**late
        assert 0 <= late <= self.how.ahead + 1
        assert isinstance(verdict, Salvaged if late else Taken)
        assert self.promised.setdefault(update, (sent.block, verdict)) == (sent.block, verdict)

    def check_combine(self, combine: Combine) -> None:
        """Every update is combined once, where its receipt said, by its factor, in order."""
        assert combine.parts
        places = []
        for part in combine.parts:
            sent = self.sent[part.update]
            assert part.update not in self.dropped
            block, verdict = self.promised[part.update]
            assert isinstance(verdict, Taken | Salvaged)
            assert (block, verdict.round) == (combine.block, combine.round)
            assert (part.factor, part.bytes_trained) == (verdict.factor, sent.bytes_trained)
            self.combined[part.update] += 1
            assert self.combined[part.update] == 1
            late = sent.round != combine.round
            place = (sent.worker, sent.update) if late else (sent.slot,)
            places.append((late, place))
        assert places == sorted(places)
        slots = [place for late, place in places if not late]
        assert len(slots) == len(set(slots))

    # --- what may happen

    @rule(worker=names, blocks=st.none() | st.sets(st.integers(0, 3)), guess=st.none() | st.just(3))
    def ask(self, worker: str, blocks: set[int] | None, guess: float | None) -> None:
        wanted = None if blocks is None else tuple(sorted(blocks))
        held = self.state.held_by(worker)
        effects = self.say(Asked(worker, wanted, guess))
        (answer,) = [it for it in effects if isinstance(it, Assigned | Idle)]
        after = self.state.held_by(worker)
        if held and after and held[1].round == after[1].round and held[0] == after[0]:
            assert held[1].slot == after[1].slot
        if isinstance(answer, Assigned):
            assert wanted is None or answer.block in wanted

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        """Any worker finishes any of its assignments, new or old, sometimes twice."""
        job = data.draw(st.sampled_from(self.jobs[-15:]), "job")
        self.send(job, data.draw(st.integers(1, job.steps), "steps"))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def lie(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.jobs[-6:]), "job")
        what = data.draw(st.sampled_from(["worker", "block", "round", "slot"]), "what")
        value = data.draw(names if what == "worker" else st.integers(-1, 5), "value")
        self.send(job, 1, **{what: value})

    @rule(workers=st.lists(names, min_size=1, unique=True), rounds=st.integers(1, 3))
    def work(self, workers: list[str], rounds: int) -> None:
        """An ordinary time, in which everybody does as asked."""
        for _ in range(rounds):
            for worker in workers:
                for job in self.say(Asked(worker)):
                    if isinstance(job, Assigned):
                        self.now += 0.5
                        self.send(job, job.steps)
            for done in pending(self.state):
                assert isinstance(done, Combine)
                self.finish(done)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def steal(self, data: st.DataObject) -> None:
        """Sends somebody's update as one's own, or under another number."""
        update = self.sent[data.draw(st.sampled_from(sorted(self.sent)), "update")]
        job = data.draw(st.sampled_from(self.jobs), "job")
        mine = (job.worker, job.block, job.round, job.slot)
        if mine == (update.worker, update.block, update.round, update.slot):
            return
        known = any(update.update == it.update for b in self.state.blocks for it in b.counted)
        if known:
            stolen = Submitted(*mine, update.update, update.bytes_trained, 1.0, update.steps)
            assert Receipt(update.update, MINE) in self.say(stolen)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        self.say(self.sent[data.draw(st.sampled_from(sorted(self.sent)), "update")])

    def send(self, job: Assigned, steps: int, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "worker": job.worker,
            "block": job.block,
            "round": job.round,
            "slot": job.slot,
            "update": Digest(f"update-{len(self.sent) * 7919 % 1000:03d}"),  # not in order
            "steps": steps,
            "bytes_trained": steps * self.how.bytes_per_step,
            "seconds": steps * 0.5,
        }
        update = Submitted(**{**fields, **changes})
        self.sent[update.update] = update
        self.say(update)

    @rule(worker=names)
    def hear(self, worker: str) -> None:
        self.say(Heard(worker))

    @rule(worker=names)
    def leave(self, worker: str) -> None:
        self.say(Left(worker))
        assert self.state.held_by(worker) is None

    @rule(worker=st.sampled_from(["dan", "eve"]))
    def ban(self, worker: str) -> None:
        self.say(Banned(worker))
        assert self.state.held_by(worker) is None

    @rule(seconds=st.integers(0, 100))
    def wait(self, seconds: int) -> None:
        self.now += seconds / 4
        self.say(Tick())

    @rule()
    def wake(self) -> None:
        """A tick when the machine wants one does something; just before, it does nothing."""
        wake = next_wake(self.state, self.now)
        if wake is None:
            return
        assert wake >= self.now
        if wake - self.now > 1e-3:
            _, nothing = step(self.state, Tick(), wake - 1e-6)
            assert nothing == ()
        self.now = wake
        assert self.say(Tick())

    @precondition(lambda self: bool(pending(self.state)))
    @rule(data=st.data())
    def combine(self, data: st.DataObject) -> None:
        done = data.draw(st.sampled_from(pending(self.state)), "combine")
        assert isinstance(done, Combine)
        self.finish(done)

    def finish(self, done: Combine) -> None:
        made = f"snap-{done.block}-{done.round}", f"steady-{done.block}-{done.round}"
        self.say(Combined(done.block, done.round, Digest(made[0]), Digest(made[1])))

    @rule(event=st.sampled_from([Pause(), Resume(), Resume(), Stop()]))
    def the_owner_says(self, event: Event) -> None:
        if not isinstance(event, Stop) or len(self.log) > 60:  # a stop at once is a short story
            self.say(event)
            assert (self.state.paused_since is None) or isinstance(event, Pause)

    @rule(clock=st.integers(-100, 100))
    def kill_and_restart(self, clock: int) -> None:
        """Only the bytes survive, and the clock starts anywhere."""
        self.now = clock * 64.0
        self.state = rebase(decode(encode(self.state)), self.now)
        self.log.append((None, self.now))

    # --- what must always hold

    @invariant()
    def nobody_holds_two_slots_and_no_slot_has_two_holders(self) -> None:
        held = [(b, s) for b, it in enumerate(self.state.blocks) for s in it.seats if s.held]
        assert len({seat.worker for _, seat in held}) == len(held)
        assert len({(block, seat.slot) for block, seat in held}) == len(held)
        for block, seat in held:
            assert isinstance(self.state.blocks[block].phase, Open)
            assert self.state.blocks[block].round == seat.round
            assert seat.worker in self.state.workers
            assert seat.worker not in self.state.banned

    @invariant()
    def no_slot_has_two_takers(self) -> None:
        for block in self.state.blocks:
            filled = [(it.round, it.slot) for it in block.counted]
            assert len(filled) == len(set(filled))
            seats = [(it.round, it.slot, it.worker) for it in block.seats]
            assert len(seats) == len(set(seats))
            held = {(it.round, it.slot) for it in block.seats if it.held}
            assert not held & set(filled)

    @invariant()
    def no_block_is_too_far_ahead(self) -> None:
        rounds = [it.round for it in self.state.blocks if isinstance(it.phase, Open)]
        slowest = min(it.progress for it in self.state.blocks)
        assert all(it - slowest <= self.how.ahead for it in rounds)

    @invariant()
    def versions_are_the_last_ones_in_a_row(self) -> None:
        for block in self.state.blocks:
            numbers = [it.round for it in block.versions]
            newest = numbers[-1]
            assert numbers == list(range(max(0, newest - self.how.ahead - 1), newest + 1))
            match block.phase:
                case Open() | Combining():
                    assert newest == block.round - 1
                case Waiting():
                    assert newest == block.round
            assert len(block.durations) <= self.how.history

    @invariant()
    def nothing_with_a_receipt_is_lost(self) -> None:
        """Whatever counts is combined already, or the state still knows where it will be."""
        known: set[Counted] = set()
        for block in self.state.blocks:
            known.update(it for it in block.counted if it.into > block.versions[-1].round)
        waiting = {it.update for it in known} - set(self.combined)
        assert waiting == set(self.promised) - set(self.combined) - self.dropped

    def teardown(self) -> None:
        """Workers that always answer bring every run to its end, and the accounts balance."""
        if not hasattr(self, "state"):
            return
        self.say(Resume())
        for _ in range(400):
            if self.state.ended:
                break
            for done in pending(self.state):
                assert isinstance(done, Combine)
                self.finish(done)
            (job,) = [it for it in self.say(Asked("ann")) if isinstance(it, Assigned | Idle)]
            self.now += 1
            if isinstance(job, Assigned):
                self.send(job, job.steps)
            self.say(Tick())
        assert self.state.ended
        assert self.seen["Ended"] == 1
        assert set(self.promised) == set(self.combined) | self.dropped
        if not self.state.stopping:
            assert all(it.versions[-1].round == self.how.rounds for it in self.state.blocks)
        self.replay()

    def replay(self) -> None:
        """The same events give the same bytes."""
        state, _ = begin(self.how, first_versions(self.how.blocks), 0)
        for event, now in self.log:
            state = rebase(state, now) if event is None else step(state, event, now)[0]
        assert encode(state) == encode(self.state)


TestAnyRun = AnyRun.TestCase
TestAnyRun.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def test_a_worker_goes_on_with_its_block_but_none_is_left_alone() -> None:
    """It remembers the optimiser of the block it trained last."""
    play = Play(blocks=2, replicas=2, quorum=2, rounds=4, lease=1000.0)
    names = ["ann", "ben", "cem", "dai"]
    homes = {"ann": 0, "ben": 1, "cem": 0, "dai": 1}
    play.whole_round(*names)
    assert {name: play.jobs[name].block for name in names} == homes
    play.whole_round("dai", "cem", "ben", "ann")  # whoever comes first
    assert {play.jobs[name].round for name in names} == {2}
    assert {name: play.jobs[name].block for name in names} == homes
    for name in ("ben", "dai"):
        play.say(Left(name))
    assert {play.job(name).block for name in ("cem", "ann")} == {0, 1}
