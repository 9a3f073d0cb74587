"""Lives of a coordinator, each a real process, each killed at the boundary it is told.

Run as a program. It imports what a coordinator needs once and forks a process for every life, so
that a life begins within some hundredths of a second. Lines come in on stdin, as JSON:

    {"folder": ..., "port": ..., "log": ..., "kill_at": 0}     ->    the life's process id

A life is what `blocktrain coordinator` does. It writes every boundary it crosses into its log, and
ends itself with SIGKILL at the one numbered `kill_at`. A boundary lies behind an effect: bytes of a
blob are written, contents are synced, a blob has its name, names are synced, a transaction is
committed, an answer is sent. Before the first effect there is nothing to lose, and after one effect
is before the next, so that these are all boundaries there are.
"""

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

from blocktrain.aggregation import store
from blocktrain.aggregation.events import Combine
from blocktrain.aggregation.keeper import Keeper
from blocktrain.aggregation.sqlite import SqliteTransaction
from blocktrain.commands import coordinator as command
from blocktrain.console import Output
from blocktrain.services.coordinator import Coordinator

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

    def behind(self, owner: Any, effect: str, name: str, when: Callable[..., bool]) -> None:
        """Puts a boundary behind every call of an effect."""
        original = getattr(owner, effect)

        @wraps(original)
        def crossing(*given: Any, **named: Any) -> Any:
            result = original(*given, **named)
            if when(*given):
                self.cross(name)
            return result

        setattr(owner, effect, crossing)

    def install(self) -> None:
        """Behind every effect that a round has."""
        always = lambda *_: True  # noqa: E731
        self.behind(store.FolderGroup, "_write", "a blob is written", always)
        self.behind(store, "sync_all", "contents or names are synced", always)
        named = lambda part, path: part.suffix == ".part" and len(path.name) == 64  # noqa: E731
        self.behind(Path, "replace", "a blob has its name", named)
        combining = lambda _, effect: isinstance(effect, Combine)  # noqa: E731
        self.behind(Keeper, "_act", "a round is handed over to be combined", combining)
        committed = lambda _, sql, *__: sql == "COMMIT"  # noqa: E731
        self.behind(SqliteTransaction, "_change", "a transaction is committed", committed)
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


def live(folder: str, port: int, log: str, kill_at: int) -> None:
    """One life, in a process of its own."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, out, out)):
        os.dup2(file, number)
    Boundaries(kill_at).install()
    command.coordinator(Path(folder), listen=command.Listen(port=port), output=Output(json=True))


def end_with(parent: int) -> None:
    """Ends this process when the other end of a pipe is closed, however its parent came to die."""

    def watch() -> None:
        os.read(parent, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Forks a life for every line; when nobody speaks any more, no life goes on."""
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
            live(**told)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)


if __name__ == "__main__":
    main()
