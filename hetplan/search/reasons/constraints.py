"""What a job and its cluster demand, one by one, each of which can be taken away.

Taken away means as if it had never been asked: a pin is free, memory is without end, nodes are
plenty. That is how a conflict is found (`hetplan.search.reasons.conflict`), not what a user would
do about it (`hetplan.search.reasons.relaxations`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from hetplan.cluster.spec import MAX_DEVICES, Cluster, Island
from hetplan.job.spec import Job, Pins
from hetplan.model.spec import ModelSpec
from hetplan.units import format_bytes

ENDLESS_BYTES = 1e18
"""Memory of a device where memory is no constraint; far above any model, far below overflow."""

_PLENTY = 256
"""Times as many nodes where the number of devices is no constraint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a search is asked."""

    model: ModelSpec
    cluster: Cluster
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """One demand, in the user's words, and the question without it."""

    words: str
    without: Callable[[Question], Question]


def constraints(asked: Question) -> tuple[Constraint, ...]:
    """Everything that could stand in the way; what is easiest to give up comes first.

    A conflict keeps what comes late, so that what the user cannot change is named only where it
    must be.
    """
    return (
        *_pins(asked.job),
        *_forbids(asked.job),
        *_reserve(asked.job),
        *_target(asked.job),
        *_batch(asked.job),
        *_nodes_out(asked.cluster),
        *_devices(asked.cluster),
        *_memory(asked.cluster),
    )


def _pins(job: Job) -> Iterator[Constraint]:
    for name in Pins.__dataclass_fields__:
        value = getattr(job.pin, name)
        if value is not None:
            shown = str(value).lower() if isinstance(value, bool) else value
            yield Constraint(words=f"pin {name}: {shown}", without=_WithoutPin(name))


@dataclass(frozen=True, slots=True)
class _WithoutPin:
    name: str

    def __call__(self, asked: Question) -> Question:
        pin = replace(asked.job.pin, **{self.name: None})
        return replace(asked, job=replace(asked.job, pin=pin))


def _forbids(job: Job) -> Iterator[Constraint]:
    if job.forbid.islands:
        yield Constraint(
            words=f"forbid islands: {', '.join(job.forbid.islands)}",
            without=lambda asked: replace(
                asked, job=replace(asked.job, forbid=replace(asked.job.forbid, islands=()))
            ),
        )
    if job.forbid.nodes:
        yield Constraint(
            words=f"forbid nodes: {_few(job.forbid.nodes)}",
            without=lambda asked: replace(
                asked, job=replace(asked.job, forbid=replace(asked.job.forbid, nodes=()))
            ),
        )


def _few(names: tuple[str, ...], most: int = 4) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _reserve(job: Job) -> Iterator[Constraint]:
    if job.memory_reserve_fraction > 0:
        yield Constraint(
            words=f"memory_reserve_fraction: {job.memory_reserve_fraction:g}",
            without=lambda asked: replace(asked, job=replace(asked.job, memory_reserve_fraction=0)),
        )


def _target(job: Job) -> Iterator[Constraint]:
    if job.target != "any":
        yield Constraint(
            words=f"target: {job.target}",
            without=lambda asked: replace(asked, job=replace(asked.job, target="any")),
        )


def _batch(job: Job) -> Iterator[Constraint]:
    yield Constraint(
        words=f"global_batch_size: {job.global_batch_size}",
        without=lambda asked: replace(
            asked, job=replace(asked.job, global_batch_size=_free_batch(asked.job))
        ),
    )


def _free_batch(job: Job) -> int:
    """A batch near the job's that every pinned degree, and many others, divide."""
    pin = job.pin
    fixed = (pin.dp or 1) * (pin.microbatch_size or 1) * (pin.pp or 1)
    unit = math.lcm(fixed, 2 ** max(0, job.global_batch_size.bit_length() - 1))
    return unit * max(1, -(-job.global_batch_size // unit))


def _nodes_out(cluster: Cluster) -> Iterator[Constraint]:
    for island in cluster.islands:
        if island.nodes_out:
            yield Constraint(
                words=f"nodes_out of {island.name}: {len(island.nodes_out)} of {island.nodes}",
                without=_OnIslands(_none_out, (island.name,)),
            )


def _devices(cluster: Cluster) -> Iterator[Constraint]:
    usable = [island for island in cluster.islands if island.usable_nodes]
    shown = " + ".join(f"{island.num_usable_devices} of {island.name}" for island in usable)
    times = min(_PLENTY, MAX_DEVICES // max(1, cluster.num_devices))
    yield Constraint(
        words=f"devices: {shown or 'none are usable'}",
        without=_OnIslands(
            partial(_plenty, times=times), tuple(island.name for island in cluster.islands)
        ),
    )


def _memory(cluster: Cluster) -> Iterator[Constraint]:
    kinds = dict.fromkeys(island.device.kind for island in cluster.islands)
    for kind in kinds:
        mine = [island for island in cluster.islands if island.device.kind == kind]
        sizes = "/".join(dict.fromkeys(format_bytes(island.memory_bytes) for island in mine))
        yield Constraint(
            words=f"memory of {kind}: {sizes} per device",
            without=_OnIslands(_endless, tuple(island.name for island in mine)),
        )


@dataclass(frozen=True, slots=True)
class _OnIslands:
    change: Callable[[Island], Island]
    names: tuple[str, ...]

    def __call__(self, asked: Question) -> Question:
        islands = tuple(
            self.change(island) if island.name in self.names else island
            for island in asked.cluster.islands
        )
        return replace(asked, cluster=replace(asked.cluster, islands=islands))


def _none_out(island: Island) -> Island:
    return replace(island, nodes_out=())


def _plenty(island: Island, times: int) -> Island:
    """New nodes have no names; those that are out stay out."""
    return replace(island, nodes=island.nodes * times, node_names=())


def _endless(island: Island) -> Island:
    return replace(island, memory_bytes=ENDLESS_BYTES)
