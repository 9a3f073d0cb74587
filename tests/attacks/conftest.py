"""One coordinator for all attacks of a file: after each of them it must still serve."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.attacks.siege import Siege, besieged
from tests.services.conftest import QUICK, TINY, corpus, words

from blocktrain.learning.data import Corpus
from blocktrain.services.begin import Settings, begin
from blocktrain.services.run import Exchange, Pace

__all__ = ["corpus", "words"]

# Rounds never run out, and a slot that an attacker holds is in nobody's way.
LONG = replace(
    TINY,
    pace=Pace(rounds=10_000, local_steps=2, batch=1, replicas=4),
    exchange=Exchange("fp32"),
)
HASTY = replace(QUICK, quorum=1, grace=0.1)


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Iterator[Siege]:
    """A coordinator with a private text."""
    folder = tmp_path_factory.mktemp("run") / "run"
    begin(folder, Settings("test", LONG, HASTY, serve_corpus=True), corpus)
    with besieged(folder) as siege:
        yield siege


@pytest.fixture
def siege(standing: Siege) -> Iterator[Siege]:
    """The same; after every attack an honest worker must get its receipt."""
    yield standing
    standing.serves_honest_workers()
