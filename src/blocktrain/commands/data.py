"""blocktrain data list|fetch"""

from dataclasses import asdict

from blocktrain.console import PLAIN, Out, bar
from blocktrain.learning import data
from blocktrain.learning import fetch as source


def show(*, output: Out = PLAIN) -> None:
    """The corpora known by name, and whether they are in the cache."""
    output.rows([asdict(each) for each in source.known()], "Corpora")


def fetch(name: str, *, again: bool = False, output: Out = PLAIN) -> None:
    """Fetch a corpus into the cache and check every byte.

    Parameters
    ----------
    name: str
        wikitext-2 or enwik8.
    again: bool
        Fetch it even if the cache has it.
    """
    with bar(f"fetching {name}") as progress:
        files = source.fetch(name, progress, again)
    corpus = data.open_corpus(name)
    found = {"name": name, "digest": corpus.digest, "files": [str(file) for file in files]}
    output.result(found, "Fetched")
