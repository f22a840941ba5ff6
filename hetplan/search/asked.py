"""Which predictions a plan's step stands on, and how many of its seconds each says.

Times on a device are asked for by kind of layer, microbatch size and tp (forward and backward are
measured together, so they are one); the update of the weights by tp; links by their cause. Seconds
are the causes of an estimate (`Estimate.causes`), waits included. Where a device's time is one
cause for all its layers (datasheet figures), or goes by classes of operators, it is dealt out to
the layers by their predicted seconds, and stays one source of errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate import estimate_with
from hetplan.cost.estimate_values import CauseSeconds, Estimate
from hetplan.cost.priced.pricer import Pricer
from hetplan.job.spec import Job
from hetplan.model.spec import TRAINED_KINDS, LayerKind, ModelSpec
from hetplan.plans.plan import Plan, Stage
from hetplan.predict.causes import is_link
from hetplan.predict.predictor import Predictor
from hetplan.search.through import Watched
from hetplan.search.what_to_measure import Part, PlanParts

UPDATE = "update"
_ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One prediction that a plan asks for."""

    cause: str
    """Device kind, or link."""
    layer: str = ""
    """A `LayerKind` value, or `update`; empty of a link."""
    microbatch_size: int = 0
    """0 of a link, and of an update, which does not depend on it."""
    tp: int = 0

    @property
    def name(self) -> str:
        """In words; equal predictions have equal ones."""
        if not self.layer:
            return self.cause
        size = f" microbatch {self.microbatch_size}" if self.microbatch_size else ""
        return f"{self.cause} {self.layer}{size} tp {self.tp}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskingPlan:
    """A plan, its estimate and what that stands on."""

    plan: Plan
    estimate: Estimate
    parts: PlanParts
    asked: tuple[Asked, ...]
    """In the order of the parts."""
    largest_messages: tuple[tuple[str, float], ...]
    """Of every link, by its cause."""


def asking(
    name: str, plan: Plan, model: ModelSpec, cluster: Cluster, job: Job, predictor: Predictor
) -> AskingPlan:
    """The plan under this name, priced, and everything that its price was asked of."""
    watched = Watched(predictor)
    estimate = estimate_with(Pricer(model, cluster, job, watched), plan)
    found: list[tuple[Asked, Part]] = []
    devices: dict[str, list[CauseSeconds]] = {}
    for each in estimate.causes:
        if is_link(each.cause):
            asked = Asked(cause=each.cause)
            found.append((asked, _part(asked, (each.cause, ""), each.seconds, each.log_halfwidth)))
        else:
            devices.setdefault(each.cause, []).append(each)
    for kind, causes in devices.items():
        found += _device_parts(kind, causes, plan, model, cluster, job, predictor)
    return AskingPlan(
        plan=plan,
        estimate=estimate,
        parts=PlanParts(
            name=name,
            step_seconds=estimate.step_seconds,
            parts=tuple(part for _, part in found),
        ),
        asked=tuple(asked for asked, _ in found),
        largest_messages=tuple(sorted(watched.largest.items())),
    )


def _part(asked: Asked, source: tuple[str, str], seconds: float, log_halfwidth: float) -> Part:
    return Part(asked=asked.name, source=source, seconds=seconds, log_halfwidth=log_halfwidth)


def _device_parts(
    kind: str,
    causes: Sequence[CauseSeconds],
    plan: Plan,
    model: ModelSpec,
    cluster: Cluster,
    job: Job,
    predictor: Predictor,
) -> list[tuple[Asked, Part]]:
    """What the plan asks of one device kind."""
    weights = _weights(kind, plan, model, cluster, job, predictor)
    by_layer = {layer.value for layer in TRAINED_KINDS}
    lump: list[CauseSeconds] = []
    found: list[tuple[Asked, Part]] = []
    for each in causes:
        layer = UPDATE if each.part.endswith(f" {UPDATE}") else each.part
        own = {asked: seconds for asked, seconds in weights.items() if asked.layer == layer}
        if layer in (*by_layer, UPDATE) and own:
            found += _dealt(own, (kind, layer), each.seconds, each.log_halfwidth)
        else:
            lump.append(each)
    if lump and weights:
        whole = math.fsum(each.seconds for each in lump)
        # Classes of operators err independently of each other.
        width = math.hypot(*(each.seconds * each.log_halfwidth for each in lump))
        found += _dealt(weights, (kind, _ALL), whole, width / whole if whole > 0 else 0.0)
    return found


def _dealt(
    weights: dict[Asked, float], source: tuple[str, str], seconds: float, log_halfwidth: float
) -> list[tuple[Asked, Part]]:
    whole = math.fsum(weights.values())
    if whole <= 0 or seconds <= 0:
        return []
    return [
        (asked, _part(asked, source, seconds * weight / whole, log_halfwidth))
        for asked, weight in weights.items()
    ]


def _weights(
    kind: str, plan: Plan, model: ModelSpec, cluster: Cluster, job: Job, predictor: Predictor
) -> dict[Asked, float]:
    """Seconds of a step that this kind spends on each thing, on one rank of each stage."""
    found: dict[Asked, float] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            if _kind(stage, cluster) != kind:
                continue
            for asked, seconds in _stage_weights(
                stage, pipeline.num_microbatches, model, cluster, job, predictor
            ):
                found[asked] = found.get(asked, 0.0) + seconds
    return found


def _kind(stage: Stage, cluster: Cluster) -> str:
    return cluster.island_of_device(stage.replicas[0].devices[0].start).device.kind


def _stage_weights(
    stage: Stage,
    num_microbatches: int,
    model: ModelSpec,
    cluster: Cluster,
    job: Job,
    predictor: Predictor,
) -> list[tuple[Asked, float]]:
    device = cluster.island_of_device(stage.replicas[0].devices[0].start).device
    replica = stage.replicas[0]
    size, tp = replica.microbatch_size, replica.tp
    held = [kind for chunk in stage.chunks for kind in model.layers[chunk.start : chunk.stop]]
    found = []
    for kind in dict.fromkeys(held):
        both = sum(
            predict(
                device,
                model,
                kind,
                microbatch_size=size,
                sequence_length=job.sequence_length,
                tp=tp,
                precision=job.precision,
            ).seconds
            for predict in (predictor.forward, predictor.backward)
        )
        # Layers that predict tokens further ahead are transformer layers to a measurement.
        layer = kind if kind in TRAINED_KINDS else LayerKind.TRANSFORMER
        asked = Asked(cause=device.kind, layer=layer.value, microbatch_size=size, tp=tp)
        found.append((asked, held.count(kind) * num_microbatches * both))
    parameters = float(sum(model.parameters(kind, tp) for kind in held))
    update = predictor.optimizer_update(device, job.optimizer, parameters, job.precision)
    found.append((Asked(cause=device.kind, layer=UPDATE, tp=tp), update.seconds))
    return found
