"""`hetplan report`: one HTML page of one or several plans, and of runs of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import PredictorFile, Stores, read_predictor, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hetplan.comparison.compare import Comparison
    from hetplan.errors import Fault
    from hetplan.search.result import SearchResult

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
    predictor: PredictorFile = None,
    store: Stores = None,
) -> None:
    """Write one page about a plan: timeline, memory, links, proof, sources.

    It needs no network. As in: hetplan report plan.json train.log --out report.html
    """
    from hetplan.errors import Fault, InputError
    from hetplan.files.writing import check_writable, write_atomically
    from hetplan.reports.html.page import report_text
    from hetplan.reports.html.values import plan_view
    from hetplan.search.files import load_legal_plan

    plans = [path for path in files if _is_plan(path)]
    if not plans:
        message = "is no plan file: name one that `hetplan plan` or `estimate --out` wrote"
        raise InputError(Fault(file=str(files[0]), message=message))
    check_writable(out)
    _check_replaceable(out)
    results = [load_legal_plan(path) for path in plans]
    compared: list[list[Comparison]] = [[] for _ in plans]
    for log in files:
        if log not in plans:
            at, comparison = _compared(log, plans, results)
            compared[at].append(comparison)
    predict, _ = read_predictor(predictor, store)
    views = [
        plan_view(str(path), result, predict, runs)
        for path, result, runs in zip(plans, results, compared, strict=True)
    ]
    text = report_text(views)
    write_atomically(out, text)
    say(f"wrote {out} ({len(text.encode()) / 1e6:.2g} MB)")


def _is_plan(path: Path) -> bool:
    """Whether the file is a JSON document of a plan; an unreadable one is an InputError later."""
    from hetplan.search.files import SCHEMA

    try:
        with path.open("rb") as stream:
            head = stream.read(1)
            stream.seek(0)
            return head == b"{" and SCHEMA.partition("/")[0].encode() in stream.read()
    except OSError:
        return path.suffix == ".json"


def _check_replaceable(out: Path) -> None:
    """Only another report is written over."""
    from hetplan.errors import Fault, InputError

    if out.exists() and out.stat().st_size and MARK.encode() not in out.read_bytes()[:200]:
        message = "exists and is no report; nothing was changed: give the name of a new file"
        raise InputError(Fault(file=str(out), message=message))


def _compared(
    log: Path, plans: Sequence[Path], results: Sequence[SearchResult]
) -> tuple[int, Comparison]:
    """The run beside the first plan that it can be of; the faults of all where it is of none."""
    from hetplan.comparison.compare import compare
    from hetplan.errors import InputError

    faults: dict[Fault, None] = {}
    for at, result in enumerate(results):
        try:
            return at, compare(log, result)
        except InputError as error:
            faults |= dict.fromkeys(error.faults)
    raise InputError(*faults)
