"""blocktrain evaluate|audit|generate|export: things to do with a model directory."""

import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from blocktrain import load
from blocktrain.commands.owner import As
from blocktrain.console import PLAIN, Out, Output, bar
from blocktrain.errors import BadInput, Leak
from blocktrain.inference import decode
from blocktrain.inference.decode import Sampling
from blocktrain.learning.audit import audit as prove
from blocktrain.learning.data import Corpus, open_corpus
from blocktrain.learning.evaluate import SAMPLE
from blocktrain.learning.evaluate import evaluate as measure
from blocktrain.learning.export import export_hf
from blocktrain.learning.readouts import readouts as other_readouts
from blocktrain.services.follow import Follower
from blocktrain.wire.link import PATIENCE


@dataclass(frozen=True)
class Text:
    """What is predicted."""

    data: str = "wikitext-2"
    """wikitext-2, enwik8, or a file or folder of your own."""
    split: str = "test"
    """train, valid or test."""


@dataclass(frozen=True)
class Follow(As):
    """A run whose model is measured whenever it has changed."""

    follow: str | None = None
    """The run's URL; its owner's token is needed, and everybody sees what is measured."""
    every: float = 30.0
    """Seconds between two measurements at the least."""


TEXT, NOBODY = Text(), Follow()


def evaluate(
    model: Path | None = None,
    *,
    follow: Annotated[Follow, Parameter(name="*")] = NOBODY,
    text: Annotated[Text, Parameter(name="*")] = TEXT,
    readouts: bool = False,
    device: str = "auto",
    output: Out = PLAIN,
) -> None:
    """Honest CE of a model, over every byte of a split; or of a run, as it goes on.

    Parameters
    ----------
    model: Path
        A model directory.
    readouts: bool
        Other readouts too, beside the headline's on the same 64 KiB sample; leaky ones say LEAKY.
    """
    if follow.follow:
        return keep_measuring(follow, open_corpus(text.data), output)
    if model is None:
        raise BadInput("Give a model directory, or a run's URL with --follow.")
    opened = load(model, device)
    read = open_corpus(text.data).split(text.split)
    with bar(f"{text.split} split") as progress:
        score = measure(opened, read, progress)
    found: dict[str, Any] = {
        "ce": score.ce,
        "bits_per_byte": score.bits_per_byte,
        "bytes": score.bytes,
        "per_block": score.per_block,
    }
    if readouts:
        for other in other_readouts(opened, read[:SAMPLE], seed=0):
            found[f"{'LEAKY: ' if other.leaky else ''}{other.name} (64 KiB sample)"] = other.ce
    output.result(found, f"{text.data} {text.split}, honest readout, nats per byte")


def keep_measuring(follow: Follow, corpus: Corpus, output: Output) -> None:
    """CE of a 64 KiB sample after every few rounds, until the run has ended."""
    assert follow.follow is not None
    with tempfile.TemporaryDirectory() as folder, closing(follow.link(follow.follow)) as link:
        link.note = output.say
        link.patience = PATIENCE
        follower, rows, seen = Follower(link, Path(folder)), [], None
        while True:
            _, found = follower.checkpoint()
            rounds = [version.round for version in found.versions]
            if rounds != seen:
                rows.append(follower.measure(corpus))
                output.say("round {round}: CE {ce_sample:.4f} (64 KiB sample)".format(**rows[-1]))
                seen = rounds
            if found.ended:
                break
            time.sleep(follow.every)
    output.rows(rows, "CE as the run went on")


def audit(model: Path, *, data: str = "wikitext-2", seed: int = 0, output: Out = PLAIN) -> None:
    """Prove that no target reaches the model; exit code 7 if one does.

    Parameters
    ----------
    model: Path
        A model directory.
    data: str
        Where the held-out bytes come from.
    seed: int
        Which bytes are changed, and how.
    """
    opened = load(model, "cpu")
    with bar("audit") as progress:
        found = prove(opened, open_corpus(data).test, seed, progress)
    output.result({**asdict(found), "passed": found.passed}, "Audit")
    if not found.passed:
        raise Leak(" ".join(found.failures()))


SAMPLING = Sampling()


def generate(
    model: Path,
    prompt: str,
    *,
    sampling: Annotated[Sampling, Parameter(name="*")] = SAMPLING,
    device: str = "auto",
    output: Out = PLAIN,
) -> None:
    """Continue a prompt.

    Parameters
    ----------
    model: Path
        A model directory.
    prompt: str
        Text to go on from.
    """
    try:
        asked = prompt.encode()
    except UnicodeEncodeError:
        raise BadInput("The prompt is not UTF-8; save or type it as UTF-8.") from None
    opened = load(model, device)
    began = time.perf_counter()
    made = bytearray()
    if not output.json:
        write(asked)
    for byte in decode.generate(opened, asked, sampling):
        made.append(byte)
        if not output.json:
            write(bytes([byte]))
    seconds = time.perf_counter() - began
    if output.json:
        text = made.decode(errors="replace")
        rate = len(made) / seconds
        output.result({"text": text, "bytes": len(made), "bytes_per_s": rate}, "Generated")
    else:
        write(b"\n")


def write(some: bytes) -> None:
    """Bytes to stdout as they come; a terminal puts split characters together itself."""
    sys.stdout.buffer.write(some)
    sys.stdout.buffer.flush()


def export(model: Path, out: Path, *, to: Literal["hf"] = "hf", output: Out = PLAIN) -> None:
    """Write the model as a standard architecture (Qwen3) that `transformers` opens.

    Parameters
    ----------
    model: Path
        A model directory, trained with neighbours.
    out: Path
        Folder to write.
    to: str
        hf: Hugging Face transformers.
    """
    opened = load(model, "cpu")
    export_hf(opened, out)
    output.result({"out": str(out), "parameters": opened.parameters}, "Exported")
