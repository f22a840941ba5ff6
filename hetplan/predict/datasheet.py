"""What a layer costs when nothing of its kind was measured: datasheet and priors.

    layer  = launches * operations
           + matrix flops / (peak * matrix_efficiency) + attention flops / (peak * attention_...)
           + elementwise bytes / (memory bandwidth * ELEMENTWISE_EFFICIENCY)
           + in the backward pass, WEIGHT_GRADIENT_TRAFFIC * weight bytes at the same rate

Priors are central values over devices whose measurements are public; kinds whose products sustain
another part of their rate are in `configs/sustained.yaml`. The half-width beside each is how far
single devices and shapes lie from it, so the interval of such a prediction is wide. It is the
time-weighted mean of its parts' half-widths, as if all parts were off together, which is the worst
case. Nothing here was measured on the device at hand.

Data behind the priors, each on fp16 or bf16 and single operators: the operator profiles that the
Sailor authors published for five NVIDIA devices (github.com/eth-easl/sailor, MIT) and SimuMax's
efficiency tables of A100-PCIe and B200 (github.com/MooreThreads/SimuMax).

The default layer has one causal attention kernel, no dropout, and a loss in place
(`hetplan.model.operators.DEFAULT_KERNELS`). Other kernels read and write more (`kernel_costs`). Per
microbatch and tensor-parallel rank, with b sequences of s tokens, a heads, width h, vocabulary V,
degree t and e bytes per element:

    scores in memory        b (a / t) s^2 elements. Forward: scores written, read by the softmax,
                            probabilities written, read by the context: 4 e. Backward: gradient of
                            the probabilities written; it and the probabilities read, gradient of
                            the scores written by the softmax; that read by the queries' and the
                            keys' gradients, the probabilities by the values': 7 e.
    dropout of them         each way a tensor read, one written, and a mask of one byte: 2 e + 1;
                            in a fused kernel the mask is drawn again: nothing moves
    dropout of the residual a mask of one byte per element, each way, of both additions (the
                            addition itself is one kernel); of the embedding 2 e + 1 each way
    sequence parallelism    norms and additions of b s / t tokens: less than nothing
    backward passes         both gradients read and their sum written at the two residual forks, and
                            every bias's gradient summed (`gradient_operators`). Without dropout an
                            addition has no kernel of its own: its passes are taken off.
    loss with a copy        b s V / t logits in float32. Forward: copied (e + 4); read by maximum
                            and sum (8), read and written by difference, exponential and quotient
                            (24): 36 + e. Backward: read and written once, converted (12 + e). The
                            default's passes, with which it is counted already, are taken off.

Measured on an A100 (16 bit, an operator profile's slopes at 1.555 TB/s): scores 7.8 of 8 B forward
and 13 of 14 B backward, dropout 6.7 and 5.5 of 5 B, loss 51 of 38 B and 17 of 14 B.
Passes: Megatron-LM, megatron/core/tensor_parallel/cross_entropy.py; arXiv 2205.05198, section 4.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from hetplan.cluster.devices import DeviceKind
from hetplan.errors import InputError
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.layers import Experts, LatentAttention
from hetplan.model.operators import (
    ADAMW_UPDATE_BYTES,
    BACKWARD,
    FORWARD,
    PRODUCTS,
    Operator,
    OperatorClass,
    operator_bytes,
)
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.predict.layer.values import layer_columns
from hetplan.predict.predictor import DATASHEET, LayerQuery, Prediction
from hetplan.predict.sustained import typical_halfwidth, typical_share

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
# Near it: products of 8 experts by Transformer Engine, 128 tokens each, take .267 ms on Blackwell,
# 33 us for each launch of a few us of work (github.com/NVIDIA/TransformerEngine, request 3134).
LAUNCH_SECONDS_FORWARD = 0.5 * 0.752e-3 / 13
LAUNCH_SECONDS_BACKWARD = 0.5 * 0.964e-3 / 13
# Up to the whole profile constant (log 2); down to a graph of kernels at 5 us each (log 6).
LAUNCH_LOG_HALFWIDTH = 1.4

# Kernels of a router. The device: a norm of 8192 tokens of width 128, whose 4 MB cross the memory
# in 1 us, takes 2 to 3 us on H200, GB200 and GB300 (cudnn-frontend's benchmark of norms). The host:
# a forward pass of torch.nn.Linear, 13.5 us on a DGX H100's Xeon, 33 to 37 us on a Grace
# (github.com/NVIDIA/TransformerEngine, issue 2053; Transformer Engine's own Linear: 91 to 100 us).
SMALL_KERNEL_SECONDS = 3e-6
SMALL_LAUNCH_SECONDS = 13.5e-6

BACKWARD_WORK = 2.0
"""Backward over forward operations and bytes: a gradient of the input and one of the weights."""


def matrix_efficiency(kind: str, precision: str = "") -> float:
    """Part of its rate that a kind's products sustain; the table's figures are of 16 bit."""
    if precision == Precision.FLOAT32:
        return MATRIX_EFFICIENCY
    line = typical_share(kind)
    return line.share if line is not None else MATRIX_EFFICIENCY


def attention_efficiency(kind: str) -> float:
    """The same of a causal kernel; in proportion to products where only those are published."""
    line = typical_share(kind)
    if line is not None and line.attention is not None:
        return line.attention
    return ATTENTION_EFFICIENCY * matrix_efficiency(kind) / MATRIX_EFFICIENCY


class PassPrior(NamedTuple):
    """What the datasheet's arithmetic takes of one direction."""

    work: float
    """Operations and bytes over the forward's."""
    launch_seconds: float
    elementwise_efficiency: float


_FORWARD_PRIOR = PassPrior(1.0, LAUNCH_SECONDS_FORWARD, ELEMENTWISE_EFFICIENCY_FORWARD)
_BACKWARD_PRIOR = PassPrior(BACKWARD_WORK, LAUNCH_SECONDS_BACKWARD, ELEMENTWISE_EFFICIENCY_BACKWARD)


def pass_prior(*, backward: bool) -> PassPrior:
    """The arithmetic of a forward or a backward pass."""
    return _BACKWARD_PRIOR if backward else _FORWARD_PRIOR


def elementwise_bytes_per_second(device: DeviceKind, *, backward: bool) -> float:
    """Rate of passes over memory by the datasheet; 0 where the bandwidth is not known."""
    share = pass_prior(backward=backward).elementwise_efficiency
    return device.memory_bandwidth_bytes_per_second * share


LAYER_LAUNCHES = 10.0
"""Kernels of a GPT layer, for laws that count no operators."""
SCORE_PASSES = 8.0
"""How often attention's scores cross the memory where they are kept (`layer.weak_prior`)."""

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


def known_kinds() -> dict[str, DeviceKind]:
    """The kinds of the catalogue by name."""
    # Reading files needs a library that a predictor on its own does without.
    from hetplan.cluster.catalogue import load_catalogue

    return {kind.kind: kind for kind in load_catalogue()}


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


def layer(device: DeviceKind, query: LayerQuery, notes: tuple[str, ...] = ()) -> Prediction:
    """One pass of a layer; an InputError where the device lacks the precision.

    A backward pass has twice the forward's operations and bytes.
    """
    columns = layer_columns(query)
    peak = device.peak(query.precision.value)
    work, launch, streaming = pass_prior(backward=query.is_backward)
    bandwidth = _memory_bandwidth(device) * streaming
    more = kernel_costs(query)
    launches = launch * (_operations(query.model, query.layer) + more.launches)
    products = peak * matrix_efficiency(device.kind, query.precision.value)
    matrix = work * columns.matrix_flops / products
    attention = work * columns.attention_flops / (peak * attention_efficiency(device.kind))
    if more.square_flops:
        # Plain products, at their rate.
        matrix += work * more.square_flops / products
        attention = 0.0
    traffic = work * columns.elementwise_bytes + more.moved_bytes
    if query.is_backward:
        traffic += WEIGHT_GRADIENT_TRAFFIC * columns.weight_bytes
    elementwise = traffic / bandwidth
    seconds = launches + matrix + attention + elementwise
    spread = (
        launches * LAUNCH_LOG_HALFWIDTH
        + matrix * max(MATRIX_LOG_HALFWIDTH, typical_halfwidth(device.kind))
        + attention * ATTENTION_LOG_HALFWIDTH
        + elementwise * ELEMENTWISE_LOG_HALFWIDTH
    )
    return Prediction(
        seconds=seconds, log_halfwidth=spread / seconds, source=DATASHEET, extrapolating=notes
    )


_MASK_BYTES = 1
# More than one causal kernel, forward and backward: scores, softmax, context for one; two products
# each for scores and context and the softmax's gradient for one.
_SCORE_LAUNCHES = (2, 4)
# Maximum, difference, exponential with its sum, quotient; the softmax scaled and copied back.
_LOSS_LAUNCHES = (4, 1)
_DEFAULT_LOSS_PASSES = 3.0
"""Over the logits, of `layer_work` for a head: written, read, and their gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCosts:
    """What one pass of a layer does beyond that with default kernels."""

    moved_bytes: float = 0.0
    launches: int = 0
    square_flops: float = 0.0
    """Forward operations of scores and context as products over the full square, in place of the
    causal kernel's operations; 0: there is that kernel."""


def kernel_costs(query: LayerQuery) -> KernelCosts:
    """Costs of one pass. A model whose transformer layer is asked for must have equal ones."""
    kernels, model = query.kernels, query.model
    tokens = float(query.microbatch_size * query.sequence_length)
    element_bytes = query.precision.bytes_per_element
    if query.layer is LayerKind.HEAD:
        return _loss_costs(query, tokens, element_bytes)
    if query.layer is LayerKind.EMBEDDING:
        if not kernels.hidden_dropout:
            return KernelCosts()
        moved = tokens * model.hidden_size * (2 * element_bytes + _MASK_BYTES)
        return KernelCosts(moved_bytes=moved, launches=1)
    costs = _transformer_costs(query, tokens, element_bytes)
    if not query.is_backward:
        return costs
    more = sum(
        op.count * operator_bytes(op, BACKWARD, element_bytes) for op in query.gradient_operators()
    )
    return replace(costs, moved_bytes=costs.moved_bytes + more)


def _transformer_costs(query: LayerQuery, tokens: float, e: int) -> KernelCosts:
    layer, kernels = query.model.common_layer(query.sequence_length), query.kernels
    hidden, tp, backward = query.model.hidden_size, query.tp, query.is_backward
    moved, launches, square = 0.0, 0, 0.0
    if not kernels.fused_attention:
        queries, other = layer.attention.slice_sizes(tp)
        value = other if isinstance(layer.attention, LatentAttention) else queries
        square = 2.0 * tokens * query.sequence_length * (queries + value)
        scores = layer.attention.num_heads / tp * tokens * query.sequence_length
        moved += scores * e * (7 if backward else 4)
        launches += _SCORE_LAUNCHES[backward]
        if kernels.attention_dropout:
            moved += scores * (2 * e + _MASK_BYTES)
            launches += 1
    cut = 1.0 / tp if kernels.sequence_parallel else 1.0
    if kernels.hidden_dropout:
        moved += 2.0 * tokens * hidden * _MASK_BYTES * cut
    # As `layer_work` counts them; backward passes have twice that.
    norms, additions = (tokens * hidden * e * each for each in (2.0 * layer.num_norms, 4.0))
    if backward:
        norms, additions = 2.0 * norms, 2.0 * additions
        if not kernels.hidden_dropout:
            moved -= additions
            additions = 0.0
    moved -= (1.0 - cut) * (norms + additions)
    if not kernels.fused_elementwise:
        more_bytes, more_launches = _apart(query, e)
        moved, launches = moved + more_bytes, launches + more_launches
    return KernelCosts(moved_bytes=moved, launches=launches, square_flops=square)


def _apart(query: LayerQuery, e: int) -> tuple[float, int]:
    """Bytes and launches that operators have on top which are not fused to one kernel each."""
    phase = BACKWARD if query.is_backward else FORWARD
    fused = replace(query, kernels=replace(query.kernels, fused_elementwise=True))

    def total(asked: LayerQuery) -> tuple[float, int]:
        passes = [op for op in asked.operators() if op.operator not in PRODUCTS]
        moved = sum(op.count * operator_bytes(op, phase, e) for op in passes)
        return moved, sum(op.count for op in passes)

    (apart, launches), (together, fewer) = total(query), total(fused)
    return apart - together, launches - fewer


def _loss_costs(query: LayerQuery, tokens: float, e: int) -> KernelCosts:
    if query.kernels.fused_loss:
        return KernelCosts()
    backward = query.is_backward
    loss = Operator(
        operator=OperatorClass.LOSS,
        what="loss",
        m=int(tokens),
        n=query.model.vocabulary_slice(query.tp),
        float32_copy=True,
    )
    moved = operator_bytes(loss, BACKWARD if backward else FORWARD, e)
    # Logits are written whatever reads them; backward passes count twice the forward's.
    counted = _DEFAULT_LOSS_PASSES * e * (2.0 if backward else 1.0) - (0.0 if backward else e)
    return KernelCosts(
        moved_bytes=max(0.0, moved - counted * loss.m * loss.n),
        launches=_LOSS_LAUNCHES[backward],
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
