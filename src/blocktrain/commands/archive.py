"""blocktrain compress|decompress"""

from pathlib import Path

from blocktrain import load
from blocktrain.console import PLAIN, Out, bar
from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.errors import BadInput
from blocktrain.learning import coding
from blocktrain.learning.files import read_manifest

ENDING = ".bt"


def compress(file: Path, *, model: Path, out: Path | None = None, output: Out = PLAIN) -> None:
    """Compress a file with the model's own probabilities.

    The archive opens with the same model on the same machine and build, and refuses elsewhere.

    Parameters
    ----------
    file: Path
        What to compress.
    model: Path
        A model directory.
    out: Path
        The archive; FILE.bt if not given.
    """
    if file.is_file() and file.stat().st_size > coding.MAX_TEXT:
        raise BadInput(f"{file} has more than {coding.MAX_TEXT} bytes; compress it in parts.")
    text = read(file)
    opened, digest = load(model, "cpu"), read_manifest(model).digest
    with bar("compressing") as progress:
        archive = coding.compress(opened, digest, text, progress)
    out = out or file.with_name(file.name + ENDING)
    with errors_are_clear(out):
        write_atomically(out, archive)
    bits = 8 * len(archive) / max(1, len(text))
    found = {"out": str(out), "bytes": len(text), "archive_bytes": len(archive)}
    output.result({**found, "bits_per_byte": bits}, "Compressed")


def decompress(file: Path, *, model: Path, out: Path | None = None, output: Out = PLAIN) -> None:
    """Give back the file that compress was given.

    Parameters
    ----------
    file: Path
        An archive made by `blocktrain compress`.
    model: Path
        The model directory it was made with.
    out: Path
        Where to write; FILE without .bt if not given.
    """
    if out is None and file.suffix != ENDING:
        raise BadInput(f"{file} does not end in {ENDING}; say where to write with --out.")
    archive = read(file)
    opened, digest = load(model, "cpu"), read_manifest(model).digest
    with bar("decompressing") as progress:
        text = coding.decompress(opened, digest, archive, progress)
    out = out or file.with_suffix("")
    with errors_are_clear(out):
        write_atomically(out, text)
    output.result({"out": str(out), "bytes": len(text)}, "Decompressed")


def read(file: Path) -> bytes:
    """The whole file, or a sentence."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise BadInput(f"{file} cannot be read ({error.strerror}); check the path.") from None
