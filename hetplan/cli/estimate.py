"""`hetplan estimate`: the cost of a layout or of a plan file, without a search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli.one_line import (
    OneLine,
    batch_option,
    between_option,
    model_option,
    nodes_option,
    question_of,
    seq_option,
)
from hetplan.cli.options import (
    AsJson,
    PredictorFile,
    Settings,
    Stores,
    TargetName,
    TraceFile,
    Verbose,
    check_replaceable,
    emit,
    job_settings,
    note,
    read_predictor,
    say,
    show_summary,
    write_trace,
)

if TYPE_CHECKING:
    from hetplan.cluster.spec import Cluster
    from hetplan.cost.goodput.lost_nic import LostNic
    from hetplan.predict.predictor import Predictor
    from hetplan.search.result import SearchResult

ESTIMATE_SCHEMA = "hetplan.estimate/7"
LAYOUT = "Layout"


def _file(help_text: str) -> Any:
    return typer.Option(metavar="FILE", help=help_text)


def _layout(help_text: str, *, hidden: bool = False) -> Any:
    return typer.Option(help=help_text, rich_help_panel=LAYOUT, hidden=hidden)


def estimate(
    plan: Annotated[
        Path | None,
        typer.Argument(help="Plan file, instead of --model, --cluster, --job and a layout."),
    ] = None,
    model: Annotated[str | None, model_option()] = None,
    cluster: Annotated[Path | None, _file("Cluster file (YAML).")] = None,
    job: Annotated[Path | None, _file("Job file (YAML).")] = None,
    nodes: Annotated[list[str] | None, nodes_option(hidden=True)] = None,
    between: Annotated[list[str] | None, between_option(hidden=True)] = None,
    batch: Annotated[int | None, batch_option(hidden=True)] = None,
    sequence: Annotated[int | None, seq_option(hidden=True)] = None,
    target: TargetName = None,
    out: Annotated[Path | None, _file("Plan file to write (JSON).")] = None,
    tp: Annotated[int, _layout("Tensor-parallel degree.")] = 1,
    pp: Annotated[int | None, _layout("Pipeline stages. Default: as --layers has.")] = None,
    dp: Annotated[
        int | None, _layout("Data-parallel degree. Default: the largest that fits.")
    ] = None,
    microbatch_size: Annotated[int, _layout("Sequences of a microbatch on one rank.")] = 1,
    layers: Annotated[
        str | None, _layout("Transformer layers of each stage, as in 8,8,10. Default: even.")
    ] = None,
    islands: Annotated[
        str | None,
        _layout(
            "Island of each stage, as in a,a,b, or one for all. Default: where they fit.",
            hidden=True,
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        _layout(
            "1f1b, gpipe, interleaved-1f1b, zb-h1, zbv, dualpipev, v-half or v-min.", hidden=True
        ),
    ] = None,
    virtual_stages: Annotated[
        int, _layout("Layer ranges of each stage, interleaved; V schedules have 2.", hidden=True)
    ] = 1,
    cp: Annotated[int, _layout("Context-parallel degree.", hidden=True)] = 1,
    ep: Annotated[int, _layout("Expert-parallel degree.", hidden=True)] = 1,
    etp: Annotated[
        int | None, _layout("Tensor-parallel degree of the experts.", hidden=True)
    ] = None,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", hidden=True, rich_help_panel=LAYOUT)
    ] = False,
    recompute: Annotated[
        bool, typer.Option("--recompute", hidden=True, rich_help_panel=LAYOUT)
    ] = False,
    recompute_layers: Annotated[
        int | None, _layout("Recompute only the first layers of each chunk.", hidden=True)
    ] = None,
    recompute_modules: Annotated[
        str | None, _layout("Recompute only these parts of a layer.", hidden=True)
    ] = None,
    sharding: Annotated[
        str | None, _layout("none, optimizer, gradients or parameters.", hidden=True)
    ] = None,
    shards: Annotated[int | None, _layout("Ranks of one sharding group.", hidden=True)] = None,
    offload: Annotated[
        float, _layout("Part of the optimizer state in host memory.", hidden=True)
    ] = 0.0,
    overlap: Annotated[
        str | None, _layout("none, or of reduction,gathering,tp,cp,send.", hidden=True)
    ] = None,
    setting: Settings = None,
    predictor: PredictorFile = None,
    store: Stores = None,
    what_if: Annotated[
        str | None,
        typer.Option(
            metavar="lost-nic=ISLAND/NODE/NIC", hidden=True, help="Price that NIC's loss too."
        ),
    ] = None,
    trace: TraceFile = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Price a layout or a plan without a search.

    As in: hetplan estimate --model M --cluster C --job J --tp 8 --layers 18,20,20,22

    Without files: --nodes, --between, --batch and --seq as in `hetplan plan`.

    Exit code 3 where a stage does not fit in memory; it is priced all the same.

    More of the layout: --islands, --schedule, --virtual-stages, --cp, --ep, --etp,
    --sequence-parallel, --recompute, --recompute-layers, --recompute-modules, --sharding,
    --shards, --offload, --overlap. Beside it: --trace FILE writes a timeline, --what-if
    lost-nic=ISLAND/NODE/NIC.
    All are explained in docs/cost.md.
    """
    from hetplan.cost.estimate import estimate_with, misfits
    from hetplan.cost.step_model.pricer import Pricer
    from hetplan.errors import InfeasibleError, InputError
    from hetplan.files.writing import check_writable
    from hetplan.plans.layout import Layout, plan_of_layout
    from hetplan.search.files import SCHEMA, load_layout, priced_result, save_result
    from hetplan.search.space.allowed import allowed_cluster
    from hetplan.whatif.within_limits import limit_use

    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        microbatch_size=microbatch_size,
        layers=_numbers(layers),
        islands=_names(islands),
        recompute=recompute,
        cp=cp,
        ep=ep,
        etp=etp,
        sequence_parallel=sequence_parallel,
        schedule=schedule,
        virtual_stages=virtual_stages,
        recompute_modules=_names(recompute_modules) or (),
        recompute_layers=recompute_layers,
        sharding=sharding,
        shards=shards,
        offload=offload,
        overlap=() if overlap == "none" else _names(overlap),
    )
    if plan is not None:
        if not plan.exists():
            raise InputError(f"{plan}: there is no such file; estimate takes a plan file")
        files = (model, cluster, job, nodes, between, batch, sequence)
        if any((*files, target, setting)) or layout != Layout():
            raise InputError(
                f"{plan} holds its own model, cluster, job and layout; leave those options out"
            )
        loaded, sealed = load_layout(plan)
        if not sealed:
            note(f"{plan} was changed after hetplan wrote it: its plan is priced, without a proof")
        inputs, usable, priced = loaded.inputs, loaded.inputs.cluster, loaded.plan
    elif model is None:
        raise InputError("give a plan file, or all of --model, --cluster and --job")
    else:
        inputs, _ = question_of(
            model,
            cluster,
            job,
            OneLine(nodes=nodes, between=between, batch=batch, sequence=sequence),
            settings=job_settings(setting),
            target=target,
            searched=False,
        )
        usable = allowed_cluster(inputs.cluster, inputs.job)
        priced = plan_of_layout(layout, inputs.model, usable, inputs.job)
    replacing = "" if out is None else check_replaceable(out, SCHEMA, "plan")
    if trace is not None:
        check_writable(trace)
    lost = None if what_if is None else _lost_nic(what_if, usable)
    predict, digest = read_predictor(predictor, store)
    pricer = Pricer(inputs.model, usable, inputs.job, predict)
    estimated = estimate_with(pricer, priced)
    use = limit_use(priced, estimated, inputs)
    faults = [f"{each.words()}; use fewer nodes there" for each in use if each.is_broken]
    if faults:
        raise InputError(*faults)
    result = priced_result(inputs, priced, estimated, digest)
    if out is not None:
        save_result(result, out)
        say(f"wrote {out}{replacing}")
    write_trace(trace, result, predict)
    if lost is not None:
        from hetplan.reports.plans import lost_nic_lines

        for line in lost_nic_lines(lost, pricer, priced):
            say(f"what if: {line}")
    show_estimate(result, verbose=verbose, as_json=as_json, predictor=predict)
    unfit = misfits(estimated)
    if unfit:
        raise InfeasibleError(unfit)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    from hetplan.errors import InputError

    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"--layers is {text!r}; write whole numbers with commas between them, as in 8,8,10"
        ) from None


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(","))


def _lost_nic(text: str, cluster: Cluster) -> LostNic:
    """The loss in `lost-nic=ISLAND/NODE/NIC` or `lost-nic=HOST/NIC`."""
    from hetplan.cluster.hosts import find_node
    from hetplan.cost.goodput.lost_nic import without_nic
    from hetplan.errors import InputError

    kind, _, place = text.partition("=")
    where, slash, nic = place.rpartition("/")
    right = slash and nic.isascii() and nic.isdecimal() and len(nic) < 10
    if kind != "lost-nic" or not right or where in [each.name for each in cluster.islands]:
        raise InputError(f"--what-if is {text!a}; write lost-nic=ISLAND/NODE/NIC, as in a/0/3")
    island, node = find_node(cluster, where)
    return without_nic(cluster, island.name, node, int(nic))


def show_estimate(
    result: SearchResult, *, verbose: bool, as_json: bool, predictor: Predictor | None = None
) -> None:
    """The ten lines of a priced plan, or its estimate as JSON."""
    if as_json:
        emit(_json(result))
    else:
        show_summary(result, verbose=verbose, predictor=predictor)


def _json(result: SearchResult) -> str:
    """The estimate, with the energy of a step and the whole run; what is infinite is null."""
    from hetplan.files.encoding import canonical, to_plain
    from hetplan.library.result import Result

    own = Result.of(result)
    data = {name: to_plain(getattr(own, name)) for name in ("estimate", "energy", "run")}
    data = json.loads(json.dumps(data), parse_constant=lambda _: None)
    return canonical({"schema": ESTIMATE_SCHEMA, **data.pop("estimate"), **data})
