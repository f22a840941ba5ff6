"""What the report of a plan shows: its result, and what follows from pricing it again.

The plan file holds what the search or the estimate said. Its timeline, the bytes on its links and
what limits it are computed again, by a predictor that may be another one than the file's: then the
step is another one too, and the report says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np

from hetplan.cluster.spec import Cluster, Link
from hetplan.comparison.compare import Comparison, compare
from hetplan.cost.energy.clocks import StageClock, stage_clocks
from hetplan.cost.energy.energy import Energy, energy_of, usd_per_step
from hetplan.cost.estimate import cause_sources
from hetplan.cost.network.segments import LinkName, LinkScope, TrafficClass
from hetplan.cost.step_model.draws import straggler_wait
from hetplan.cost.step_model.pricer import Pricer
from hetplan.cost.traffic import Ledger, ledger
from hetplan.deadline import seconds_left
from hetplan.errors import Fault, InputError, OutOfTimeError
from hetplan.plans.pieces import Devices, Places, device_array, stage_array, used_devices
from hetplan.plans.plan import Plan
from hetplan.plans.v_schedules import stage_of
from hetplan.predict.predictor import Predictor
from hetplan.reports.summary import StageRow, stage_rows
from hetplan.reports.timeline import PipelineTimeline, Timeline, timeline_of
from hetplan.search.result import Question, SearchResult
from hetplan.whatif.ask import widened, wider
from hetplan.whatif.limits import Limits, limits

SAME_STEP = 1e-6
"""Relative difference below which two steps are of one predictor: sums in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """What the links of one name carry in a step, and how much they could."""

    link: LinkName
    carried: tuple[tuple[TrafficClass, float], ...]
    """Bytes per step by class, each counted once where it is sent."""
    bytes_per_second: float | None
    """What all that send over it can send at once, both ways; None: not known."""
    senders: int
    """Devices that send over it; 0 where they share one capacity."""
    one: float
    """Bytes per second of one of them, or of the capacity one way."""
    at_half: float | None = None
    """Part by which the step of the same layout grows at half the bandwidth; None: the link is
    known by samples, or carries storage."""
    at_twice: float | None = None
    """The same at twice the bandwidth."""

    @property
    def bytes_per_step(self) -> float:
        """All classes."""
        return sum(size for _, size in self.carried)

    def share(self, step_seconds: float) -> float | None:
        """Mean over the step of what it carries as a part of what it could; peaks are higher."""
        if self.bytes_per_second is None:
            return None
        return self.bytes_per_step / (self.bytes_per_second * step_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """Everything that the report shows of one plan."""

    name: str
    """Of its file."""
    result: SearchResult
    rows: tuple[StageRow, ...]
    timeline: Timeline
    """Of devices of mean speed."""
    straggler_seconds: float
    """What the slowest ranks add to its step."""
    limits: Limits
    sources: dict[tuple[str, str], set[str]]
    """Where predictions come from, by `CauseSeconds`' cause and part."""
    links: tuple[LinkUse, ...]
    usd_per_step: float | None
    """None where a price is not given."""
    energy: Energy | None
    """None where a power is not known."""
    clocks: tuple[StageClock, ...]
    comparisons: tuple[Comparison, ...] = ()

    @property
    def is_priced_anew(self) -> bool:
        """Whether timeline, links and limits are of another predictor than the estimate."""
        step = self.result.estimate.step_seconds
        return abs(self.priced_seconds - step) > SAME_STEP * step

    @property
    def priced_seconds(self) -> float:
        """The step by this report's predictor."""
        return self.timeline.step_seconds + self.straggler_seconds


def plan_views(
    results: Sequence[tuple[str, SearchResult]],
    predictor: Predictor,
    logs: Sequence[Path] = (),
) -> list[PlanView]:
    """Every (name, legal plan) with the runs of it; every log is of one run.

    A run belongs to the first plan that it can be of. An InputError with the faults of all plans
    where it is of none.
    """
    runs: list[list[Comparison]] = [[] for _ in results]
    for log in logs:
        faults: dict[Fault, None] = {}
        for own, (_, result) in zip(runs, results, strict=True):
            try:
                own.append(compare(log, result))
                break
            except InputError as error:
                faults |= dict.fromkeys(error.faults)
        else:
            raise InputError(*faults)
    return [
        plan_view(name, result, predictor, own)
        for (name, result), own in zip(results, runs, strict=True)
    ]


def plan_view(
    name: str,
    result: SearchResult,
    predictor: Predictor,
    comparisons: Sequence[Comparison] = (),
) -> PlanView:
    """A legal plan with its timeline, its links and its limits by this predictor."""
    inputs, plan = result.inputs, result.plan
    pricer = Pricer(inputs.model, inputs.cluster, inputs.job, predictor)
    costs, step = pricer.costs(plan), pricer.step(plan)
    counted = ledger(plan, inputs.model, inputs.cluster, inputs.job, predictor)
    return PlanView(
        name=name,
        result=result,
        rows=tuple(stage_rows(result, apart=True)),
        timeline=timeline_of(plan, pricer),
        straggler_seconds=straggler_wait(plan, costs, step),
        sources=cause_sources(costs, step),
        limits=limits(result, predictor),
        links=tuple(
            _with_other_bandwidths(use, plan, inputs, predictor, step.step_seconds)
            for use in link_uses(plan, inputs.cluster, counted)
        ),
        usd_per_step=usd_per_step(plan, result.estimate, inputs.model, inputs.cluster, inputs.job),
        energy=energy_of(plan, result.estimate, inputs.cluster),
        clocks=stage_clocks(pricer, plan),
        comparisons=tuple(comparisons),
    )


# ---- links


def link_uses(plan: Plan, cluster: Cluster, counted: Ledger) -> Iterator[LinkUse]:
    """Every link that carries anything, with what those who send over it could send."""
    used = {island.name: int(mine.sum()) for island, mine in used_devices(plan, cluster)}
    across = _senders_across(plan, cluster)
    for name in counted.links:
        carried = tuple((e.traffic, e.bytes_per_step) for e in counted.entries if e.link == name)
        island = cluster.island(name.left)
        link: Link | None = None
        senders = used[name.left]
        if name.scope is LinkScope.NODE:
            link = island.intra_node
        elif name.scope is LinkScope.ISLAND:
            link = cluster.link_between(name.left, name.left).among(island.devices_per_node)
        elif name.scope is LinkScope.ISLANDS:
            link = cluster.link_between(name.left, name.right)
            senders = across[name.left, name.right]
        if link is None:
            yield LinkUse(link=name, carried=carried, bytes_per_second=None, senders=0, one=0.0)
            continue
        shared = link.shared_bandwidth_bytes_per_second
        if name.scope is LinkScope.ISLANDS and shared is not None:
            yield LinkUse(
                link=name, carried=carried, bytes_per_second=2 * shared, senders=0, one=shared
            )
            continue
        one = link.bandwidth_bytes_per_second
        yield LinkUse(
            link=name, carried=carried, bytes_per_second=senders * one, senders=senders, one=one
        )


def _with_other_bandwidths(
    use: LinkUse, plan: Plan, question: Question, predictor: Predictor, step: float
) -> LinkUse:
    """With what half and twice the bandwidth make of the step, the layout as it is."""
    if seconds_left() <= 0.0:
        return use
    name, island = use.link, question.cluster.island(use.link.left)
    link = {
        LinkScope.NODE: island.intra_node,
        LinkScope.ISLAND: island.inter_node,
    }.get(name.scope) or question.cluster.link_between(name.left, name.right)
    if name.scope is LinkScope.STORAGE or link.samples is not None:
        return use

    def grown(factor: float) -> float:
        nics = island.nics
        if name.scope is LinkScope.ISLANDS:
            changed = wider(question, [(name.left, name.right)], factor)
        elif name.scope is LinkScope.NODE:
            changed = question.with_island(replace(island, intra_node=widened(link, factor)))
        else:
            if nics is not None:
                rate = factor * nics.bandwidth_bytes_per_second
                nics = replace(nics, bandwidth_bytes_per_second=rate)
            wide = replace(island, inter_node=widened(link, factor), nics=nics)
            changed = question.with_island(wide)
        pricer = Pricer(question.model, changed.cluster, question.job, predictor)
        return pricer.step(plan).step_seconds / step - 1.0

    try:
        return replace(use, at_half=grown(0.5), at_twice=grown(2.0))
    except OutOfTimeError:
        return use


def _senders_across(plan: Plan, cluster: Cluster) -> dict[tuple[str, str], int]:
    """By pair of islands: devices of neighbouring stages, and of reduction groups, on both."""
    places, names = Places(cluster=cluster), [island.name for island in cluster.islands]
    found: dict[tuple[str, str], list[Devices]] = {}

    def add(devices: Devices) -> None:
        of = places.islands(devices)
        here = np.unique(of).tolist()
        for one, two in combinations(here, 2):
            left, right = sorted((names[one], names[two]))
            found.setdefault((left, right), []).append(devices[(of == one) | (of == two)])

    for pipeline in plan.pipelines:
        stages, schedule = pipeline.stages, pipeline.schedule
        count = len(stages)
        row = [stage_of(schedule.name, k, count) for k in range(count * schedule.virtual_stages)]
        for a, b in sorted({*pairwise(row)}):
            add(np.concatenate([stage_array(stages[a]), stage_array(stages[b])]))
        if len(pipeline.ends) == 2 and plan.tied_embedding_devices:
            add(device_array(plan.tied_embedding_devices))
    for group in plan.every_group:
        add(device_array(group.members))
    return {pair: int(np.unique(np.concatenate(each)).size) for pair, each in found.items()}


# ---- pipelines


def distinct(timeline: Timeline) -> list[tuple[tuple[int, ...], PipelineTimeline]]:
    """Pipelines of equal times on equal devices together: (their numbers, the first of them)."""
    found: dict[object, tuple[list[int], PipelineTimeline]] = {}
    for p, pipeline in enumerate(timeline.pipelines):
        key = tuple(
            (
                stage.device,
                stage.num_devices,
                tuple((bar.name, bar.start_seconds, bar.end_seconds) for bar in stage.bars),
            )
            for stage in pipeline.stages
        )
        found.setdefault(key, ([], pipeline))[0].append(p)
    return [(tuple(numbers), pipeline) for numbers, pipeline in found.values()]
