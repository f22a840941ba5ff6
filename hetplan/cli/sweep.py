"""`hetplan sweep`: a grid of questions, planned side by side, into one table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import (
    PredictorFile,
    Stores,
    TimeLimit,
    moment_of,
    read_predictor,
    say,
    say_left_out,
)

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
    time_limit: TimeLimit = None,
    predictor: PredictorFile = None,
    store: Stores = None,
) -> None:
    """Plan a grid of questions (YAML) into one table.

    Ctrl-C exits with 130 and keeps the finished rows; --resume continues.
    """
    from hetplan.kernels import loading

    with loading:
        from hetplan.deadline import ends_by
        from hetplan.files.writing import check_writable
        from hetplan.reports.terminal import ProgressLine
        from hetplan.whatif.sweep import check_fresh, run_sweep
        from hetplan.whatif.sweep_grid import load_sweep

    end = moment_of(time_limit)
    check_writable(out)
    check_fresh(out, resume=resume)
    questions = load_sweep(file)
    statuses: Counter[str] = Counter()
    with ends_by(end), ProgressLine("planning") as line:
        predict, digest = read_predictor(predictor, store)

        def show(done: int, total: int, row: Row) -> None:
            statuses[row.status] += 1
            line.show(done, total, None, row.words)

        planned, missing = run_sweep(
            questions,
            out,
            resume=resume,
            predictor=predict,
            digest=digest,
            plans=plans,
            progress=show,
        )
    kept = len(questions.points) - planned - missing
    before = f"; {kept} were there before" if kept else ""
    found = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    what = f"{planned} of {len(questions.points)} questions planned"
    say(f"wrote {out}: {what}{f' ({found})' * bool(found)}{before}")
    say_left_out(*([f"{missing} questions; --resume plans them"] if missing else []))
