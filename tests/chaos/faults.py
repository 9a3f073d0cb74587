"""A script of what goes wrong in a run, said beforehand and done when its round comes.

    faults = Faults(net)
    faults.kill(worker=2, round=3)
    faults.partition(worker=1, round=4, seconds=2.0)
    faults.play()

Workers count from 1. A fault happens as soon as some block has begun its round; one that lasts ends
after so many seconds. `play` looks after the run until it is over.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.proxy import Line

from blocktrain.aggregation.state import State


class Stage:
    """Where faults happen. What a network cannot suffer, it need not have."""

    def state(self) -> State:
        """Where the rounds are."""
        raise NotImplementedError

    def look_after(self) -> None:
        """Starts again what died."""
        raise NotImplementedError

    def kill(self, worker: int) -> None:
        """kill -9."""
        raise NotImplementedError

    def kill_coordinator(self) -> None:
        """kill -9."""
        raise NotImplementedError

    def line(self, worker: int) -> Line:
        """How a worker reaches the coordinator."""
        raise NotImplementedError

    def fill_disk(self) -> None:
        """Leaves no room on the coordinator's disk."""
        raise NotImplementedError

    def free_disk(self) -> None:
        """Makes room again."""
        raise NotImplementedError


@dataclass(order=True)
class Fault:
    """Something that happens at a round, and is over after some time, if it lasts."""

    round: int
    begin: Callable[[], None] = field(compare=False)
    end: Callable[[], None] | None = field(default=None, compare=False)
    seconds: float = field(default=0.0, compare=False)
    begun: float | None = field(default=None, compare=False)
    over: bool = field(default=False, compare=False)

    def look(self, round: int) -> None:
        """Begins or ends, if it is time."""
        now = time.monotonic()
        if self.begun is None and round >= self.round:
            self.begun = now
            self.begin()
            self.over = self.end is None
        elif self.begun is not None and self.end and not self.over:
            self.over = now >= self.begun + self.seconds
            if self.over:
                self.end()


class Faults:
    """The script of one run."""

    def __init__(self, net: Stage) -> None:
        self.net = net
        self.script: list[Fault] = []

    def kill(self, *, worker: int, round: int) -> None:
        """kill -9 of a worker."""
        self.add(Fault(round, lambda: self.net.kill(worker)))

    def kill_coordinator(self, *, round: int) -> None:
        """kill -9 of the coordinator."""
        self.add(Fault(round, self.net.kill_coordinator))

    def partition(self, *, worker: int, round: int, seconds: float) -> None:
        """Nothing goes between a worker and the coordinator, without a word, and then all of it."""
        line = self.net.line(worker)
        self.add(Fault(round, line.cut, line.heal, seconds))

    def partition_within(self, what: bytes, *, worker: int, round: int, seconds: float) -> None:
        """The same, in the middle of the next request that holds these bytes."""
        line = self.net.line(worker)
        self.add(Fault(round, lambda: setattr(line, "cut_behind", what), line.heal, seconds))

    def lose_answers(self, *, worker: int, round: int, seconds: float) -> None:
        """The coordinator hears a worker, and the worker hears nothing."""
        line = self.net.line(worker)
        self.add(Fault(round, line.deafen, line.heal, seconds))

    def fill_disk(self, *, round: int, seconds: float) -> None:
        """The coordinator's disk is full."""
        self.add(Fault(round, self.net.fill_disk, self.net.free_disk, seconds))

    def add(self, fault: Fault) -> None:
        """One more."""
        self.script = sorted([*self.script, fault])

    def play(self, within: float = 50.0) -> None:
        """Looks after the run until it is over; by then all of the script has happened."""
        deadline = time.monotonic() + within
        while not (state := self.net.state()).ended:
            for fault in self.script:
                fault.look(max(block.round for block in state.blocks))
            self.net.look_after()
            assert time.monotonic() < deadline, f"not over after {within} s: {state}"
            time.sleep(0.02)
        assert all(fault.over for fault in self.script), "the run was over before its faults were"
