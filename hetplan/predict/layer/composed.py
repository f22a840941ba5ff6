"""A layer's forward or backward time as the sum over its operators (`hetplan.model`).

    device = sum over launches of (work + launch)
    host   = max(sum over launches of floors, sum over launches of the host's time for one)
    seconds = max(device, host)

Floors are what a profiler saw of one operator. The host's time for one is LAUNCH_SECONDS in a
trainer that runs operators one by one, or SMALL_LAUNCH_SECONDS for a router's passes
(`predict.datasheet`), or as much longer as the island's `host_launch` is; a grouped product is a
launch per expert where the trainer has it so.

Launches run ahead of the device, so the host's time shows only where all of it together is longer
than the device's: in layers so small that the device waits. Where the host waits for the device
itself, before it dispatches tokens to experts in a forward pass (`Kernels.host_counts`), it is
ahead of nothing: of the experts' launches it shows what is longer than the device's time for them.
With A what comes before and B the experts after it,

    seconds = max(host_A + host_B, device_A + device_B, device_A + host_B)

Parts: one per class of operators, `launch`, what launches cost the device, and `wait`, what the
device waits for the host when nothing else keeps it busy (`hetplan.cost.step_model.layer_compute`
takes off what communication does).

A backward pass has kernels that no operator of a profile holds (`gradient_operators`): passes over
memory at the median rate of those that were measured.

Half-width: parts of one class err together, classes independently of each other, so the square of
the sum's is the sum over classes of (seconds * half-width)^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from hetplan.cluster.devices import CPU_KIND, DeviceKind
from hetplan.job.spec import Precision, ProductFormat
from hetplan.model.operators import (
    BACKWARD,
    FORWARD,
    PRODUCTS,
    WEIGHT_GRADIENT,
    WITH_WEIGHTS,
    Operator,
    OperatorClass,
    has_backward,
)
from hetplan.predict.datasheet import (
    ELEMENTWISE_LOG_HALFWIDTH,
    LAUNCH_LOG_HALFWIDTH,
    SMALL_KERNEL_SECONDS,
    SMALL_LAUNCH_SECONDS,
    elementwise_bytes_per_second,
    pass_prior,
)
from hetplan.predict.layer.float8 import narrowed
from hetplan.predict.operator.answer import DeviceOperators, Launch, words
from hetplan.predict.operator.values import OperatorColumn, column_value
from hetplan.predict.predictor import (
    MEASURED,
    LayerQuery,
    Prediction,
    PredictionPart,
    is_extrapolation,
)

LAUNCH_PART = "launch"
WAIT_PART = "wait"


def layer_prediction(
    own: DeviceOperators | None,
    device: DeviceKind,
    query: LayerQuery,
    *,
    lent: Lender | None = None,
    narrow: NarrowLender | None = None,
) -> Prediction | None:
    """Time of one layer's pass on one tensor-parallel rank, without communication.

    `own` are the device's operators. `lent` says what other kinds of device lend it where a class
    of operators was not measured on it, `narrow` which formats of products were. None where `own`
    does not cover the layer's products.
    """
    if own is None:
        return None
    precision, backward = query.precision.value, query.is_backward
    asked = query.kernels.product_format
    measured = narrow(device, asked, query.precision) if narrow is not None and asked else None
    here = narrowed(own, device, asked, measured)
    others = cache(lambda: None if lent is None else lent(device, query.precision))
    launches: list[_Launches] = []
    sums = True
    for op in query.operators():
        if backward and not has_backward(op):
            continue
        of_op = here.launches(op, backward=backward, lent=others)
        if of_op is None:
            if op.operator in PRODUCTS:
                return None
            of_op = (_by_bandwidth(op, device, precision, backward=backward),)
        if op.operator is OperatorClass.FUSED_ATTENTION and not query.kernels.tuned_attention:
            factor = _PLAIN_ATTENTION.get(device.architecture, (1.0, 1.0))[backward]
            of_op = [replace(each, work_seconds=each.work_seconds * factor) for each in of_op]
        launches.extend(_launches(op, each, device, query) for each in of_op)
        if op.operator in WITH_WEIGHTS:
            # Laws of weight gradients are asked for float32 sums, stand-ins know of none.
            sums = sums and here.has(op.operator, WEIGHT_GRADIENT)
    if backward:
        launches += _gradients(own, others, device, query)
    return replace(_sum(launches), float32_sums=backward and sums)


@dataclass(frozen=True, slots=True)
class _Launches:
    """Equal launches of one operator."""

    count: int
    launch: Launch
    host_seconds: float
    """The host's time for one."""
    synchronised: bool = False
    """Of a pass in which the host waits for the device before these launches."""

    @property
    def device_seconds(self) -> float:
        """The device's time for all."""
        return self.count * (self.launch.work_seconds + self.launch.launch_seconds)


def _launches(op: Operator, launch: Launch, device: DeviceKind, query: LayerQuery) -> _Launches:
    """So many launches as the operator has, with the host's time for them."""
    # A CPU is its own host: what it takes for a call is in its measured times.
    if device.kind == CPU_KIND:
        return _Launches(op.count, launch, 0.0)
    given = query.kernels.host_launch_seconds
    slow = 1.0 if given is None else given / pass_prior(backward=False).launch_seconds
    if op.operator is OperatorClass.ROUTER:
        launch = replace(launch, launch_seconds=SMALL_KERNEL_SECONDS)
        return _Launches(op.count, launch, slow * SMALL_LAUNCH_SECONDS)
    counts = query.kernels.host_counts
    host = slow * pass_prior(backward=query.is_backward).launch_seconds
    if launch.operator == OperatorClass.GROUPED_PRODUCT and counts:
        host *= op.batch
    after = op.dispatched and counts and not query.is_backward
    return _Launches(op.count, launch, host, synchronised=after)


# By architecture, forward and backward: FlashAttention 2, which scaled_dot_product_attention runs,
# over FlashAttention 3 on H100: 1.5 to 2.0 and 1.5 to 1.75 (arXiv 2407.08608, section 4.1).
_PLAIN_ATTENTION = {"sm90": (1.73, 1.62)}


def worth_saying(notes: Iterable[str]) -> tuple[str, ...]:
    """Of a kind of which the user measured nothing: sizes and formats that nobody measured.

    That classes were lent and stood in for goes without saying there.
    """
    return tuple(
        note for note in notes if is_extrapolation(note) or note.startswith(tuple(ProductFormat))
    )


Lender = Callable[[DeviceKind, Precision], DeviceOperators | None]
NarrowLender = Callable[[DeviceKind, str, Precision], DeviceOperators | None]
"""(device, `ProductFormat` value, precision of the rest) -> measured products in that format."""


def _gradients(
    here: DeviceOperators,
    lent: Callable[[], DeviceOperators | None],
    device: DeviceKind,
    query: LayerQuery,
) -> Iterator[_Launches]:
    """What autograd runs between the operators of a layer."""
    ops = query.gradient_operators()
    if not ops:
        return
    rate = here.pass_rate(BACKWARD) or here.pass_rate(FORWARD)
    if rate is None:
        others = lent()
        rate = None if others is None else others.pass_rate(BACKWARD)
    for op in ops:
        launch = _by_bandwidth(op, device, query.precision.value, backward=True)
        if rate is not None:
            moved = column_value(OperatorColumn.BYTES, op, BACKWARD, query.precision.value)
            launch = replace(launch, work_seconds=moved * rate)
        yield _launches(op, replace(launch, notes=(GRADIENTS_NOTE,)), device, query)


GRADIENTS_NOTE = (
    "sums of residual gradients and of biases' gradients are in no measured operator: at the rate "
    "of passes over memory"
)


def _by_bandwidth(op: Operator, device: DeviceKind, precision: str, *, backward: bool) -> Launch:
    """A pass over memory on a device of which none was measured: datasheet bandwidth."""
    moved = column_value(OperatorColumn.BYTES, op, BACKWARD if backward else FORWARD, precision)
    rate = elementwise_bytes_per_second(device, backward=backward)
    note = f"{words(op.operator)} not measured: from the memory bandwidth"
    return Launch(
        operator=op.operator,
        work_seconds=moved / rate if rate > 0 else 0.0,
        log_halfwidth=ELEMENTWISE_LOG_HALFWIDTH,
        notes=(note,),
    )


def _sum(launches: list[_Launches]) -> Prediction:
    work: dict[str, float] = {}
    spread: dict[str, float] = {}
    notes: dict[str, None] = {}
    on_device = floors = host = 0.0
    for each in launches:
        count, launch = each.count, each.launch
        seconds = count * launch.work_seconds
        work[launch.operator] = work.get(launch.operator, 0.0) + seconds
        spread[launch.operator] = spread.get(launch.operator, 0.0) + seconds * launch.log_halfwidth
        on_device += count * launch.launch_seconds
        floors += count * launch.floor_seconds
        host += count * each.host_seconds
        notes.update(dict.fromkeys(launch.notes))
    busy = sum(work.values())
    after = [each for each in launches if each.synchronised]
    waits = max(
        0.0,
        max(floors, host) - busy - on_device,
        sum(each.count * each.host_seconds - each.device_seconds for each in after),
    )
    total = busy + on_device + waits
    for name, seconds in ((LAUNCH_PART, on_device), (WAIT_PART, waits)):
        if seconds > 0:
            spread[name] = seconds * LAUNCH_LOG_HALFWIDTH
            work[name] = seconds
    variance = sum(value * value for value in spread.values())
    return Prediction(
        seconds=total,
        log_halfwidth=math.sqrt(variance) / total if total else 0.0,
        source=MEASURED,
        extrapolating=tuple(notes),
        parts=tuple(
            PredictionPart(
                name=str(name),
                seconds=seconds,
                log_halfwidth=spread[name] / seconds if seconds else 0.0,
            )
            for name, seconds in work.items()
        ),
    )
