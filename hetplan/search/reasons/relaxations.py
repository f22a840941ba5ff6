"""What would give a job without a plan one: single changes that a user can make, cheapest first.

Each is a question of its own, tried by `feasible` first and then verified by a search, so that what
is offered comes with the step time it would have. More nodes are counted: as few as make a plan
possible, by doubling and halving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hetplan.cluster.spec import MAX_DEVICES, Island
from hetplan.job.spec import Forbids, Job, Pins
from hetplan.plans.targets import TARGETS
from hetplan.search.reasons.constraints import Question

_RESERVES = (0.05, 0.0)
"""Values of `memory_reserve_fraction` that are tried where they are below the job's."""
_MAX_BATCH_CHANGE = 2
"""A batch is changed to at most so many times, or that part of, what was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """One change, in words, and the question that has it."""

    words: str
    asked: Question
    pin: str = ""
    """The pin that it leaves out, where that is all."""


def relaxations(asked: Question, feasible: Callable[[Question], bool]) -> Iterator[Relaxation]:
    """Changes that make a plan possible as far as memory and divisibility say."""
    for each in _without_devices(asked):
        if feasible(each.asked):
            yield each
    for island in asked.cluster.islands:
        found = _more_nodes(asked, island, feasible)
        if found is not None:
            yield found


def _without_devices(asked: Question) -> Iterator[Relaxation]:
    """What costs no hardware."""
    job = asked.job
    for words, changed, pin in _jobs(job):
        yield Relaxation(words=words, asked=replace(asked, job=changed), pin=pin)
    for island in asked.cluster.islands:
        if island.nodes_out:
            back = replace(island, nodes_out=())
            yield Relaxation(
                words=f"the {len(island.nodes_out)} nodes of {island.name} that are out",
                asked=_with_island(asked, back),
            )


def _jobs(job: Job) -> Iterator[tuple[str, Job, str]]:
    """(words, job, name of the pin) of every change of the job, cheapest first."""
    for name in _pins_by_cost():
        value = getattr(job.pin, name)
        if value is not None:
            shown = str(value).lower() if isinstance(value, bool) else value
            pin = replace(job.pin, **{name: None})
            yield f"leaving out pin {name}: {shown}", replace(job, pin=pin), name
    if job.forbid != Forbids():
        yield "allowing the forbidden islands and nodes", replace(job, forbid=Forbids()), ""
    for reserve in _RESERVES:
        if job.memory_reserve_fraction > reserve:
            yield (
                f"memory_reserve_fraction {reserve:g} instead of {job.memory_reserve_fraction:g}",
                replace(job, memory_reserve_fraction=reserve),
                "",
            )
    for name in TARGETS:
        if name not in (job.target, "any"):
            yield f"target {name} instead of {job.target}", replace(job, target=name), ""
    for size in _batches(job):
        yield (
            f"global_batch_size {size} instead of {job.global_batch_size}",
            replace(job, global_batch_size=size),
            "",
        )
    if job.sequence_length > 1 and not job.sequence_lengths:
        half = job.sequence_length // 2
        yield (
            f"sequence_length {half} instead of {job.sequence_length}",
            replace(job, sequence_length=half),
            "",
        )
    if sum(getattr(job.pin, name) is not None for name in Pins.__dataclass_fields__) > 1:
        yield "leaving out all pins", replace(job, pin=Pins()), ""


def _pins_by_cost() -> tuple[str, ...]:
    """Pins that only save time come before those that place things."""
    first = ("recompute", "sharded_optimizer", "microbatch_size", "sequence_parallel")
    rest = [name for name in Pins.__dataclass_fields__ if name not in first]
    return tuple(name for name in (*first, *rest) if name in Pins.__dataclass_fields__)


def _batches(job: Job) -> Iterator[int]:
    """The nearest batches that the pins divide, then half and twice the batch."""
    pin, batch = job.pin, job.global_batch_size
    fixed = (pin.dp or 1) * (pin.microbatch_size or 1)
    near = [batch // fixed * fixed, -(-batch // fixed) * fixed]
    wide = [batch // _MAX_BATCH_CHANGE, batch * _MAX_BATCH_CHANGE]
    for size in dict.fromkeys((*near, *wide)):
        if size >= 1 and size != batch:
            yield size


def _more_nodes(
    asked: Question, island: Island, feasible: Callable[[Question], bool]
) -> Relaxation | None:
    """The fewest more nodes of one island with which there is a plan; None: no number helps."""
    room = (MAX_DEVICES - asked.cluster.num_devices) // island.devices_per_node

    def with_more(more: int) -> Question:
        return _with_island(asked, replace(island, nodes=island.nodes + more, node_names=()))

    high = 1
    while not feasible(with_more(high)):
        high *= 2
        if high > min(room, 16 * max(1, island.nodes)):
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if feasible(with_more(middle)) else (middle, high)
    return Relaxation(
        words=f"{high} more node{'s' * (high > 1)} of {island.name} "
        f"({len(island.usable_nodes) + high} instead of {len(island.usable_nodes)})",
        asked=with_more(high),
    )


def _with_island(asked: Question, changed: Island) -> Question:
    islands = tuple(
        changed if each.name == changed.name else each for each in asked.cluster.islands
    )
    return replace(asked, cluster=replace(asked.cluster, islands=islands))
