"""Why a job has no plan, in the user's words, and what would give it one.

First the smallest set of demands that cannot hold together (`hetplan.whatif.conflict`), or where
plans break limits of sites, of these, each with a value that would be enough; then, where
memory is among them, what one layer needs and how many fit; then single changes that a user can
make, cheapest first. A change is tried by `Feasible` and verified by a search, so that an offer
comes with its step time. More nodes are counted: as few as make a plan possible, by doubling and
halving.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from hetplan.cluster.libraries import AS_NCCL, island_library
from hetplan.cluster.spec import MAX_DEVICES, Island
from hetplan.deadline import check_time, ends_by
from hetplan.errors import InfeasibleError, LimitError, OutOfTimeError
from hetplan.job.spec import Forbids, Job, Pins
from hetplan.plans.limits import Limit, LimitKind, limits_of, with_limit
from hetplan.plans.pinned import pinned_values
from hetplan.plans.rules import some
from hetplan.plans.targets import TARGETS, target
from hetplan.predict.predictor import Predictor
from hetplan.search.result import Question, SearchResult
from hetplan.units import format_bytes, format_seconds
from hetplan.whatif.ask import (
    NO_ANSWER,
    Change,
    ask,
    libraries_apart,
    mixing,
    other_value,
    pins_in_words,
    with_nodes,
)
from hetplan.whatif.conflict import Conflict, Constraint, Feasible, constraints, find_conflict
from hetplan.whatif.memory_shortage import room_lines
from hetplan.whatif.smaller_questions import usable_islands
from hetplan.whatif.within_limits import OverLimitsError, limit_use

_RESERVES = (0.05, 0.0)
"""Values of `memory_reserve_fraction` that are tried where they are below the job's."""
_CHEAP_PINS = ("recompute", "sharded_optimizer", "microbatch_size", "sequence_parallel")
"""In the order in which they are left out, before the others."""
_HOST_BYTES = float(1 << 40)
"""Of a node whose host memory is not known: half of what nodes of eight accelerators are sold with
(2 TB in a DGX H100)."""
_MAX_BATCH_CHANGE = 2
"""A batch is changed to at most so many times, or that part of, what was asked."""


def relaxations(asked: Question, feasible: Callable[[Question], bool]) -> Iterator[Change]:
    """Changes that make a plan possible as far as memory and divisibility say."""
    for each in _without_devices(asked):
        if feasible(each.question):
            yield each
    yield from _more_nodes(asked, feasible)


def _without_devices(asked: Question) -> Iterator[Change]:
    """What costs no hardware, cheapest first."""
    job = asked.job
    for name, words in sorted(pins_in_words(job), key=_cost_of_pin):
        free = asked.with_pins(**{name: None})
        yield Change(words=f"leaving out pin {words}", question=free, pin=name)
    if job.forbid != Forbids():
        allowed = asked.with_job(forbid=Forbids())
        yield Change(words="allowing the forbidden islands and nodes", question=allowed)
    yield from _mixing(asked)
    yield from _in_host_memory(asked)
    for name, value in _other_values(job):
        yield other_value(asked, name, value)
    if len([*pins_in_words(job)]) > 1:
        yield Change(words="leaving out all pins", question=asked.with_job(pin=Pins()))
    for island in asked.cluster.islands:
        if island.nodes_out:
            back = replace(island, nodes_out=())
            yield Change(
                words=f"the {len(island.nodes_out)} nodes of {island.name} that are out",
                question=asked.with_island(back),
            )


def _mixing(asked: Question) -> Iterator[Change]:
    """A patched trainer, on the islands whose libraries torch runs as nccl: no patch of this kind
    starts others. Where these have one library, a target that mixes them is tried anyway.
    """
    left = [each for each in usable_islands(asked) if island_library(each) not in AS_NCCL]
    may = asked.without_islands(*(each.name for each in left)) if left else asked
    if libraries_apart(may):
        without = f", without {some([each.name for each in left], 3)}" if left else ""
        words = f"a patched trainer that mixes libraries (trainer.mixed_libraries: true){without}"
        yield Change(words=words, question=mixing(may))


def _in_host_memory(asked: Question) -> Iterator[Change]:
    """The optimizer beside the devices, where the cluster file does not say whether there is room.

    A pin of it without that is refused before a search.
    """
    silent = [
        island
        for island in asked.cluster.islands
        if island.host_memory_bytes is None and island.device.host is not None
    ]
    if not silent or not target(asked.job.target).optimizer_offload:
        return
    known = asked
    for island in silent:
        known = known.with_island(replace(island, host_memory_bytes=_HOST_BYTES))
    words = (
        f"the optimizer in host memory (host_memory of {some([i.name for i in silent], 3)} in the "
        f"cluster file; tried with {format_bytes(_HOST_BYTES)} a node)"
    )
    yield Change(words=words, question=known)


def _other_values(job: Job) -> Iterator[tuple[str, Any]]:
    """(field, value) of every other value of the job that is tried, cheapest first."""
    for reserve in _RESERVES:
        if job.memory_reserve_fraction > reserve:
            yield "memory_reserve_fraction", reserve
    for name in TARGETS:
        if name not in (job.target, "any"):
            yield "target", name
    for size in _batches(job):
        yield "global_batch_size", size
    if job.sequence_length > 1 and not job.sequence_lengths:
        yield "sequence_length", job.sequence_length // 2


def _cost_of_pin(pin: tuple[str, str]) -> int:
    """Pins that only save time come before those that place things."""
    name, _ = pin
    return _CHEAP_PINS.index(name) if name in _CHEAP_PINS else len(_CHEAP_PINS)


def _batches(job: Job) -> Iterator[int]:
    """The nearest batches that the pins divide, then half and twice the batch."""
    pin, batch = job.pin, job.global_batch_size
    fixed = (pin.dp or 1) * (pin.microbatch_size or 1)
    near = [batch // fixed * fixed, -(-batch // fixed) * fixed]
    wide = [batch // _MAX_BATCH_CHANGE, batch * _MAX_BATCH_CHANGE]
    for size in dict.fromkeys((*near, *wide)):
        if size >= 1 and size != batch:
            yield size


def _more_nodes(asked: Question, feasible: Callable[[Question], bool]) -> Iterator[Change]:
    """The fewest more nodes of one island with which there is a plan, of the islands that need the
    fewest: others need about twice as many at least.
    """
    islands = asked.cluster.islands
    spare = MAX_DEVICES - asked.cluster.num_devices

    def with_more(island: Island, more: int) -> Question:
        return with_nodes(asked, island, island.nodes + more)

    def may(island: Island, more: int) -> bool:
        most = min(spare // island.devices_per_node, _MOST_TIMES * max(1, island.nodes))
        return more <= most and feasible(with_more(island, more))

    longest = _MOST_TIMES * max(1, *(island.nodes for island in islands))
    doubled = (1 << power for power in range(longest.bit_length()))
    enough = ((more, [each for each in islands if may(each, more)]) for more in doubled)
    first, found = next((each for each in enough if each[1]), (0, []))
    for island in found:
        low, high = first // 2, first
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if may(island, middle) else (middle, high)
        yield Change(
            words=f"{high} more node{'s' * (high > 1)} of {island.name} "
            f"({len(island.usable_nodes) + high} instead of {len(island.usable_nodes)})",
            question=with_more(island, high),
        )


_MOST_TIMES = 16
"""Times the nodes of an island up to which more of them are tried: more is another cluster."""

_MAX_OFFERED = 4
"""Relaxations that are shown."""

_MAX_VERIFIED = 12
"""Relaxations that look possible and are handed to a search."""

_LOOSE_GAP = 0.2
"""A relaxation is shown to have a plan; how good that can get is another search."""

_SECONDS = 20.0
"""Longest verification of one relaxation. Those of DeepSeek-V3 on 112 devices that have a plan took
2.6 CPU seconds at most; a machine that others use may need several times as long."""


_MOST_HALVED = 6
"""Searches for the value of one limit that would be enough, the one without the limit included."""
_NEAR = 0.02
"""Part of that value below which nothing is asked: powers are not known better."""


def why_no_plan(asked: Question, predictor: Predictor, over: bool = False) -> tuple[str, ...]:
    """Lines: the smallest conflict, what memory lacks, and the changes that would help.

    over: where there are plans, which break limits of sites.

    Where time is over (`hetplan.deadline`) those that are there, and what is left out.
    """
    lines: list[str] = []
    try:
        check_time()
        feasible = Feasible(predictor)
        changes = relaxations(asked, feasible)
        if not over:
            lines += _demands(asked, predictor, feasible)
        elif within := _limits(asked, predictor):
            return tuple(within)
        lines += _changes(changes, predictor, feasible)
    except OutOfTimeError:
        what = "" if lines else "which demands cannot hold together, and "
        lines.append(f"left out for the time limit: {what}what would help")
    return tuple(lines)


def _limits(asked: Question, predictor: Predictor) -> list[str]:
    """The smallest set of limits that no plan was found within, each with a value that would be
    enough; nothing where a second search found a plan within all of them, or none without any.
    """

    def found(question: Question) -> SearchResult | None:
        try:
            return ask(question.looser(_LOOSE_GAP, _SECONDS), predictor)
        except (LimitError, OutOfTimeError):  # what is not known of one set names no set
            raise OutOfTimeError from None
        except NO_ANSWER:
            return None

    every = tuple(limits_of(asked.cluster, asked.job))
    if too_few := _cores(asked, every):
        return too_few
    demands = [
        Constraint(words=each.name, without=partial(_with_limit, each, None)) for each in every
    ]
    conflict = find_conflict(asked, demands, lambda question: found(question) is not None)
    named = [each for each in every if each.name in {one.words for one in conflict.constraints}]
    if not named:
        return []
    together = f"these {len(named)} limits together" if len(named) > 1 else "this limit"
    lines = [f"plans were found, and none of them within {together}:"]
    for limit in named:
        enough = _enough(asked, limit, found)
        words = "no value of it alone was found to be enough"
        if enough is not None:
            words = f"{limit.figure(enough)} would be enough"
        lines.append(f"  {limit.name}: {limit.figure(limit.most)}; {words}")
    return lines


def _cores(asked: Question, limits: Sequence[Limit]) -> list[str]:
    """What is plain without a search: no host has the cores of one device."""
    usable = {island.name for island in usable_islands(asked)}
    each = asked.job.cpu_cores_per_device or 0
    own = [one for one in limits if one.kind is LimitKind.CORES and usable & {*one.islands}]
    few = [one for one in own if one.most < each]
    if not few or {name for one in few for name in one.islands} != usable:
        return []
    lines = ["no host has the cores of one device:"]
    lines += [
        f"  {one.name}: {one.figure(one.most)}; {one.figure(each)} would be enough" for one in few
    ]
    return lines


def _with_limit(limit: Limit, most: float | None, asked: Question) -> Question:
    return asked.changed(cluster=with_limit(asked.cluster, limit, most))


def _enough(
    asked: Question, limit: Limit, found: Callable[[Question], SearchResult | None]
) -> float | None:
    """A value of the limit with which there is a plan, all others kept: what the plan takes, three
    digits of it, after halving the way to the limit's own; None where no value was found.
    """
    low, high, most = limit.most, None, None
    for _ in range(_MOST_HALVED):
        result = found(_with_limit(limit, most, asked))
        if result is not None:
            use = limit_use(
                result.plan, result.estimate, result.inputs.changed(cluster=asked.cluster)
            )
            taken = max(1.0, next(each.used for each in use if each.name == limit.name))
            unit = 10.0 ** max(0, math.floor(math.log10(taken)) - 2)
            high = math.ceil(taken / unit) * unit
        elif most is not None:
            low = most
        if high is None:
            return None
        most = (low + high) / 2 if limit.kind is LimitKind.POWER else (low + high) // 2
        if high - low <= max(1.0, _NEAR * high):
            break
    return high


def _demands(asked: Question, predictor: Predictor, feasible: Feasible) -> list[str]:
    conflict = find_conflict(asked, constraints(asked), feasible)
    lines = [_words(conflict, sure=not feasible.uncertain)]
    lines += [f"  {each.words}" for each in conflict.constraints]
    if any(each.words.startswith("memory of ") for each in conflict.constraints):
        lines += room_lines(asked, predictor)
    return lines


def _changes(
    changes: Iterable[Change], predictor: Predictor, feasible: Feasible
) -> tuple[str, ...]:
    """Those that give a plan; what was tried where none does."""
    likely: list[str] = []
    offers: list[str] = []
    open_: list[Change] = []
    feasible.uncertain = False
    for change in islice(changes, _MAX_VERIFIED):
        likely.append(change.words)
        if feasible.uncertain:
            open_.append(change)
        else:
            offers += filter(None, [_verified(change, predictor)])
        feasible.uncertain = False
        if len(offers) == _MAX_OFFERED:
            break
    if not offers:  # a search may still find what is not shown to be there
        offers += filter(None, (_verified(change, predictor) for change in open_))
    elif open_:
        words = "; ".join(change.words for change in open_)
        offers.append(f"whether these give a plan is not decided: {words}")
    if offers:
        return ("each of these alone gives a plan:", *offers)
    if likely:
        words = "; ".join(likely)
        return (f"memory allows these, and no plan was found in time: {words}",)
    return (
        "no single change of a pin, a forbid, the batch, the target, the memory reserve or the "
        "number of nodes gives a plan",
    )


def _words(conflict: Conflict, *, sure: bool) -> str:
    if not conflict.constraints:
        return (
            "no plan, whatever is taken away: the layers cannot be cut into stages that any target "
            "runs, or one layer is larger than any device"
        )
    if len(conflict.constraints) == 1:
        return "this alone cannot be met:"
    which = f"no plan meets these {len(conflict.constraints)} demands together"
    if not sure:
        return f"{which}; perhaps it is fewer that conflict:"
    if conflict.smallest:
        return f"{which}; no fewer conflict:"
    return f"{which}; without any one of them they would not conflict:"


def _verified(relaxation: Change, predictor: Predictor) -> str:
    """The change with its step; empty where the search found no plan after all."""
    try:
        found = ask(relaxation.question.looser(_LOOSE_GAP, _SECONDS), predictor)
    except NO_ANSWER:
        return ""
    instead = pinned_values(found.plan).get(relaxation.pin)
    having = "" if instead is None else f" (the plan has {instead})"
    step = format_seconds(found.estimate.step_seconds)
    return f"  {relaxation.words}{having}: {step} per step"


@contextmanager
def with_reasons(question: Question, predictor: Predictor, end: float = math.inf) -> Iterator[None]:
    """Let an InfeasibleError of the search inside say why the question has no plan, by `end`."""
    try:
        yield
    except InfeasibleError as error:
        over = isinstance(error, OverLimitsError)
        with ends_by(end):
            raise InfeasibleError(why_no_plan(question, predictor, over)) from None
