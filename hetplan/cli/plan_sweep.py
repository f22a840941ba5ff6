"""`hetplan plan --sweep`: a grid of questions, planned side by side, into one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.cli.options import read_predictor, say

if TYPE_CHECKING:
    from hetplan.search.sweep.table import Row

USUAL_TABLE = Path("sweep.csv")


def plan_sweep(
    sweep: Path,
    *,
    out: Path | None,
    plans: Path | None,
    resume: bool,
    predictor: Path | None,
    store: list[Path] | None,
) -> None:
    """Plan every question that is not in the table yet.

    Ctrl-C exits with 130; the rows that are done stay, and --resume goes on.
    """
    from hetplan.cli.progress import ProgressLine
    from hetplan.errors import Fault, InputError
    from hetplan.files.writing import check_writable
    from hetplan.search.sweep.form import load_sweep
    from hetplan.search.sweep.run import run_sweep

    table = USUAL_TABLE if out is None else out
    check_writable(table)
    if not resume and table.exists() and table.stat().st_size > 0:
        message = "exists already; go on from it with --resume, or name another file"
        raise InputError(Fault(file=str(table), message=message))
    asked = load_sweep(sweep)
    predict, digest = read_predictor(predictor, store)
    with ProgressLine("planning") as line:

        def show(done: int, total: int, row: Row) -> None:
            line.show(done, total, None, row.words)

        done = run_sweep(
            asked,
            table,
            resume=resume,
            predictor=predict,
            digest=digest,
            plans=plans,
            progress=show,
        )
    kept = len(asked.points) - done
    before = f", {kept} were there before" if kept else ""
    say(f"wrote {table}: {done} of {len(asked.points)} questions planned{before}")
