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
    check_replaceable,
    emit,
    read_inputs,
    read_predictor,
    say,
)

if TYPE_CHECKING:
    from hetplan.cluster.spec import Cluster
    from hetplan.cost.estimate_values import Estimate
    from hetplan.cost.network.lost_nic import LostNic
    from hetplan.cost.step_model.pricer import Pricer
    from hetplan.model.spec import ModelSpec
    from hetplan.plans.plan import Plan
    from hetplan.search.result import Inputs

ESTIMATE_SCHEMA = "hetplan.estimate/3"


def estimate(
    plan: Annotated[
        Path | None,
        typer.Argument(
            help="Plan file that `hetplan plan` or `estimate` wrote; it holds its inputs."
        ),
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
        typer.Option(
            help="Transformer layers of each stage, as in 8,8,10; with virtual stages once through "
            "the pipeline for each. Default: even."
        ),
    ] = None,
    islands: Annotated[
        str | None,
        typer.Option(
            help="Island of each stage, as in a,a,b, or one for all. Default: one with room for "
            "all stages, or all in file order."
        ),
    ] = None,
    recompute: Annotated[
        bool,
        typer.Option("--recompute", help="Recompute all of every transformer layer, or of some."),
    ] = False,
    recompute_modules: Annotated[
        str | None,
        typer.Option(
            help="Recompute only these parts of a layer: core_attn, mlp, moe, layernorm, moe_act."
        ),
    ] = None,
    recompute_layers: Annotated[
        int | None,
        typer.Option(help="Recompute only the first so many layers of each chunk. Default: all."),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="1f1b, gpipe, interleaved-1f1b or zb-h1. Default: 1f1b, with --virtual-stages "
            "interleaved-1f1b."
        ),
    ] = None,
    virtual_stages: Annotated[
        int | None, typer.Option(help="Layer ranges of each stage, interleaved. Default: 1.")
    ] = None,
    cp: Annotated[int | None, typer.Option(help="Context-parallel degree. Default: 1.")] = None,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel degree. Default: 1.")] = None,
    etp: Annotated[
        int | None,
        typer.Option(help="Tensor-parallel degree of the experts. Default: tp, with --ep 1."),
    ] = None,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Split what tp leaves whole as well.")
    ] = False,
    sharding: Annotated[
        str | None,
        typer.Option(
            help="What data-parallel ranks split: none, optimizer (ZeRO-1), gradients (2) or "
            "parameters (3). Default: optimizer where the target can."
        ),
    ] = None,
    shards: Annotated[
        int | None, typer.Option(help="Ranks of one sharding group. Default: all copies.")
    ] = None,
    offload: Annotated[
        float | None,
        typer.Option(help="Part of the optimizer state in host memory, 0 to 1. Default: 0."),
    ] = None,
    overlap: Annotated[
        str | None,
        typer.Option(
            help="Communication beside compute: none, or of reduction,gathering,tp,cp,send. "
            "Default: cp."
        ),
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option(
            "--what-if",
            help="lost-nic=ISLAND/NODE/NIC, as in a/0/3: price the plan with that NIC's port down "
            "as well; printed on stderr.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Timeline to write, for chrome://tracing and ui.perfetto.dev."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Plan file to write (JSON), for `hetplan launch`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Price a layout or a plan without a search.

    As in: hetplan estimate --model M --cluster C --job J --tp 8 --layers 18,20,20,22

    Exit code 3 where a stage does not fit in memory; it is priced all the same.
    """
    from hetplan.cli.estimate_layout import LayoutOptions, plan_of
    from hetplan.cost.estimate import estimate_with, misfits
    from hetplan.cost.step_model.pricer import Pricer
    from hetplan.errors import InfeasibleError, InputError
    from hetplan.files.writing import check_writable
    from hetplan.search.families.allowed import allowed_cluster
    from hetplan.search.files import SCHEMA

    files = (model, cluster, job, target)
    layout = (
        tp, pp, dp, microbatch_size, layers, islands, recompute_modules, recompute_layers,
        schedule, virtual_stages, cp, ep, etp, sharding, shards, offload, overlap,
    )  # fmt: skip
    if plan is not None:
        given = recompute or sequence_parallel
        if given or any(option is not None for option in (*files, *layout)):
            raise InputError(
                f"{plan} holds its own model, cluster, job and layout; leave those options out"
            )
        asked, chosen = _read_plan(plan)
        inputs = (asked.model, asked.cluster, asked.job)
    elif model is None or cluster is None or job is None:
        raise InputError("give a plan file, or all of --model, --cluster and --job")
    else:
        asked = read_inputs(model, cluster, job, target, searched=False)
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
            cp=1 if cp is None else cp,
            ep=1 if ep is None else ep,
            etp=etp,
            sequence_parallel=sequence_parallel,
            schedule=schedule,
            virtual_stages=1 if virtual_stages is None else virtual_stages,
            recompute_modules=recompute_modules,
            recompute_layers=recompute_layers,
            sharding=sharding,
            shards=shards,
            offload=0.0 if offload is None else offload,
            overlap=overlap,
        )
        chosen = plan_of(options, *inputs)
    replacing = "" if out is None else check_replaceable(out, SCHEMA, "plan")
    if trace is not None:
        check_writable(trace)
    lost = None if what_if is None else _lost_nic(what_if, inputs[1])
    predict, digest = read_predictor(predictor, store)
    pricer = Pricer(*inputs, predict)
    found = estimate_with(pricer, chosen)
    if out is not None:
        _write(out, asked, digest, chosen, found)
        say(f"wrote {out}{replacing}")
    if trace is not None:
        _trace(trace, pricer, chosen)
        say(f"wrote {trace}")
    if lost is not None:
        _what_if(lost, pricer, chosen)
    _show(inputs[0], chosen, found, as_json=as_json)
    unfit = misfits(found)
    if unfit:
        raise InfeasibleError(unfit)


def _trace(path: Path, pricer: Pricer, plan: Plan) -> None:
    from hetplan.files.writing import write_atomically
    from hetplan.reports.trace import trace_text

    write_atomically(path, trace_text(plan, pricer))


def _lost_nic(text: str, cluster: Cluster) -> LostNic:
    """What `lost-nic=ISLAND/NODE/NIC` asks for."""
    from hetplan.cost.network.lost_nic import without_nic
    from hetplan.errors import InputError

    kind, _, where = text.partition("=")
    parts = where.rsplit("/", 2)
    numbers = parts[1:]
    if kind != "lost-nic" or len(numbers) != 2 or not all(map(_is_number, numbers)):
        raise InputError(f"--what-if is {text!a}; write lost-nic=ISLAND/NODE/NIC, as in a/0/3")
    return without_nic(cluster, parts[0], int(parts[1]), int(parts[2]))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def _what_if(lost: LostNic, pricer: Pricer, plan: Plan) -> None:
    """One line per finding on stderr; the plan's own estimate stays the result."""
    from dataclasses import replace

    from hetplan.plans.plan import expand
    from hetplan.units import format_seconds

    if not any(
        device in lost.devices
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for replica in stage.replicas
        for device in expand(replica.devices)
    ):
        say("what if: the plan uses no device of that node; nothing changes")
        return
    for note in lost.notes:
        say(f"what if: {note}")
    if lost.kept == 0:
        say("what if: the node is cut off; plan again without it")
        return
    before, after = (
        replace(pricer, cluster=cluster, _known={}).step(plan).step_seconds
        for cluster in (lost.before, lost.after)
    )
    say(
        f"what if: the step takes {format_seconds(after)} instead of {format_seconds(before)} "
        f"({after / before - 1:+.1%}), once {format_seconds(lost.detection_seconds)} to notice"
    )


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
    from hetplan.reports.plans import component_table, estimate_lines, memory_line, stage_table
    from hetplan.reports.terminal import print_table

    print_table(stage_table(model, plan, estimate))
    print_table(component_table(estimate))
    memory = memory_line(estimate)
    if memory is not None:
        emit(memory)
    for line in estimate_lines(estimate):
        emit(line)
