"""What the chaos tests share."""

from collections.abc import Iterator

import msgspec
import pytest
from tests.chaos.lives import Lives

from blocktrain.aggregation.charter import Charter
from blocktrain.aggregation.state import State
from blocktrain.wire import link, messages


@pytest.fixture(autouse=True, scope="session")
def known_kinds() -> None:
    """msgspec 0.22 looks into a type when it is first decoded, and not for two threads at once.

    Six of 60 processes whose eight threads began with the same kind of message died by SIGSEGV.
    """
    for kind in (*vars(messages).values(), Charter, State):
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            msgspec.json.Decoder(kind)


@pytest.fixture(scope="session")
def lives() -> Iterator[Lives]:
    """Starts coordinators within some hundredths of a second."""
    made = Lives("coordinator")
    yield made
    made.close()


@pytest.fixture(scope="session")
def worker_lives() -> Iterator[Lives]:
    """Starts real workers as soon."""
    made = Lives("worker")
    yield made
    made.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links try again soon: a test that kills a hundred coordinators cannot wait for each."""
    monkeypatch.setattr(link, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(link, "LONGEST_PAUSE", 0.2)
