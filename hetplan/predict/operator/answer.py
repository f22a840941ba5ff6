"""What one operator takes on one device: a measured shape, else its law, else a stand-in.

    measured shape   of exactly these sizes, pass and output format
    law              of this class and pass, with the learned residual where it has one
    stand-in         another class or pass of the same device that does alike work; says so

Everything is the device's own time; floors (the host's) are given apart, because the launches of a
row of operators hide behind the work of the one before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hetplan.model.operators import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    PRODUCTS,
    WEIGHT_GRADIENT,
    WITH_WEIGHTS,
    Operator,
    OperatorClass,
    operator_flops,
)
from hetplan.predict.datasheet import ELEMENTWISE_LOG_HALFWIDTH, MATRIX_LOG_HALFWIDTH
from hetplan.predict.law_parts import outside
from hetplan.predict.operator.values import (
    OperatorColumn,
    OperatorLaw,
    Point,
    column_value,
    point_of,
    range_values,
    residual,
)

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
    """The device's time, without its cost of the launch."""
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


def ready_of(law: OperatorLaw) -> Ready:
    """The law with its look-ups built."""
    terms = tuple((term.column, term.coefficient) for term in law.terms)
    launch = sum(value for column, value in terms if column == OperatorColumn.LAUNCHES)
    work = tuple((column, value) for column, value in terms if column != OperatorColumn.LAUNCHES)
    shapes = {
        (each.batch, each.m, each.n, each.k, each.output_precision): each.seconds
        for each in law.shapes
    }
    points, residuals = [], []
    for shape in law.shapes if law.residual is not None else ():
        seconds = law.sum_of_columns(shape.operator(law.operator), shape.output_precision)
        if shape.seconds > law.floor_seconds and seconds > 0:
            points.append(point_of(shape.batch, shape.m, shape.n, shape.k))
            residuals.append(math.log(shape.seconds / seconds))
    return Ready(
        law=law,
        terms=work,
        launch=launch,
        shapes=shapes,
        points=tuple(points),
        residuals=tuple(residuals),
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
    """One launch by the law's measured shape, else by its terms."""
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
        seconds = ready.shapes.get((*key, output))
        if seconds is not None:
            return seconds
    return None


def changed(launch: Launch, note: str, *, factor: float = 1.0, least: float = 0.0) -> Launch:
    """The launch with its time times a factor, at least so wide, and a note that says so."""
    return replace(
        launch,
        work_seconds=launch.work_seconds * factor,
        log_halfwidth=max(launch.log_halfwidth, least),
        notes=(*launch.notes, note),
    )


def words(name: str) -> str:
    """Name of a class or pass, for people."""
    return str(name).replace("_", " ")


# Gradient of the weights, written in 16 bit, over the forward product of equal operations: median
# of 82 shapes measured both ways on B200 (SimuMax's tables). Sums kept in float32 (1.05 to 1.07
# there) are memory traffic that `hetplan.cost` counts apart.
WEIGHT_GRADIENT_OVER_FORWARD = 1.02
# The same shapes, and 61 of A100-PCIe and 144 of B200 for input gradients: 90 % of the time lies
# within .03 (A100-PCIe) and .09 (B200) of the rule; of single shapes, most of them short, 90 %
# within .13 and .24.
DERIVED_LOG_HALFWIDTH = 0.09
"""Least half-width of a product that is derived from another pass of its class."""
# A fused causal kernel does half of the square's operations, at about half of the rate of plain
# products: counted as the full square it runs at the rate of the unfused scores and context (335
# against 292 to 344 TFLOP/s forward, 250 against 202 to 229 backward, on A100). Rates of single
# shapes lie within a third.
FUSED_FROM_UNFUSED_LOG_HALFWIDTH = 0.3


@dataclass(frozen=True, slots=True)
class DeviceOperators:
    """Every operator law of one device and precision."""

    precision: str
    _laws: dict[tuple[str, str], Ready] = field(repr=False)
    kept: dict[object, DeviceOperators] = field(default_factory=dict, repr=False, compare=False)
    """Cache of changed copies of these laws (`predict.layer.float8`)."""

    @property
    def laws(self) -> Iterator[OperatorLaw]:
        """What it answers by."""
        return (ready.law for ready in self._laws.values())

    def has(self, operator: str, phase: str) -> bool:
        """Whether there is a law of this class and pass."""
        return (operator, phase) in self._laws

    def launches(
        self, op: Operator, *, backward: bool, lent: Callable[[], DeviceOperators | None]
    ) -> Sequence[Launch] | None:
        """The launches of one pass of this operator; None where nothing here stands for it.

        Of a class that was not measured on this device laws that other kinds lend it come before
        stand-ins of its own, but for the passes of products with weights, which are alike.
        """
        kind = op.operator
        phase = BACKWARD if backward else FORWARD
        if kind not in WITH_WEIGHTS:
            if not self.has(kind, phase):
                others = lent()
                if others is not None and (others.has(kind, phase) or not self._stands_in(kind)):
                    note = f"{words(kind)} not measured here: by laws of other kinds of device"
                    return tuple(changed(each, note) for each in others._one(op, phase) or ())
            return self._one(op, phase)
        if not backward or self.has(kind, BACKWARD):
            return self._one(op, phase)
        of_input = Operator(operator=kind, what=op.what, batch=op.batch, m=op.m, n=op.k, k=op.n)
        of_weight = Operator(operator=kind, what=op.what, batch=op.batch, m=op.n, n=op.k, k=op.m)
        first = self._one(of_input, INPUT_GRADIENT)
        second = self._one(of_weight, WEIGHT_GRADIENT)
        return None if first is None or second is None else (*first, *second)

    def _stands_in(self, kind: str) -> bool:
        """Whether anything of this device can stand for a class that was not measured."""
        return kind in PRODUCTS or self.pass_rate(FORWARD) is not None

    def _one(self, op: Operator, phase: str) -> tuple[Launch, ...] | None:
        ready = self._laws.get((op.operator, phase))
        if ready is not None:
            return (by_law(ready, op, phase, self.precision),)
        stand_in = self._stand_in(op, phase)
        return None if stand_in is None else (stand_in,)

    def _stand_in(self, op: Operator, phase: str) -> Launch | None:
        kind = op.operator
        if kind is OperatorClass.FUSED_ATTENTION:
            return self._fused_from_unfused(op, phase)
        if kind not in PRODUCTS:
            return self._memory_pass(op, phase)
        if phase == BACKWARD:
            # Two products of the forward's size.
            forward = self._one(op, FORWARD)
            if forward is None:
                return None
            note = f"{words(kind)} backward not measured: as two forward products"
            return changed(forward[0], note, factor=2.0, least=DERIVED_LOG_HALFWIDTH)
        for other, other_phase, factor in (
            (kind, FORWARD, WEIGHT_GRADIENT_OVER_FORWARD if phase == WEIGHT_GRADIENT else 1.0),
            (OperatorClass.MATRIX_PRODUCT, phase, 1.0),
            (OperatorClass.MATRIX_PRODUCT, FORWARD, WEIGHT_GRADIENT_OVER_FORWARD),
        ):
            ready = self._laws.get((other, other_phase))
            if ready is not None:
                least = DERIVED_LOG_HALFWIDTH if other is kind else MATRIX_LOG_HALFWIDTH
                if phase != FORWARD:
                    ready = self._product_alone(ready)
                launch = by_law(ready, op, other_phase, self.precision, looked_up=False)
                note = f"{words(kind)} {words(phase)} not measured: from {words(other)} forward"
                return changed(launch, note, factor=factor, least=least)
        return None

    def _product_alone(self, ready: Ready) -> Ready:
        """The law without what writes its result more slowly than other passes write.

        A profiler's forward operator may hold passes beside its product (a bias, a split of its
        result); the products of the backward pass have none.
        """
        rate = self.pass_rate(BACKWARD) or self.pass_rate(FORWARD)
        if rate is None:
            return ready
        terms = tuple(
            (column, min(value, rate) if column == OperatorColumn.OUTPUT_BYTES else value)
            for column, value in ready.terms
        )
        return replace(ready, terms=terms)

    def _fused_from_unfused(self, op: Operator, phase: str) -> Launch | None:
        """Operations of the full square at the rate of the unfused products."""
        rates = [
            coefficient
            for kind in (OperatorClass.ATTENTION_SCORE, OperatorClass.ATTENTION_CONTEXT)
            for column, coefficient in self._terms(kind, phase)
            if column in _OPERATIONS and coefficient > 0
        ]
        if not rates:
            rates = [
                coefficient
                for column, coefficient in self._terms(OperatorClass.MATRIX_PRODUCT, FORWARD)
                if column in _OPERATIONS and coefficient > 0
            ]
        if not rates:
            return None
        return Launch(
            operator=op.operator,
            work_seconds=operator_flops(op, phase) * sum(rates) / len(rates),
            log_halfwidth=FUSED_FROM_UNFUSED_LOG_HALFWIDTH,
            notes=("fused attention not measured: from products over the full square",),
        )

    def _memory_pass(self, op: Operator, phase: str) -> Launch | None:
        """Least bytes at the median rate of the passes over memory that were measured."""
        phase = FORWARD if phase == FORWARD else BACKWARD
        rate = self.pass_rate(phase)
        if rate is None:
            return None
        moved = column_value(OperatorColumn.BYTES, op, phase, self.precision)
        note = f"{words(op.operator)} not measured: at the rate of other passes over memory"
        return Launch(
            operator=op.operator,
            work_seconds=moved * rate,
            log_halfwidth=ELEMENTWISE_LOG_HALFWIDTH,
            notes=(note,),
        )

    def pass_rate(self, phase: str) -> float | None:
        """Median seconds per byte of the plain passes over memory that were measured."""
        rates = sorted(
            coefficient
            for (kind, other), ready in self._laws.items()
            if kind not in _UNLIKE_PASSES and other == phase
            for column, coefficient in ready.terms
            if column == OperatorColumn.BYTES and coefficient > 0
        )
        return rates[len(rates) // 2] if rates else None

    def _terms(self, kind: str, phase: str) -> tuple[tuple[str, float], ...]:
        ready = self._laws.get((kind, phase))
        return () if ready is None else ready.terms


_OPERATIONS = frozenset({OperatorColumn.FLOPS, OperatorColumn.TILED_FLOPS})

# Look-ups jump in memory, and updates and losses mix formats: no measure of a plain pass.
_UNLIKE_PASSES = frozenset(
    {*PRODUCTS, OperatorClass.EMBEDDING, OperatorClass.LOSS, OperatorClass.OPTIMIZER}
)


def index_operators(
    laws: Iterable[OperatorLaw],
) -> dict[tuple[str, str], DeviceOperators]:
    """Laws by device and precision."""
    by_device: dict[tuple[str, str], dict[tuple[str, str], Ready]] = {}
    for law in laws:
        phase = law.phase
        if law.operator == OperatorClass.LOSS and phase == INPUT_GRADIENT:
            phase = BACKWARD  # what a loss's own backward pass is; its product stands apart
        here = by_device.setdefault((law.device, law.precision), {})
        here[law.operator, phase] = ready_of(law)
    return {key: DeviceOperators(key[1], _like_forward(here)) for key, here in by_device.items()}


def _like_forward(laws: dict[tuple[str, str], Ready]) -> dict[tuple[str, str], Ready]:
    """The laws, without those of input gradients that no real gradient follows.

    A product of constant numbers switches fewer transistors than one of real ones, so a chip at its
    power limit runs it faster (Gregersen et al., arXiv 2409.18324; on A100 zeros 295 and random
    numbers 257 TFLOP/s: H. He, Strangely, Matrix Multiplications on GPUs Run Faster When Given
    "Predictable" Data, 2024). A profiler's gradients are often constant. Real input gradients take
    as long as the forward product of equal operations: 0.995 of it on A100-PCIe (61 shapes), 1.007
    on B200 (144; SimuMax's tables).
    """
    result = dict(laws)
    for kind in WITH_WEIGHTS:
        forward, gradient = laws.get((kind, FORWARD)), laws.get((kind, INPUT_GRADIENT))
        if forward is None or gradient is None or not gradient.law.shapes:
            continue
        ops = [
            shape.operator(kind)
            for shape in gradient.law.shapes
            if shape.seconds > gradient.law.floor_seconds * ABOVE_FLOOR
        ]
        ratios = sorted(
            gradient.law.sum_of_columns(op) / max(forward.law.sum_of_columns(op), _TINY_SECONDS)
            for op in ops
        )
        if ratios and ratios[len(ratios) // 2] < _TOO_FAST:
            del result[kind, INPUT_GRADIENT]
    return result


_TOO_FAST = 0.95
"""Gradients over forward: between real ones (.995, 1.007, see above) and constant ones (.9)."""
_TINY_SECONDS = 1e-12
"""Below any clock's tick: only against a division by zero."""
