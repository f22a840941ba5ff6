"""`hetplan estimate`: what a layout or a plan file costs, without a search."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import (
    AsJson,
    PredictorFile,
    Stores,
    TargetName,
    emit,
    read_inputs,
    read_predictor,
    say,
)

if TYPE_CHECKING:
    from hetplan.cost.estimate_values import Estimate
    from hetplan.model.spec import ModelSpec
    from hetplan.plans.plan import Plan
    from hetplan.search.result import Inputs

ESTIMATE_SCHEMA = "hetplan.estimate/1"


def estimate(
    plan: Annotated[
        Path | None,
        typer.Argument(help="Plan file that `hetplan plan` wrote; it holds its inputs."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Model file (YAML, or a Hugging Face config.json).")
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="Cluster file (YAML).")] = None,
    job: Annotated[Path | None, typer.Option(help="Job file (YAML).")] = None,
    predictor: PredictorFile = None,
    store: Stores = None,
    target: TargetName = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel degree. Default: 1.")] = None,
    pp: Annotated[
        int | None, typer.Option(help="Pipeline stages. Default: as many as --layers has.")
    ] = None,
    dp: Annotated[
        int | None, typer.Option(help="Data-parallel degree. Default: the largest that fits.")
    ] = None,
    microbatch_size: Annotated[
        int | None, typer.Option(help="Sequences of one microbatch on one rank. Default: 1.")
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Transformer layers of each stage, as in 8,8,10. Default: even."),
    ] = None,
    islands: Annotated[
        str | None,
        typer.Option(
            help="Island of each stage, as in a,a,b, or one for all. Default: one with room for "
            "all stages, or all in file order."
        ),
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Recompute all transformer layers.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Plan file to write, for `hetplan launch`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Price a layout or a plan without a search.

    Exit code 3 where a stage does not fit in memory; it is priced all the same.
    """
    from hetplan.cli.estimate_layout import LayoutOptions, plan_of
    from hetplan.cost.estimate import estimate as price
    from hetplan.cost.estimate import misfits
    from hetplan.errors import InfeasibleError, InputError
    from hetplan.files.writing import check_writable
    from hetplan.search.candidates import allowed_cluster

    layout = (model, cluster, job, target, tp, pp, dp, microbatch_size, layers, islands)
    if plan is not None:
        if recompute or any(option is not None for option in layout):
            raise InputError(
                f"{plan} holds its own model, cluster, job and layout; leave those options out"
            )
        asked, chosen = _read_plan(plan)
        inputs = (asked.model, asked.cluster, asked.job)
    elif model is None or cluster is None or job is None:
        raise InputError("give a plan file, or all of --model, --cluster and --job")
    else:
        asked = read_inputs(model, cluster, job, target)
        usable = allowed_cluster(asked.cluster, asked.job)
        inputs = (asked.model, usable, asked.job)
        options = LayoutOptions(
            tp=1 if tp is None else tp,
            pp=pp,
            dp=dp,
            microbatch_size=1 if microbatch_size is None else microbatch_size,
            layers=layers,
            islands=islands,
            recompute=recompute,
        )
        chosen = plan_of(options, *inputs)
    if out is not None:
        check_writable(out)
    predict, digest = read_predictor(predictor, store)
    found = price(chosen, *inputs, predict)
    if out is not None:
        _write(out, asked, digest, chosen, found)
        say(f"wrote {out}")
    _show(inputs[0], chosen, found, as_json=as_json)
    unfit = misfits(found)
    if unfit:
        raise InfeasibleError(unfit)


def _write(out: Path, inputs: Inputs, digest: str, plan: Plan, estimate: Estimate) -> None:
    """The layout as a plan file without a certificate: it was given, not searched."""
    from dataclasses import replace

    from hetplan.search.files import SCHEMA, save_result
    from hetplan.search.result import SearchResult
    from hetplan.version import __version__

    files = tuple(entry for entry in inputs.sha256 if entry[0] != "predictor")
    save_result(
        SearchResult(
            schema=SCHEMA,
            hetplan_version=__version__,
            seed=inputs.job.seed,
            inputs=replace(inputs, sha256=(*files, ("predictor", digest))),
            plan=plan,
            estimate=estimate,
            certificate=None,
        ),
        out,
    )


def _read_plan(path: Path) -> tuple[Inputs, Plan]:
    """Inputs and plan of a plan file; an InputError where the plan breaks a rule."""
    from hetplan.search.files import load_legal_plan

    result = load_legal_plan(path)
    return result.inputs, result.plan


def _show(model: ModelSpec, plan: Plan, estimate: Estimate, *, as_json: bool) -> None:
    from hetplan.files.encoding import encode

    if as_json:
        emit(encode(estimate, schema=ESTIMATE_SCHEMA))
        return
    from hetplan.reports.plans import estimate_lines, stage_table
    from hetplan.reports.terminal import print_table

    print_table(stage_table(model, plan, estimate))
    for line in estimate_lines(estimate):
        emit(line)
