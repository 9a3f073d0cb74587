"""Lives of a coordinator or of a worker, each a real process, killed at the boundary it is told.

Run as a program, with `coordinator` or `worker`. It imports what they need once and forks a process
for every life, so that a life begins within some hundredths of a second. Lines come in on stdin:

    {"told": {"folder": ..., "port": ...}, "log": ..., "kill_at": 0}     ->    its process id

A life does what `blocktrain coordinator` or `blocktrain join` does. It writes every boundary
it crosses into its log, and ends itself with SIGKILL at the one numbered `kill_at`. A boundary lies
behind an effect: a file has been written, synced, named or removed, a transaction is committed, an
answer is sent. Before the first effect there is nothing to lose, and behind one effect is before
the next, so that these are all boundaries there are.
"""

import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from blocktrain.aggregation import folder_store
from blocktrain.aggregation.events import Combine
from blocktrain.aggregation.keeper import Keeper
from blocktrain.aggregation.sqlite_queries import SqliteTransaction
from blocktrain.commands import coordinator as command
from blocktrain.commands.listen import Listen
from blocktrain.console import Output
from blocktrain.services.coordinator import Coordinator
from blocktrain.wire.link import Link

MARK = "crossed "


class Boundaries:
    """Counts what is crossed, and ends the process where it was told."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at, self.crossed, self.lock = kill_at, 0, threading.Lock()

    def cross(self, name: str) -> None:
        """The effect of this name has just happened."""
        with self.lock:
            self.crossed += 1
            with suppress(OSError):  # the disk may be full
                os.write(2, f"{MARK}{self.crossed} {name}\n".encode())
            if self.crossed == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def behind(
        self, owner: Any, effect: str, name: str, when: Callable[..., bool] = lambda *_: True
    ) -> None:
        """Puts a boundary behind every call of an effect."""
        original = getattr(owner, effect)

        @wraps(original)
        def crossing(*given: Any, **named: Any) -> Any:
            result = original(*given, **named)
            if when(*given):
                self.cross(name)
            return result

        setattr(owner, effect, crossing)

    def of_a_coordinator(self) -> None:
        """Behind every effect that a round has there."""

        def names_a_blob(part: Path, path: Path) -> bool:
            return part.suffix == ".part" and len(path.name) == 64

        def commits(_: SqliteTransaction, sql: str, *values: Any) -> bool:
            return sql == "COMMIT"

        def combines(_: Keeper, effect: object) -> bool:
            return isinstance(effect, Combine)

        self.behind(folder_store.FolderGroup, "_write", "a blob is written")
        self.behind(folder_store, "sync_all", "contents or names are synced")
        self.behind(Path, "replace", "a blob has its name", names_a_blob)
        self.behind(SqliteTransaction, "_change", "a transaction is committed", commits)
        self.behind(Keeper, "_act", "a round is handed over to be combined", combines)
        self.behind_answers()

    def behind_answers(self) -> None:
        """Behind every answer to a worker, when its last byte is with the system."""
        original = Coordinator.app

        def app(coordinator: Coordinator, base_path: str = "") -> Any:
            inner = original(coordinator, base_path)

            async def outer(scope: Any, receive: Any, send: Any) -> None:
                async def sending(message: Any) -> None:
                    await send(message)
                    if message["type"] == "http.response.body" and not message.get("more_body"):
                        self.cross(f"{scope['method']} {scope['path'].split('/')[2]} is answered")

                watched = scope["type"] == "http" and scope["method"] != "GET"
                await inner(scope, receive, sending if watched else send)

            return outer

        Coordinator.app = app  # type: ignore[assignment]

    def of_a_worker(self) -> None:
        """Behind every effect that a round has there."""
        self.behind(Path, "write_bytes", "a file is written")
        for effect in ("rename", "replace", "unlink", "rmdir"):
            self.behind(os, effect, effect)
        self.behind(Link, "send", "the tensors are sent")
        self.behind(Link, "say", "an answer is heard")


def coordinator(folder: str, port: int) -> None:
    """What `blocktrain coordinator` does."""
    command.coordinator(Path(folder), listen=Listen(port=port), output=Output(json=True))


def worker(url: str, token: str, folder: str, **wishes: Any) -> None:
    """What `blocktrain join` does."""
    from blocktrain.commands.join import join
    from blocktrain.services.wishes import Wishes

    join(url, token=token, folder=Path(folder), wishes=Wishes(threads=1, **wishes))


def live(kind: str, told: dict[str, Any], log: str, kill_at: int) -> None:
    """One life, in a process of its own."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, out, out)):
        os.dup2(file, number)
    boundaries = Boundaries(kill_at)
    if kind == "worker":
        boundaries.of_a_worker()
        worker(**told)
    else:
        boundaries.of_a_coordinator()
        coordinator(**told)


def end_with(parent: int) -> None:
    """Ends this process when the other end of a pipe is closed, however its parent came to die."""

    def watch() -> None:
        os.read(parent, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(kind: str) -> None:
    """Forks a life for every line; when nobody speaks any more, no life goes on."""
    if kind == "worker":  # once for all lives: a block's first step imports torch's compiler
        for module in ("blocktrain.commands.join", "torch._dynamo"):
            importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: no zombies
    alive, held = os.pipe()
    for line in sys.stdin:
        told = json.loads(line)
        if pid := os.fork():
            print(pid, flush=True)
            continue
        try:
            os.close(held)
            end_with(alive)
            live(kind, **told)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
