"""A training network that is quick to start: a real coordinator, and workers without torch.

    begin_light(run, quick(rounds=5))
    with network(run, lives, workers=2) as net:
        net.finish()
    settled(net.run, net.receipts)

The coordinator is a process that may be killed, and is started again when it is looked after.
"""

import signal
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.faults import Stage
from tests.chaos.light import Light, state_of
from tests.chaos.lives import Life, Lives, free_port
from tests.chaos.proxy import Line

from blocktrain.aggregation.folder import owners_token
from blocktrain.aggregation.state import State
from blocktrain.wire.messages import Signed


@dataclass
class Network(Stage):
    """A run, its coordinator, and light workers in threads."""

    run: Path
    lives: Lives
    port: int = field(default_factory=free_port)
    workers: list[Light] = field(default_factory=list)
    working: "list[Future[int]]" = field(default_factory=list)
    kill_at: Iterator[int] = field(default_factory=lambda: iter(()))
    """At which boundary each life dies; those for which nothing is told live on."""
    lines: dict[int, Line] = field(default_factory=dict)
    life: Life | None = None
    starts: int = 0

    def __post_init__(self) -> None:
        self.token, self.log = owners_token(self.run), self.run.with_suffix(".log")
        self.url = f"http://127.0.0.1:{self.port}"
        self.threads = ThreadPoolExecutor(32, "light")

    @property
    def receipts(self) -> list[Signed]:
        """All that workers hold."""
        return [receipt for worker in self.workers for receipt in worker.receipts]

    def worker(self, seconds_per_step: float = 0.0) -> Light:
        """One more worker, who does nothing by itself."""
        self.workers.append(Light(self.url, self.token, seconds_per_step))
        return self.workers[-1]

    def distant_worker(self, seconds_per_step: float = 0.0) -> Light:
        """One more, at the end of a line that can be cut."""
        line = Line(self.port)
        self.workers.append(Light(line.url, self.token, seconds_per_step))
        self.lines[len(self.workers)] = line
        return self.workers[-1]

    def set_to_work(self, *workers: Light) -> None:
        """Lets workers work on their own."""
        self.working += [self.threads.submit(worker.work) for worker in workers]

    def look_after(self) -> None:
        """Starts the coordinator if it is dead."""
        if self.life is not None and not self.life.over():
            return
        kill_at = next(self.kill_at, 0)
        self.life = self.lives.start(self.log, kill_at, folder=str(self.run), port=self.port)
        self.starts += 1

    def kill_coordinator(self) -> None:
        """kill -9; it stays dead until somebody looks after it."""
        assert self.life is not None
        self.life.end()

    def state(self) -> State:
        """Where the rounds are."""
        return state_of(self.run)

    def line(self, worker: int) -> Line:
        """How a worker reaches the coordinator."""
        return self.lines[worker]

    def finish(self, within: float = 40.0) -> int:
        """Looks after the run until all workers are told that it is over; returns their updates."""
        deadline = time.monotonic() + within
        while not all(each.done() for each in self.working):
            assert time.monotonic() < deadline, f"not over after {within} s: {self.state()}"
            self.look_after()
            time.sleep(0.01)
        return sum(each.result() for each in self.working)

    def close(self) -> None:
        """Everybody goes home."""
        for worker in self.workers:
            worker.leaving.set()
            worker.link.stop.set()
        if self.life is not None:
            self.life.end(signal.SIGTERM)
            self.life = None
        self.threads.shutdown()
        for worker in self.workers:
            worker.link.close()
        for line in self.lines.values():
            line.close()


@contextmanager
def network(
    run: Path,
    lives: Lives,
    workers: int = 0,
    kill_at: Iterable[int] = (),
    kind: type[Network] = Network,
) -> Iterator[Network]:
    """The network of a run, at work; in the end all of it has ended in good order."""
    net = kind(run, lives, kill_at=iter(kill_at))
    try:
        net.look_after()
        net.set_to_work(*[net.worker() for _ in range(workers)])
        yield net
    finally:
        net.close()
