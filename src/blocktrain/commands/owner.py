"""blocktrain backup|restore|status|pause|resume|stop|ban|tokens: what an owner does with a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from blocktrain.aggregation import backup
from blocktrain.aggregation.folder import owners_token
from blocktrain.console import PLAIN, Out, bar, print_json
from blocktrain.wire import messages, owner
from blocktrain.wire.link import Link
from blocktrain.wire.tls import trust_by_fingerprint

PATIENCE = 10.0  # seconds: a person waits
Token = Annotated[str, Parameter(allow_leading_hyphen=True)]  # one of 64 begins with a hyphen


@dataclass(frozen=True)
class As:
    """Who asks."""

    token: Token | None = None
    """The owner's token."""
    run: Path | None = None
    """The run's folder, where the owner's token lies, instead of --token."""
    fingerprint: str | None = None
    """Of the run's certificate authority, as its coordinator prints it (--tls auto)."""

    def link(self, url: str) -> Link:
        """A link on which the owner speaks."""
        trusted = trust_by_fingerprint(url, self.fingerprint) if self.fingerprint else None
        link = Link(url, verify=trusted, patience=PATIENCE)
        if self.token or self.run:
            link.bearer = self.token or owners_token(self.run or Path())
        return link


NOBODY = As()
Asking = Annotated[As, Parameter(name="*")]


def back_up(run: Path, file: Path, *, output: Out = PLAIN) -> None:
    """Write a run's folder into one file, while its coordinator runs.

    Parameters
    ----------
    run: Path
        The coordinator's folder.
    file: Path
        What to write; it holds keys and the owner's token.
    """
    with bar("blobs") as progress:
        size = backup.back_up(run, file, progress)
    output.result({"file": str(file), "bytes": size}, "Backup")


def restore(file: Path, run: Path, *, output: Out = PLAIN) -> None:
    """Make a run's folder from a backup, for `blocktrain coordinator` to go on with.

    Parameters
    ----------
    file: Path
        What `blocktrain backup` wrote.
    run: Path
        A new folder.
    """
    backup.restore(file, run)
    output.result({"folder": str(run)}, "Restored")


def status(url: str, *, asking: Asking = NOBODY, output: Out = PLAIN) -> None:
    """How a run is doing."""
    now = asking.link(url).ask("v1/status", owner.Status)
    if output.json:
        print_json(msgspec.to_builtins(now))
        return
    newest = f", CE {now.curve[-1].ce:.4f}" if now.curve else ""
    seen, moved = now.bytes_seen / 1e6, now.bytes_moved / 1e6
    output.say(f"{now.name or now.run[:16]}: {now.state}{newest}, {seen:.2f} MB seen by each block")
    output.say(f"{now.parameters:,} parameters, codec {now.codec}, {moved:.2f} MB moved")
    blocks: list[dict[str, Any]] = [
        {
            "block": block.block + 1,
            "round": f"{block.round} of {now.rounds}",
            "phase": block.phase,
            "left": "-" if block.seconds_left is None else f"{block.seconds_left:.0f} s",
            "allowance": f"{block.allowance:.0f} s",
            "updates": f"{block.updates} of {now.replicas}",
            "taken": block.taken,
            "late": block.late,
            "refused": block.refused,
        }
        for block in now.blocks
    ]
    output.rows(blocks, "Blocks")
    workers: list[dict[str, Any]] = [
        {
            "worker": worker.worker[:8],
            "name": worker.name,
            "is": "banned" if worker.banned else "here" if worker.here else "gone",
            "block": "-" if worker.block is None else worker.block + 1,
            "s a step": worker.seconds_per_step,
            "updates": worker.updates,
            "MB trained": f"{worker.bytes_trained / 1e6:.2f}",
            "MB up": f"{worker.traffic.sent / 1e6:.2f}",
            "MB down": f"{worker.traffic.received / 1e6:.2f}",
        }
        for worker in now.workers
    ]
    output.rows(workers, "Workers")


def pause(url: str, *, asking: Asking = NOBODY, output: Out = PLAIN) -> None:
    """Hold everything: close no round and open none."""
    _command(url, "pause", asking, output)


def resume(url: str, *, asking: Asking = NOBODY, output: Out = PLAIN) -> None:
    """Go on; the pause does not count."""
    _command(url, "resume", asking, output)


def stop(url: str, *, asking: Asking = NOBODY, output: Out = PLAIN) -> None:
    """Finish what is under way, begin nothing new, and end."""
    _command(url, "stop", asking, output)


def _command(url: str, do: str, asking: As, output: Out) -> None:
    asking.link(url).say("v1/command", owner.Command(do), messages.Done)
    output.result({"done": do}, "Done")


def ban(url: str, worker: str, *, asking: Asking = NOBODY, output: Out = PLAIN) -> None:
    """Take nothing more from a worker.

    Parameters
    ----------
    worker: str
        Its id, or at least eight digits of its beginning, as `blocktrain status` shows.
    """
    asking.link(url).say("v1/ban", owner.Ban(worker), messages.Done)
    output.result({"banned": worker}, "Done")


def issue(url: str, *, label: str = "", asking: Asking = NOBODY, output: Out = PLAIN) -> None:
    """Make a token for somebody who wants to work.

    Parameters
    ----------
    label: str
        For whom it is, so that you know which one to revoke.
    """
    made = asking.link(url).say("v1/tokens", owner.Issue(label), owner.Issued)
    output.result({"token": made.token, "hash": made.hash, "label": label}, "Shown once")


def revoke(url: str, hash: str, *, asking: Asking = NOBODY, output: Out = PLAIN) -> None:
    """Send away whoever comes with a token.

    Parameters
    ----------
    hash: str
        The token's hash, or at least eight digits of its beginning, as `tokens list` shows.
    """
    asking.link(url).say("v1/tokens/revoke", owner.Revoke(hash), messages.Done)
    output.result({"revoked": hash}, "Done")


def tokens(url: str, *, asking: Asking = NOBODY, output: Out = PLAIN) -> None:
    """All tokens, by their hashes."""
    known = asking.link(url).ask("v1/tokens", owner.Tokens).tokens
    rows: list[dict[str, Any]] = [
        {
            "hash": each.hash if output.json else each.hash[:16],
            "role": each.role,
            "label": each.label,
            "revoked": each.revoked is not None,
        }
        for each in known
    ]
    output.rows(rows, "Tokens")
