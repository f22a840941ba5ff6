"""What one law of an operator answers for one launch: a measured shape, else its terms.

A law's floor is the host's and is given apart: a row of launches hides it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hetplan.model.operators import (
    PRODUCTS,
    WEIGHT_GRADIENT,
    Operator,
    OperatorClass,
    operator_flops,
)
from hetplan.predict.law_parts import outside
from hetplan.predict.operator_columns import column_value, range_values
from hetplan.predict.operator_values import MeasuredShape, OperatorColumn, OperatorLaw
from hetplan.predict.residual import Point, point_of, residual

# The same shape measured twice on B200 (SimuMax's tables, 58 shapes): 90 % of |log ratio| below
# 0.07.
LOOKED_UP_LOG_HALFWIDTH = 0.07
ABOVE_FLOOR = 1.15
"""Times up to this much above a floor may show the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch of an operator, or two that stand for it."""

    operator: str
    work_seconds: float
    """Of the device, without its cost of the launch."""
    launch_seconds: float = 0.0
    """What the launch costs the device."""
    floor_seconds: float = 0.0
    """Least time that the host needs."""
    log_halfwidth: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A law with what it is asked for most often at hand."""

    law: OperatorLaw
    terms: tuple[tuple[str, float], ...]
    launch: float
    shapes: dict[tuple[int, int, int, int, str], float]
    points: tuple[Point, ...]
    residuals: tuple[float, ...]


def alone(ready: Ready, each: MeasuredShape) -> float:
    """Seconds of a measured shape by the law's terms."""
    op = _shape_operator(ready.law, each)
    return ready.launch + _work(ready.law, ready.terms, op, ready.law.phase)


def ready_of(law: OperatorLaw) -> Ready:
    """The law with its look-ups built."""
    terms = tuple((term.column, term.coefficient) for term in law.terms)
    launch = sum(value for column, value in terms if column == OperatorColumn.LAUNCHES)
    work = tuple((column, value) for column, value in terms if column != OperatorColumn.LAUNCHES)
    shapes = {
        (each.batch, each.m, each.n, each.k, each.output_precision): each.seconds
        for each in law.shapes
    }
    points: tuple[Point, ...] = ()
    residuals: tuple[float, ...] = ()
    if law.residual is not None:
        points, residuals = _residuals(law, work, launch)
    return Ready(
        law=law, terms=work, launch=launch, shapes=shapes, points=points, residuals=residuals
    )


def _residuals(
    law: OperatorLaw, work: tuple[tuple[str, float], ...], launch: float
) -> tuple[tuple[Point, ...], tuple[float, ...]]:
    points, residuals = [], []
    for each in law.shapes:
        if each.seconds <= law.floor_seconds:
            continue
        op = _shape_operator(law, each)
        seconds = launch + _work(law, work, op, law.phase, each.output_precision)
        if seconds > 0:
            points.append(point_of(each.batch, each.m, each.n, each.k))
            residuals.append(math.log(each.seconds / seconds))
    return tuple(points), tuple(residuals)


def _shape_operator(law: OperatorLaw, each: MeasuredShape) -> Operator:
    return Operator(
        operator=OperatorClass(law.operator),
        what="sample",
        batch=each.batch,
        m=each.m,
        n=each.n,
        k=each.k,
    )


def _work(
    law: OperatorLaw,
    terms: tuple[tuple[str, float], ...],
    op: Operator,
    phase: str,
    output_precision: str = "",
) -> float:
    return sum(
        value
        * column_value(column, op, phase, law.precision, output_precision, law.multiprocessors)
        for column, value in terms
        if value > 0
    )


def by_law(
    ready: Ready, op: Operator, phase: str, precision: str, *, looked_up: bool = True
) -> Launch:
    """By the law's shapes where they hold this one, else by its terms."""
    law = ready.law
    # Sums of weights' gradients are kept in float32 by every trainer that is planned for.
    output = "float32" if phase == WEIGHT_GRADIENT else precision
    if looked_up and ready.shapes:
        seconds = _look_up(ready, op, phase, output)
        # Times on the floor show the host.
        if seconds is not None and seconds > law.floor_seconds * ABOVE_FLOOR:
            return Launch(
                operator=op.operator,
                work_seconds=max(0.0, seconds - ready.launch),
                launch_seconds=min(ready.launch, seconds),
                floor_seconds=law.floor_seconds,
                log_halfwidth=min(LOOKED_UP_LOG_HALFWIDTH, law.log_halfwidth),
            )
    of_law = phase if law.operator == op.operator else law.phase
    work = _work(law, ready.terms, op, of_law, output if op.operator in PRODUCTS else "")
    if ready.points:
        near = residual(
            point_of(op.batch, op.m, op.n, op.k),
            ready.points,
            ready.residuals,
            law.residual.doublings if law.residual is not None else 1.0,
        )
        work = max(0.0, (work + ready.launch) * math.exp(near) - ready.launch)
    if law.sustained_flops_per_second:
        work = max(work, operator_flops(op, of_law) / law.sustained_flops_per_second)
    values = tuple(value for _, value in range_values(op, of_law))
    halfwidth, warnings = outside(law.ranges, values, law.halfwidth_at(work + ready.launch))
    return Launch(
        operator=op.operator,
        work_seconds=work,
        launch_seconds=ready.launch,
        floor_seconds=law.floor_seconds,
        log_halfwidth=halfwidth,
        notes=warnings,
    )


def _look_up(ready: Ready, op: Operator, phase: str, output: str) -> float | None:
    keys = [(op.batch, op.m, op.n, op.k)]
    if phase == WEIGHT_GRADIENT:
        keys.append((op.batch, op.n, op.m, op.k))  # the same product, its result transposed
    for key in keys:
        found = ready.shapes.get((*key, output))
        if found is not None:
            return found
    return None


def changed(launch: Launch, note: str, *, factor: float = 1.0, least: float = 0.0) -> Launch:
    """The launch with its time times a factor and a note that says so."""
    return replace(
        launch,
        work_seconds=launch.work_seconds * factor,
        log_halfwidth=max(launch.log_halfwidth, least),
        notes=(*launch.notes, note),
    )


def words(name: str) -> str:
    """Name of a class or pass, for people."""
    return str(name).replace("_", " ")
