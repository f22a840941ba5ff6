"""Which layout the options of `hetplan estimate` mean: stages on islands, degrees, schedule.

One pipeline whose stages all have the same degrees; plan files say more. The stages of an island
take its usable devices in order, tp x cp x dp each, tensor-parallel ranks next to each other, then
context-parallel ones. With virtual stages `--layers` goes through the pipeline once per virtual
stage: v times as many numbers as stages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from hetplan.cluster.spec import Cluster
from hetplan.errors import Fault, InputError
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.assemble import assemble_pipeline, assemble_plan
from hetplan.plans.build import Degrees, stages_that_fit
from hetplan.plans.check import check_plan
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import (
    SCHEDULES,
    LayerRange,
    OverlapSettings,
    Plan,
    Recompute,
    RecomputeGranularity,
    RecomputeModule,
    Replica,
    Schedule,
    Sharding,
    Stage,
    compress,
)
from hetplan.plans.rules import experts_of
from hetplan.plans.targets import target

OVERLAPS = (
    ("reduction", "reduction"),
    ("gathering", "gathering"),
    ("tp", "tensor_parallel"),
    ("cp", "context_parallel"),
    ("send", "send"),
)
"""Words of `--overlap` and fields of `OverlapSettings`."""

_STAGE = re.compile(r"(?<=\.stages)\[\d+\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    """What the user wrote; None, or the default, where nothing."""

    tp: int
    pp: int | None
    dp: int | None
    microbatch_size: int
    layers: str | None
    islands: str | None
    recompute: bool
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    sequence_parallel: bool = False
    schedule: str | None = None
    virtual_stages: int = 1
    recompute_modules: str | None = None
    recompute_layers: int | None = None
    sharding: str | None = None
    shards: int | None = None
    offload: float = 0.0
    overlap: str | None = None


def plan_of(options: LayoutOptions, model: ModelSpec, cluster: Cluster, job: Job) -> Plan:
    """The legal plan that the options mean; an InputError says what does not divide or fit."""
    layers, islands = _numbers(options.layers), _names(options.islands, cluster)
    _check_counts(options)
    virtual = options.virtual_stages
    if layers is not None and len(layers) % virtual:
        raise InputError(
            f"--layers has {len(layers)} entries for {virtual} virtual stages; give that many for "
            "each stage"
        )
    stages = _stage_count(options.pp, layers, islands, virtual)
    layers = layers or _even_layers(model, stages * virtual)
    _check_layers(layers, stages, virtual, model)
    if islands is not None and len(islands) == 1:
        islands *= stages
    if islands is not None and len(islands) != stages:
        raise InputError(f"--islands has {len(islands)} entries for {stages} pipeline stages")
    degrees, islands = _place(options, job, cluster, stages, islands)
    plan = _built(options, model, cluster, job, layers, islands, degrees)
    faults = check_plan(plan, model, cluster, job)
    if faults:
        raise InputError(*_once(faults, stages))
    return plan


def _once(faults: tuple[Fault, ...], stages: int) -> Iterator[Fault]:
    """What is wrong with all stages alike in one line: options mean every stage."""
    alike: dict[tuple[str, str], list[Fault]] = {}
    for fault in faults:
        alike.setdefault((_STAGE.sub("[*]", fault.field), fault.message), []).append(fault)
    for (field, _), same in alike.items():
        whole = 1 < len(same) == stages
        yield replace(same[0], field=f"{field} (all {stages})") if whole else same[0]
        yield from () if whole else same[1:]


def _check_counts(options: LayoutOptions) -> None:
    for option, value in (
        ("--tp", options.tp),
        ("--cp", options.cp),
        ("--ep", options.ep),
        ("--etp", options.etp or 1),
        ("--microbatch-size", options.microbatch_size),
        ("--virtual-stages", options.virtual_stages),
        ("--dp", 1 if options.dp is None else options.dp),
        ("--shards", 1 if options.shards is None else options.shards),
        ("--recompute-layers", 1 if options.recompute_layers is None else options.recompute_layers),
    ):
        if value < 1:
            raise InputError(f"{option} is {value}; it must be at least 1")


def _check_layers(layers: tuple[int, ...], stages: int, virtual: int, model: ModelSpec) -> None:
    if len(layers) != stages * virtual:
        raise InputError(f"--layers has {len(layers)} entries for {stages} pipeline stages")
    if len(layers) > model.num_layers:
        raise InputError(
            f"{len(layers)} pipeline stages for {model.num_layers} transformer layers of "
            f"{model.name}; every stage needs at least one, so use at most {model.num_layers}"
        )
    if min(layers) < 1:
        raise InputError(f"stage {layers.index(min(layers))} has no transformer layer; give it one")
    if sum(layers) != model.num_layers:
        raise InputError(
            f"the stages hold {sum(layers)} transformer layers, {model.name} has "
            f"{model.num_layers}; the numbers must add up to that"
        )


def _built(
    options: LayoutOptions,
    model: ModelSpec,
    cluster: Cluster,
    job: Job,
    layers: tuple[int, ...],
    islands: tuple[str, ...],
    degrees: Degrees,
) -> Plan:
    """The plan of one pipeline with these stages."""
    stages, virtual = len(islands), options.virtual_stages
    dp = degrees.dp // options.cp
    samples = dp * options.microbatch_size
    if job.global_batch_size % samples:
        raise InputError(
            f"global_batch_size {job.global_batch_size} is not a multiple of microbatch size "
            f"{options.microbatch_size} x dp {dp} = {samples}"
        )
    num_microbatches = job.global_batch_size // samples
    name = options.schedule or ("interleaved-1f1b" if virtual > 1 else "1f1b")
    if name not in SCHEDULES:
        raise InputError(f"--schedule is {name}; it is one of {', '.join(SCHEDULES)}")
    chunks = _chunks(layers, model)
    devices = _devices(cluster, islands, degrees)
    etp = options.tp if options.etp is None and options.ep == 1 else options.etp or 1
    if not experts_of(model, 0, len(model.layers)):
        etp = options.etp or 1
    recompute = _recompute(options)
    pipeline = assemble_pipeline(
        cluster,
        job,
        [
            Stage(
                chunks=tuple(chunks[s + k * stages] for k in range(virtual)),
                replicas=(
                    Replica(
                        devices=compress(devices[s]),
                        tp=options.tp,
                        cp=options.cp,
                        ep=options.ep,
                        etp=etp,
                        microbatch_size=options.microbatch_size,
                        sequence_parallel=options.sequence_parallel,
                    ),
                ),
                recompute=recompute,
                warmup_depth=own_depth(name, s, stages, num_microbatches, virtual),
            )
            for s in range(stages)
        ],
        num_microbatches=num_microbatches,
        schedule=Schedule(name=name, virtual_stages=virtual),
    )
    sharding, shards = _sharding(options, job, degrees.dp)
    return assemble_plan(
        model,
        cluster,
        job,
        (pipeline,),
        sharding=sharding,
        optimizer_shards=shards,
        optimizer_offload=options.offload,
        overlap=_overlap(options.overlap),
    )


def _chunks(layers: tuple[int, ...], model: ModelSpec) -> list[LayerRange]:
    """Layer range of every virtual stage; embedding first, what follows the layers last."""
    total, at, found = len(model.layers), 0, []
    for index, count in enumerate(layers):
        stop = at + count + (index == 0)
        stop = total if index == len(layers) - 1 else stop
        found.append(LayerRange(start=at, stop=stop))
        at = stop
    return found


def _recompute(options: LayoutOptions) -> Recompute:
    if options.recompute_layers is not None and not options.recompute:
        raise InputError("--recompute-layers goes with --recompute, of whole layers")
    if options.recompute_modules is not None:
        if options.recompute:
            raise InputError("--recompute is of whole layers, --recompute-modules of parts: one")
        known = ", ".join(RecomputeModule)
        names = [name.strip() for name in options.recompute_modules.split(",")]
        for name in names:
            if name not in tuple(RecomputeModule):
                raise InputError(f"--recompute-modules has {name!a}; it is of {known}")
        return Recompute(
            granularity=RecomputeGranularity.SELECTIVE,
            modules=tuple(RecomputeModule(name) for name in dict.fromkeys(names)),
        )
    if not options.recompute:
        return Recompute()
    return Recompute(granularity=RecomputeGranularity.FULL, layers=options.recompute_layers)


def _sharding(options: LayoutOptions, job: Job, copies: int) -> tuple[Sharding, int]:
    """Level and ranks: as asked, or what the target does by itself."""
    levels = ", ".join(Sharding)
    if options.sharding is not None and options.sharding not in tuple(Sharding):
        raise InputError(f"--sharding is {options.sharding!a}; it is one of {levels}")
    level = None if options.sharding is None else Sharding(options.sharding)
    if level is None:
        trainer = target(job.target)
        own = trainer.optimizer_sharding and Sharding.OPTIMIZER in trainer.shardings(job.optimizer)
        level = Sharding.OPTIMIZER if own and options.shards != 1 else Sharding.NONE
    if level is Sharding.NONE:
        if options.shards not in (None, 1):
            raise InputError(f"--shards is {options.shards}, and --sharding none shares nothing")
        return level, 1
    shards = options.shards or copies
    return (Sharding.NONE, 1) if shards == 1 else (level, shards)


def _overlap(text: str | None) -> OverlapSettings:
    if text is None:
        return OverlapSettings()
    words = [] if text.strip() == "none" else [word.strip() for word in text.split(",")]
    known = dict(OVERLAPS)
    for word in words:
        if word not in known:
            raise InputError(f"--overlap has {word!a}; it is none, or of {', '.join(known)}")
    asked = {field: word in words for word, field in OVERLAPS}
    return OverlapSettings(**asked)


def _devices(cluster: Cluster, islands: tuple[str, ...], degrees: Degrees) -> list[tuple[int, ...]]:
    """Device numbers of every stage, in (dp, cp, tp) order."""
    size = degrees.tp * degrees.dp
    found: list[tuple[int, ...]] = []
    for name, run in groupby(islands):
        island, count = cluster.island(name), len(list(run))
        if any(name == other for other in islands[: len(found)]):
            raise InputError(
                f"the stages of island {name} are not next to each other in the pipeline"
            )
        if stages_that_fit(island, degrees) < count:
            raise InputError(
                f"island {name} ({len(island.usable_nodes)} usable nodes of "
                f"{island.devices_per_node} devices) has no room for {count} stages of tp x cp x "
                f"dp = {size} devices; tp must divide a node, and tp x cp x dp a node or be whole "
                "nodes"
            )
        first = cluster.first_device(name)
        usable = [
            first + node * island.devices_per_node + local
            for node in island.usable_nodes
            for local in range(island.devices_per_node)
        ]
        found += [tuple(usable[at * size : (at + 1) * size]) for at in range(count)]
    return found


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"--layers is {text!r}; write whole numbers with commas between them, as in 8,8,10"
        ) from None


def _names(text: str | None, cluster: Cluster) -> tuple[str, ...] | None:
    if text is None:
        return None
    return tuple(cluster.island(name.strip()).name for name in text.split(","))


def _stage_count(
    pp: int | None,
    layers: tuple[int, ...] | None,
    islands: tuple[str, ...] | None,
    virtual: int,
) -> int:
    if pp is not None and pp < 1:
        raise InputError(f"--pp is {pp}; a pipeline has at least one stage")
    if layers is not None:
        stages = len(layers) // virtual
        if pp not in (None, stages):
            each = f" ({virtual} numbers for each)" if virtual > 1 else ""
            raise InputError(f"--pp is {pp}, --layers has {stages} stages{each}; leave one out")
        return stages
    return pp or (len(islands) if islands else 1)


def _even_layers(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """As equal as they can be, the first stages with one more where they do not divide."""
    each, more = divmod(model.num_layers, stages)
    return tuple(each + (stage < more) for stage in range(stages))


def _place(
    options: LayoutOptions,
    job: Job,
    cluster: Cluster,
    stages: int,
    islands: tuple[str, ...] | None,
) -> tuple[Degrees, tuple[str, ...]]:
    """Degrees, and the island of every stage: as given, or where they have room."""
    for dp in _data_degrees(options, job, cluster):
        degrees = Degrees(
            tp=options.tp,
            # Context-parallel ranks lie like data-parallel ones.
            dp=dp * options.cp,
            microbatch_size=options.microbatch_size,
        )
        found = islands if islands is not None else _islands_with_room(cluster, degrees, stages)
        if found is not None and (options.dp is not None or _has_room(cluster, degrees, found)):
            # With a given dp, `_devices` says what is wrong with islands that were given.
            return degrees, found
    cp = f" x cp {options.cp}" if options.cp > 1 else ""
    where = f"islands {', '.join(dict.fromkeys(islands))}" if islands else "the cluster"
    raise InputError(
        f"{stages} stages of tp {options.tp}{cp} x dp {options.dp or '(any)'} devices do not fit "
        f"on {where}: tp must divide the devices of a node, tp{cp} x dp divide them or be whole "
        f"nodes, and dp x microbatch size {options.microbatch_size} divide global_batch_size "
        f"{job.global_batch_size}"
    )


def _data_degrees(options: LayoutOptions, job: Job, cluster: Cluster) -> Iterator[int]:
    """The dp that was given, or every one that divides, largest first."""
    if options.dp is not None:
        yield options.dp
        return
    for dp in range(min(cluster.num_devices, job.global_batch_size), 0, -1):
        if job.global_batch_size % (dp * options.microbatch_size) == 0:
            yield dp


def _islands_with_room(cluster: Cluster, degrees: Degrees, stages: int) -> tuple[str, ...] | None:
    """One island for all stages, or the islands in file order, each filled before the next."""
    room = {island.name: stages_that_fit(island, degrees) for island in cluster.islands}
    for name, count in room.items():
        if count >= stages:
            return (name,) * stages
    row = [name for name, count in room.items() for _ in range(count)]
    return tuple(row[:stages]) if len(row) >= stages else None


def _has_room(cluster: Cluster, degrees: Degrees, islands: tuple[str, ...]) -> bool:
    return all(
        len(list(run)) <= stages_that_fit(cluster.island(name), degrees)
        for name, run in groupby(islands)
    )
