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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetplan.advice.measurement_order import Part, PlanParts
from hetplan.cost.estimate import estimate_with
from hetplan.cost.estimate_values import CauseSeconds, Estimate
from hetplan.cost.step_model.plan import StageWork
from hetplan.cost.step_model.pricer import Pricer
from hetplan.cost.terms import compute_seconds
from hetplan.model.spec import TRAINED_KINDS, LayerKind
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Predictor, is_link
from hetplan.search.result import Question
from hetplan.search.space.forwarding_predictor import RecordingPredictor

UPDATE = "update"
_ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionKey:
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
class PlanSensitivities(PlanParts):
    """A plan, its estimate and what that stands on."""

    plan: Plan
    estimate: Estimate
    asked: tuple[PredictionKey, ...]
    """In the order of the parts."""
    largest_messages: Mapping[str, float]
    """Bytes of the largest message of every link, by its cause."""


_Weights = dict[PredictionKey, float]
"""Seconds of a step that one device kind spends on each thing, on one rank of each stage."""


def plan_sensitivities(
    name: str, plan: Plan, question: Question, predictor: Predictor
) -> PlanSensitivities:
    """The plan under this name, priced, and everything that its price was asked of."""
    watched = RecordingPredictor(predictor)
    pricer = Pricer(question.model, question.cluster, question.job, watched)
    estimate = estimate_with(pricer, plan)
    parts: list[tuple[PredictionKey, Part]] = []
    devices: dict[str, list[CauseSeconds]] = {}
    for each in estimate.causes:
        if is_link(each.cause):
            link = {PredictionKey(cause=each.cause): 1.0}
            parts += _dealt(link, (each.cause, ""), each.seconds, each.log_halfwidth)
        else:
            devices.setdefault(each.cause, []).append(each)
    weights = _weights(plan, pricer)
    for kind, causes in devices.items():
        own = {asked: seconds for asked, seconds in weights.items() if asked.cause == kind}
        parts += _device_parts(kind, causes, own)
    return PlanSensitivities(
        name=name,
        step_seconds=estimate.step_seconds,
        parts=tuple(part for _, part in parts),
        plan=plan,
        estimate=estimate,
        asked=tuple(asked for asked, _ in parts),
        largest_messages=dict(sorted(watched.largest.items())),
    )


def _device_parts(
    kind: str, causes: Sequence[CauseSeconds], weights: _Weights
) -> list[tuple[PredictionKey, Part]]:
    """What the plan asks of one device kind."""
    by_layer = {layer.value for layer in TRAINED_KINDS}
    lump: list[CauseSeconds] = []
    parts: list[tuple[PredictionKey, Part]] = []
    for each in causes:
        layer = UPDATE if each.part.endswith(f" {UPDATE}") else each.part
        own = {asked: seconds for asked, seconds in weights.items() if asked.layer == layer}
        if layer in (*by_layer, UPDATE) and own:
            parts += _dealt(own, (kind, layer), each.seconds, each.log_halfwidth)
        else:
            lump.append(each)
    if lump and weights:
        whole = math.fsum(each.seconds for each in lump)
        # Classes of operators err independently of each other.
        width = math.hypot(*(each.seconds * each.log_halfwidth for each in lump))
        parts += _dealt(weights, (kind, _ALL), whole, width / whole if whole > 0 else 0.0)
    return parts


def _dealt(
    weights: _Weights, source: tuple[str, str], seconds: float, log_halfwidth: float
) -> list[tuple[PredictionKey, Part]]:
    """These seconds as parts of one source, by the weights."""
    whole = math.fsum(weights.values())
    if whole <= 0 or seconds <= 0:
        return []
    return [
        (
            asked,
            Part(
                asked=asked.name,
                source=source,
                seconds=seconds * weight / whole,
                log_halfwidth=log_halfwidth,
            ),
        )
        for asked, weight in weights.items()
    ]


def _weights(plan: Plan, pricer: Pricer) -> _Weights:
    """Everything that the plan computes, each prediction once."""
    weights: _Weights = {}
    for work in pricer.costs(plan).work(plan):
        for stage in work.stages:
            for asked, seconds in (
                *_layer_weights(stage, work.pipeline.num_microbatches),
                _update_weight(stage, plan, pricer),
            ):
                weights[asked] = weights.get(asked, 0.0) + seconds
    return weights


def _layer_weights(
    stage: StageWork, num_microbatches: int
) -> Iterator[tuple[PredictionKey, float]]:
    """Seconds that the passes of each layer of a stage compute, as the estimate prices them."""
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
            asked = PredictionKey(
                cause=unit.island.device.kind,
                layer=layer.value,
                microbatch_size=replica.microbatch_size,
                tp=replica.tp,
            )
            yield asked, num_microbatches * compute_seconds(parts)


def _update_weight(stage: StageWork, plan: Plan, pricer: Pricer) -> tuple[PredictionKey, float]:
    device, job = stage.unit.island.device, pricer.job
    parameters = (stage.parameters + stage.expert_parameters) / plan.optimizer_shards
    update = pricer.predictor.optimizer_update(device, job.optimizer, parameters, job.precision)
    asked = PredictionKey(cause=device.kind, layer=UPDATE, tp=stage.unit.replica.tp)
    return asked, update.seconds
