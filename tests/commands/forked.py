"""The `blocktrain` command in a process of its own, without waiting for torch each time.

Run as a program: it imports what commands need once, and forks a process for every line on stdin,
so that a command begins within some hundredths of a second: 28 of them took two to three
CPU-seconds each to import the same. A line says what was typed, and where; what comes back is the
exit code:

    {"typed": ["evaluate", ...], "folder": ..., "stdout": ..., "stderr": ...}     ->     0
"""

import atexit
import importlib
import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from blocktrain.config import calm_threads, environment

HEAVY = [
    "blocktrain.commands.lab",
    "blocktrain.commands.model",
    "blocktrain.commands.archive",
    "torch._dynamo",  # a block's first step imports it
    "matplotlib.pyplot",
]
Done = subprocess.CompletedProcess[str]


class Forked:
    """Runs commands, one after the other."""

    def __init__(self, modules: Sequence[str] = HEAVY) -> None:
        self.parent = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def run(self, typed: list[str], folder: Path, notes: Path) -> Done:
        """What a command, typed in this folder, said, and how it ended."""
        stdout, stderr = notes / "stdout", notes / "stderr"
        told = {"typed": typed, "folder": str(folder), "stdout": str(stdout), "stderr": str(stderr)}
        assert self.parent.stdin
        assert self.parent.stdout
        self.parent.stdin.write(json.dumps(told) + "\n")
        self.parent.stdin.flush()
        code = int(self.parent.stdout.readline())
        return Done(typed, code, stdout.read_text(), stderr.read_text())

    def close(self) -> None:
        """No more commands."""
        assert self.parent.stdin
        assert self.parent.stdout
        self.parent.stdin.close()
        self.parent.wait()
        self.parent.stdout.close()


def become(typed: list[str], folder: str, stdout: str, stderr: str) -> NoReturn:
    """This process is now the command, and ends as that does."""
    writing = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, (path, mode) in enumerate(
        [(os.devnull, os.O_RDONLY), (stdout, writing), (stderr, writing)]
    ):
        os.dup2(os.open(path, mode), number)
    os.chdir(folder)
    sys.argv = ["blocktrain", *typed]
    code: Any = 1
    try:
        runpy.run_module("blocktrain", run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # to take torch apart, module by module, costs 1.3 s and shows nothing


def main() -> None:
    """Forks for every line."""
    calm_threads()
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        if not (child := os.fork()):
            become(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
