"""A whole run in one process, no sockets: the same learning and aggregation code as the network.

The instrument of research, and the yardstick of the network. The reference is the same code with
one block of the whole depth: same bytes, same order, same optimiser, rates and weight averaging.

    OUT/manifest.json, block-*      the assembled model
    OUT/history.jsonl               CE of a sample as the run went on
    OUT/state-N/, state.json        where to go on after a stop, a crash or kill -9
    OUT/reference/, OUT/shallow/    the same for the end-to-end models, with --reference
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blocktrain.aggregation.combine import Kept, Part, combine
from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.errors import BadConfig, BadModel
from blocktrain.learning.data import Corpus, Cursor, batches
from blocktrain.learning.device import threads
from blocktrain.learning.evaluate import SAMPLE, evaluate
from blocktrain.learning.files import (
    from_parameters,
    load_tensors,
    save_model,
    save_tensors,
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
from blocktrain.learning.objective import Loader, objective_for
from blocktrain.services.run import Run
from blocktrain.terms import Parameters, Progress, silent
from blocktrain.wire import tensors

PARTS = ("snapshot", "steady", "momentum", "residual")
SAVE_EVERY = 60.0  # seconds: at most this much work is lost to kill -9


@dataclass
class Standings:
    """All that changes while a run goes on."""

    blocks: list[Kept]
    optimisers: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)
    residuals: dict[tuple[int, int], Parameters] = field(default_factory=dict)
    """What the codec lost of each replica's last update: it is added to the next one."""
    round: int = 0
    core_seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Watch:
    """How a run tells what it does, and how it is told to stop."""

    rounds: Progress = silent
    evaluation: Progress = silent
    note: Callable[[str], None] = lambda text: None
    noted: Callable[[dict[str, Any]], None] = lambda row: None
    notes: int = 10  # how often, in a whole run, CE of a sample is measured


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

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        return {"run": asdict(self.run), "data": self.corpus.name, "corpus": self.corpus.digest}

    def train(self) -> tuple[Model, Standings]:
        """Goes on from what the folder holds until every round is closed; saves the model."""
        now = self.resume()
        saved = time.monotonic()
        try:
            while now.round < self.run.pace.rounds:
                self.watch.rounds(now.round, self.run.pace.rounds)
                now = self.advance(now)
                if self.is_noted(now.round):
                    self.note(now)
                if time.monotonic() - saved > SAVE_EVERY:
                    self.save(now)
                    saved = time.monotonic()
        finally:
            self.save(now)  # on Ctrl+C too: `now` is always the state after a whole round
        self.watch.rounds(now.round, self.run.pace.rounds)
        model = self.assemble(now)
        save_model(model, self.folder, self.identity)
        return model, now

    def advance(self, now: Standings) -> Standings:
        """One round of every block, against the steady neighbours of the round before."""
        began = time.process_time()
        number, replicas = now.round + 1, self.run.pace.replicas
        neighbours = [self.loader(index, block.steady) for index, block in enumerate(now.blocks)]

        def replica(at: tuple[int, int]) -> tuple[Update, dict[str, Tensor]]:
            index, slot = at
            return train_locally(
                Start(now.blocks[index].snapshot, copied(now.optimisers.get(at, {}))),
                (rows for rows, _ in self.batches(slot, number)),
                objective_for(index, self.run.recipe, neighbours),
                self.work(index, slot, number),
                self.device,
            )

        places = [(index, slot) for index in range(len(now.blocks)) for slot in range(replicas)]
        with threads(self.threads), ThreadPoolExecutor(self.at_once) as pool:
            done = dict(zip(places, pool.map(replica, places), strict=True))
        blocks, residuals = [], {}
        for index, standing in enumerate(now.blocks):
            parts = []
            for slot in range(replicas):
                update, at = done[index, slot][0], (index, slot)
                change, lost = self.sent(update.change, now.residuals.get(at))
                parts.append(Part(change.__getitem__, update.bytes_trained))
                if lost is not None:
                    residuals[at] = lost
            blocks.append(combine(standing, parts, self.run.averaging, self.run.exchange.codec))
        return Standings(
            blocks,
            {at: optimiser for at, (_, optimiser) in done.items()},
            residuals,
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
        """The data of one slot in one round, the same for every block."""
        return batches(self.corpus.train, self.run.plan, Cursor(slot, number, 0))

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
        notes, rounds = self.watch.notes, self.run.pace.rounds
        return number * notes // rounds > (number - 1) * notes // rounds

    def note(self, now: Standings) -> None:
        """Measures CE on a sample of the valid split, and writes it down."""
        score = evaluate(self.assemble(now), self.corpus.valid[:SAMPLE])
        row = {
            "round": now.round,
            "bytes_seen": self.run.bytes_after(now.round),
            "ce_sample": round(score.ce, 4),
            "per_block_sample": [round(ce, 4) for ce in score.per_block],
            "losses": [round(loss, 4) for loss in now.losses],
            "core_seconds": round(now.core_seconds, 1),
        }
        now.history.append(row)
        self.watch.noted(row)

    def save(self, now: Standings) -> None:
        """Writes everything needed to go on; the pointer `state.json` is replaced last."""
        name = f"state-{now.round}"
        with errors_are_clear(self.folder):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
            for index, standing in enumerate(now.blocks):
                values = {
                    f"{part}.{key}": torch.from_numpy(value)
                    for part in PARTS
                    for key, value in (getattr(standing, part) or {}).items()
                }
                save_tensors(self.folder / name / f"block-{index}.safetensors", values)
            for (index, slot), state in now.optimisers.items():
                save_tensors(
                    self.folder / name / f"optimiser-{index}-{slot}.safetensors", copied(state)
                )
            for (index, slot), residual in now.residuals.items():
                lost = {name: torch.from_numpy(value) for name, value in residual.items()}
                save_tensors(self.folder / name / f"residual-{index}-{slot}.safetensors", lost)
            lines = b"".join(msgspec.json.encode(row) + b"\n" for row in now.history)
            write_atomically(self.folder / "history.jsonl", lines)
            body = Saved(self.identity, name, now.round, now.core_seconds)
            write_atomically(self.folder / "state.json", msgspec.json.encode(body))
            for old in self.folder.glob("state-*"):
                if old.name != name:
                    shutil.rmtree(old)

    def resume(self) -> Standings:
        """The state in the folder if there is one of this very run, else the beginning."""
        pointer = self.folder / "state.json"
        if not pointer.exists():
            return self.beginning()
        try:
            saved = msgspec.json.decode(pointer.read_bytes(), type=Saved)
            if saved.identity != msgspec.to_builtins(self.identity):
                raise BadConfig(
                    f"{self.folder} holds a run with other settings; choose another --out, "
                    "or repeat the command that made it."
                )
            folder = self.folder / saved.folder
            blocks = [
                standing_of(load_tensors(folder / f"block-{index}.safetensors"))
                for index in range(self.run.shape.blocks)
            ]
            optimisers = {
                (index, slot): load_tensors(folder / f"optimiser-{index}-{slot}.safetensors")
                for index in range(len(blocks))
                for slot in range(self.run.pace.replicas if saved.round else 0)
            }
            residuals = {
                at: {name: value.numpy() for name, value in load_tensors(path).items()}
                for at in optimisers
                if (path := folder / "residual-{}-{}.safetensors".format(*at)).exists()
            }
            lines = (self.folder / "history.jsonl").read_bytes().splitlines()
        except (msgspec.DecodeError, OSError) as error:
            raise BadModel(
                f"{pointer} is damaged ({error}); choose another --out or remove the folder."
            ) from None
        history = [msgspec.json.decode(line) for line in lines]
        return Standings(blocks, optimisers, residuals, saved.round, saved.core_seconds, history)

    def beginning(self) -> Standings:
        """Every block as its seed makes it; the first steady one is the first snapshot."""
        first = [
            parameters_of(new_block(self.run.shape, index, self.run.pace.seed))
            for index in range(self.run.shape.blocks)
        ]
        return Standings([Kept(snapshot, snapshot) for snapshot in first])


@dataclass(frozen=True)
class Saved:
    """The pointer to the newest state."""

    identity: dict[str, Any]
    folder: str
    round: int
    core_seconds: float


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of their own, so that nobody else's change with them."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def standing_of(found: dict[str, Tensor]) -> Kept:
    """A block's standing from its file."""
    parts: dict[str, Parameters] = {}
    for key, tensor in found.items():
        part, name = key.split(".", 1)
        parts.setdefault(part, {})[name] = tensor.numpy()
    return Kept(**parts)


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
        threads=lab.threads * lab.at_once,  # one replica: it may have all the cores
    )
    model, _ = other.train()
    return evaluate(model, lab.corpus.test, lab.watch.evaluation).ce
