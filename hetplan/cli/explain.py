"""`hetplan explain`: why a plan is as it is; which bytes cross which links; each rank's place."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import AsJson, PredictorFile, Stores, emit

if TYPE_CHECKING:
    from hetplan.cost.traffic.published import ArticleRow
    from hetplan.plans.ranks import RankRow
    from hetplan.reports.traffic import TrafficReport
    from hetplan.search.result import SearchResult

RANKS_SCHEMA = "hetplan.ranks/1"
TRAFFIC_MODELS = ("ring", "priced", "asterfusion")


def explain(
    plan: Annotated[
        Path | None, typer.Argument(help="Plan file that `hetplan plan` or `estimate` wrote.")
    ] = None,
    shadow_prices: Annotated[
        bool,
        typer.Option(
            "--shadow-prices",
            help="What more bandwidth, nodes, memory, or fewer demands would be worth: plans again "
            "for each.",
        ),
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option("--against", help="Another plan file: why it was not chosen."),
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(help="--shadow-prices: longest search of one change. Default: the job's."),
    ] = None,
    traffic: Annotated[
        bool, typer.Option("--traffic", help="Bytes per link, class and step, and switches.")
    ] = False,
    ranks: Annotated[
        bool, typer.Option("--ranks", help="Island, node, device and groups of every rank.")
    ] = False,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", min=1, max=10**18, help="Length of the run, over the job's."),
    ] = None,
    traffic_model: Annotated[
        str | None,
        typer.Option(
            "--traffic-model",
            help="ring (default); priced: the algorithms that an estimate chooses; asterfusion: "
            "the formulas of a published article beside rings, without a plan its own table.",
        ),
    ] = None,
    predictor: PredictorFile = None,
    store: Stores = None,
    as_json: AsJson = False,
) -> None:
    """Say what limits a plan, what would help, why not another plan; its traffic; its ranks."""
    from hetplan.errors import InputError

    if traffic and ranks:
        raise InputError("one thing at a time: --traffic or --ranks")
    if (traffic or ranks) and (shadow_prices or against is not None or time_limit is not None):
        raise InputError(
            "--shadow-prices, --against and --time-limit do not go with --traffic or --ranks"
        )
    if time_limit is not None and not shadow_prices:
        raise InputError("--time-limit belongs to --shadow-prices")
    if not traffic and not ranks and traffic_model is None and tokens is None:
        if plan is None:
            raise InputError("name a plan file, as in `hetplan explain plan.json`")
        from hetplan.cli.explain_why import explain_why

        explain_why(
            plan,
            against=against,
            shadow_prices=shadow_prices,
            time_limit=time_limit,
            predictor=predictor,
            store=store,
            as_json=as_json,
        )
        return
    if not traffic and not ranks:
        raise InputError("--tokens and --traffic-model belong to --traffic")
    if ranks and (tokens is not None or traffic_model is not None):
        raise InputError("--tokens and --traffic-model belong to --traffic")
    kind = traffic_model or "ring"
    if kind not in TRAFFIC_MODELS:
        known = ", ".join(TRAFFIC_MODELS)
        raise InputError(f"--traffic-model {kind}: there is no such model; known: {known}")
    if kind != "priced" and (predictor is not None or store):
        raise InputError("--predictor and --store belong to --traffic-model priced")
    if plan is None:
        if kind != "asterfusion":
            raise InputError("name a plan file; only --traffic-model asterfusion goes without one")
        if tokens is not None:
            raise InputError("--tokens belongs to a plan; the article's table has its own")
        _show_article(as_json=as_json)
        return
    from hetplan.search.files import load_legal_plan

    result = load_legal_plan(plan)
    if ranks:
        _show_ranks(result, as_json=as_json)
    else:
        _show_traffic(_report(result, kind, tokens, predictor, store), as_json=as_json)


def _report(
    result: SearchResult,
    kind: str,
    tokens: int | None,
    predictor: Path | None,
    store: list[Path] | None,
) -> TrafficReport:
    from hetplan.cli.options import read_predictor
    from hetplan.cost.traffic.ledger import ledger
    from hetplan.cost.traffic.published import article_rows, inputs_of
    from hetplan.errors import InputError
    from hetplan.reports.traffic import TrafficReport, switching_of

    inputs = result.inputs
    found = ledger(
        result.plan,
        inputs.model,
        inputs.cluster,
        inputs.job,
        read_predictor(predictor, store)[0] if kind == "priced" else None,
        total_tokens=tokens,
    )
    article: tuple[ArticleRow, ...] = ()
    if kind == "asterfusion":
        if found.total_tokens is None:
            raise InputError(
                "the article counts whole runs: give --tokens, or total_tokens in the job"
            )
        article = article_rows(inputs_of(result.plan, inputs.model, inputs.job, found.total_tokens))
    step = result.estimate.step_seconds
    names = tuple(island.name for island in inputs.cluster.islands)
    return TrafficReport(
        model="priced" if kind == "priced" else "ring",
        ledger=found,
        step_seconds=step,
        switching=switching_of(found, names, step),
        article=article,
    )


def _show_traffic(report: TrafficReport, *, as_json: bool) -> None:
    from hetplan.reports.traffic import (
        TRAFFIC_SCHEMA,
        article_table,
        ledger_lines,
        ledger_table,
    )

    if as_json:
        from hetplan.files.encoding import encode

        emit(encode(report, schema=TRAFFIC_SCHEMA))
        return
    from hetplan.reports.terminal import print_table

    print_table(ledger_table(report))
    for line in ledger_lines(report):
        emit(line)
    if report.article:
        title = "the whole run by the article's formulas, with the first stage's degrees"
        print_table(article_table(report.article, title))


def _show_article(*, as_json: bool) -> None:
    from hetplan.cost.traffic.published import article_rows, article_slips
    from hetplan.reports.traffic import (
        ARTICLE_SCHEMA,
        ArticleReport,
        article_table,
        slip_lines,
    )

    report = ArticleReport(rows=article_rows(), slips=article_slips())
    if as_json:
        from hetplan.files.encoding import encode

        emit(encode(report, schema=ARTICLE_SCHEMA))
        return
    from hetplan.reports.terminal import print_table

    title = "Llama-3 70B, one epoch of C4: G = 8; 3D with dp 16, tp 8, pp 8"
    print_table(article_table(report.rows, title))
    for line in slip_lines(report.slips):
        emit(line)


def _show_ranks(result: SearchResult, *, as_json: bool) -> None:
    """Row by row: a plan may have a hundred thousand ranks."""
    from hetplan.plans.ranks import rank_rows

    rows = rank_rows(result.plan, result.inputs.cluster)
    replicas = [
        replica
        for pipeline in result.plan.pipelines
        for stage in pipeline.stages
        for replica in stage.replicas
    ]
    if as_json:
        _write(_json_lines(rows))
        return
    names = ["rank", "device", "island", "node", "local", "stage", "dp", "cp", "tp"]
    if len(result.plan.pipelines) > 1:
        names.insert(5, "pipeline")
    if any(replica.ep * replica.etp > 1 for replica in replicas):
        names += ["ep", "etp"]
    if any(island.node_names for island in result.inputs.cluster.islands):
        names.insert(4, "node_name")
    islands = max(len(island.name) for island in result.inputs.cluster.islands)
    widths = [max(len(name), islands if name == "island" else 7) for name in names]
    _write(_table_lines(rows, names, widths))


def _table_lines(rows: Iterable[RankRow], names: list[str], widths: list[int]) -> Iterator[str]:
    def line(cells: Iterable[object]) -> str:
        return "  ".join(f"{cell!s:>{width}}" for cell, width in zip(cells, widths, strict=True))

    yield line(name.replace("_", " ") for name in names)
    for row in rows:
        values = (getattr(row, name) for name in names)
        yield line("-" if value is None else value for value in values)


def _json_lines(rows: Iterable[RankRow]) -> Iterator[str]:
    """One document, one rank in a line."""
    yield "{"
    yield '  "ranks": ['
    before = None
    for row in rows:
        if before is not None:
            yield f"    {before},"
        before = json.dumps(asdict(row), sort_keys=True)
    yield f"    {before}"
    yield "  ],"
    yield f'  "schema": "{RANKS_SCHEMA}"'
    yield "}"


def _write(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()
