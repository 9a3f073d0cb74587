"""The text of a run, as a worker comes by it."""

from blocktrain.aggregation.charter import Charter
from blocktrain.errors import BadCorpus
from blocktrain.learning.data import SPLITS, Corpus, open_corpus, open_splits
from blocktrain.services.room import Room
from blocktrain.terms import Progress
from blocktrain.wire.link import Link


def text_of(
    charter: Charter, data: str | None, link: Link, room: Room, progress: Progress
) -> Corpus:
    """By its name, from a file of the volunteer's (`data`), or from the coordinator."""
    name = data or charter.data
    if data is None and charter.corpus_served:
        corpus = served_text(charter, link, room, progress)
    else:
        corpus = open_corpus(name)
    if corpus.digest != charter.corpus:
        raise BadCorpus(
            f"'{name}' is not the text of this run (digest {corpus.digest[:16]}, not "
            f"{charter.corpus[:16]}); give the right one with --data."
        )
    return corpus


def served_text(charter: Charter, link: Link, room: Room, progress: Progress) -> Corpus:
    """Fetches what is not here yet of a private text."""
    folder = room.folder / "corpus"
    folder.mkdir(exist_ok=True)
    missing = {
        name: split
        for name, split in zip(SPLITS, charter.splits, strict=True)
        if not (folder / name).is_file()
    }
    if missing:
        parts = sum(path.stat().st_size for path in folder.glob("*.part"))
        room.claim(sum(length for length, _ in missing.values()) - parts, "The text")
    for name, (length, digest) in missing.items():
        link.fetch(f"v1/corpus/{name}", digest, folder / name, length, progress)
    return open_splits(charter.data, folder)
