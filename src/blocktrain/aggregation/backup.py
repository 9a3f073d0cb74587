"""A run's folder as one file, taken while its coordinator runs, and back.

The ledger is copied first, as it is at one moment; then the blobs that a coordinator keeps at that
moment. Keys and the owner's token are in it: keep the file as safe as the folder.
"""

import io
import os
import secrets
import tarfile
from pathlib import Path

from blocktrain.aggregation.folder import BLOBS, CORPUS, LEDGER, LOCK, open_ledger, open_store
from blocktrain.aggregation.retention import blobs_kept
from blocktrain.disk import errors_are_clear, sync
from blocktrain.errors import BadInput, BadRun, NoBlob
from blocktrain.terms import Digest, Progress, silent

ATTEMPTS = 3  # a blob may be pruned between the ledger's copy and its own


def back_up(folder: Path, file: Path, progress: Progress = silent) -> int:
    """Writes the file, whole or not at all; returns its length."""
    if not (folder / LEDGER).is_file():
        raise BadRun(f"There is no run in {folder}; give the folder of a coordinator.")
    part = file.with_name(f".{file.name}.{secrets.token_hex(8)}.part")
    copy = part.with_suffix(".ledger")
    try:
        with errors_are_clear(file):
            for attempt in range(ATTEMPTS):
                try:
                    _write(folder, part, copy, progress)
                    break
                except NoBlob:
                    if attempt == ATTEMPTS - 1:
                        raise
            sync(part)
            part.replace(file)
            sync(file.absolute().parent)
    finally:
        part.unlink(missing_ok=True)
        copy.unlink(missing_ok=True)
    return file.stat().st_size


def _write(folder: Path, part: Path, copy: Path, progress: Progress) -> None:
    with open_ledger(folder) as ledger:
        ledger.backup(copy)
    with open_ledger(copy) as ledger, ledger.reading() as r:
        run, used = r.run(), blobs_kept(r)
    store = open_store(folder)
    used.discard(run.corpus if run else Digest(""))  # it lies beside the blobs, if it is served
    for digest in used:
        store.renew(digest)  # young ones are not pruned, though rounds close while we copy
    with tarfile.open(part, "w") as tar:
        os.chmod(part, 0o600)
        tar.add(copy, LEDGER)
        for path in sorted(folder.iterdir()):
            if path.is_file() and not path.name.startswith((LEDGER, LOCK, ".")):
                tar.add(path, path.name)
        if (folder / CORPUS).is_dir():
            tar.add(folder / CORPUS, CORPUS)
        for done, digest in enumerate(sorted(used)):
            progress(done, len(used))
            body = store.get(digest)
            entry = tarfile.TarInfo(f"{BLOBS}/{digest[0]}/{digest[1]}/{digest}")
            entry.size = len(body)
            tar.addfile(entry, io.BytesIO(body))
        progress(len(used), len(used))


def restore(file: Path, folder: Path) -> None:
    """A folder that a coordinator can go on from; it appears whole or not at all."""
    if folder.exists() and any(folder.iterdir()):
        raise BadInput(f"{folder} is not empty; restore into a new folder.")
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.part")
    try:
        with errors_are_clear(folder), tarfile.open(file, "r:") as tar:
            tar.extractall(part, filter="data")
    except (tarfile.TarError, FileNotFoundError) as error:
        raise BadInput(f"{file} is no backup of a run ({error}); give another file.") from None
    if not (part / LEDGER).is_file():
        raise BadInput(f"{file} is no backup of a run; give another file.")
    with errors_are_clear(folder):
        if folder.exists():
            folder.rmdir()
        part.rename(folder)
        sync(folder.absolute().parent)
