"""`hetplan replan`: the best next plan when a run's cluster changes, the move to it included."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import (
    AsJson,
    PredictorFile,
    Stores,
    check_replaceable,
    emit,
    emit_lines,
    quantity,
    read_predictor,
    say,
)

if TYPE_CHECKING:
    from hetplan.whatif.replan import Terms

_MOVE = "The move"


def replan(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file of the run.")],
    lost: Annotated[
        list[str] | None,
        typer.Option(metavar="NODES", help="Nodes that are gone, as in node17,node18."),
    ] = None,
    gained: Annotated[
        list[str] | None,
        typer.Option(metavar="WORDS", help="New nodes, as in '2x8 h100 @A', or one that is back."),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Cluster file to go on with."),
    ] = None,
    horizon: Annotated[
        str | None,
        typer.Option(
            metavar="WORK",
            help="Tokens left, as in 500B, or time to the next change, as in 6h. "
            "Default: the job's tokens, or a day.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Global batch. Default: as the plan has."),
    ] = None,
    announced: Annotated[
        bool,
        typer.Option(
            "--announced",
            help="A checkpoint is saved before: no step is repeated.",
            rich_help_panel=_MOVE,
        ),
    ] = False,
    state: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="SOURCE",
            help="checkpoint, or peers: devices keep their state.",
            rich_help_panel=_MOVE,
        ),
    ] = "checkpoint",
    start: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="To start again, without the move. Default: as for the days of the run.",
            rich_help_panel=_MOVE,
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="All readers of the checkpoint together. Default: as for the days.",
            rich_help_panel=_MOVE,
        ),
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Of search and prices. Default: 60 s."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Plan file to write.")] = None,
    predictor: PredictorFile = None,
    store: Stores = None,
    as_json: AsJson = False,
) -> None:
    """Find the next plan when nodes are lost or gained, or the job moves.

    It counts the start, the move of the state and the steps to repeat. The batch stays.
    """
    from hetplan.files.encoding import encode
    from hetplan.library.replan import change_of, planned_again
    from hetplan.reports.replanned import REPLANNED_SCHEMA, replanned_lines
    from hetplan.search.files import SCHEMA, load_legal_plan, save_result

    replacing = "" if out is None else check_replaceable(out, SCHEMA, "plan")
    terms = _terms(horizon, state, start, storage, time_limit)
    before = load_legal_plan(plan)
    change = change_of(before, lost or (), gained or (), cluster, announced=announced)
    predict, _ = read_predictor(predictor, store)
    found = planned_again(before, change, predict, terms, batch)
    if as_json:
        emit(encode(found, schema=REPLANNED_SCHEMA))
    else:
        emit_lines(replanned_lines(found, terms))
    if out is not None:
        save_result(found.result, out)
        say(f"wrote {out}{replacing}")


def _terms(
    horizon: str | None, state: str, start: str | None, storage: str | None, limit: str | None
) -> Terms:
    from hetplan.units import Dimension
    from hetplan.whatif.replan import SEARCH_SECONDS, Terms, source_named, with_horizon

    search = quantity("--time-limit", limit, Dimension.TIME)
    terms = Terms(
        start_seconds=quantity("--start", start, Dimension.TIME),
        source=source_named(state, "--from"),
        storage_bytes_per_second=quantity("--storage", storage, Dimension.BANDWIDTH),
        search_seconds=SEARCH_SECONDS if search is None else search,
    )
    return with_horizon(terms, horizon)
