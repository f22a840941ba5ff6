"""`hetplan explain`: what limits a plan, what would help, its traffic and its ranks."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import (
    AsJson,
    PredictorFile,
    Stores,
    TimeLimit,
    Verbose,
    emit,
    emit_lines,
    moment_of,
    read_predictor,
    say_left_out,
)

if TYPE_CHECKING:
    from hetplan.reports.explained import Explained

app = typer.Typer(
    help="Explain a plan: what limits it, what would help, why not another one.\n\n"
    "`hetplan explain plan.json` is `hetplan explain limits plan.json`.",
    no_args_is_help=True,
)
DEFAULT_COMMAND = "limits"
TRAFFIC_MODELS = ("ring", "priced")

PlanFile = Annotated[
    Path, typer.Argument(metavar="PLAN", help="Plan file that `hetplan plan` or `estimate` wrote.")
]


@app.command()
def limits(
    plan: PlanFile,
    predictor: PredictorFile = None,
    store: Stores = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Show what limits the plan, and why islands are idle if known (default)."""
    from hetplan.reports.explained import Explained, every_limit, idle_lines, limit_lines
    from hetplan.search.files import load_legal_plan
    from hetplan.whatif.idle import little_used
    from hetplan.whatif.limits import limits as limits_of

    result = load_legal_plan(plan)
    predict, _ = read_predictor(predictor, store)
    explained = Explained(limits=limits_of(result, predict), idle=result.idle)
    if as_json:
        _emit_json(explained)
        return
    said = every_limit if verbose else limit_lines
    emit_lines((*said(explained.limits), *idle_lines(result.idle, result, verbose=verbose)))
    unexplained = [] if result.idle else little_used(result)
    if unexplained:
        emit_lines(
            [
                f"too little to do: {', '.join(unexplained)}: `hetplan explain idle "
                f"{shlex.quote(str(plan))}` plans again to say why"
            ]
        )


@app.command()
def idle(
    plan: PlanFile,
    time_limit: TimeLimit = None,
    predictor: PredictorFile = None,
    store: Stores = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Show why islands are idle, and from where they pay: plan again for each.

    The plan file keeps the answer, which `hetplan explain` and `hetplan report` show from then on.
    """
    from hetplan.kernels import loading

    with loading:
        from hetplan.deadline import ends_by
        from hetplan.files.reading import read_document
        from hetplan.reports.explained import Explained, idle_lines
        from hetplan.reports.terminal import ProgressLine
        from hetplan.search.files import load_legal_plan, save_in_place
        from hetplan.whatif.idle import idle_reasons, little_used
        from hetplan.whatif.limits import limits as limits_of

    end, before = moment_of(time_limit), read_document(plan).sha256
    result = load_legal_plan(plan)
    found, left_out = result.idle, list[str]()
    with ends_by(end):
        predict, _ = read_predictor(predictor, store)
        if not found:
            with ProgressLine("planning with idle islands") as line:
                found = idle_reasons(
                    result, predict, progress=lambda at, of, name: line.show(at, of, None, name)
                )
            known = {each.island for each in found}
            left_out = [f"why {name} is idle" for name in little_used(result) if name not in known]
    if found and not result.idle and not left_out:
        save_in_place(replace(result, idle=found), plan, before)
    result = replace(result, idle=found)
    say_left_out(*left_out, *(["writing it into the plan file"] if found and left_out else []))
    if as_json:
        _emit_json(Explained(limits=limits_of(result, predict), idle=found))
        return
    lines = [*idle_lines(found, result, verbose=verbose)]
    if not left_out or lines:
        emit_lines(lines or ["no island is idle or has little to do, as far as a search says"])


@app.command()
def against(
    plan: PlanFile,
    other: Annotated[Path, typer.Argument(metavar="OTHER", help="The plan file to compare with.")],
    predictor: PredictorFile = None,
    store: Stores = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Show why another plan was not chosen."""
    from hetplan.reports.explained import (
        Explained,
        against_lines,
        choice_table,
        spent_lines,
    )
    from hetplan.reports.terminal import print_small
    from hetplan.search.files import load_legal_plan
    from hetplan.whatif.against import against as set_against
    from hetplan.whatif.limits import limits as limits_of

    result, second = load_legal_plan(plan), load_legal_plan(other)
    predict, _ = read_predictor(predictor, store)
    difference = set_against(result, second, predict)
    if as_json:
        _emit_json(Explained(limits=limits_of(result, predict), against=difference))
        return
    emit_lines(against_lines(difference))
    if difference.choices:
        print_small(choice_table(difference))
    emit_lines(spent_lines(difference, verbose=verbose))


@app.command()
def prices(
    plan: PlanFile,
    time_limit: TimeLimit = None,
    predictor: PredictorFile = None,
    store: Stores = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Show what more bandwidth, nodes, memory or fewer demands are worth: plan again for each."""
    from hetplan.kernels import loading

    with loading:
        from hetplan.deadline import ends_by
        from hetplan.reports.explained import Explained, price_lines
        from hetplan.reports.terminal import ProgressLine
        from hetplan.search.files import load_legal_plan
        from hetplan.whatif.limits import limits as limits_of
        from hetplan.whatif.shadow_prices import changes, shadow_prices

    end, result = moment_of(time_limit), load_legal_plan(plan)
    priced, planned = result.prices, tuple(changes(result.inputs))
    with ends_by(end):
        predict, _ = read_predictor(predictor, store)
        if not priced or time_limit is not None:
            with ProgressLine("planning with one change at a time") as line:
                priced = shadow_prices(
                    result,
                    predict,
                    asked=planned,
                    progress=lambda number, words: line.show(number, len(planned), None, words),
                )
            if len(priced) < len(planned):
                missing = len(planned) - len(priced)
                say_left_out(f"{missing} of {len(planned)} changes")
    if as_json:
        _emit_json(Explained(limits=limits_of(result, predict), shadow_prices=priced))
        return
    emit_lines(price_lines(priced, verbose=verbose))


@app.command()
def traffic(
    plan: PlanFile,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, max=10**18, metavar="N", help="Length of the run. Default: the job's."),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="ring, or priced: the algorithms that an estimate chooses.",
        ),
    ] = "ring",
    predictor: PredictorFile = None,
    store: Stores = None,
    as_json: AsJson = False,
) -> None:
    """Show the bytes per link, class and step, and the switches."""
    from hetplan.errors import InputError
    from hetplan.reports.explained import print_traffic, traffic_report
    from hetplan.search.files import load_legal_plan

    if model not in TRAFFIC_MODELS:
        raise InputError(f"--model {model}: known: {', '.join(TRAFFIC_MODELS)}")
    if model != "priced" and (predictor is not None or store):
        raise InputError("--predictor and --store belong to --model priced")
    predict = read_predictor(predictor, store)[0] if model == "priced" else None
    report = traffic_report(load_legal_plan(plan), model, tokens, predict)
    print_traffic(report, as_json=as_json)


@app.command()
def ranks(plan: PlanFile, as_json: AsJson = False) -> None:
    """Show island, node, device and groups of every rank."""
    from hetplan.reports.explained import print_ranks
    from hetplan.search.files import load_legal_plan

    print_ranks(load_legal_plan(plan), as_json=as_json)


def _emit_json(explained: Explained) -> None:
    from hetplan.files.encoding import encode
    from hetplan.reports.explained import EXPLAIN_SCHEMA

    emit(encode(explained, schema=EXPLAIN_SCHEMA))
