"""What do a layer's products with weights take in a narrower format than the rest of the layer?

    measured   the format's own law (of this kind, or of another board of its chip)
    otherwise  t' = launch + (flops term) / r + (bytes and output terms)
    quantise   bytes(m k) forward, bytes(m n) backward, at the rate of other passes over memory

Without a law of the format the laws of the wide one are changed: only the term of operations, and
the sustained rate, by what measured kinds reach of the ratio of the datasheet's dense rates
(`reached_ratio`); measured shapes by what that does to the law. Constants and memory terms stay, as
products still write the wide format and add gradients up in float32. MXFP8's laws are FLOAT8's.

Quantising (Transformer Engine's user guide, low precision training): a product's activations are
read in 16 bits and written narrow, forward the input, backward the gradient of the output. Each is
needed along rows and along columns: one copy serves both where the tensor has one scale (Blackwell
multiplies every layout; Hopper keeps a transposed copy), blocks of scales need one of each. Weights
are quantised once per step (`is_first_microbatch`) and not counted. Current scaling and NVFP4 read
the tensor once before for its largest element. A measured product holds one pass over what it
reads, at one read and one copy: forward the input, backward the gradient twice, for each of the two
products. So of a measured format only what training does beyond that is added.

Routers, logits, attention and passes over memory keep the wide format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hetplan.cluster.devices import DeviceKind
from hetplan.job.spec import ProductFormat
from hetplan.model.operators import (
    BACKWARD,
    FORWARD,
    WITH_WEIGHTS,
    Operator,
    operator_flops,
)
from hetplan.model.spec import LayerKind
from hetplan.predict.datasheet import (
    ELEMENTWISE_LOG_HALFWIDTH,
    elementwise_bytes_per_second,
    matrix_efficiency,
)
from hetplan.predict.operator.answer import DeviceOperators, Launch, index_operators
from hetplan.predict.operator.values import MeasuredShape, OperatorLaw, element_bytes
from hetplan.predict.predictor import LayerQuery, Prediction

QUANTISE = "quantise"
"""Name of the part of a prediction that holds the passes which narrow activations."""

KEPT_WIDE = frozenset({"router", "head projection", "logits", "embedding projection"})
"""Products with weights that trainers do not narrow (`Operator.what`)."""


@dataclass(frozen=True, slots=True)
class _Passes:
    """Bytes per element of one tensor that is quantised."""

    read: float
    written: float


# Hopper's products take operands along rows only (Transformer Engine, "handling transposes"); how
# many copies one scale needs is not known per kind, so the two of Hopper are counted for all.
_PASSES = {
    ProductFormat.FLOAT8: _Passes(2.0 + 2.0, 2 * 1.0),
    ProductFormat.MXFP8: _Passes(2.0, 2 * element_bytes(ProductFormat.MXFP8)),
    ProductFormat.NVFP4: _Passes(2.0 + 2.0, 2 * element_bytes(ProductFormat.NVFP4)),
}


@dataclass(frozen=True, slots=True)
class NarrowOperators:
    """A device's operators with narrow products; asked like `DeviceOperators`."""

    wide: DeviceOperators
    scaled: DeviceOperators
    """The wide laws by the ratio of rates."""
    measured: DeviceOperators | None
    """Laws of the format itself."""
    device: DeviceKind
    format: ProductFormat

    def has(self, operator: str, phase: str) -> bool:
        """Whether there is a law of this class and pass."""
        return self.wide.has(operator, phase)

    def launches(
        self, op: Operator, *, backward: bool, lent: Callable[[], DeviceOperators | None]
    ) -> Sequence[Launch] | None:
        """The launches of one pass of this operator, quantising of a narrow product among them."""
        if not is_narrow(op):
            return self.wide.launches(op, backward=backward, lent=lent)
        own = self.measured
        if own is not None and own.has(op.operator, FORWARD):
            launches = own.launches(op, backward=backward, lent=lent)
            return (*(launches or ()), self._quantise(op, backward=backward, within=True))
        launches = self.scaled.launches(op, backward=backward, lent=lent)
        if launches is None:
            return None
        note = assumed(self.device, self.format, self.wide.precision)
        added = _assumption(reached_ratio(self.device, self.format, self.wide.precision))
        return (
            *(
                replace(
                    launch,
                    log_halfwidth=math.hypot(launch.log_halfwidth, added),
                    notes=(*launch.notes, note),
                )
                for launch in launches
            ),
            self._quantise(op, backward=backward, within=False),
        )

    def _quantise(self, op: Operator, *, backward: bool, within: bool) -> Launch:
        """What is quantised, but for what is within the times of measured products."""
        rate = self.wide.pass_rate(BACKWARD if backward else FORWARD)
        if rate is None:
            rate = _seconds_per_byte(self.device, backward=backward)
        moved = quantise_bytes(op, self.format, backward=backward)
        if within:
            elements = float(op.batch) * op.m * (2.0 * op.n if backward else op.k)
            moved = max(0.0, moved - elements * (2.0 + element_bytes(self.format.value)))
        return Launch(
            operator=QUANTISE,
            work_seconds=moved * rate,
            log_halfwidth=ELEMENTWISE_LOG_HALFWIDTH,
        )


def in_one_format(query: LayerQuery) -> LayerQuery:
    """The query with products in the job's precision; the query itself where they are."""
    if not query.kernels.product_format:
        return query
    return replace(query, kernels=replace(query.kernels, product_format=""))


def is_narrow(op: Operator) -> bool:
    """Whether a trainer of narrow products narrows this one."""
    return op.operator in WITH_WEIGHTS and op.what not in KEPT_WIDE


def law_format(query: LayerQuery) -> str:
    """The format whose laws the layer's narrow products go by; empty where it has none."""
    asked = query.kernels.product_format
    if not asked or query.layer is not LayerKind.TRANSFORMER:
        return ""
    return ProductFormat.FLOAT8.value if asked == ProductFormat.MXFP8 else asked


def quantise_bytes(op: Operator, product_format: ProductFormat, *, backward: bool) -> float:
    """Read and written to narrow what one pass of a product gets."""
    passes = _PASSES[product_format]
    elements = float(op.batch) * op.m * (op.n if backward else op.k)
    return elements * (passes.read + passes.written)


# Eight kinds' products were measured in both formats (profiles/kinds). Ratios of the laws' terms of
# operations: FP8 1.51 to 1.86 where the datasheets say 2, NVFP4 2.5 to 3.2 for 4 and 3.7 to 4.2 for
# 6; so the ratio of peaks to the power .60 to .90, .75 in the middle.
_REACHED, _REACHED_HALFWIDTH = 0.75, 0.25


def reached_ratio(device: DeviceKind, product_format: ProductFormat, precision: str) -> float:
    """How many times as fast as in the wide format products are in the narrow one, at least 1.

    An InputError where the device has one of the formats not.
    """
    peaks = device.peak(product_format.rate) / device.peak(precision)
    return math.pow(max(1.0, peaks), _REACHED)


def _assumption(ratio: float) -> float:
    """Log half-width of that ratio."""
    return _REACHED_HALFWIDTH / _REACHED * math.log(ratio)


def assumed(device: DeviceKind, product_format: ProductFormat, precision: str) -> str:
    """The note of every such prediction."""
    ratio = reached_ratio(device, product_format, precision)
    return (
        f"{product_format.value} products not measured: {precision}'s law by what others "
        f"reach of the ratio of peak rates, {ratio:.3g}"
    )


def narrowed(
    here: DeviceOperators,
    device: DeviceKind,
    product_format: str,
    measured: DeviceOperators | None,
) -> DeviceOperators | NarrowOperators:
    """A device's laws with products in this format (a `ProductFormat` value, or empty: none).

    `measured`: laws of the format itself.
    """
    if not product_format:
        return here
    asked = ProductFormat(product_format)
    ratio = reached_ratio(device, asked, here.precision)
    key = (device, ratio)
    if key not in here.kept:
        laws = index_operators(_narrow_law(law, ratio) for law in here.laws)
        here.kept[key] = next(iter(laws.values()))
    return NarrowOperators(here, here.kept[key], measured, device, asked)


def _narrow_law(law: OperatorLaw, ratio: float) -> OperatorLaw:
    if law.operator not in tuple(WITH_WEIGHTS) or ratio <= 1.0:
        return law
    narrowed_law = replace(
        law,
        terms=law.scaled_terms(lambda column: 1.0 / ratio if "flops" in column else 1.0),
        sustained_flops_per_second=law.sustained_flops_per_second * ratio,
    )
    shapes = []
    for shape in law.shapes:
        narrow, wide = _device_seconds(narrowed_law, shape), _device_seconds(law, shape)
        shapes.append(replace(shape, seconds=shape.seconds * narrow / wide))
    return replace(narrowed_law, shapes=tuple(shapes))


def _device_seconds(law: OperatorLaw, shape: MeasuredShape) -> float:
    """Seconds of a measured shape by the law's terms and its sustained rate."""
    op = shape.operator(law.operator)
    rate = law.sustained_flops_per_second
    return max(
        law.sum_of_columns(op, shape.output_precision),
        operator_flops(op, law.phase) / rate if rate else 0.0,
        _TINY_SECONDS,
    )


_TINY_SECONDS = 1e-12


def scaled(whole: Prediction, wide: Prediction, narrow: Prediction) -> Prediction:
    """A prediction of whole layers, changed as the sum of operators changes."""
    return replace(
        whole,
        seconds=whole.seconds * narrow.seconds / wide.seconds,
        log_halfwidth=max(whole.log_halfwidth, narrow.log_halfwidth),
        extrapolating=tuple(dict.fromkeys((*whole.extrapolating, *narrow.extrapolating))),
    )


def by_datasheet(wide: Prediction, device: DeviceKind, query: LayerQuery) -> Prediction:
    """The datasheet's answer in the wide format, its products with weights in the narrow one."""
    narrow, precision = ProductFormat(query.kernels.product_format), query.precision.value
    ratio = reached_ratio(device, narrow, precision)
    ops = [op for op in query.operators() if is_narrow(op)]
    if not ops:
        return wide
    backward = query.is_backward
    flops = sum(op.count * operator_flops(op, query.phase) for op in ops)
    moved = sum(op.count * quantise_bytes(op, narrow, backward=backward) for op in ops)
    products = flops / (device.peak(precision) * matrix_efficiency(device.kind))
    quantising = moved * _seconds_per_byte(device, backward=backward)
    seconds = max(wide.seconds - products * (1.0 - 1.0 / ratio), products / ratio) + quantising
    return replace(
        wide,
        seconds=seconds,
        log_halfwidth=math.hypot(
            wide.log_halfwidth, _assumption(ratio) * products / ratio / seconds
        ),
        extrapolating=(*wide.extrapolating, assumed(device, narrow, precision)),
    )


def _seconds_per_byte(device: DeviceKind, *, backward: bool) -> float:
    rate = elementwise_bytes_per_second(device, backward=backward)
    return 1.0 / rate if rate > 0 else 0.0
