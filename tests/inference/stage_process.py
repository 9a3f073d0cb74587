"""Stages as real processes, killed with SIGKILL at the very point that they are told.

Run as a program: it imports what a stage needs once, and forks a process for every line on stdin,
so that a stage begins within some hundredths of a second. A line says what to serve (`Told`); what
comes back is the stage's process id, port and id. SIGTERM lets a stage leave. When nobody speaks
any more, no stage goes on.
"""

import asyncio
import json
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blocktrain.inference.desk import Desk, Job, Limits, Outcome
from blocktrain.inference.span import Span
from blocktrain.inference.stage import Stage
from blocktrain.learning.model import Model, Shape, new_block
from blocktrain.learning.noise import Noise
from blocktrain.wire.tls import Papers


@dataclass(frozen=True)
class Told:
    """What a stage shall serve, and where it shall die."""

    model: str
    first: int
    last: int
    certificate: str
    key: str
    authority: str
    port: int = 0
    step: int = 0
    """The traversal at which it dies, from 1; 0: none."""
    point: str = "before"
    """`before` or `after` computing it, or when it has `passed` it on."""
    threads: int = 1
    limits: dict[str, Any] | None = None


class Mortal:
    """Blocks that may be the last thing a process does."""

    def __init__(self, span: Span, told: Told) -> None:
        self._span, self._told, self._steps = span, told, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._span, name)

    def step(self, *given: Any) -> Any:
        return self._around(self._span.step, given)

    def draft(self, *given: Any) -> Any:
        return self._around(self._span.draft, given)

    def emit(self, *given: Any) -> Any:
        return self._around(self._span.emit, given)

    def _around(self, compute: Any, given: tuple[Any, ...]) -> Any:
        self._steps += 1
        self.die_if("before")
        done = compute(*given)
        self.die_if("after")
        return done

    def die_if(self, point: str) -> None:
        """Ends the process, if this is where."""
        if self._told.step == self._steps and self._told.point == point:
            os.kill(os.getpid(), signal.SIGKILL)


async def serve(told: Told, ready: int) -> None:
    """One stage, from its beginning to its end."""
    torch.set_num_threads(told.threads)
    blocks = Mortal(Span.open(Path(told.model), told.first, told.last), told)
    deliver = Desk._deliver

    async def delivering(desk: Desk, job: Job, outcome: Outcome) -> None:
        await deliver(desk, job, outcome)
        if job.said.tokens:
            blocks.die_if("passed")

    setattr(Desk, "_deliver", delivering)  # noqa: B010
    papers = Papers(Path(told.certificate), Path(told.key))
    pem = Path(told.authority).read_bytes()
    limits = Limits(**(told.limits or {}))
    async with Stage(blocks, papers, pem, "127.0.0.1", told.port, limits) as stage:
        tasks = set()

        def leave() -> None:
            tasks.add(asyncio.create_task(stage.leave(within=0.3)))

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave)
        place = {"pid": os.getpid(), "port": stage.port, "id": stage.id}
        os.write(ready, json.dumps(place).encode() + b"\n")
        os.close(ready)
        await stage.closed()
        await asyncio.gather(*tasks)


def end_with(parent: int) -> None:
    """Ends this process when the other end of a pipe is closed, however its parent came to die."""

    def watch() -> None:
        os.read(parent, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Forks a stage for every line."""
    warm = Shape(blocks=1, width=32, heads=2, window=8)  # imports what torch imports late
    Span.of(Model(warm, Noise(), [new_block(warm, 0, seed=1)]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: no zombies
    alive, held = os.pipe()
    for line in sys.stdin:
        told = Told(**json.loads(line))
        answer, ready = os.pipe()
        if os.fork():
            os.close(ready)
            with os.fdopen(answer) as said:
                print(said.readline() or "{}", end="", flush=True)
            continue
        try:
            os.close(held)
            end_with(alive)
            asyncio.run(serve(told, ready))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)


if __name__ == "__main__":
    main()
