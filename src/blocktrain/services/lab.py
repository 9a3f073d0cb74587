"""A whole run in one process, no sockets: the same learning and aggregation code as the network.

The instrument of research, and the yardstick of the network. The reference is the same code with
one block of the whole depth: same bytes, same order, same optimiser, rates and weight averaging.

    OUT/manifest.json, block-*      the assembled model
    OUT/history.jsonl, state*       where to go on after a stop or kill -9 (standings.py)
    OUT/reference/, OUT/shallow/    the same for the end-to-end models, with --reference
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blocktrain.aggregation.combine import Kept, Part, combine
from blocktrain.errors import BadConfig
from blocktrain.learning.data import Corpus, Cursor, batches
from blocktrain.learning.device import threads
from blocktrain.learning.evaluate import SAMPLE, evaluate
from blocktrain.learning.files import (
    from_parameters,
    save_model,
)
from blocktrain.learning.local import (
    Start,
    Update,
    Work,
    open_block,
    parameters_of,
    train_locally,
)
from blocktrain.learning.model import Model, new_block
from blocktrain.learning.objective import Loader, objective_for, streams
from blocktrain.services.hardship import NONE, Hardship
from blocktrain.services.run import Run
from blocktrain.services.standings import Standings, copied, save, saved
from blocktrain.terms import Parameters, Progress, silent
from blocktrain.wire import tensors

STREAMS_AT_ONCE = 2**30  # bytes of upstream features; beyond it every block computes its own
SAVE_EVERY = 60.0  # seconds: at most this much work is lost to kill -9


@dataclass(frozen=True)
class Watch:
    """How a run tells what it does, and how it is told to stop."""

    steps: Progress = silent
    evaluation: Progress = silent
    note: Callable[[str], None] = lambda text: None
    noted: Callable[[dict[str, Any]], None] = lambda row: None
    notes: int = 10  # how often, in a whole run, CE of a sample is measured

    def __post_init__(self) -> None:
        if self.notes < 1:
            raise BadConfig(f"notes is {self.notes}; it must be at least 1.")


@dataclass
class Lab:
    """One run on one corpus."""

    run: Run
    corpus: Corpus
    folder: Path
    device: torch.device
    watch: Watch = field(default_factory=Watch)
    threads: int = 1
    """Threads per replica. The last bits of a result depend on it; the order of replicas does not
    matter."""
    at_once: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Replicas trained at the same time: one thread each is faster than several for one, and not
    slowed down tenfold by a busy neighbour."""
    hardship: Hardship = NONE
    sharing: bool = True
    """Whether what is upstream is computed once for all blocks; workers cannot, each is alone."""

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        hardship = {} if self.hardship == NONE else {"hardship": asdict(self.hardship)}
        told = {"run": asdict(self.run), "data": self.corpus.name, "corpus": self.corpus.digest}
        return told | hardship

    def train(self) -> tuple[Model, Standings]:
        """Goes on from what the folder holds until every round is closed; saves the model."""
        now = self.resume()
        last = time.monotonic()
        try:
            while now.round < self.run.pace.rounds:
                self.watch.steps(*self.steps_done(now.round))
                after = self.advance(now)
                if self.is_noted(after.round):
                    now = self.measured(after)
                    self.watch.noted(now.history[-1])  # told when it is kept, not before
                else:
                    now = after
                if time.monotonic() - last > SAVE_EVERY:
                    save(now, self.folder, self.identity)
                    last = time.monotonic()
        finally:  # on Ctrl+C too: `now` is the state after a whole round, its sample measured
            save(now, self.folder, self.identity)
        self.watch.steps(*self.steps_done(now.round))
        model = self.assemble(now)
        save_model(model, self.folder, self.identity)
        return model, now

    def advance(self, now: Standings) -> Standings:
        """One round of every block, against the steady neighbours of the round before."""
        began = time.process_time()
        number, replicas = now.round + 1, self.run.pace.replicas
        neighbours = [self.loader(index, block.steady) for index, block in enumerate(now.blocks)]

        known: dict[int, list[list[Tensor]]] = {}

        def replica(at: tuple[int, int]) -> tuple[Update, dict[str, Tensor]]:
            index, slot = at
            return train_locally(
                Start(now.blocks[index].snapshot, copied(now.optimisers.get(at, {}))),
                (rows for rows, _ in self.batches(slot, number)),
                objective_for(index, self.run.recipe, neighbours, known.get(slot)),
                self.work(index, slot, number),
                self.device,
            )

        def stream(batch: tuple[NDArray[np.int64], Cursor]) -> list[Tensor]:
            rows_BT1 = torch.from_numpy(batch[0]).to(self.device)
            return streams(rows_BT1, neighbours, self.run.recipe)

        places = [(index, slot) for index in range(len(now.blocks)) for slot in range(replicas)]
        with threads(self.threads), ThreadPoolExecutor(self.at_once) as pool:
            if self.shares_streams(number):
                for slot in range(replicas):
                    known[slot] = list(pool.map(stream, self.batches(slot, number)))
            done = dict(zip(places, pool.map(replica, places), strict=True))
        blocks, optimisers, residuals, late = [], {}, {}, {}
        for index, standing in enumerate(now.blocks):
            parts = []
            for slot in range(replicas):
                at = (index, slot)
                update, optimisers[at] = done[at]
                change, lost = self.sent(update.change, now.residuals.get(at))
                if before := now.late.get(at):
                    parts.append(Part(before[0].__getitem__, before[1], self.hardship.salvaged))
                if not self.hardship.is_late(self.run.pace.seed, number, index, slot):
                    parts.append(Part(change.__getitem__, update.bytes_trained))
                elif self.hardship.salvaged:
                    late[at] = (change, update.bytes_trained)
                else:  # refused: the worker goes on from what it had before
                    lost, optimisers[at] = now.residuals.get(at), now.optimisers.get(at, {})
                if lost is not None:
                    residuals[at] = lost
            blocks.append(combine(standing, parts, self.run.averaging, self.run.exchange.codec))
        return Standings(
            blocks,
            optimisers,
            residuals,
            late,
            number,
            now.core_seconds + time.process_time() - began,
            now.history,
            [update.loss for update, _ in done.values()],
        )

    def sent(
        self, change: Parameters, residual: Parameters | None
    ) -> tuple[Parameters, Parameters | None]:
        """What arrives of a change over the wire, and what the codec keeps back."""
        codec = self.run.exchange.codec
        body, lost = tensors.encode_with_residual(change, residual, codec)
        return tensors.decode(body, codec, tensors.shapes_of(change)), lost

    def batches(self, slot: int, number: int) -> Iterator[tuple[NDArray[np.int64], Cursor]]:
        """The data of one slot in one round, the same for every block: what it has time for."""
        pace = self.run.pace
        steps = self.hardship.steps(pace.steps.of(number), slot, pace.replicas)
        return islice(batches(self.corpus.train, self.run.plan, Cursor(slot, number, 0)), steps)

    def shares_streams(self, number: int) -> bool:
        """Whether that is so in this round: memory allowing."""
        run = self.run
        numbers = run.pace.steps.of(number) * run.bytes_per_step * run.shape.width
        upstream = run.shape.blocks - 1 if run.shape.objective == "neighbours" else 0
        return self.sharing and 0 < 4 * numbers * upstream <= STREAMS_AT_ONCE

    def loader(self, index: int, steady: Parameters) -> Loader:
        """Opens a neighbour once per round, however many blocks and replicas look at it."""
        block = open_block(self.run.shape, index, steady).to(self.device).requires_grad_(False)
        return lambda: block

    def work(self, index: int, slot: int, number: int) -> Work:
        """Names one replica's work in one round."""
        run = self.run
        return Work(
            recipe=run.recipe,
            block=index,
            slot=slot,
            round=number,
            seed=run.pace.seed,
            bytes_before=run.bytes_after(number - 1),
            bytes_per_step=run.bytes_per_step,
            bytes_planned=run.bytes_after(run.pace.rounds),
        )

    def assemble(self, now: Standings) -> Model:
        """The model of every block's steady state."""
        run = self.run
        model = from_parameters(run.shape, run.noise, [block.steady for block in now.blocks])
        return Model(model.shape, model.noise, [block.to(self.device) for block in model.blocks])

    def is_noted(self, number: int) -> bool:
        """Whether CE of a sample is measured after this round: about `notes` times in a run."""
        notes = self.watch.notes
        (before, total), (after, _) = self.steps_done(number - 1), self.steps_done(number)
        return after * notes // total > before * notes // total

    def steps_done(self, number: int) -> tuple[int, int]:
        """Steps of each replica after so many rounds, and in all."""
        steps, rounds = self.run.pace.steps, self.run.pace.rounds
        return steps.before(number + 1), steps.before(rounds + 1)

    def measured(self, now: Standings) -> Standings:
        """The same with CE of a sample of the valid split in its history."""
        score = evaluate(self.assemble(now), self.corpus.valid[:SAMPLE])
        row = {
            "round": now.round,
            "bytes_seen": self.run.bytes_after(now.round),
            "ce_sample": round(score.ce, 4),
            "per_block_sample": [round(ce, 4) for ce in score.per_block],
            "losses": [round(loss, 4) for loss in now.losses],
            "core_seconds": round(now.core_seconds, 1),
        }
        return replace(now, history=[*now.history, row])

    def resume(self) -> Standings:
        """Where the folder says that this very run is, else the beginning."""
        return saved(self.folder, self.identity) or self.beginning()

    def beginning(self) -> Standings:
        """Every block as its seed makes it; the first steady one equals the first snapshot."""
        first = [
            parameters_of(new_block(self.run.shape, index, self.run.pace.seed))
            for index in range(self.run.shape.blocks)
        ]
        own = [{name: value.copy() for name, value in snapshot.items()} for snapshot in first]
        return Standings([Kept(*both) for both in zip(first, own, strict=True)])


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    ce: float
    ce_reference: float | None
    ce_shallow: float | None
    gap: float | None
    bytes_seen: int
    core_seconds: float
    parameters: int
    per_block: list[float]


def experiment(lab: Lab, with_reference: bool) -> Result:
    """Trains, and with the reference also the end-to-end models of full and of one block's depth.

    CE is of every byte of the test split.
    """
    model, now = lab.train()
    score = evaluate(model, lab.corpus.test, lab.watch.evaluation)
    shape = lab.run.shape
    deep = shallow = None
    if with_reference:
        deep = end_to_end_ce(lab, shape.blocks * shape.layers, "reference")
        shallow = end_to_end_ce(lab, shape.layers, "shallow")
    return Result(
        ce=score.ce,
        ce_reference=deep,
        ce_shallow=shallow,
        gap=None if deep is None else score.ce - deep,
        bytes_seen=lab.run.bytes_after(lab.run.pace.rounds),
        core_seconds=now.core_seconds,
        parameters=model.parameters,
        per_block=score.per_block,
    )


def end_to_end_ce(lab: Lab, layers: int, name: str) -> float:
    """Test CE of the ordinary model of this depth, trained in a folder of its own."""
    lab.watch.note(f"{name}: {layers} layers, end to end, same bytes")
    other = replace(
        lab,
        run=lab.run.end_to_end(layers),
        folder=lab.folder / name,
        hardship=NONE,
        threads=lab.threads * lab.at_once,  # one replica: it may have all the cores
    )
    model, _ = other.train()
    return evaluate(model, lab.corpus.test, lab.watch.evaluation).ce
