"""What many tests share: a tiny shape and models whose every parameter is alive."""

import fcntl
import os
import signal
from collections.abc import Callable, Generator
from typing import cast

# Before torch is imported, and for every process that a test starts: the second thread of a tiny
# model mostly spins, and takes the core from whoever has work. Training in `bench memory` took 67
# CPU-seconds with two threads, and 24 with one. Who asks for two gets two that sleep when idle.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hypothesis
import pytest
import torch

from blocktrain.learning.model import Model, Objective, Shape, new_block
from blocktrain.learning.noise import Noise

# No deadline: a busy machine is no bug. 50 examples: all tests together stay within a minute.
hypothesis.settings.register_profile("blocktrain", deadline=None, max_examples=50)
hypothesis.settings.load_profile("blocktrain")

MakeModel = Callable[[Shape], Model]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """CI leaves no test out: a skipped one fails the run there. Elsewhere `-ra` says why."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """With `-n 2` another test goes on meanwhile; but not beside one that measures (`alone`).

    Everybody comes in by a gate, one after the other: else who wants the room empty waits for ever.
    """
    if not hasattr(item.config, "workerinput"):
        return (yield)
    folder = item.config.cache.mkdir("turns")
    with (folder / "gate").open("w") as gate, (folder / "room").open("w") as room:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # a forked child may still have the file open


@pytest.fixture(autouse=True, scope="session")
def ctrl_c_is_heard() -> None:
    """Also where a shell started us with `&`: then what we start would ignore it, as we would."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny tensors gain nothing from more, and bit-for-bit tests want it to be fixed."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_luck() -> None:
    """Every test draws the same numbers in every run."""
    torch.manual_seed(0)


@pytest.fixture(params=["neighbours", "denoise"])
def objective(request: pytest.FixtureRequest) -> Objective:
    return cast(Objective, request.param)


@pytest.fixture
def shape(objective: Objective) -> Shape:
    """A tiny shape of each objective."""
    return Shape(objective, blocks=3, layers=1, width=16, heads=2, window=12)


@pytest.fixture(scope="session")
def alive() -> MakeModel:
    """Makes a model with random, non-zero parameters: heads, gates and norms included."""

    def make(shape: Shape) -> Model:
        random = torch.Generator().manual_seed(7)
        blocks = [new_block(shape, index, seed=3) for index in range(shape.blocks)]
        for block in blocks:
            for parameter in block.parameters():
                parameter.data += 0.2 * torch.randn(parameter.shape, generator=random)
        return Model(shape, Noise(), [block.requires_grad_(False) for block in blocks])

    return make


@pytest.fixture
def model(shape: Shape, alive: MakeModel) -> Model:
    """A tiny, living model of each objective."""
    return alive(shape)


@pytest.fixture(scope="session")
def sentence() -> Callable[[BaseException], str]:
    """The error's message, which must be one sentence that also says what to do."""

    def check(error: BaseException) -> str:
        text = str(error)
        assert "\n" not in text
        assert text[-1] in ".?", text
        assert ";" in text or " must " in text, f"says not what to do: {text}"
        return text

    return check
