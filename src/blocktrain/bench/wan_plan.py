"""What `bench wan` expects before it starts: the forecasts that stand beside its rates."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from blocktrain.bench.wan import HOSTS, Models, Trial
from blocktrain.bench.wan_rows import Kind
from blocktrain.inference import layout, plan, survey
from blocktrain.inference.layout import Host, Layout
from blocktrain.inference.plan import Forecast, Speed, Task, Way
from blocktrain.learning.files import read_manifest


class Planner:
    """Knows the models, and other held-out text than what is measured."""

    def __init__(self, models: Models, length: int, other: Sequence[bytes]) -> None:
        self._models, self._length, self._other = models, length, other
        self._speed, self._reach = cache(self._measure_speed), cache(self._measure_reach)

    def all(self, trial: Trial) -> dict[Kind, Forecast]:
        """Every row of the table."""
        kinds = {
            (wan.rtt_ms, wan.mbit, job.temperature, job.mode, job.traversals): None
            for wan in trial.networks
            for job in self._models.jobs(trial)
        }
        return {kind: self.forecast(kind) for kind in kinds}

    def forecast(self, kind: Kind) -> Forecast:
        """For one row of the table."""
        rtt_ms, mbit, temperature, mode, traversals = kind
        folder = self._models.folder_for(mode)
        assert folder is not None
        shape = read_manifest(folder).shape
        way = self._way(folder, shape.blocks, rtt_ms, mbit)
        task = Task(shape, len(self._models.prompts[0]), self._length)
        if mode == "whole":
            return plan.whole(way, task, traversals)
        if mode == "ar":
            return plan.forecast(way, task, mode)
        reach = self._reach(folder, way.seats[0].last + 1, temperature)
        return plan.forecast(way, task, mode, reach.exact if mode == "exact" else reach.speculative)

    def _way(self, folder: Path, blocks: int, rtt_ms: float, mbit: float) -> Way:
        """As the hosts are made."""
        hosts = [Host(name) for name in HOSTS]
        here = Layout(hosts, gateway=HOSTS[0], rtt_ms=rtt_ms, mbit=mbit)
        return layout.way(here, blocks, lambda first, last: self._speed(folder, first, last))

    def _measure_speed(self, folder: Path, first: int, last: int) -> Speed:
        return survey.speed(folder, first, last)

    def _measure_reach(self, folder: Path, drafting: int, temperature: float) -> survey.Reach:
        return survey.reach(folder, survey.Question(drafting, temperature, self._other))
