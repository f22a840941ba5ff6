"""Candidates: what can be measured for a job's best plans, where, for how long, to what effect.

What a measurement leaves of a prediction's interval follows the rules of the fit:

- a kind with fewer than three points of a layer has a prior that each point moves: one more leaves
  what `predict.kinds.related.shift` says;
- a law of more points that has not been checked by leaving hidden sizes out gets checked by all the
  sizes around what is asked for, as one measurement: it leaves what checked laws of this layer
  have; on this device, else on devices of its sort;
- the very layer (kind, microbatch size, tp) is answered by its measurement from then on, unless a
  checked law knows better: what `predict.layer.tables` says, with this kind's usual scatter.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetplan.advice.measurement_order import Leaves, Measurement
from hetplan.advice.plan_sensitivities import UPDATE, PredictionKey
from hetplan.cluster.devices import CPU_KIND
from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job
from hetplan.model.layer_units import own_layer_fault
from hetplan.model.spec import ModelSpec
from hetplan.predict.fit import FittedPredictor
from hetplan.predict.kinds.related import shift
from hetplan.predict.law_parts import MIN_POINTS, OWN_ROWS, UNCHECKED
from hetplan.predict.layer.tables import (
    answers_itself,
    exact_log_halfwidth,
    scatter_log_halfwidth,
)
from hetplan.predict.layer.values import ALL_LAYERS, LayerLaw
from hetplan.predict.predictor import calibrated_cause, link_cause
from hetplan.profiling.grid import job_grid
from hetplan.profiling.measure_layers import Unit, units
from hetplan.profiling.measure_links import MIN_MESSAGE_BYTES, LinkCase, message_sizes
from hetplan.profiling.needs import (
    MAX_BUCKET_BYTES,
    Here,
    LayerNeed,
    LinkPlace,
    layer_need,
    link_need,
    link_places,
)
from hetplan.profiling.samples import LayerSample
from hetplan.profiling.timing import ACCELERATOR_LIMITS, CPU_LIMITS, expected_seconds

# Where no law of the kind was checked anywhere: 90 % of left-out sizes of published layer profiles
# lie within it (`predict.layer.tables`: 4.4 % mean error of a law over all sizes, times 2.06, the
# ratio of the 90 % quantile to the mean of a half-normal).
TYPICAL_LOG_HALFWIDTH = 0.09
CPU_TYPICAL_LOG_HALFWIDTH = 0.33  # laws of transformer layers of profiles/cpu: .32 and .34
LINK_START_SECONDS = 10.0  # each rank's program imports torch: 6 to 8 s on two cores
_UNKNOWN_SECONDS = 0.01  # of one pass on a kind of which nothing is known: nearly all is warm-up


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Measurement):
    """One thing to measure: a unit of layers, or a link."""

    kinds: tuple[str, ...]
    """Device kinds that it needs."""
    units: tuple[Unit, ...] = ()
    """Layers, cheapest first."""
    place: LinkPlace | None = None
    sizes: tuple[int, ...] = ()
    """Message sizes of a link, in bytes."""
    missing: tuple[LinkCase, ...] = ()
    here: bool = False
    """Whether this machine can measure it."""
    why_not: str = ""
    """Why this machine cannot measure it although it has the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanNeeds:
    """Everything that the near-best plans ask, and what of it is held."""

    model: ModelSpec
    cluster: Cluster
    job: Job
    predictor: FittedPredictor
    asked: tuple[PredictionKey, ...]
    largest_messages: Mapping[str, float]
    """Bytes of the largest message of every link, by its cause."""
    log_halfwidths: Mapping[str, float]
    """Half-width of every prediction, by its name."""
    layers: tuple[LayerSample, ...]
    """Samples that count as measured."""
    links: tuple[tuple[str, LinkCase], ...]
    """Link name and case of those that count as measured."""


def candidates(needs: PlanNeeds, here: Here, devices_here: int) -> tuple[Candidate, ...]:
    """Everything that could be measured for these plans and is not held."""
    result: list[Candidate] = []
    if not own_layer_fault(needs.model):
        for kind in dict.fromkeys(each.cause for each in needs.asked if each.layer):
            result += _layers(needs, kind, here.is_kind(kind))
    result += _links(needs, here, devices_here)
    return tuple(result)


def first_units(
    model: ModelSpec,
    job: Job,
    degrees: Sequence[int],
    held: Collection[tuple[object, ...]],
    shapes: Callable[[Unit], Collection[tuple[object, ...]]],
) -> tuple[Unit, ...]:
    """What a kind without datasheet figures needs before anything can be predicted on it.

    Every kind of layer at the two smallest microbatch sizes and every one of these degrees;
    cheapest first, those left out that are held.
    """
    sizes = _grid_sizes(model, job)[:2]
    grid = job_grid(model, job, tp_degrees=degrees, microbatch_sizes=sizes, neighbours=False)
    return tuple(unit for unit in units(grid) if not set(shapes(unit)) <= set(held))


def _grid_sizes(model: ModelSpec, job: Job) -> tuple[int, ...]:
    points = job_grid(model, job, tp_degrees=(1,) if job.pin.tp is None else (), neighbours=False)
    return tuple(sorted({point.microbatch_size for point in points}))


def _layers(needs: PlanNeeds, kind: str, here: bool) -> Iterator[Candidate]:
    """What is missing of one device kind: the very layers first, then laws checked as a whole."""
    asked = [each for each in needs.asked if each.cause == kind and each.layer]
    degrees = sorted({each.tp for each in asked})
    sizes = {each.microbatch_size for each in asked if each.microbatch_size}
    grid = job_grid(
        needs.model,
        needs.job,
        tp_degrees=degrees,
        microbatch_sizes=sorted({*sizes, *_grid_sizes(needs.model, needs.job)[:2]}),
    )
    devices = (island.device for island in needs.cluster.islands)
    device = next((device for device in devices if device.kind == kind), None)
    every = units(grid)
    for layer in dict.fromkeys(each.layer for each in asked):
        alike = [unit for unit in every if unit.kind.value == layer]
        need = layer_need(kind, device, alike, needs.layers)
        own = [
            unit for unit in need.missing if unit.point.model.hidden_size == needs.model.hidden_size
        ]
        for unit in own:
            one = layer_need(kind, device, (unit,), needs.layers)
            name = f"{kind} {unit}"
            yield from _candidate(needs, asked, kind, name, one, here)
        if len(need.missing) > 1:
            name = f"{kind} {layer} around these sizes, {len(need.missing)} shapes"
            yield from _candidate(needs, asked, kind, name, need, here)


def _candidate(
    needs: PlanNeeds,
    asked: Sequence[PredictionKey],
    kind: str,
    name: str,
    need: LayerNeed,
    here: bool,
) -> Iterator[Candidate]:
    leaves = tuple(_leaves(needs, asked, need.missing, kind))
    if leaves:
        yield Candidate(
            name=name,
            seconds=_expected(need, kind),
            leaves=leaves,
            kinds=(kind,),
            units=need.missing,
            here=here,
        )


def _expected(need: LayerNeed, kind: str) -> float:
    if need.seconds is not None:
        return need.seconds
    limits = CPU_LIMITS if kind == CPU_KIND else ACCELERATOR_LIMITS
    return len(need.missing) * expected_seconds(limits, _UNKNOWN_SECONDS)


def _leaves(
    needs: PlanNeeds, asked: Sequence[PredictionKey], measured: Sequence[Unit], kind: str
) -> Iterator[Leaves]:
    """What these units leave of everything that is asked of their device."""
    predictor, precision = needs.predictor, needs.job.precision.value
    layers = {unit.kind.value for unit in measured}
    points = {
        (unit.kind.value, unit.point.microbatch_size, unit.point.tp)
        for unit in measured
        if unit.point.model.hidden_size == needs.model.hidden_size
    }
    updated = {unit.point.tp for unit in measured if unit.with_updates}
    whole = len({unit.point.model.hidden_size for unit in measured}) > 1
    for each in asked:
        layer = ALL_LAYERS if each.layer == UPDATE else each.layer
        least = typical_log_halfwidth(predictor, kind, layer)
        law = next(iter(laws_of(predictor, kind, layer, precision)), None)
        if each.layer == UPDATE:
            if each.tp in updated:
                yield Leaves(asked=each.name, least_log_halfwidth=least)
            continue
        if each.layer not in layers:
            continue
        checked = whole and not (law is not None and _is_mature(law))
        if (each.layer, each.microbatch_size, each.tp) in points:
            inside = least if checked else _inside(law)
            own = exact_log_halfwidth(kind, _scatter(needs, kind, layer), inside)
            trusted = checked or (law is not None and UNCHECKED not in law.calibration)
            left = own if answers_itself(own, inside, checked=trusted) else inside
            yield Leaves(asked=each.name, least_log_halfwidth=left)
        elif checked:
            yield Leaves(asked=each.name, least_log_halfwidth=least)
        elif law is None or law.points < MIN_POINTS:
            yield _few(needs, each, 0 if law is None else law.points, least)


def _inside(law: LayerLaw | None) -> float:
    """Half-width of a law between what was measured."""
    if law is None:
        return math.inf
    return min(law.log_halfwidth, law.table_log_halfwidth) if law.tables else law.log_halfwidth


def _scatter(needs: PlanNeeds, kind: str, layer: str) -> float:
    """Scatter that a row of this layer will have: the median of its rows, else of the kind's."""
    rows = [sample for sample in needs.layers if sample.device == kind]
    same = [sample for sample in rows if sample.layer == layer]
    widths = [scatter_log_halfwidth(sample) for sample in same or rows]
    return statistics.median(widths) if widths else 0.0


def _few(needs: PlanNeeds, asked: PredictionKey, points: int, least: float) -> Leaves:
    """What one more of few points leaves: the part that each size has of its own stays."""
    now, then, at_best = (_after_points(count) for count in (points, points + 1, _MANY))
    stays = needs.log_halfwidths.get(asked.name, 0.0) * at_best / now
    return Leaves(asked=asked.name, least_log_halfwidth=max(least, stays), factor=then / now)


_MANY = 1000  # points, of which more change nothing: the part of each size by itself is left


def _after_points(points: int) -> float:
    """Part of a prior's half-width that so many measured points leave for another size."""
    return shift([0.0] * points, 1.0).log_halfwidth


def laws_of(
    predictor: FittedPredictor, kind: str, layer: str, precision: str
) -> tuple[LayerLaw, ...]:
    """The laws of both passes of a layer on this kind, the wider one first."""
    laws = [
        law
        for law in predictor.laws.layers
        if (law.device, law.layer, law.precision) == (kind, layer, precision)
    ]
    return tuple(sorted(laws, key=lambda law: -law.log_halfwidth))


def _is_mature(law: LayerLaw) -> bool:
    """Whether own rows checked it on whole hidden sizes: more rows do not make it narrower."""
    return law.calibration == OWN_ROWS and law.validation.left_out in ("hidden", "parameters")


def typical_log_halfwidth(predictor: FittedPredictor, kind: str, layer: str) -> float:
    """What a measurement leaves: the half-width of mature laws of this layer.

    Of this kind, else of other kinds of its sort (accelerators' times repeat better than CPUs').
    """
    mature = [
        law
        for law in predictor.laws.layers
        if law.layer == layer and _is_mature(law) and (law.device == CPU_KIND) == (kind == CPU_KIND)
    ]
    own = [law for law in mature if law.device == kind]
    widths = [_inside(law) for law in own or mature]
    if widths:
        return statistics.median(widths)
    return CPU_TYPICAL_LOG_HALFWIDTH if kind == CPU_KIND else TYPICAL_LOG_HALFWIDTH


def _links(needs: PlanNeeds, here: Here, devices_here: int) -> Iterator[Candidate]:
    """Links that the plans use, each with every message size up to the largest asked for."""
    causes = {each.cause for each in needs.asked if not each.layer}
    for place in link_places(needs.cluster):
        name = link_cause(place.link)
        used = sorted(
            cause for cause in causes if calibrated_cause(cause) == calibrated_cause(name)
        )
        if not used:
            continue
        largest = max(round(needs.largest_messages.get(each, 0.0)) for each in used)
        sizes = message_sizes(min(MAX_BUCKET_BYTES, max(MIN_MESSAGE_BYTES, largest)))
        held = {key for link, key in needs.links if link == place.name}
        need = link_need(place, sizes, held)
        if not need.missing:
            continue
        devices = place.nodes == 1 and all(map(here.is_kind, place.kinds))
        enough = place.processes_per_node <= devices_here
        why = ""
        if devices and not place.is_named:
            why = f"the cluster file names no samples for it: write `samples: {place.name}` there"
        elif devices and not enough:
            why = f"it needs {place.processes_per_node} devices, this machine has {devices_here}"
        yield Candidate(
            name=f"link {place.name} ({place.words})",
            seconds=LINK_START_SECONDS + need.seconds,
            leaves=tuple(
                Leaves(asked=each, least_log_halfwidth=_typical_link(needs.predictor))
                for each in used
            ),
            kinds=place.kinds,
            place=place,
            sizes=sizes,
            missing=need.missing,
            here=devices and enough and place.is_named,
            why_not=why,
        )


def _typical_link(predictor: FittedPredictor) -> float:
    widths = [
        table.log_halfwidth
        for law in predictor.laws.links
        for table in law.tables
        if table.calibration == OWN_ROWS
    ]
    return statistics.median(widths) if widths else TYPICAL_LOG_HALFWIDTH
