"""A coordinator whose disk is full, and has room again."""

import resource
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.chaos.faults import Faults
from tests.chaos.light import begin_light, quick
from tests.chaos.lives import Lives
from tests.chaos.network import Network, network
from tests.chaos.settled import settled

from blocktrain.aggregation.state import State
from blocktrain.errors import CannotSave

ROOM = 4 * 2**20  # bytes of the small disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A disk of its own; None where only root may make one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "small", str(disk)]
    if subprocess.run(mount, check=False).returncode != 0:
        yield None
        return
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


class SmallDisk(Network):
    """A network whose coordinator keeps its run on a small disk."""

    seen: State

    def state(self) -> State:
        """As it was last seen: a ledger may need room even to be opened."""
        with suppress(CannotSave):
            self.seen = super().state()
        return self.seen

    @property
    def ballast(self) -> Path:
        return self.run.parent / "ballast"

    def fill_disk(self) -> None:
        """Writes until nothing more fits."""
        with self.ballast.open("wb", buffering=0) as file:
            for size in (2**16, 2**12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue

    def free_disk(self) -> None:
        self.ballast.unlink()


class SmallFiles(Network):
    """The same for those who are not root: no file of the coordinator may grow, nor begin."""

    def fill_disk(self) -> None:
        self.limit(0)

    def free_disk(self) -> None:
        self.limit(resource.RLIM_INFINITY)

    def limit(self, size: int) -> None:
        assert self.life is not None
        resource.prlimit(self.life.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.parametrize(
    ("kind", "killed"), [(SmallDisk, False), (SmallDisk, True), (SmallFiles, False)]
)
def test_a_full_disk(
    tmp_path: Path, lives: Lives, small_disk: Path | None, kind: type[Network], killed: bool
) -> None:
    """Workers are told to come again; with room again the run goes on, and nothing is lost.

    Also if the coordinator is killed meanwhile, and cannot even start.
    """
    if small_disk is None:
        kind = SmallFiles
    run = (small_disk if kind is SmallDisk and small_disk else tmp_path) / "run"
    begin_light(run, quick(rounds=12, lease=30.0))
    with network(run, lives, kind=kind) as net:
        workers = [net.worker(0.02), net.worker(0.02)]
        net.set_to_work(*workers)
        faults = Faults(net)
        faults.fill_disk(round=4, seconds=2.0)
        if killed:
            faults.kill_coordinator(round=4)
        faults.play()
        net.finish()
    settled(run, net.receipts)
    for worker in workers:
        assert any("it answers 503" in note for note in worker.notes) or killed, worker.notes
        assert not any("it answers 500" in note for note in worker.notes), worker.notes
