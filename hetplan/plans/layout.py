"""A layout that the user already has, as a plan: degrees, layers per stage, islands, schedule.

One pipeline whose stages all have the same degrees; plan files can hold more. The stages of an
island take its usable devices in order, tp x cp x dp each: tensor-parallel ranks next to each
other, then context-parallel ones. With virtual stages `layers` goes through the pipeline once per
virtual stage: v times as many numbers as stages; a V schedule comes back up, last stage first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetplan.cluster.spec import Cluster
from hetplan.errors import Fault, InputError
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.assemble import stages_with_room
from hetplan.plans.build import overlap_of, plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import (
    SCHEDULES,
    OverlapSettings,
    Plan,
    Recompute,
    RecomputeGranularity,
    RecomputeModule,
    Schedule,
    Sharding,
)
from hetplan.plans.rules import experts_of
from hetplan.plans.targets import target
from hetplan.plans.v_schedules import is_v, looped

OVERLAPS = (
    ("reduction", "reduction"),
    ("gathering", "gathering"),
    ("tp", "tensor_parallel"),
    ("cp", "context_parallel"),
    ("send", "send"),
    ("ep", "expert_parallel"),
)
"""Names that `Layout.overlap` has, and fields of `OverlapSettings`."""

_STAGE = re.compile(r"(?<=\.stages)\[\d+\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees and settings of every stage; None: as the other fields, or the target, have it."""

    tp: int = 1
    pp: int | None = None
    """Pipeline stages; None: as many as `layers`, or `islands`, has."""
    dp: int | None = None
    """None: the largest that fits."""
    microbatch_size: int = 1
    layers: tuple[int, ...] | None = None
    """Transformer layers of each stage; None: even."""
    islands: tuple[str, ...] | None = None
    """Island of each stage, or one for all; None: one with room for all stages, or all in file
    order."""
    recompute: bool = False
    """Recompute whole transformer layers."""
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    """Tensor-parallel degree of the experts; None: tp, where ep is 1."""
    sequence_parallel: bool = False
    schedule: str | None = None
    """None: 1f1b, with virtual stages interleaved-1f1b."""
    virtual_stages: int = 1
    """V schedules: 2, which 1 stands for."""
    recompute_modules: tuple[str, ...] = ()
    """Parts of a layer that are recomputed (`RecomputeModule` values), without `recompute`."""
    recompute_layers: int | None = None
    """Layers of each chunk that `recompute` is of; None: all."""
    sharding: str | None = None
    """A `Sharding` value; None: `optimizer` where the target does that by itself."""
    shards: int | None = None
    """Ranks of one sharding group; None: all copies."""
    offload: float = 0.0
    """Part of the optimizer state in host memory."""
    overlap: tuple[str, ...] | None = None
    """Names of OVERLAPS that run beside compute; None: what the job's trainer does."""


def plan_of_layout(layout: Layout, model: ModelSpec, cluster: Cluster, job: Job) -> Plan:
    """The legal plan of this layout; an InputError names what does not divide or fit."""
    _check_counts(layout)
    if is_v(layout.schedule or "") and layout.virtual_stages == 1:
        layout = replace(layout, virtual_stages=2)
    virtual, stages = layout.virtual_stages, _stage_count(layout)
    layers = layout.layers or _even_layers(model, stages, virtual)
    if (held := sum(layers)) != model.num_layers:
        message = (
            f"the stages hold {held} transformer layers, {model.name} has {model.num_layers}; the "
            "numbers must add up to that"
        )
        raise _wrong("layers", message)
    islands = layout.islands
    if islands is not None:
        islands = tuple(cluster.island(name).name for name in islands)
        islands *= stages if len(islands) == 1 else 1
        if len(islands) != stages:
            message = f"{len(islands)} entries for {stages} pipeline stages"
            raise _wrong("islands", message)
    dp, islands = _place(layout, job, cluster, stages, islands)
    pipeline = _pipeline(layout, model, job, layers, islands, dp)
    plan = plan_of(model, cluster, job, ChosenPlan(pipelines=(pipeline,)))
    recompute = _recompute(layout)
    sharding, shards = _sharding(layout, job, dp * layout.cp)
    (placed,) = plan.pipelines
    placed_stages = tuple(replace(stage, recompute=recompute) for stage in placed.stages)
    shapes = [part.shape for stage in pipeline.stages for part in stage.parts]
    plan = replace(
        plan,
        pipelines=(replace(placed, stages=placed_stages),),
        sharding=sharding,
        optimizer_shards=shards,
        optimizer_offload=layout.offload,
        overlap=(
            overlap_of(job, shapes, sharding)
            if layout.overlap is None
            else _overlap(layout.overlap)
        ),
    )
    faults = check_plan(plan, model, cluster, job)
    if faults:
        raise InputError(*_once(faults, stages))
    return plan


def _once(faults: tuple[Fault, ...], stages: int) -> Iterator[Fault]:
    """A fault of all stages in one line: a layout has one value for every stage."""
    alike: dict[tuple[str, str], list[Fault]] = {}
    for fault in faults:
        alike.setdefault((_STAGE.sub("[*]", fault.field), fault.message), []).append(fault)
    for (field, _), same in alike.items():
        whole = 1 < len(same) == stages
        yield replace(same[0], field=f"{field} (all {stages})") if whole else same[0]
        yield from () if whole else same[1:]


def _check_counts(layout: Layout) -> None:
    for name in (
        "tp", "cp", "ep", "etp", "pp", "dp", "microbatch_size", "virtual_stages", "shards",
        "recompute_layers",
    ):  # fmt: skip
        value = getattr(layout, name)
        if value is not None and value < 1:
            raise _wrong(name, f"{value}; it must be at least 1")


def _wrong(field: str, message: str) -> InputError:
    return InputError(Fault(field=field, message=message))


def _pipeline(
    layout: Layout,
    model: ModelSpec,
    job: Job,
    layers: tuple[int, ...],
    islands: tuple[str, ...],
    dp: int,
) -> ChosenPipeline:
    stages, virtual = len(islands), layout.virtual_stages
    samples = dp * layout.microbatch_size
    if job.global_batch_size % samples:
        message = (
            f"global_batch_size {job.global_batch_size} is not a multiple of microbatch size "
            f"{layout.microbatch_size} x dp {dp} = {samples}"
        )
        raise _wrong("microbatch_size" if layout.dp is None else "dp", message)
    num_microbatches = job.global_batch_size // samples
    name = layout.schedule or ("interleaved-1f1b" if virtual > 1 else "1f1b")
    if name not in SCHEDULES:
        raise _wrong("schedule", f"{name!a}; it is one of {', '.join(SCHEDULES)}")
    etp = layout.etp
    if etp is None:
        # Without expert parallelism experts are cut like the other weights.
        experts = experts_of(model, 0, len(model.layers))
        etp = layout.tp if experts and layout.ep == 1 else 1
    rows = looped(layers, name, stages)
    shape = Shape(
        tp=layout.tp,
        cp=layout.cp,
        dp=dp,
        microbatch_size=layout.microbatch_size,
        ep=layout.ep,
        etp=etp,
        sequence_parallel=layout.sequence_parallel,
    )
    return ChosenPipeline(
        stages=tuple(
            ChosenStage(
                parts=(Part(island=island, shape=shape),),
                layers=rows[s],
                warmup_depth=own_depth(name, s, stages, num_microbatches, virtual),
            )
            for s, island in enumerate(islands)
        ),
        num_microbatches=num_microbatches,
        schedule=Schedule(name=name, virtual_stages=virtual),
    )


def _recompute(layout: Layout) -> Recompute:
    if layout.recompute_layers is not None and not layout.recompute:
        raise _wrong("recompute_layers", "goes with recompute, of whole layers")
    if layout.recompute_modules:
        if layout.recompute:
            message = "recompute is of whole layers, recompute_modules of parts: give one"
            raise _wrong("recompute_modules", message)
        for name in layout.recompute_modules:
            if name not in tuple(RecomputeModule):
                known = ", ".join(RecomputeModule)
                raise _wrong("recompute_modules", f"{name!a}; known: {known}")
        return Recompute(
            granularity=RecomputeGranularity.SELECTIVE,
            modules=tuple(
                RecomputeModule(name) for name in dict.fromkeys(layout.recompute_modules)
            ),
        )
    if not layout.recompute:
        return Recompute()
    return Recompute(granularity=RecomputeGranularity.FULL, layers=layout.recompute_layers)


def _sharding(layout: Layout, job: Job, copies: int) -> tuple[Sharding, int]:
    """Level and ranks: as given, or what the target does by itself."""
    levels = ", ".join(Sharding)
    if layout.sharding is not None and layout.sharding not in tuple(Sharding):
        raise _wrong("sharding", f"{layout.sharding!a}; it is one of {levels}")
    level = None if layout.sharding is None else Sharding(layout.sharding)
    if level is None:
        trainer = target(job.target)
        own = trainer.optimizer_sharding and Sharding.OPTIMIZER in trainer.shardings(job.optimizer)
        level = Sharding.OPTIMIZER if own and layout.shards != 1 else Sharding.NONE
    if level is Sharding.NONE:
        if layout.shards not in (None, 1):
            raise _wrong("shards", f"{layout.shards}, and sharding none shares nothing")
        return level, 1
    shards = layout.shards or copies
    return (Sharding.NONE, 1) if shards == 1 else (level, shards)


def _overlap(names: tuple[str, ...]) -> OverlapSettings:
    known = dict(OVERLAPS)
    for name in names:
        if name not in known:
            raise _wrong("overlap", f"{name!a}; it is none, or of {', '.join(known)}")
    return OverlapSettings(**{field: name in names for name, field in OVERLAPS})


def _stage_count(layout: Layout) -> int:
    if layout.layers is None:
        return layout.pp or (len(layout.islands) if layout.islands else 1)
    virtual = layout.virtual_stages
    stages, rest = divmod(len(layout.layers), virtual)
    if rest or not stages:
        count = len(layout.layers)
        message = f"{count} entries for {virtual} virtual stages; give that many for each stage"
        raise _wrong("layers", message)
    if layout.pp not in (None, stages):
        share = f" ({virtual} numbers for each)" if virtual > 1 else ""
        raise _wrong("pp", f"{layout.pp}, but layers has {stages} stages{share}; leave one out")
    return stages


def _even_layers(model: ModelSpec, stages: int, virtual: int) -> tuple[int, ...]:
    """As equal as they can be, the first chunks with one more where they do not divide."""
    count = stages * virtual
    if count > model.num_layers:
        chunks = f" of {virtual} chunks" if virtual > 1 else ""
        each = "chunk" if virtual > 1 else "stage"
        message = (
            f"{stages} pipeline stages{chunks} for {model.num_layers} transformer layers of "
            f"{model.name}; every {each} needs at least one, so use at most "
            f"{model.num_layers // virtual} stages"
        )
        raise _wrong("pp", message)
    layers, more = divmod(model.num_layers, count)
    return tuple(layers + (chunk < more) for chunk in range(count))


def _place(
    layout: Layout,
    job: Job,
    cluster: Cluster,
    stages: int,
    islands: tuple[str, ...] | None,
) -> tuple[int, tuple[str, ...]]:
    """Data-parallel degree, and the island of every stage: as given, or where they have room."""
    for dp in _data_degrees(layout, job, cluster):
        size = layout.tp * layout.cp * dp
        room = {x.name: stages_with_room(x, layout.tp, size) for x in cluster.islands}
        row = islands or _islands_with_room(room, stages)
        fits = row is not None and all(room[name] >= row.count(name) for name in row)
        if row is not None and (fits or layout.dp is not None):
            # With a given dp, `plan_of` says what is wrong with islands that were given.
            return dp, row
    nodes = {each.devices_per_node for each in cluster.islands}
    if all(per_node % layout.tp for per_node in nodes):
        have = " or ".join(map(str, sorted(nodes)))
        message = f"{layout.tp}; tp must divide the devices of a node, and nodes have {have}"
        raise _wrong("tp", message)
    cp = f" x cp {layout.cp}" if layout.cp > 1 else ""
    where = f"islands {', '.join(dict.fromkeys(islands))}" if islands else "the cluster"
    what = "1 stage" if stages == 1 else f"{stages} stages"
    raise InputError(
        f"{what} of tp {layout.tp}{cp} x dp {layout.dp or '(any)'} devices "
        f"{'does' if stages == 1 else 'do'} not fit on {where}: tp must divide the devices of a "
        f"node, tp{cp} x dp divide them or be whole nodes, and dp x microbatch size "
        f"{layout.microbatch_size} divide global_batch_size {job.global_batch_size}"
    )


def _data_degrees(layout: Layout, job: Job, cluster: Cluster) -> Iterator[int]:
    """The dp that was given, or every one that divides, largest first."""
    if layout.dp is not None:
        yield layout.dp
        return
    for dp in range(min(cluster.num_devices, job.global_batch_size), 0, -1):
        if job.global_batch_size % (dp * layout.microbatch_size) == 0:
            yield dp


def _islands_with_room(room: dict[str, int], stages: int) -> tuple[str, ...] | None:
    """One island for all stages, or the islands in file order, each filled before the next."""
    for name, count in room.items():
        if count >= stages:
            return (name,) * stages
    row = [name for name, count in room.items() for _ in range(count)]
    return tuple(row[:stages]) if len(row) >= stages else None
