"""What a layer or a link costs when nothing of its kind was measured: datasheet and priors.

    layer  = launches * operations
           + matrix flops / (peak * MATRIX_EFFICIENCY) + attention flops / (peak * ATTENTION_...)
           + elementwise bytes / (memory bandwidth * ELEMENTWISE_EFFICIENCY)
           + in the backward pass, WEIGHT_GRADIENT_TRAFFIC * weight bytes at the same rate

Priors are central values over devices whose measurements are public; the half-width beside each
is how far single devices and shapes lie from it, so the interval of such a prediction is wide. It
is the time-weighted mean of its parts' half-widths, as if all parts were off together, which is the
worst case. Nothing here was measured on the device at hand.

Data behind the priors, each on fp16 or bf16 and single operators: the operator profiles that the
Sailor authors published for five NVIDIA devices (github.com/eth-easl/sailor, MIT) and SimuMax's
efficiency tables of A100-PCIe and B200 (github.com/MooreThreads/SimuMax).
"""

from __future__ import annotations

import math

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Link, Transport
from hetplan.errors import InputError
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.layers import Experts, LatentAttention
from hetplan.model.operators import ADAMW_UPDATE_BYTES, DEFAULT_KERNELS, Kernels
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.predict.kernel_costs import kernel_costs
from hetplan.predict.layer.columns import layer_columns
from hetplan.predict.link import prior as links_prior
from hetplan.predict.link.shapes import lane_bytes, ring_shape
from hetplan.predict.predictor import DATASHEET, Prediction, SendLaw

# Matrix products of at least 100 GFLOP, median per device of rate / dense peak with float32
# accumulation: A100-40 .79 (of 312 TFLOP/s), GH200 .59 (989), V100 .71 (125), RTX 3090 1.00 (71),
# Titan RTX .65 (130.5), A100-PCIe .73 (312), B200 .48 (2250), RTX 2080 Ti .98 (56.9). V100 and
# A100-PCIe stand in the middle.
MATRIX_EFFICIENCY = 0.70
# Farthest device: log(.70 / .48) = .38; 90 % of one device's shapes lie within .1 to .25 of its
# median, the two being independent: sqrt(.38^2 + .25^2).
MATRIX_LOG_HALFWIDTH = 0.45

# Fused attention over the full square reaches 1.00 (A100-PCIe) and .73 (B200) forward, .80 and .69
# backward; a causal kernel does half of those operations in that time. Geometric mean of the
# halves, over forward and backward.
ATTENTION_EFFICIENCY = 0.40
# 10 % to 90 % of the shapes: .155 (B200 forward) to .565 (A100-PCIe forward).
ATTENTION_LOG_HALFWIDTH = 0.95

# Norms, residual additions with dropout and GELU of a GPT layer, 16-bit, hidden 7168: bytes by
# `layer_work` / time / memory bandwidth is .50 A100-40, .36 GH200, .56 RTX 3090, .53 Titan RTX, .55
# V100 forward and .71 .66 .78 .73 .75 backward (twice the bytes).
ELEMENTWISE_EFFICIENCY_FORWARD = 0.53
ELEMENTWISE_EFFICIENCY_BACKWARD = 0.73
# log(.53 / .36) = .39; fusing compilers read and write half as often: log 2 = .69.
ELEMENTWISE_LOG_HALFWIDTH = 0.6

# Sum of the constants of 13 forward operators in an A100 operator profile: 0.752 ms; of their
# backward passes: 0.964 ms. Training runs on 64 to 512 A100 show about half of that.
LAUNCH_SECONDS_FORWARD = 0.5 * 0.752e-3 / 13
LAUNCH_SECONDS_BACKWARD = 0.5 * 0.964e-3 / 13
# Up to the whole profile constant (log 2); down to a graph of kernels at 5 us each (log 6).
LAUNCH_LOG_HALFWIDTH = 1.4

LAYER_LAUNCHES = 10.0
"""Kernels of a GPT layer, for laws that count no operators."""
SCORE_PASSES = 8.0
"""How often attention's scores cross the memory where they are kept (`predict.layer_prior`)."""

BACKWARD_WORK = 2.0
"""Backward over forward operations and bytes: a gradient of the input and one of the weights."""

# Once per microbatch: 2 where the product adds to the gradient itself (read and written), 4 where
# the gradient is written, then read with the sum, which is written back.
WEIGHT_GRADIENT_TRAFFIC = 3.0

# Least traffic, a fused kernel in float32: gradient read (4), parameter and two moments read and
# written (24): 28 bytes per parameter for AdamW; gradient read, parameter read and written: 12 for
# SGD. 16-bit training adds the 16-bit parameter written and the gradient converted (2 + 2 + 4), and
# a pass over the gradients for their norm (4).
_FUSED_BYTES = ((Optimizer.ADAMW, ADAMW_UPDATE_BYTES), (Optimizer.SGD, 12.0))
_MIXED_PRECISION_BYTES = 12.0
# Fused AdamW in float32 took (per parameter, time * memory bandwidth, tp 1, Sailor's profiles) 33.5
# B on V100, 35.0 on A100-40, 35.1 on RTX 3090, 38 to 41 on GH200, 42 on Titan RTX, 42.7 on RTX 2080
# Ti; 28 are the fused traffic. Geometric mean of the extremes.
OPTIMIZER_TRAFFIC_FACTOR = math.sqrt(33.5 * 42.7) / ADAMW_UPDATE_BYTES
# Kinds: log(42.7 / 37.8) = .12. The passes over 16-bit gradients and their norm are counted, not
# measured, and an optimizer without a fused kernel takes up to twice as long: half of log 2.
OPTIMIZER_LOG_HALFWIDTH = 0.12 + 0.5 * math.log(2.0)

LINK_LOG_HALFWIDTH = links_prior.OTHERS_LOG_HALFWIDTH
"""Of a link's figures, where nothing better is known."""


def _operations(model: ModelSpec, layer: LayerKind) -> int:
    """Kernels of a forward pass, each with one launch, fused as in hetplan's own layers."""
    if layer is LayerKind.EMBEDDING:
        return 2  # look-up, positions
    if layer is LayerKind.HEAD:
        return 6  # norm, product, and four passes of the float32 cross-entropy
    # Norms, query-key-value, attention, output, up, activation, down, two additions; a gate adds
    # its product and multiplication, rotation one kernel for queries and one for keys.
    shape = model.common_layer()
    attention, mlp = shape.attention, shape.mlp
    count = 8 + shape.num_norms + (2 if mlp.gated else 0)
    if isinstance(attention, LatentAttention):
        # Products to and from the latents, their norms, rotations, keys put together.
        count += 6 if attention.query_rank is None else 8
    else:
        count += (2 if attention.rotary else 0) + (2 if attention.qk_norm else 0)
    if isinstance(mlp, Experts):
        # Router, softmax, choice, sort, tokens to their experts and back, weighted sum; the
        # experts' products are grouped, so their number launches nothing more.
        count += 7 + (4 if mlp.shared_ffn_hidden_size else 0)
    return count


def _memory_bandwidth(device: DeviceKind) -> float:
    """The device's figure; an InputError where it is not known, because every time needs it."""
    if device.memory_bandwidth_bytes_per_second > 0:
        return device.memory_bandwidth_bytes_per_second
    raise InputError(
        f"device kind {device.kind} has no memory bandwidth, and what is asked was not measured; "
        "add memory_bandwidth to its entry, or measure the kind with `hetplan profile`"
    )


def _layer(
    device: DeviceKind,
    model: ModelSpec,
    layer: LayerKind,
    microbatch_size: int,
    sequence_length: int,
    tp: int,
    precision: Precision,
    kernels: Kernels,
    *,
    backward: bool,
    notes: tuple[str, ...],
) -> Prediction:
    columns = layer_columns(
        model,
        layer,
        microbatch_size=microbatch_size,
        sequence_length=sequence_length,
        tp=tp,
        bytes_per_element=precision.bytes_per_element,
    )
    peak = device.peak(precision.value)
    work = BACKWARD_WORK if backward else 1.0
    launch = LAUNCH_SECONDS_BACKWARD if backward else LAUNCH_SECONDS_FORWARD
    streaming = ELEMENTWISE_EFFICIENCY_BACKWARD if backward else ELEMENTWISE_EFFICIENCY_FORWARD
    bandwidth = _memory_bandwidth(device) * streaming
    more = kernel_costs(
        model,
        layer,
        kernels,
        microbatch_size=microbatch_size,
        sequence_length=sequence_length,
        tp=tp,
        bytes_per_element=precision.bytes_per_element,
        backward=backward,
    )
    launches = launch * (_operations(model, layer) + more.launches)
    matrix = work * columns.matrix_flops / (peak * MATRIX_EFFICIENCY)
    attention = work * columns.attention_flops / (peak * ATTENTION_EFFICIENCY)
    if more.square_flops:
        # Plain products, at their rate.
        matrix += work * more.square_flops / (peak * MATRIX_EFFICIENCY)
        attention = 0.0
    traffic = work * columns.elementwise_bytes + more.moved_bytes
    if backward:
        traffic += WEIGHT_GRADIENT_TRAFFIC * columns.weight_bytes
    elementwise = traffic / bandwidth
    seconds = launches + matrix + attention + elementwise
    spread = (
        launches * LAUNCH_LOG_HALFWIDTH
        + matrix * MATRIX_LOG_HALFWIDTH
        + attention * ATTENTION_LOG_HALFWIDTH
        + elementwise * ELEMENTWISE_LOG_HALFWIDTH
    )
    return Prediction(
        seconds=seconds, log_halfwidth=spread / seconds, source=DATASHEET, extrapolating=notes
    )


def forward(
    device: DeviceKind,
    model: ModelSpec,
    layer: LayerKind,
    *,
    microbatch_size: int,
    sequence_length: int,
    tp: int,
    precision: Precision,
    kernels: Kernels = DEFAULT_KERNELS,
    notes: tuple[str, ...] = (),
) -> Prediction:
    """Forward time from the datasheet; an InputError where the device lacks the precision."""
    return _layer(
        device,
        model,
        layer,
        microbatch_size,
        sequence_length,
        tp,
        precision,
        kernels,
        backward=False,
        notes=notes,
    )


def backward(
    device: DeviceKind,
    model: ModelSpec,
    layer: LayerKind,
    *,
    microbatch_size: int,
    sequence_length: int,
    tp: int,
    precision: Precision,
    kernels: Kernels = DEFAULT_KERNELS,
    notes: tuple[str, ...] = (),
) -> Prediction:
    """Backward time from the datasheet: twice the forward's operations and bytes."""
    return _layer(
        device,
        model,
        layer,
        microbatch_size,
        sequence_length,
        tp,
        precision,
        kernels,
        backward=True,
        notes=notes,
    )


def optimizer_update(
    device: DeviceKind,
    optimizer: Optimizer,
    parameters: float,
    precision: Precision,
    notes: tuple[str, ...] = (),
) -> Prediction:
    """Time of the update's memory traffic."""
    fused = dict(_FUSED_BYTES)[optimizer]
    if precision is not Precision.FLOAT32:
        fused += _MIXED_PRECISION_BYTES
    traffic = fused * OPTIMIZER_TRAFFIC_FACTOR * parameters
    return Prediction(
        seconds=traffic / _memory_bandwidth(device),
        log_halfwidth=OPTIMIZER_LOG_HALFWIDTH,
        source=DATASHEET,
        extrapolating=notes,
    )


def send(link: Link, notes: tuple[str, ...] = (), *, nodes: int = 1) -> SendLaw:
    """Point-to-point law of a link without samples; device-direct as `links_prior` has it.

    Host-staged, or where the figures themselves were measured: latency, and goodput for the bytes.

    The data crosses once after the receiver is known to be ready: wire = latency. With both sides
    posting together the receiver's readiness has to cross to the sender first, another one-way
    latency: rendezvous = 2 * latency. (gloo over a 10.3 ms round trip: 10.3 ms when posted
    together, 5.5 to 5.7 ms with the receiver early.)
    """
    if link.transport is Transport.DEVICE_DIRECT and not link.measured:
        return links_prior.send(link, nodes=nodes, notes=notes)
    return SendLaw(
        rendezvous_latency_seconds=2.0 * link.latency_seconds,
        wire_latency_seconds=link.latency_seconds,
        seconds_per_byte=1.0 / link.goodput_bytes_per_second,
        log_halfwidth=LINK_LOG_HALFWIDTH,
        source=DATASHEET,
        extrapolating=notes,
    )


def collective(
    link: Link,
    operation: str,
    group_size: int,
    message_bytes: float,
    notes: tuple[str, ...] = (),
    *,
    nodes: int = 1,
) -> Prediction:
    """A collective over a link without samples; device-direct ones as `links_prior` has it.

    Host-staged, or where the figures themselves were measured, by latency and goodput: for
    all_reduce 2 (n - 1) (alpha + S / n / beta).
    """
    if link.transport is Transport.DEVICE_DIRECT and not link.measured:
        return links_prior.collective(
            link, operation, group_size, message_bytes, nodes=nodes, notes=notes
        )
    message_bytes = lane_bytes(operation, group_size, nodes, message_bytes)
    steps, share = ring_shape(operation, group_size)
    step = link.latency_seconds + share * message_bytes / link.goodput_bytes_per_second
    return Prediction(
        seconds=steps * step,
        log_halfwidth=LINK_LOG_HALFWIDTH,
        source=DATASHEET,
        extrapolating=notes,
    )
