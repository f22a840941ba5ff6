"""An operator's law as frozen values: one per device, precision, class and pass.

    seconds of one launch alone = max(floor, sum over terms of coefficient * column)

The sum is the device's own time. The floor is the host's: below it a device waits for the next
launch, which in a row of operators is hidden behind the one before (`layer.composed`).

Tiles: a product's result is cut into 128 x 128 tiles, each computed by one multiprocessor; tiles
run in waves of as many as there are multiprocessors, and the last wave costs as much as a full one
(NVIDIA, Matrix Multiplication Background User's Guide, sections 3.1 and 3.2). Where the number of
multiprocessors is not known only the rounding to tiles counts.

The learned residual is a kernel average of the law's own errors (Nadaraya 1964, Watson 1964),

    log seconds = log law + sum_i w_i r_i / (PRIOR_WEIGHT + sum_i w_i)
    w_i = exp(-d_i^2 / (2 reach^2)),  r_i = log(measured_i / law_i)
    d_i = distance to the i-th measured shape, in log2 of the sizes

drawn to 0 far from all measured shapes, so it cannot run away as a tree or a polynomial does.
Leaving out whole sizes decides whether a law has one (`operator.laws`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from hetplan.errors import InputError
from hetplan.job.spec import Precision, ProductFormat
from hetplan.model.operators import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    PRODUCTS,
    WEIGHT_GRADIENT,
    Operator,
    OperatorClass,
    operator_bytes,
    operator_flops,
)
from hetplan.predict.law_parts import MeasuredRange, Term, Validation, check_columns
from hetplan.profiling.samples import OperatorSample


class OperatorColumn(StrEnum):
    """One physical quantity of one launch of an operator; coefficients are seconds per unit."""

    LAUNCHES = "launches"
    """1: what a launch costs the device itself, its ramp and its tail."""
    FLOPS = "flops"
    """`hetplan.model.operators.operator_flops`."""
    TILED_FLOPS = "tiled_flops"
    """The same with the result rounded up to whole tiles, and the tiles to whole waves."""
    BYTES = "bytes"
    """`hetplan.model.operators.operator_bytes`."""
    OUTPUT_BYTES = "output_bytes"
    """Bytes of a product's result: written after the last operation, which nothing hides."""
    TABLE_BYTES = "table_bytes"
    """Bytes of the table's gradient in an embedding's backward pass."""


_PHASES = (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredShape:
    """The measured time of one shape, to be looked up where exactly it is asked for."""

    batch: int
    m: int
    n: int
    k: int
    output_precision: str
    seconds: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise InputError(
                f"shape {self.batch} x [{self.m}, {self.n}, {self.k}] took {self.seconds} s; a "
                "time is more than 0: fit again"
            )

    def operator(self, name: str) -> Operator:
        """The shape as an operator of this class."""
        return Operator(
            operator=OperatorClass(name),
            what="shape",
            batch=self.batch,
            m=self.m,
            n=self.n,
            k=self.k,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedResidual:
    """How far measured shapes near the one asked for lay from the law (`operator.values`)."""

    doublings: float
    """Distance in log2 of the sizes at which a measured shape counts exp(-1/2)."""
    error_before: float
    """Mean |log(measured / predicted)| on left-out sizes without it."""
    error_after: float
    """The same with it."""

    def __post_init__(self) -> None:
        if not self.doublings > 0:
            raise InputError(f"a residual reaches {self.doublings} doublings; it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorLaw:
    """Time of one pass of one class of operators on one kind of device."""

    device: str
    precision: str
    operator: str
    """A `hetplan.model.operators.OperatorClass` value."""
    phase: str
    """`forward`, `backward`, `input_gradient` or `weight_gradient`."""
    terms: tuple[Term, ...]
    floor_seconds: float
    """Least time of one launch alone: the host's; 0: none was seen."""
    ranges: tuple[MeasuredRange, ...]
    """Measured ranges of what `range_values` names."""
    log_halfwidth: float
    """Half-width of the 90 % interval inside the measured ranges."""
    calibration: str
    """Which errors set the interval, in words."""
    rows: int
    points: int
    """Rows of different shapes."""
    validation: Validation
    sustained_flops_per_second: float = 0.0
    """Rate of the largest products, which no smaller one exceeds for long: short benchmarks run
    above the clock that a training step keeps; 0: no such difference was seen."""
    floor_rows: int = 0
    """Rows on the floor; they tell the floor and nothing else."""
    multiprocessors: int = 0
    """Tiles of one wave (`tiled_flops`); 0: waves are not counted."""
    shapes: tuple[MeasuredShape, ...] = ()
    """Measured shapes of products, sorted."""
    residual: LearnedResidual | None = None
    """None: leaving out whole sizes, nothing was learned from them."""
    notes: tuple[str, ...] = ()
    large_seconds: float = 0.0
    """Times from which `large_log_halfwidth` holds: half of the rows; 0: all are as good."""
    large_log_halfwidth: float = 0.0
    """Half-width for the longer half, rows weighted by their time: steps are made of those."""

    def sum_of_columns(self, op: Operator, output_precision: str = "") -> float:
        """Seconds of one launch by the terms alone."""
        return sum(
            term.coefficient
            * column_value(
                term.column,
                op,
                self.phase,
                self.precision,
                output_precision,
                self.multiprocessors,
            )
            for term in self.terms
        )

    def scaled_terms(self, factor: Callable[[str], float]) -> tuple[Term, ...]:
        """The terms with every coefficient times the factor of its column."""
        return tuple(
            replace(term, coefficient=term.coefficient * factor(term.column)) for term in self.terms
        )

    def seconds(self, op: Operator) -> float:
        """Seconds of one launch by the terms and the floor, without shapes and residual."""
        return max(self.floor_seconds, self.sum_of_columns(op))

    def halfwidth_at(self, seconds: float) -> float:
        """Half-width inside the measured ranges of a launch that takes so long."""
        if self.large_seconds and seconds >= self.large_seconds:
            return self.large_log_halfwidth
        return self.log_halfwidth

    def widened(self, log_halfwidth: float) -> OperatorLaw:
        """The law with a further, independent error of this half-width."""
        large = math.hypot(self.large_log_halfwidth, log_halfwidth) if self.large_seconds else 0.0
        return replace(
            self,
            log_halfwidth=math.hypot(self.log_halfwidth, log_halfwidth),
            large_log_halfwidth=large,
        )

    def __post_init__(self) -> None:
        check_columns(self.terms, OperatorColumn)
        if self.phase not in _PHASES:
            raise InputError(f"phase is {self.phase!r}; it is one of {', '.join(_PHASES)}")
        if not (math.isfinite(self.floor_seconds) and self.floor_seconds >= 0):
            raise InputError(f"floor is {self.floor_seconds} s; it is at least 0: fit again")
        for value in (self.log_halfwidth, self.large_log_halfwidth):
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"half-width is {value}; it is at least 0: fit again")

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Device, precision, class and pass."""
        return self.device, self.precision, self.operator, self.phase


TILE = 128
"""Rows and columns of a tile (the guide's section 3.1 lists 256 x 128 to 64 x 64)."""

# Vendors' white papers and product briefs: streaming multiprocessors of the whole device.
_MULTIPROCESSORS = (
    ("nvidia-a100", 108),  # NVIDIA A100 Tensor Core GPU Architecture, table 4
    ("nvidia-h100", 132),  # NVIDIA H100 Tensor Core GPU Architecture, SXM5
    ("nvidia-h200", 132),  # the same die
    ("nvidia-gh200", 132),  # the same die
    ("nvidia-v100", 80),  # NVIDIA Tesla V100 GPU Architecture, table 1
    ("nvidia-b200", 148),  # NVIDIA Blackwell Architecture Technical Brief, two dies of 74
)


def multiprocessors(device: str) -> int:
    """Streaming multiprocessors of this device kind; 0: not known here."""
    for start, count in _MULTIPROCESSORS:
        if device.startswith(start):
            return count
    return 0


# With their scales: 1 byte per 32 elements (MXFP8) and per 16 (NVFP4).
_NARROW_BYTES = {
    ProductFormat.FLOAT8.value: 1.0,
    ProductFormat.MXFP8.value: 1.0 + 1 / 32,
    ProductFormat.NVFP4.value: 0.5 + 1 / 16,
}


@lru_cache(maxsize=64)
def element_bytes(precision: str) -> float:
    """Bytes of one element of a `Precision` or `ProductFormat` value."""
    return _NARROW_BYTES.get(precision) or Precision(precision).bytes_per_element


def tiled_flops(op: Operator, phase: str, waves_of: int) -> float:
    """Operations with the result rounded up to whole tiles, and tiles to whole waves."""
    flops = operator_flops(op, phase)
    if not flops:
        return 0.0
    tiles = op.batch * -(-op.m // TILE) * -(-op.n // TILE)
    if waves_of:
        tiles = -(-tiles // waves_of) * waves_of
    return flops * tiles * TILE * TILE / (float(op.batch) * op.m * op.n)


def column_value(
    column: str,
    op: Operator,
    phase: str,
    precision: str,
    output_precision: str = "",
    waves_of: int = 0,
) -> float:
    """Value of one column (an `OperatorColumn` value) for one launch in this pass."""
    if column == OperatorColumn.LAUNCHES:
        return 1.0
    if column == OperatorColumn.FLOPS:
        return operator_flops(op, phase)
    if column == OperatorColumn.TILED_FLOPS:
        return tiled_flops(op, phase, waves_of)
    element = element_bytes(precision)
    if column == OperatorColumn.TABLE_BYTES:
        return float(element * op.n * op.k) if phase != FORWARD else 0.0
    output = element_bytes(output_precision) if output_precision else element
    if column == OperatorColumn.OUTPUT_BYTES:
        return float(output) * op.batch * op.m * op.n
    return operator_bytes(op, phase, element, output)


def sample_operator(sample: OperatorSample) -> Operator:
    """The operator that was measured.

    A loss whose result is float32 while its logits are not works on a float32 copy of them.
    """
    kind = OperatorClass(sample.operator)
    return Operator(
        operator=kind,
        what="sample",
        batch=sample.batch,
        m=sample.m,
        n=sample.n,
        k=sample.k,
        float32_copy=kind is OperatorClass.LOSS and sample.output_precision != sample.precision,
    )


def column_sets(operator: str, phase: str) -> tuple[tuple[OperatorColumn, ...], ...]:
    """Sets of columns that a law of this class may have, simplest first."""
    launches, flops, moved = OperatorColumn.LAUNCHES, OperatorColumn.FLOPS, OperatorColumn.BYTES
    if operator == OperatorClass.LOSS:
        return ((moved,), (launches, moved), (flops, moved), (launches, flops, moved))
    if operator == OperatorClass.EMBEDDING and phase != FORWARD:
        return ((moved,), (launches, moved), (moved, OperatorColumn.TABLE_BYTES))
    if operator not in PRODUCTS:
        return ((moved,), (launches, moved))
    tiled, written = OperatorColumn.TILED_FLOPS, OperatorColumn.OUTPUT_BYTES
    return (
        (flops,),
        (launches, flops),
        (flops, moved),
        (flops, written),
        (launches, flops, moved),
        (launches, flops, written),
        (launches, tiled),
        (launches, tiled, moved),
    )


def range_values(op: Operator, phase: str) -> tuple[tuple[str, float], ...]:
    """What a law keeps the measured range of: how wide the operator is and how much it does."""
    name = op.operator.value.replace("_", " ")
    if op.operator in PRODUCTS:
        width = op.k if op.operator not in _BY_LARGEST else max(op.n, op.k)
        return ((f"{name} width", float(width)), (f"{name} flop", operator_flops(op, phase)))
    # Widths of memory passes do not matter beyond the bytes they move.
    return ((f"{name} elements", float(op.batch) * op.m * op.n),)


_BY_LARGEST = frozenset({OperatorClass.MATRIX_PRODUCT, OperatorClass.GROUPED_PRODUCT})


def size_groups(samples: Sequence[OperatorSample]) -> tuple[tuple[str, list[float]], ...]:
    """What may be left out, one value at a time, best first, and its value in each row.

    Whole models first: widths that stand in one product belong to one model's sizes (a hidden
    size, its multiples and its slices), so products that share a width are left out together.
    """
    kind = OperatorClass(samples[0].operator)
    if kind is OperatorClass.ATTENTION_CONTEXT:
        first = ("head width", [float(each.n) for each in samples])
    elif kind in (OperatorClass.ATTENTION_SCORE, OperatorClass.FUSED_ATTENTION):
        first = ("head width", [float(each.k) for each in samples])
    elif kind in PRODUCTS or kind is OperatorClass.LOSS:
        first = ("hidden", _families(samples))
    else:
        first = ("width", [float(each.n) for each in samples])
    return first, ("size", _blocks(samples))


def _families(samples: Sequence[OperatorSample]) -> list[float]:
    """For each product the least width of the model that it belongs to."""
    parents: dict[int, int] = {}

    def root(width: int) -> int:
        parents.setdefault(width, width)
        while parents[width] != width:
            width = parents[width]
        return width

    pairs = [_weights(sample) for sample in samples]
    for one, other in pairs:
        low, high = sorted((root(one), root(other)))
        parents[high] = low
    return [float(root(one)) for one, _ in pairs]


def _weights(sample: OperatorSample) -> tuple[int, int]:
    """The two sizes of the weights: of a weight gradient its result's, else all but the rows."""
    if sample.phase == WEIGHT_GRADIENT:
        return sample.m, sample.n
    return (sample.k, sample.k) if sample.operator == OperatorClass.LOSS else (sample.n, sample.k)


_BLOCKS = 5
"""Blocks of sizes: as few as leave four fifths of the sizes to fit on."""


def _blocks(samples: Sequence[OperatorSample]) -> list[float]:
    """Blocks of rows by the work they do, whole sizes together."""
    work = [_work(sample) for sample in samples]
    distinct = sorted(set(work))
    blocks = min(_BLOCKS, len(distinct))
    place = {value: at * blocks // len(distinct) for at, value in enumerate(distinct)}
    return [float(place[value]) for value in work]


def _work(sample: OperatorSample) -> float:
    op = sample_operator(sample)
    return operator_flops(op, sample.phase) or operator_bytes(
        op, sample.phase, element_bytes(sample.precision)
    )


REACHES = (0.25, 0.5, 1.0)
"""Doublings that are tried."""
# One neighbour at no distance moves the law half of the way to it: as much as a mean of one value
# of a spread that equals the prior's.
PRIOR_WEIGHT = 1.0

Point = tuple[float, ...]
"""log2 of the sizes of one shape."""


def point_of(batch: int, m: int, n: int, k: int) -> Point:
    """The shape's place: log2 of its sizes."""
    return (math.log2(max(batch, 1)), math.log2(m), math.log2(n), math.log2(max(k, 1)))


def residual(
    point: Point, points: Sequence[Point], residuals: Sequence[float], reach: float
) -> float:
    """What to add to the law's log at this point."""
    total, weights = 0.0, PRIOR_WEIGHT
    scale = -0.5 / (reach * reach)
    for other, value in zip(points, residuals, strict=True):
        squared = sum((a - b) ** 2 for a, b in zip(point, other, strict=True))
        weight = math.exp(scale * squared)
        total += weight * value
        weights += weight
    return total / weights


def left_out_residuals(
    points: Sequence[Point],
    seen_residuals: Sequence[float],
    errors: Sequence[float],
    groups: Sequence[float],
    reach: float,
) -> tuple[float, ...]:
    """Errors of left-out rows after the residual that the rows of all other groups give.

    `seen_residuals` are the law's errors on rows it was fitted on, `errors` those on rows that it
    was not.
    """
    import numpy as np

    at = np.asarray(points, dtype=float)
    squared = ((at[:, None, :] - at[None, :, :]) ** 2).sum(axis=2)
    weights = np.exp(-0.5 / (reach * reach) * squared)
    names = np.asarray(groups)
    weights[names[:, None] == names[None, :]] = 0.0
    known = weights @ np.asarray(seen_residuals, dtype=float)
    corrected = np.asarray(errors, dtype=float) - known / (PRIOR_WEIGHT + weights.sum(axis=1))
    return tuple(float(error) for error in corrected)
