"""`hetplan report`: one HTML page of one or several plans, and of runs of them."""

from __future__ import annotations

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
    from hetplan.predict.predictor import Predictor
    from hetplan.search.result import SearchResult

MARK = "<!-- hetplan report -->"
_PAGE_SECONDS = 2.0
"""Of a time limit, for the page; the rest is for what-ifs."""


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="PLAN... [LOG...]",
            help="Plan files, and logs of their runs.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Page to write (HTML).")] = Path(
        "report.html"
    ),
    what_if: Annotated[
        bool,
        typer.Option(
            "--what-if",
            help="Plan again for idle devices, one more node, half and twice each link; the plan "
            "file keeps the answers.",
        ),
    ] = False,
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
        from hetplan.files.writing import check_replaceable, write_atomically
        from hetplan.reports.html.page import report_text
        from hetplan.reports.html.values import plan_views
        from hetplan.search.files import load_legal_plan

    end = moment_of(time_limit)
    plans = [path for path in files if _is_plan(path)]
    if not plans:
        message = "is no plan file: name one that `hetplan plan` or `estimate --out` wrote"
        raise InputError(Fault(file=str(files[0]), message=message))
    check_replaceable(out, "report", lambda held: MARK.encode() in held[:200])
    results = [(str(path), load_legal_plan(path)) for path in plans]
    logs = [path for path in files if path not in plans]
    with ends_by(end):
        predict, _ = read_predictor(predictor, store)
        if what_if:
            results = [(name, _asked(Path(name), predict)) for name, _ in results]
        views = plan_views(results, predict, logs)
        if seconds_left() <= 0.0:
            say_left_out("steps at other bandwidths of links")
    text = report_text(views)
    write_atomically(out, text)
    say(f"wrote {out} ({len(text.encode()) / 1e6:.2g} MB)")


def _asked(path: Path, predictor: Predictor) -> SearchResult:
    """The result with all answers, each written into its file as soon as it is there; with those
    that there was time for.
    """
    from hetplan.deadline import ends_by, moment
    from hetplan.errors import Fault, InputError, OutOfTimeError
    from hetplan.files.reading import read_document
    from hetplan.files.writing import check_writable
    from hetplan.reports.html.values import plan_view
    from hetplan.reports.terminal import ProgressLine
    from hetplan.search.files import load_legal_plan, save_in_place
    from hetplan.whatif.kept import with_what_ifs

    check_writable(path)
    before, result = read_document(path).sha256, load_legal_plan(path)
    if plan_view(path.name, result, predictor).is_priced_anew:
        message = (
            "was priced by another predictor than this one, so that answers would not be about "
            "this plan: give its own with --predictor or --store, or plan again"
        )
        raise InputError(Fault(file=str(path), message=message))
    with ProgressLine("planning with one change at a time") as line:
        try:
            with ends_by(moment() - _PAGE_SECONDS):
                for found in with_what_ifs(
                    result, predictor, lambda at, of, what: line.show(at, of, None, what)
                ):
                    result = found
                    before = save_in_place(result, path, before)
        except OutOfTimeError:
            say_left_out(f"answers to what-ifs of {path}")
    return result


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
