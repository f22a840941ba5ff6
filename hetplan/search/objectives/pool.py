"""Which plans are worth a look when the shortest step is not all that is asked?

The search finds the plan of the shortest step. Plans that are more robust, cheaper or simply
different are the best ones of nearby questions, each asked of the same search: without one island,
with one device kind only, with fewer nodes, with other degrees, without interleaving, with and
without recomputation. The questions depend on the first plan and nothing else, so equal inputs
give an equal pool. No proof goes with it: better plans by such an aim may exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hetplan.cluster.spec import Cluster, Island
from hetplan.errors import InfeasibleError, InputError, LimitError
from hetplan.job.spec import Job
from hetplan.plans.plan import Plan, RecomputeGranularity
from hetplan.predict.predictor import Predictor
from hetplan.search.result import SearchResult
from hetplan.search.search import search

_PARTS = (0.75, 0.5, 0.25, 0.125)
"""Parts of every island's nodes that are left for cheaper plans."""

_LOOSE_GAP = 0.05
"""Of a nearby question: about what an interval tells apart (docs/accuracy.md); proofs cost most."""

_DEGREES = (1, 2, 4, 8, 16)
"""Degrees that are pinned instead of the plan's, where they divide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearby:
    """One question near the job's."""

    words: str
    job: Job


def nearby(result: SearchResult) -> Iterator[Nearby]:
    """Every question whose best plan could be wanted instead of the result's."""
    plan, cluster, job = result.plan, result.inputs.cluster, result.inputs.job
    usable = [
        island
        for island in cluster.islands
        if island.usable_nodes and island.name not in job.forbid.islands
    ]
    used = _islands(plan, cluster)
    if len(usable) > 1:
        for name in used:
            yield Nearby(words=f"without {name}", job=_without_islands(job, (name,)))
        for kind in dict.fromkeys(island.device.kind for island in usable):
            others = tuple(island.name for island in usable if island.device.kind != kind)
            if others:
                yield Nearby(words=f"{kind} only", job=_without_islands(job, others))
    for part in _PARTS:
        fewer = _fewer_nodes(job, usable, part)
        if fewer != job:
            yield Nearby(words=f"{part:.0%} of the nodes", job=fewer)
    yield from _other_degrees(plan, job)


def _islands(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(
            cluster.island_of_device(replica.devices[0].start).name for replica in plan.replicas
        )
    )


def _without_islands(job: Job, names: tuple[str, ...]) -> Job:
    forbid = replace(job.forbid, islands=(*job.forbid.islands, *names))
    return replace(job, forbid=forbid)


def _fewer_nodes(job: Job, islands: list[Island], part: float) -> Job:
    """The last nodes of every island are left out, so that device numbers stay."""
    out = []
    for island in islands:
        kept = max(1, round(part * len(island.usable_nodes)))
        out += [f"{island.name}/{node}" for node in island.usable_nodes[kept:]]
    if not out:
        return job
    return replace(job, forbid=replace(job.forbid, nodes=(*job.forbid.nodes, *out)))


def _other_degrees(plan: Plan, job: Job) -> Iterator[Nearby]:
    replicas = plan.replicas
    pin = job.pin
    if pin.tp is None and pin.same_degrees is None and len({r.tp for r in replicas}) > 1:
        changed = replace(pin, same_degrees=True)
        yield Nearby(words="the same degrees everywhere", job=replace(job, pin=changed))
    if pin.tp is None:
        now = {replica.tp for replica in replicas}
        for tp in _DEGREES:
            if now != {tp}:
                yield Nearby(words=f"tp {tp}", job=replace(job, pin=replace(pin, tp=tp)))
    if pin.microbatch_size is None:
        size = max(replica.microbatch_size for replica in replicas)
        for other in dict.fromkeys((size * 2, max(1, size // 2))):
            if other != size:
                changed = replace(pin, microbatch_size=other)
                yield Nearby(words=f"microbatch size {other}", job=replace(job, pin=changed))
    chunks = max(pipeline.schedule.virtual_stages for pipeline in plan.pipelines)
    if pin.virtual_stages is None and chunks > 1:
        changed = replace(pin, virtual_stages=1)
        yield Nearby(words="without interleaving", job=replace(job, pin=changed))
    if pin.recompute is None:
        full = any(
            stage.recompute.granularity is RecomputeGranularity.FULL
            for pipeline in plan.pipelines
            for stage in pipeline.stages
        )
        words = "without recomputation" if full else "with recomputation"
        yield Nearby(words=words, job=replace(job, pin=replace(pin, recompute=not full)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan of the pool and the question that it is the best answer to."""

    words: str
    result: SearchResult


def pool(
    result: SearchResult,
    predictor: Predictor,
    *,
    time_limit_seconds: float | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> tuple[Candidate, ...]:
    """The result and the best plans of nearby questions, each plan once.

    `time_limit_seconds` is for each search. Questions without a plan are left out. Ctrl-C ends it
    with the plans so far and the first one's certificate `interrupted`.
    """
    inputs = result.inputs
    found = [Candidate(words="the shortest step", result=result)]
    known = {result.plan}
    if _interrupted(result):
        return tuple(found)
    for number, each in enumerate(nearby(result)):
        if progress is not None:
            progress(number, each.words)
        job = replace(
            each.job,
            gap=max(each.job.gap, _LOOSE_GAP),
            time_limit_seconds=each.job.time_limit_seconds
            if time_limit_seconds is None
            else time_limit_seconds,
        )
        try:
            other = search(inputs.model, inputs.cluster, job, predictor, reasons=False)
        except (InfeasibleError, InputError, LimitError):
            continue
        except KeyboardInterrupt:
            return _ended(found)
        if other.plan not in known:
            known.add(other.plan)
            found.append(Candidate(words=each.words, result=other))
        if _interrupted(other):
            return _ended(found)
    return tuple(found)


def _interrupted(result: SearchResult) -> bool:
    return result.certificate is not None and result.certificate.status == "interrupted"


def interrupted(result: SearchResult) -> SearchResult:
    """The result, whose certificate says that more was wanted."""
    if result.certificate is None:
        return result
    return replace(result, certificate=replace(result.certificate, status="interrupted"))


def _ended(found: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The plans so far, of which the first says that more were wanted."""
    first, *rest = found
    return (replace(first, result=interrupted(first.result)), *rest)
