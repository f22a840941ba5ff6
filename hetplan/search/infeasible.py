"""Why a job has no plan, in the user's words, and what would give it one.

First the constraint that fails (nothing divides, no room, memory), with its numbers; then every
single relaxation that was tried and found to make a plan possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate_values import MemoryUse
from hetplan.job.spec import Forbids, Job, Pins
from hetplan.model.spec import ModelSpec
from hetplan.predict.predictor import Predictor
from hetplan.search.candidates import (
    Candidate,
    allowed_cluster,
    divisors,
    enumerate_candidates,
    tensor_degrees,
)
from hetplan.search.explore import few_islands, rough
from hetplan.search.orders import OrderProgram
from hetplan.search.partition import NONE
from hetplan.search.spaces import SpaceMaker, ends
from hetplan.units import format_bytes


def reasons(model: ModelSpec, cluster: Cluster, job: Job, predictor: Predictor) -> tuple[str, ...]:
    """What cannot hold together, then what would help; at least one line."""
    allowed = allowed_cluster(cluster, job)
    candidates = enumerate_candidates(model, allowed, job)
    maker = SpaceMaker(model=model, cluster=allowed, job=job, predictor=predictor)
    why = (
        _memory(model, job, candidates, maker)
        if candidates
        else tuple(_nothing_divides(model, allowed, job))
    )
    helps = [
        f"{words} would make it possible"
        for words, other in relaxations(job)
        if feasible(model, cluster, other, predictor)
    ]
    if not helps:
        helps = ["no single change of a pin, a forbid or the memory reserve makes it possible"]
    return (*why, *helps)


def feasible(model: ModelSpec, cluster: Cluster, job: Job, predictor: Predictor) -> bool:
    """Whether any plan fits, shown by finding slots and layers for one."""
    allowed = allowed_cluster(cluster, job)
    maker = SpaceMaker(model=model, cluster=allowed, job=job, predictor=predictor)
    for candidate in enumerate_candidates(model, allowed, job):
        if rough(maker.outline(candidate)).bound_seconds == float("inf"):
            continue
        space = maker.space(candidate)
        # Too many islands for the program: then nothing is claimed.
        if few_islands(space) and OrderProgram(space).least(NONE) < NONE:
            return True
    return False


def relaxations(job: Job) -> Iterator[tuple[str, Job]]:
    """Jobs that ask for one thing less, and what that is in words."""
    for name in Pins.__dataclass_fields__:
        value = getattr(job.pin, name)
        if value is not None:
            shown = str(value).lower() if isinstance(value, bool) else value
            pin = replace(job.pin, **{name: None})
            yield f"leaving out pin {name}: {shown}", replace(job, pin=pin)
    if job.forbid != Forbids():
        yield "allowing the forbidden islands and nodes", replace(job, forbid=Forbids())
    if job.memory_reserve_fraction > 0:
        yield (
            f"memory_reserve_fraction 0 instead of {job.memory_reserve_fraction:g}",
            replace(job, memory_reserve_fraction=0.0),
        )
    if job.global_batch_size > 1:
        for size in (job.global_batch_size + 1, job.global_batch_size // 2):
            yield f"global_batch_size {size}", replace(job, global_batch_size=size)


def _nothing_divides(model: ModelSpec, cluster: Cluster, job: Job) -> Iterator[str]:
    pin = job.pin
    usable = [island for island in cluster.islands if island.usable_nodes]
    if not usable:
        yield "devices: every node of the cluster is out or forbidden"
        return
    degrees = tensor_degrees(model, cluster)
    if pin.tp is not None and pin.tp not in degrees:
        yield (
            f"tp: {pin.tp} is pinned; heads, MLP and nodes allow "
            f"{', '.join(str(tp) for tp in degrees) or 'none'}"
        )
    batch = job.global_batch_size
    fixed = (pin.dp or 1) * (pin.microbatch_size or 1)
    if batch % fixed:
        named = " x ".join(
            f"{name} {value}"
            for name, value in (("dp", pin.dp), ("microbatch_size", pin.microbatch_size))
            if value is not None
        )
        yield (
            f"batch: global_batch_size {batch} is not a multiple of the pinned {named}; its "
            f"divisors are {', '.join(map(str, divisors(batch)))}"
        )
        return
    rooms = ", ".join(
        f"{island.name} {len(island.usable_nodes)} nodes of {island.devices_per_node}"
        for island in usable
    )
    yield (
        f"devices: no stages of tp x dp devices fill the nodes"
        f"{f' for pp {pin.pp}' if pin.pp else ''}: tp "
        f"{pin.tp or '/'.join(map(str, degrees)) or 'none'}, dp {pin.dp or 'a divisor'}"
        f" of the batch of {batch}; tp x dp must divide a node or be whole nodes; usable: {rooms}"
    )


def _memory(
    model: ModelSpec, job: Job, candidates: tuple[Candidate, ...], maker: SpaceMaker
) -> tuple[str, ...]:
    """Where the layers fit best, and why that is not enough."""
    fits = [(_room(maker, candidate), candidate) for candidate in candidates]
    room, candidate = max(fits, key=lambda pair: pair[0])
    degrees = candidate.degrees
    named = (
        f"tp {degrees.tp}, dp {degrees.dp}, microbatch size {degrees.microbatch_size}, "
        f"{'full' if degrees.full_recompute else 'no'} recompute"
    )
    if room >= model.num_layers:
        pins = ", ".join(
            f"{name} {value}"
            for name in Pins.__dataclass_fields__
            if (value := getattr(job.pin, name)) is not None
        )
        return (
            f"memory: the layers of {model.name} fit one by one, but no row of stages holds them "
            f"with the embedding, the head and the microbatches in flight at every position"
            f"{f' under the pins {pins}' if pins else ''} (closest: {named})",
        )
    lines = []
    for island, stages in zip(candidate.islands, candidate.max_stages, strict=True):
        cost = maker.costs(island, degrees)
        use = cost.memory(1, False, False, 1)
        most = max(cost.max_transformer_layers(*ends(role), 1) for role in range(4))
        lines.append(
            f"memory: one transformer layer of {model.name} needs {format_bytes(_states(use))} of "
            f"states and {format_bytes(use.activation_bytes + use.temporary_bytes)} of activations "
            f"and buffers per device at {named}; a device of {island.name} offers "
            f"{format_bytes(use.available_bytes)}: {most} layers a stage, {stages} stages"
        )
    lines.append(
        f"memory: together at most {room} of {model.num_layers} transformer layers fit "
        "(the most of all degrees that divide)"
    )
    return tuple(lines)


def _room(maker: SpaceMaker, candidate: Candidate) -> int:
    outline = maker.outline(candidate)
    return int((outline.most_layers[:, :, 1].max(axis=0) * outline.max_stages).sum())


def _states(use: MemoryUse) -> float:
    return use.parameter_bytes + use.gradient_bytes + use.optimizer_bytes
