"""blocktrain join: give a block some of this machine's time."""

import os
import signal
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import platformdirs
from cyclopts import Parameter

from blocktrain.commands.logs import Logged, log_as
from blocktrain.commands.owner import Token
from blocktrain.console import bar
from blocktrain.disk import errors_are_clear, lock
from blocktrain.errors import BlockTrainError
from blocktrain.services.wishes import Wishes
from blocktrain.services.worker import Worker
from blocktrain.wire.link import Link
from blocktrain.wire.tls import trust_by_fingerprint

WISHES, PLAIN = Wishes(), Logged()
THANKS = "What you gave; thank you"


def join(
    url: str,
    *,
    token: Token,
    fingerprint: str | None = None,
    folder: Path | None = None,
    wishes: Annotated[Wishes, Parameter(name="*")] = WISHES,
    output: Annotated[Logged, Parameter(name="*")] = PLAIN,
) -> None:
    """Train one block of somebody's run, over outbound HTTP only.

    Ctrl+C submits what was trained so far and leaves; a second one leaves at once. The next start
    goes on, also after kill -9.

    Parameters
    ----------
    url: str
        Where the coordinator is.
    token: str
        What its owner gave you.
    fingerprint: str
        Of the run's certificate authority, as its coordinator prints it (--tls auto).
    folder: Path
        Where this worker keeps its identity and its blocks; one folder is one worker.
    """
    if output.log == "json":
        log_as(output.log)
    home = folder or Path(platformdirs.user_data_dir("blocktrain")) / "worker"
    with errors_are_clear(home):
        home.mkdir(parents=True, exist_ok=True)
    held = lock(home / "lock", f"Another worker lives in {home}; give this one its own --folder.")
    trusted = trust_by_fingerprint(url, fingerprint) if fingerprint else None
    link = Link(url, wishes.limits, trusted)
    link.note = output.say
    with closing(link), bar("text") as progress:
        worker = Worker(link, token, home, wishes, output.say, progress)
        leave_when_told(worker)
        try:
            worker.work()
        except BlockTrainError as error:
            if worker.was_let_in:
                output.result_beside(error, contribution(worker), THANKS)
            raise
        finally:
            os.close(held)
    output.result(contribution(worker), THANKS)


def leave_when_told(worker: Worker) -> None:
    """Ctrl+C leaves after the step under way, a second one at once."""
    asked = False

    def leave(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked or worker.leaving.is_set():
            os._exit(130)
        asked = True  # before anything is said: the second one may come while it is
        worker.say("Leaving after this step; once more to leave at once.")
        worker.leaving.set()
        worker.link.stop.set()

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, leave)


def contribution(worker: Worker) -> dict[str, Any]:
    """What it gave in this life, and the bytes that it moved for the run in all."""
    moved = worker.traffic()
    return {**asdict(worker.gave), "bytes_sent": moved.sent, "bytes_received": moved.received}
