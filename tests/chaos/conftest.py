"""What the chaos tests share."""

from collections.abc import Iterator

import pytest
from tests.chaos.lives import Lives

from blocktrain.wire import link


@pytest.fixture(scope="session")
def lives() -> Iterator[Lives]:
    """Starts coordinators within some hundredths of a second."""
    made = Lives("coordinator")
    yield made
    made.close()


@pytest.fixture(scope="module")
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
