"""Subcommands, nothing else. Exit codes are those of errors.py; 130 is Ctrl+C.

Each command lives in blocktrain.commands and is imported only when it is called, so that help and
commands that need no torch answer at once.
"""

import sys
from collections.abc import Mapping
from types import MappingProxyType

import cyclopts
from cyclopts import App

from blocktrain import config, console
from blocktrain.errors import BlockTrainError

COMMANDS = {
    "train": ("train:train", "Train a model with real workers on this machine, over HTTP."),
    "lab": ("lab:lab", "Train a model, one block at a time, in this process; no network."),
    "reproduce": ("reproduce:reproduce", "Measure every row of the results again."),
    "evaluate": ("model:evaluate", "Honest CE of a model, over every byte of a split."),
    "audit": ("model:audit", "Prove that no target reaches the model."),
    "generate": ("model:generate", "Continue a prompt."),
    "export": ("model:export", "Write the model as a standard architecture."),
    "compress": ("archive:compress", "Compress a file with the model's own probabilities."),
    "decompress": ("archive:decompress", "Give back the file that compress was given."),
    "init": ("init:init", "Make a run for others to join."),
    "coordinator": ("coordinator:coordinator", "Keep a run: rounds, updates, snapshots."),
    "join": ("join:join", "Train one block of somebody's run."),
    "status": ("owner:status", "How a run is doing."),
    "pause": ("owner:pause", "Hold a run."),
    "resume": ("owner:resume", "Let a paused run go on."),
    "stop": ("owner:stop", "End a run when its open rounds are closed."),
    "ban": ("owner:ban", "Take nothing more from a worker."),
    "backup": ("owner:back_up", "Write a run into one file, while it runs."),
    "restore": ("owner:restore", "Make a run's folder from a backup."),
    "stage": ("stage:stage", "Hold some blocks of a model for others to read through."),
    "gateway": ("gateway:gateway", "Serve a model over its stages, as OpenAI does."),
    "serve": ("serve:serve", "Serve a model with stages on this machine."),
    "plan": ("plan:plan", "How fast a model would be over given hosts."),
    "refit": ("refit:refit", "Let a first stage guess better; the text stays."),
    "publish": ("stage:publish", "Let all stages of a run serve its newest checkpoint."),
    "admit": ("stage:admit", "Make papers for a host of a serving network."),
    "doctor": ("doctor:doctor", "What this machine can do."),
}
GROUPS = {
    "data": (
        "Text to train on.",
        {
            "list": ("data:show", "The corpora known by name, and whether they are in the cache."),
            "fetch": ("data:fetch", "Fetch a corpus into the cache and check every byte."),
        },
    ),
    "tokens": (
        "Who may come in.",
        {
            "issue": ("owner:issue", "Make a token for somebody who wants to work."),
            "revoke": ("owner:revoke", "Send away whoever comes with a token."),
            "list": ("owner:tokens", "All tokens, by their hashes."),
        },
    ),
    "keys": (
        "Who may ask a gateway.",
        {
            "issue": ("gateway:issue", "Make an API key."),
            "revoke": ("gateway:revoke", "Take an API key back."),
            "list": ("gateway:keys", "Who has an API key."),
        },
    ),
    "bench": (
        "What this machine does, measured.",
        {
            "compute": ("bench:compute", "A block's training step against the GEMM peak."),
            "combine": ("bench:combine", "Combining updates of a large block: memory and speed."),
            "network": ("network:network", "The network's CPU-seconds against the lab's."),
            "coordinator": ("load:coordinator", "Receipts for 200 workers, and a burst."),
            "three-hosts": ("hosts:three_hosts", "CE and bytes moved across a WAN of three hosts."),
            "wan": ("serving_bench:wan", "Bytes a second over a WAN of three stages, by mode."),
            "failover": ("serving_bench:failover", "What a stage's death costs a text."),
            "serve": ("serving_bench:serve", "64 streams at once through a gateway."),
            "stages": ("serving_bench:stages", "Three stages on loopback against one process."),
            "activations": ("serving_bench:activations", "CE by the codec of activations."),
            "logical": ("logical:logical", "75.80 B logical parameters over three hosts."),
            "memory": ("bench:memory", "A worker's memory against an end-to-end trainer's."),
        },
    ),
}


def build() -> App:
    """The command line as a tree."""
    app = App(
        name="blocktrain",
        help="Strangers with ordinary machines train and serve one model together, a block each.",
        help_format="plaintext",
        suppress_keyboard_interrupt=False,  # main says what Ctrl+C keeps
    )
    for name, (target, help_line) in COMMANDS.items():
        app.command(f"blocktrain.commands.{target}", name=name, help=help_line)
    for group, (group_help, members) in GROUPS.items():
        inner = App(name=group, help=group_help)
        for name, (target, help_line) in members.items():
            inner.command(f"blocktrain.commands.{target}", name=name, help=help_line)
        app.command(inner)
    return app


def main() -> None:
    """The `blocktrain` command."""
    arguments = sys.argv[1:]
    config.calm_threads()
    app = build()
    try:
        if path := config_in(arguments):
            from blocktrain.commands.lab import defaults_from

            app.config = (defaults_from(path),)
        app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except cyclopts.CycloptsError as error:
        give_up(" ".join(str(error).split()), 2)
    except BlockTrainError as error:
        give_up(str(error), error.exit_code, error.told)
    except KeyboardInterrupt:
        give_up("Stopped. What was saved is intact; the same command goes on from there.", 130)
    except BrokenPipeError:  # the reader has seen enough, as with `| head`
        sys.stderr.close()


def config_in(arguments: list[str]) -> str | None:
    """The file that --config names: it must be read before the flags are understood."""
    for each, following in zip(arguments, [*arguments[1:], None], strict=True):
        if each == "--config":
            return following
        if each.startswith("--config="):
            return each.removeprefix("--config=")
    return None


def give_up(why: str, code: int, told: Mapping[str, object] = MappingProxyType({})) -> None:
    """One sentence, and the exit code that says what kind of trouble it is."""
    console.people.print(f"blocktrain: {why}", markup=False, soft_wrap=True)
    if "--json" in sys.argv:
        console.print_json({"error": why, "exit_code": code, **told})
    sys.exit(code)
