"""blocktrain reproduce"""

import signal
from pathlib import Path
from typing import Any

from blocktrain.bench.reproduce import Measuring, adopt, chosen, keep, look
from blocktrain.bench.results import Results, collect
from blocktrain.bench.results_page import BEGIN, NOT_YET, publish
from blocktrain.bench.scales import FULL, QUICK, Scale
from blocktrain.console import PLAIN, Out, bars
from blocktrain.errors import BadInput, BlockTrainError

DOCS = Path("docs")


def reproduce(
    *,
    quick: bool = False,
    rows: str = "",
    out: Path | None = None,
    known: Path | None = None,
    report_only: bool = False,
    output: Out = PLAIN,
) -> None:
    """Measure every row of docs/results.md again, and write it. It may take a day on two cores.

    The same command goes on where it was stopped. What another row has measured, or an earlier
    command in the same folder, is not measured twice.

    Parameters
    ----------
    quick: bool
        A small version in less than twenty minutes; it writes into its own folder only.
    rows: str
        Only these, as ce,gap; all if not given.
    out: Path
        Folder for the runs: runs/reproduce, or runs/reproduce-quick.
    known: Path
        Records of an earlier reproduction, as docs/records, to go on from instead of from nothing.
    report_only: bool
        Measure nothing; write what has been measured.
    """
    scale = QUICK if quick else FULL
    folder = out or Path(scale.folder)
    wanted = chosen([name.strip() for name in rows.split(",") if name.strip()], scale)
    place, readme = (folder, None) if quick else (DOCS, readme_beside(DOCS))
    failed: dict[str, str] = {}
    if known is not None:
        adopt(known, folder)
    if not report_only:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # children are told to stop too
        with bars("steps", "rounds of these steps") as (steps, rounds):
            measuring = Measuring(wanted, scale, folder, say=output.say, steps=steps, rounds=rounds)
            failed = measuring.run()
    records = folder if quick else keep(folder, place / "records")
    results = told(scale, records)
    written = publish(results, place, readme)
    output.say("written: " + ", ".join(map(str, written)))
    output.rows([line(results, row.key) for row in wanted], "Reproduced")
    if failed:
        raise BlockTrainError(
            f"{len(failed)} steps failed, the first: {next(iter(failed.values()))} The same "
            "command tries them again."
        )


def told(scale: Scale, records: Path) -> Results:
    """Every row of the scale as far as it is known, also those not asked for now."""
    looks = [look(row, scale, records) for row in chosen([], scale)]
    return collect(looks, scale, records)


def readme_beside(docs: Path) -> Path:
    """README.md beside the docs, which has a place for results."""
    readme = docs.resolve().parent / "README.md"
    if not readme.exists() or BEGIN not in readme.read_text():
        raise BadInput(f"{readme} has no place for results; run this where BlockTrain's code is.")
    return readme


def line(results: Results, key: str) -> dict[str, Any]:
    """One row for the terminal."""
    row = next(row for row in results.rows if row.key == key)
    return {
        "row": row.key,
        "value": row.value,
        "spread": row.spread,
        "bar": row.bar,
        "goal": row.goal,
        "met": row.met,
        "state": "measured" if row.measured else NOT_YET,
    }
