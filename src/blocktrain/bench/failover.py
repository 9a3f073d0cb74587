"""What it costs when a stage dies in the middle of a text, over a WAN.

Three stages and a replica of each that ends, every one on a host of its own, and whoever asks on
another, all with the same round trip between any two (bench/hosts.py). In the middle of a text, by
time, one of the stages that it goes through is killed (-9: the kernel closes its links), or stopped
(it keeps its links and says nothing, as a host that was unplugged). It is another process from then
on that holds those blocks; the one that ended is started again before the next text. Nothing is
tuned.

    stalled = seconds of the traversal in which the stage was missed, until its answer came
    lost    = wasted + again
    extra   = stalled - an undisturbed traversal - lost: noticing, another route, links to open

By the traversal and not by the text, since 64 of them differ by a second from text to text for no
reason at all; `delay`, by the text (undisturbed: the median of three), stands beside it.

Lost work is estimated, and rather too low, so that extra is rather too high. `wasted` is how long
the traversal that had to be repeated was under way when the stage ended; 0 if it began later.
`again` is what the replay takes beyond an ordinary traversal: measured without any death, as the
time of a fresh traversal with half of the text less that of a traversal with one byte, the median
of three. A `whole` traversal carries all it needs: there `again` is 0.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any

import msgspec

from blocktrain.bench.failover_driver import Due, How, Hurt, Order, Plain
from blocktrain.bench.hosts import Host, Wan, hosts
from blocktrain.bench.staged import Post, Posted, stage_at, up
from blocktrain.bench.wan import Models, asking
from blocktrain.bench.wan_driver import Job
from blocktrain.errors import BadInput
from blocktrain.inference.layout import equal_parts
from blocktrain.inference.plan import Mode
from blocktrain.learning.files import read_manifest
from blocktrain.services.papers import admit, authority_in

STAGES = 3
ASKER = "gateway"
DRIVER = "blocktrain.bench.failover_driver"
PORT = 7000  # of every stage, on its own host: a stage that comes back is where it was
SIGNALS: dict[How, Signals] = {"killed": Signals.SIGKILL, "silent": Signals.SIGSTOP}
SHOWN = {
    "mode": "mode",
    "stage": "stage",
    "how": "how",
    "same text": "same_text",
    "delay s": "delay_s",
    "stalled s": "stalled_s",
    "lost s": "lost_s",
    "extra s": "extra_s",
}
"""Of a row, what fits on a terminal."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    """What is tried."""

    rtt: float = 100.0
    """Milliseconds from any host to any other and back."""
    mbit: float = 100.0
    """Megabits a second, up and down, of each host."""
    length: int = 64
    """Bytes of each text."""
    temperature: float = 0.8
    """0 is greedy."""
    traversals: int = 8
    """That whole takes."""
    modes: tuple[Mode, ...] = ("ar", "exact", "whole")
    """How texts are made; whole is left out where there is no model for it."""
    hows: tuple[How, ...] = ("killed", "silent")
    """How stages end."""
    stages: tuple[int, ...] = (1, 2, 3)
    """Which of them do, each in a text of its own."""

    def __post_init__(self) -> None:
        if min(self.length, self.traversals) < 4:  # so that there is a middle
            raise BadInput("Length and traversals must be 4 or more; choose more.")
        if not self.stages or not {*self.stages} <= {*range(1, STAGES + 1)} or not self.hows:
            raise BadInput(f"Stages are counted from 1 to {STAGES}; name at least one to end.")


def measure(trial: Trial, models: Models, folder: Path, say: Say) -> list[dict[str, Any]]:
    """A row for every text in whose middle a stage ended."""
    rows = []
    for model in dict.fromkeys(models.folders):  # one may be for all modes
        modes = [mode for mode in trial.modes if models.folder_for(mode) == model]
        jobs = [job_of(mode, trial, models) for mode in modes]
        undisturbed: dict[Job, Plain] = {}
        for told in over(trial, model, jobs, models.prompts[0], folder) if jobs else ():
            if isinstance(told, Plain):
                undisturbed[told.job] = told
                say(f"{told.job.mode}: {told.seconds:.1f} s undisturbed")
            else:
                rows.append(row(undisturbed[told.case.job], told))
                say(f"  stage {rows[-1]['stage']} {told.case.how}: {rows[-1]['stalled_s']:.2f} s")
    return rows


def job_of(mode: Mode, trial: Trial, models: Models) -> Job:
    """The text that is made by this mode."""
    traversals = trial.traversals if mode == "whole" else 0
    digest = models.digest_for(mode)
    return Job(mode, trial.temperature, 0, traversals, trial.length, digest)


def row(plain: Plain, hurt: Hurt) -> dict[str, Any]:
    """What a stage's end has cost one text."""
    lost = hurt.wasted + plain.again
    return {
        "mode": plain.job.mode,
        "how": hurt.case.how,
        "stage": hurt.case.stage + 1,
        "same_text": hurt.text == plain.text,
        "replays": hurt.replays,
        "undisturbed_s": plain.seconds,
        "delay_s": hurt.seconds - plain.seconds,
        "lost_s": lost,
        "extra_s": hurt.stalled - plain.traversal - lost,
        "wasted_s": hurt.wasted,
        "again_s": plain.again,
        "stalled_s": hurt.stalled,
    }


def summary(trial: Trial, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All rows, and the worst of them by how a stage ended."""
    worst = {
        f"{how}_extra_s": max(row["extra_s"] for row in rows if row["how"] == how)
        for how in trial.hows
        if any(row["how"] == how for row in rows)
    }
    same = all(row["same_text"] for row in rows)
    return {"rows": list(rows), "rtt_ms": trial.rtt, "mbit": trial.mbit, "same_text": same, **worst}


def over(
    trial: Trial, model: Path, jobs: list[Job], prompt: bytes, folder: Path
) -> Iterator[Plain | Hurt]:
    """Starts stages, replicas and whoever asks them on hosts of their own; gives what it tells."""
    papers = folder / "papers"
    authority = authority_in(papers / "authority")
    admit(authority, papers / ASKER)
    spans = equal_parts(read_manifest(model).shape.blocks, STAGES)
    seats = {f"stage-{number}": span for number, span in enumerate(spans, 1)}
    seats |= {f"replica-{number}": spans[number - 1] for number in trial.stages}
    with ExitStack() as stack:
        made = stack.enter_context(hosts([ASKER, *seats], Wan(trial.rtt, trial.mbit)))
        crew = []
        for name, span in seats.items():
            admit(authority, papers / name)
            post = Post(made[name].address, made[name].start)
            crew.append(stage_at(post, model, span, papers / name, port=PORT))
        told = stack.enter_context(up(crew))
        order = Order(
            papers=str(papers / ASKER),
            model=str(model),
            places=[f"{each['host']}:{each['port']}" for each in told],
            prompt=prompt,
            jobs=jobs,
            hows=list(trial.hows),
            stages=[number - 1 for number in trial.stages],
        )
        by_id = {each["stage"]: child for each, child in zip(told, crew, strict=True)}
        yield from driven(made[ASKER], order, by_id, papers / "driver.log")


def driven(host: Host, order: Order, crew: dict[str, Posted], log: Path) -> Iterator[Plain | Hurt]:
    """Whoever asks, from its first text to its last; ends stages when it says so."""
    with asking(host, DRIVER, log) as (hears, says):
        hears.write(msgspec.json.encode(order) + b"\n")
        hears.flush()
        cases = [case for job in order.jobs for case in order.cases(job)]
        ended: Posted | None = None
        for line in says:
            told = msgspec.json.decode(line, type=Plain | Due | Hurt)
            if isinstance(told, Due):
                ended = crew[told.stage]
                ended.stop(SIGNALS[cases[0].how])
                continue
            yield told
            if isinstance(told, Hurt):
                cases.pop(0)
                assert ended
                assert ended.process
                ended.process.kill()  # where it was only stopped
                ended.process.wait()
                if cases:
                    ended.start()
                    ended.first_line("stage")
                hears.write(b"go on\n")
                hears.flush()
