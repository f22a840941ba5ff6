"""Why a job has no plan, in the user's words, and what would give it one: the whole answer.

First the smallest set of demands that cannot hold together; then, where memory is among them, what
one layer needs and how many fit; then the changes that help, each with the step time that a search
found with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from hetplan.errors import InfeasibleError, InputError, LimitError
from hetplan.plans.plan import RecomputeGranularity, Sharding, Stage
from hetplan.search.reasons.conflict import Conflict, find_conflict
from hetplan.search.reasons.constraints import Question, constraints
from hetplan.search.reasons.feasible import Feasible
from hetplan.search.reasons.relaxations import Relaxation, relaxations
from hetplan.search.result import SearchResult
from hetplan.units import format_seconds

_MAX_OFFERED = 6
"""Relaxations that are shown."""

_MAX_TRIED = 12
"""Relaxations that look possible and are handed to a search."""

_LOOSE_GAP = 0.2
"""A relaxation is shown to have a plan; how good that can get is another search."""

_SECONDS = 60.0
"""Longest verification of one relaxation."""


def why_no_plan(
    asked: Question,
    feasible: Feasible,
    *,
    details: Callable[[Question], tuple[str, ...]],
    searched: Callable[[Question], SearchResult],
) -> tuple[str, ...]:
    """At least one line; `details` says how far memory is from enough, `searched` makes plans."""
    feasible.uncertain = False
    conflict = find_conflict(asked, constraints(asked), feasible)
    lines = [_words(conflict, sure=not feasible.uncertain)]
    lines += [f"  {each.words}" for each in conflict.constraints]
    if any(each.words.startswith("memory of ") for each in conflict.constraints):
        lines += details(asked)
    likely = islice(relaxations(asked, feasible), _MAX_TRIED)
    verified = (_verified(each, searched) for each in likely)
    offers = list(islice((line for line in verified if line), _MAX_OFFERED))
    if offers:
        return (*lines, "each of these alone gives a plan:", *offers)
    return (
        *lines,
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
    size = f"set of {len(conflict.constraints)}, of which each part is needed"
    if conflict.smallest:
        size = f"smallest set, of {len(conflict.constraints)}"
    if not sure:
        size = f"set of {len(conflict.constraints)}; a smaller one may be in conflict too"
    return f"these cannot hold together ({size}):"


def _verified(relaxation: Relaxation, searched: Callable[[Question], SearchResult]) -> str:
    """The change with its step; empty where the search found no plan after all."""
    job = relaxation.asked.job
    quick = replace(job, gap=max(job.gap, _LOOSE_GAP), time_limit_seconds=_SECONDS)
    try:
        found = searched(replace(relaxation.asked, job=quick))
    except (InfeasibleError, InputError, LimitError):
        return ""
    instead = _instead(relaxation.pin, found)
    step = format_seconds(found.estimate.step_seconds)
    return f"  {relaxation.words}{instead}: {step} per step"


def _instead(pin: str, found: SearchResult) -> str:
    """What the plan that was found has in the pin's place, as in ` (the plan has 1)`."""
    pipelines = found.plan.pipelines
    stages = [stage for pipeline in pipelines for stage in pipeline.stages]
    replicas = [replica for stage in stages for replica in stage.replicas]
    values: Iterator[object]
    if pin in ("tp", "cp", "ep", "microbatch_size"):
        values = (getattr(replica, pin) for replica in replicas)
    elif pin == "dp":
        values = (sum(replica.dp for replica in stage.replicas) for stage in stages)
    elif pin == "pp":
        values = (len(pipeline.stages) for pipeline in pipelines)
    elif pin == "pipelines":
        values = iter((len(pipelines),))
    elif pin == "virtual_stages":
        values = (pipeline.schedule.virtual_stages for pipeline in pipelines)
    elif pin == "recompute":
        values = (_recomputes(stage) for stage in stages)
    elif pin == "sharded_optimizer":
        values = iter((str(found.plan.sharding is not Sharding.NONE).lower(),))
    else:
        return ""
    return f" (the plan has {'/'.join(dict.fromkeys(str(value) for value in values))})"


def _recomputes(stage: Stage) -> str:
    return str(stage.recompute.granularity is not RecomputeGranularity.NONE).lower()
