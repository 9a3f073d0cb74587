"""A tiny run, and a coordinator for it that listens on a real socket in a thread."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import uvicorn

from blocktrain.aggregation.folder import RunFolder, owners_token
from blocktrain.aggregation.keeper import Keeper
from blocktrain.commands.listen import Listen, listening
from blocktrain.learning.data import Corpus, open_corpus
from blocktrain.learning.model import Shape
from blocktrain.services.begin import Settings, Timing, begin
from blocktrain.services.coordinator import Coordinator
from blocktrain.services.run import Exchange, Pace, Run
from blocktrain.services.wishes import Wishes
from blocktrain.services.worker import Worker
from blocktrain.wire.certificates import load_authority
from blocktrain.wire.link import Link

TINY = Run(
    shape=Shape(blocks=2, layers=1, width=32, heads=2, window=32, grams=2, gram_rows=16),
    pace=Pace(rounds=3, local_steps=2, batch=4),
)
QUICK = Timing(grace=0.2, floor=1.0, first_allowance=20.0, lease=5.0)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text with something to learn: words in a fixed order with random gaps."""
    random = np.random.default_rng(0)
    told = ["one ", "two ", "three ", "four\n", "five, ", "six. "]
    text = "".join(told[i % 6] + " " * int(random.integers(0, 2)) for i in range(12_000))
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def corpus(words: Path) -> Corpus:
    return open_corpus(str(words))


@dataclass
class Place:
    """A coordinator that is up."""

    url: str
    folder: Path
    keeper: Keeper
    words: Path
    coordinator: Coordinator
    links: list[Link] = field(default_factory=list)

    @property
    def token(self) -> str:
        return owners_token(self.folder)

    def link(self, token: str | None = None, **more: object) -> Link:
        link = Link(self.url, **{"patience": 5.0, **more})  # type: ignore[arg-type]
        link.bearer = self.token if token is None else token
        self.links.append(link)
        return link

    def worker(self, folder: Path, **wishes: object) -> Worker:
        """A worker in this process; its torch is there already."""
        given: dict[str, object] = {"data": str(self.words), "device": "cpu", **wishes}
        return Worker(self.link(), self.token, folder, Wishes(**given))  # type: ignore[arg-type]

    def run_to_the_end(self, folder: Path, workers: int, **wishes: object) -> list[Worker]:
        """Lets so many workers work until the run is over."""
        crew = [self.worker(folder / str(n), name=f"w{n}", **wishes) for n in range(workers)]
        threads = [threading.Thread(target=each.work) for each in crew]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert self.keeper.state.ended
        return crew


@contextmanager
def serving(folder: Path, words: Path, listen: Listen) -> Iterator[Place]:
    """Keeps the run in a thread of this process, on a port of its own."""
    with RunFolder(folder) as run, listening(listen) as (sock, url):
        papers, _ = listen.papers(folder)
        keeper = run.keeper()
        served = run.corpus if run.charter.corpus_served else None
        coordinator = Coordinator(keeper, served, [], load_authority(folder))
        config = uvicorn.Config(
            coordinator.app(listen.base_path),
            log_config=None,
            timeout_graceful_shutdown=1,
            ssl_certfile=papers.certificate if papers else None,
            ssl_keyfile=papers.key if papers else None,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            place = Place(url, folder, keeper, words, coordinator)
            yield place
            for link in place.links:
                link.close()
        finally:
            server.should_exit = True
            thread.join()


Coordinate = Callable[..., Place]


@pytest.fixture
def coordinate(tmp_path: Path, corpus: Corpus, words: Path) -> Iterator[Coordinate]:
    """Makes a run and its coordinator; `folder` again goes on with it."""
    ends = []

    def make(
        run: Run = TINY,
        codec: str = "fp32",
        folder: Path | None = None,
        listen: Listen | None = None,
        **settings: object,
    ) -> Place:
        where = folder or tmp_path / "run"
        if not where.exists():
            chosen = replace(run, exchange=Exchange(codec))
            told = {"timing": QUICK, **settings}
            begin(where, Settings("test", chosen, **told), corpus)  # type: ignore[arg-type]
        context = serving(where, words, listen or Listen(port=0))
        place = context.__enter__()
        ends.append(context)
        return place

    yield make
    for context in reversed(ends):
        context.__exit__(None, None, None)
