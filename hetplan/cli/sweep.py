"""`hetplan sweep`: a grid of questions, planned side by side, into one table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import PredictorFile, Stores, read_predictor, say

if TYPE_CHECKING:
    from hetplan.whatif.sweep import Row


def sweep(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Grid of models, clusters, jobs and links.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Table to write (CSV).")] = Path(
        "sweep.csv"
    ),
    plans: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the plan files too.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Plan what is missing in the table.")
    ] = False,
    predictor: PredictorFile = None,
    store: Stores = None,
) -> None:
    """Plan a grid of questions (YAML) into one table.

    Ctrl-C exits with 130 and keeps the finished rows; --resume continues.
    """
    from hetplan.files.writing import check_writable
    from hetplan.reports.progress import ProgressLine
    from hetplan.whatif.sweep import check_fresh, run_sweep
    from hetplan.whatif.sweep_grid import load_sweep

    check_writable(out)
    check_fresh(out, resume=resume)
    questions = load_sweep(file)
    predict, digest = read_predictor(predictor, store)
    statuses: Counter[str] = Counter()
    with ProgressLine("planning") as line:

        def show(done: int, total: int, row: Row) -> None:
            statuses[row.status] += 1
            line.show(done, total, None, row.words)

        planned = run_sweep(
            questions,
            out,
            resume=resume,
            predictor=predict,
            digest=digest,
            plans=plans,
            progress=show,
        )
    kept = len(questions.points) - planned
    before = f"; {kept} were there before" if kept else ""
    found = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    what = f"{planned} of {len(questions.points)} questions planned"
    say(f"wrote {out}: {what}{f' ({found})' * bool(found)}{before}")
