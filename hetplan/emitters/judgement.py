"""Is the placement of a plan's ranks good: which groups leave their node, island or region?

Tensor-parallel groups belong inside nodes, data-parallel ones inside islands, neighbours in the
pipeline close to each other. What a tied embedding and the norm of all gradients send between the
first and the last stage is said with the seconds at which the plan's estimate has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hetplan.cost.estimate_values import Component
from hetplan.emitters.placement import listed
from hetplan.plans.formats import tied_format
from hetplan.plans.pieces import Devices, Places, device_array, stage_array
from hetplan.plans.plan import Pipeline, Plan, Replica, Stage
from hetplan.search.result import SearchResult
from hetplan.units import format_bytes, format_seconds, format_share

_Rows: TypeAlias = NDArray[np.int64]
"""Devices of one group per row."""
LOUD = "ATTENTION: "
"""In front of what costs most and is easily overlooked."""


def placement_remarks(result: SearchResult) -> tuple[str, ...]:
    """What a reader should know about the placement, a line each."""
    plan, places = result.plan, Places(cluster=result.inputs.cluster)
    areas = _Areas(places)
    return (
        *_inside_stages(plan, areas),
        *(
            line
            for p, pipeline in enumerate(plan.pipelines)
            for line in _neighbours(plan, areas, p, pipeline)
        ),
        *_first_and_last(result, areas),
    )


class _Areas:
    """Node, island and region of devices as numbers that are equal inside one of them."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.cluster = places.cluster
        names = list(self.cluster.regions)
        self._region = np.array([names.index(each.region) for each in self.cluster.islands])

    def of(self, devices: Devices) -> tuple[tuple[str, Devices], ...]:
        """(what it is, number of every device's), smallest first."""
        islands = self.places.islands(devices)
        return (
            ("node", self.places.nodes(devices)),
            ("island", islands),
            ("region", self._region[islands]),
        )

    def said(self, devices: Devices) -> str:
        """Islands and regions of these devices in words."""
        at = np.unique(self.places.islands(devices))
        islands = [self.cluster.islands[each] for each in at]
        regions = dict.fromkeys(island.region for island in islands)
        return f"{listed([island.name for island in islands])} in {listed(tuple(regions))}"


def _inside_stages(plan: Plan, areas: _Areas) -> Iterator[str]:
    """Groups inside of stages by the largest thing that they leave."""
    rows: dict[tuple[str, int], list[_Rows]] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for name, groups in _groups(stage):
                if groups.shape[1] > 1:
                    rows.setdefault((name, groups.shape[1]), []).append(groups)
    homes = {"tp": "node", "cp": "node", "ep": "node", "dp": "island"}
    for (name, size), found in rows.items():
        groups = np.concatenate(found)
        home = homes[name]
        leaving = _leaving(areas, groups)
        count = len(groups)
        if not leaving[home]:
            yield f"{name} {size}: " + (
                f"all {count} groups lie inside {home}s"
                if count > 1
                else f"its one group lies inside its {home}"
            )
            continue
        parts = [f"{leaving[home]} of {count} groups leave their {home}"]
        wider = {"node": ("island", "region"), "island": ("region",)}[home]
        parts += [f"{leaving[each]} their {each}" for each in wider if leaving[each]]
        loud = LOUD if name == "tp" or leaving["region"] else ""
        yield f"{loud}{name} {size}: {', '.join(parts)}"


def _leaving(areas: _Areas, groups: _Rows) -> dict[str, int]:
    """How many rows hold devices of more than one node, island, region."""
    return {
        what: int((numbers != numbers[:, :1]).any(axis=1).sum())
        for what, numbers in areas.of(groups)
    }


def _groups(stage: Stage) -> Iterator[tuple[str, _Rows]]:
    """(kind, groups) of a stage: tp, cp and ep by replica, dp over all replicas of equal shape."""
    for replica in stage.replicas:
        at = device_array(replica.devices)
        ranks = at.reshape(-1, replica.cp, replica.tp)
        yield "tp", ranks.reshape(-1, replica.tp)
        yield "cp", ranks.transpose(0, 2, 1).reshape(-1, replica.cp)
        experts = at.reshape(-1, replica.ep, replica.etp)
        yield "ep", experts.transpose(0, 2, 1).reshape(-1, replica.ep)
    slices = {(each.tp, each.cp) for each in stage.replicas}
    if len(slices) == 1:
        ((tp, cp),) = slices
        yield "dp", stage_array(stage).reshape(-1, cp * tp).T


def _neighbours(plan: Plan, areas: _Areas, p: int, pipeline: Pipeline) -> Iterator[str]:
    """How far apart the stages of a pipeline are."""
    if len(pipeline.stages) < 2:
        return
    stages = list(enumerate(stage_array(stage) for stage in pipeline.stages))
    hops = list(pairwise(stages))
    if pipeline.schedule.virtual_stages > 1:
        # The last stage sends the next chunk's activations to the first.
        hops.append((stages[-1], stages[0]))
    crossing = {"island": 0, "region": 0}
    far: list[str] = []
    for (s, left), (t, right) in hops:
        apart = {what for what in crossing if _apart(areas, left, right, what)}
        for what in apart:
            crossing[what] += 1
        if "region" in apart:
            far.append(f"stage {s} ({areas.said(left)}) to stage {t} ({areas.said(right)})")
    where = f"pipeline {p}" if len(plan.pipelines) > 1 else "pipeline"
    yield (
        f"{where}: of {len(hops)} transfers between stages {crossing['island']} leave their "
        f"island, {crossing['region']} their region" + (f": {listed(far, '; ')}" if far else "")
    )


def _apart(areas: _Areas, left: Devices, right: Devices, what: str) -> bool:
    """Whether anything is sent out of an island or region: rank to rank where stages are alike."""
    one, two = dict(areas.of(left))[what], dict(areas.of(right))[what]
    if len(one) == len(two):
        return bool((one != two).any())
    return len(np.union1d(one, two)) > 1


def _first_and_last(result: SearchResult, areas: _Areas) -> Iterator[str]:
    """What first and last stage exchange at the end of every step, and what the estimate has it at.

    Sources: megatron/core/parallel_state.py, the embedding group;
    hetplan.cost.step_model.end_of_step.
    """
    plan, model = result.plan, result.inputs.model
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    estimate = result.estimate
    pipeline = plan.pipelines[0]
    if plan.tied_embedding_devices and len(pipeline.stages) > 1:
        first, last = stage_array(pipeline.stages[0]), stage_array(pipeline.stages[-1])
        tp = min(_least_tp(pipeline.stages[0].replicas), _least_tp(pipeline.stages[-1].replicas))
        size = (
            plan.padded_vocab_size
            // tp
            * model.embedding_width
            * tied_format(plan, result.inputs.job).bytes_per_element
        )
        crosses = _apart(areas, first, last, "region")
        seconds = _priced(result, Component.EMBEDDING)
        yield (
            f"{LOUD if crosses else ''}tied embedding: after every step first and last stage sum "
            f"its gradient, {format_bytes(size)} a rank, between {areas.said(first)} and "
            f"{areas.said(last)}{_across(crosses)}; priced at "
            f"{_of_step(seconds, estimate.step_seconds)}"
            + ("; an untied model would not do it" if crosses else "")
        )
    if len(stages) < 2:
        return
    everybody = np.concatenate([stage_array(stage) for stage in stages])
    norm = _priced(result, Component.NORM)
    if norm:
        crosses = len(np.unique(dict(areas.of(everybody))["region"])) > 1
        yield (
            f"gradient norm: one number is summed over all {len(everybody)} ranks in every step"
            f"{_across(crosses)}; priced at {_of_step(norm, estimate.step_seconds)}"
        )


def _across(crosses: bool) -> str:
    return ", ACROSS REGIONS" if crosses else ""


def _least_tp(replicas: tuple[Replica, ...]) -> int:
    return min(replica.tp for replica in replicas)


def _priced(result: SearchResult, component: Component) -> float | None:
    """Seconds of a component at the stage that has most of it; None where none was kept."""
    rows = [stage.components for stage in result.estimate.stages]
    if not all(rows):
        return None
    return max(
        (each.seconds for row in rows for each in row if each.component is component), default=0.0
    )


def _of_step(seconds: float | None, step_seconds: float) -> str:
    if seconds is None:
        return "nothing known: the estimate has no break-down; price the plan with hetplan estimate"
    share = format_share(seconds / step_seconds)
    return f"{format_seconds(seconds)}, {share} of the step"
