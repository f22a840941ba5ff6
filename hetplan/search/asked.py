"""Which predictions a plan's step stands on, and how many of its seconds each says.

Times on a device are asked for by kind of layer, microbatch size and tp (forward and backward are
measured together, so they are one); the update of the weights by tp; links by their cause. Seconds
are the causes of an estimate (`Estimate.causes`), waits included. Where a device's time is one
cause for all its layers (datasheet figures), or goes by classes of operators, it is dealt out to
the layers by the seconds that the estimate itself gives them on the slowest replica of each stage,
which the others wait for, and stays one source of errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate import estimate_with
from hetplan.cost.estimate_values import CauseSeconds, Estimate
from hetplan.cost.step_model.pricer import Pricer
from hetplan.cost.step_model.values import compute_seconds
from hetplan.cost.step_model.work import StageWork
from hetplan.job.spec import Job
from hetplan.model.spec import TRAINED_KINDS, LayerKind, ModelSpec
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Predictor, is_link
from hetplan.search.forwarding_predictor import Recording
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weight:
    """Seconds of a step that one device kind spends on one thing, on one rank of each stage."""

    asked: Asked
    seconds: float


def asking(
    name: str, plan: Plan, model: ModelSpec, cluster: Cluster, job: Job, predictor: Predictor
) -> AskingPlan:
    """The plan under this name, priced, and everything that its price was asked of."""
    watched = Recording(predictor)
    pricer = Pricer(model, cluster, job, watched)
    estimate = estimate_with(pricer, plan)
    found: list[tuple[Asked, Part]] = []
    devices: dict[str, list[CauseSeconds]] = {}
    for each in estimate.causes:
        if is_link(each.cause):
            asked = Asked(cause=each.cause)
            found.append((asked, _part(asked, (each.cause, ""), each.seconds, each.log_halfwidth)))
        else:
            devices.setdefault(each.cause, []).append(each)
    weights = _weights(plan, pricer)
    for kind, causes in devices.items():
        found += _device_parts(kind, causes, [w for w in weights if w.asked.cause == kind])
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
    kind: str, causes: Sequence[CauseSeconds], weights: Sequence[_Weight]
) -> list[tuple[Asked, Part]]:
    """What the plan asks of one device kind."""
    by_layer = {layer.value for layer in TRAINED_KINDS}
    lump: list[CauseSeconds] = []
    found: list[tuple[Asked, Part]] = []
    for each in causes:
        layer = UPDATE if each.part.endswith(f" {UPDATE}") else each.part
        own = [weight for weight in weights if weight.asked.layer == layer]
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
    weights: Sequence[_Weight], source: tuple[str, str], seconds: float, log_halfwidth: float
) -> list[tuple[Asked, Part]]:
    whole = math.fsum(each.seconds for each in weights)
    if whole <= 0 or seconds <= 0:
        return []
    return [
        (each.asked, _part(each.asked, source, seconds * each.seconds / whole, log_halfwidth))
        for each in weights
    ]


def _weights(plan: Plan, pricer: Pricer) -> tuple[_Weight, ...]:
    """Everything that the plan computes, each prediction once."""
    found: dict[Asked, float] = {}
    for work in pricer.costs(plan).work(plan):
        for stage in work.stages:
            for each in (
                *_layer_weights(stage, work.pipeline.num_microbatches),
                _update_weight(stage, plan, pricer),
            ):
                found[each.asked] = found.get(each.asked, 0.0) + each.seconds
    return tuple(_Weight(asked=asked, seconds=seconds) for asked, seconds in found.items())


def _layer_weights(stage: StageWork, num_microbatches: int) -> Iterator[_Weight]:
    """Of each layer of a stage what its passes compute, as the estimate prices them."""
    unit = stage.unit
    kinds, replica = unit.settings.model.layers, unit.replica
    for start, stop in stage.ranges:
        first, last = unit.repeated_range(start, stop)
        for position in range(start, stop):
            cost, kind = unit.costs[unit.kind_at[position]], kinds[position]
            parts = (*cost.forward, *cost.backward)
            if first <= position < last:
                parts = (*parts, *cost.again)
            # Layers that predict tokens further ahead are transformer layers to a measurement.
            layer = kind if kind in TRAINED_KINDS else LayerKind.TRANSFORMER
            asked = Asked(
                cause=unit.island.device.kind,
                layer=layer.value,
                microbatch_size=replica.microbatch_size,
                tp=replica.tp,
            )
            yield _Weight(asked=asked, seconds=num_microbatches * compute_seconds(parts))


def _update_weight(stage: StageWork, plan: Plan, pricer: Pricer) -> _Weight:
    device, job = stage.unit.island.device, pricer.job
    parameters = (stage.parameters + stage.expert_parameters) / plan.optimizer_shards
    update = pricer.predictor.optimizer_update(device, job.optimizer, parameters, job.precision)
    asked = Asked(cause=device.kind, layer=UPDATE, tp=stage.unit.replica.tp)
    return _Weight(asked=asked, seconds=update.seconds)
