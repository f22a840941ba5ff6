"""`hetplan report`: one HTML page of one or several plans, and of runs of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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

MARK = "<!-- hetplan report -->"


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="PLAN... [LOG...]",
            help="Plan files, shown side by side, and logs of runs of them.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Page to write (HTML).")] = Path(
        "report.html"
    ),
    time_limit: TimeLimit = None,
    predictor: PredictorFile = None,
    store: Stores = None,
) -> None:
    """Write one page about a plan: timeline, memory, links, proof, sources.

    It needs no network. As in: hetplan report plan.json train.log --out report.html
    """
    from hetplan.kernels import loading

    with loading:
        from hetplan.deadline import ends_by, seconds_left
        from hetplan.errors import Fault, InputError
        from hetplan.files.writing import check_writable, write_atomically
        from hetplan.reports.html.page import report_text
        from hetplan.reports.html.values import plan_views
        from hetplan.search.files import load_legal_plan

    end = moment_of(time_limit)
    plans = [path for path in files if _is_plan(path)]
    if not plans:
        message = "is no plan file: name one that `hetplan plan` or `estimate --out` wrote"
        raise InputError(Fault(file=str(files[0]), message=message))
    check_writable(out)
    _check_replaceable(out)
    results = [(str(path), load_legal_plan(path)) for path in plans]
    logs = [path for path in files if path not in plans]
    with ends_by(end):
        predict, _ = read_predictor(predictor, store)
        views = plan_views(results, predict, logs)
        if seconds_left() <= 0.0:
            say_left_out("steps at other bandwidths of links")
    text = report_text(views)
    write_atomically(out, text)
    say(f"wrote {out} ({len(text.encode()) / 1e6:.2g} MB)")


def _is_plan(path: Path) -> bool:
    """Whether the file is a plan's; a missing one is taken for what its name says."""
    import re

    from hetplan.search.files import SCHEMA

    name = re.escape(SCHEMA.partition("/")[0].encode())
    if path.exists() and not path.is_file():
        return False  # opening a pipe would wait for its writer
    try:
        with path.open("rb") as stream:
            if stream.read(1) != b"{":
                return False
            return re.search(rb'"schema"\s*:\s*"' + name + b"/", stream.read()) is not None
    except OSError:
        return path.suffix == ".json"


def _check_replaceable(out: Path) -> None:
    """Only another report is written over."""
    from hetplan.errors import Fault, InputError

    if out.exists() and out.stat().st_size and MARK.encode() not in out.read_bytes()[:200]:
        message = "exists and is no report; nothing was changed: give the name of a new file"
        raise InputError(Fault(file=str(out), message=message))
