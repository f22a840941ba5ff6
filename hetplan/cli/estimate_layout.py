"""Which layout the options of `hetplan estimate` mean: stages on islands, and degrees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from hetplan.cluster.spec import Cluster
from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import Degrees, StageChoice, build_plan, stages_that_fit
from hetplan.plans.check import check_plan
from hetplan.plans.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    """What the user wrote; None where nothing."""

    tp: int
    pp: int | None
    dp: int | None
    microbatch_size: int
    layers: str | None
    islands: str | None
    recompute: bool


def plan_of(options: LayoutOptions, model: ModelSpec, cluster: Cluster, job: Job) -> Plan:
    """The legal plan that the options mean; an InputError says what does not divide or fit."""
    layers, islands = _numbers(options.layers), _names(options.islands, cluster)
    stages = _stage_count(options.pp, layers, islands)
    layers = layers or _even_layers(model, stages)
    if islands is not None and len(islands) == 1:
        islands *= stages
    for given, option in ((layers, "--layers"), (islands, "--islands")):
        if given is not None and len(given) != stages:
            raise InputError(f"{option} has {len(given)} entries for {stages} pipeline stages")
    degrees, islands = _place(options, job, cluster, stages, islands)
    choices = [
        StageChoice(island=island, transformer_layers=count)
        for island, count in zip(islands, layers, strict=True)
    ]
    plan = build_plan(model, cluster, job, choices, degrees)
    faults = check_plan(plan, model, cluster, job)
    if faults:
        raise InputError(*faults)
    return plan


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
    pp: int | None, layers: tuple[int, ...] | None, islands: tuple[str, ...] | None
) -> int:
    if pp is not None and pp < 1:
        raise InputError(f"--pp is {pp}; a pipeline has at least one stage")
    if layers is not None:
        if pp not in (None, len(layers)):
            raise InputError(f"--pp is {pp}, --layers has {len(layers)} stages; leave one out")
        return len(layers)
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
    for option, value in (("--tp", options.tp), ("--microbatch-size", options.microbatch_size)):
        if value < 1:
            raise InputError(f"{option} is {value}; it must be at least 1")
    if options.dp is not None and options.dp < 1:
        raise InputError(f"--dp is {options.dp}; it must be at least 1")
    for dp in _data_degrees(options, job, cluster):
        degrees = Degrees(
            tp=options.tp,
            dp=dp,
            microbatch_size=options.microbatch_size,
            full_recompute=options.recompute,
        )
        found = islands if islands is not None else _islands_with_room(cluster, degrees, stages)
        if found is not None and (options.dp is not None or _has_room(cluster, degrees, found)):
            # With a given dp, build_plan says what is wrong with islands that were given.
            return degrees, found
    where = f"islands {', '.join(dict.fromkeys(islands))}" if islands else "the cluster"
    raise InputError(
        f"{stages} stages of tp {options.tp} x dp {options.dp or '(any)'} devices do not fit on "
        f"{where}: tp must divide the devices of a node, tp x dp divide them or be whole nodes, "
        f"and dp x microbatch size {options.microbatch_size} divide global_batch_size "
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
