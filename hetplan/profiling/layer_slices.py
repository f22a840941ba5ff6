"""The parts that trained layers are made of, one rank's slice of a layer, and how both are timed.

`hetplan.profiling.layers` builds the trained layers of these parts and adds the communication of
the tensor-parallel group. `LayerSlice` is rank 0's slice without a group, for the stand-alone
measure.py: the same parts in the same order. Symbols: b microbatch, s sequence, h hidden.

Part of the stand-alone measure.py: Python 3.8 and torch 2.1 only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from hetplan.profiling.timing import Timing, TimingLimits, measure

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INITIAL_STD = 0.02  # GPT-2 (Radford et al. 2019), kept by Megatron-LM and Llama ports
NORM_EPSILON = 1e-5  # hetplan.model.numerics: OWN_NORM_EPSILON
ROTARY_BASE = 10000.0  # hetplan.model.numerics: OWN_ROTARY_BASE
# `enable_gqa` came with torch 2.5 and `rms_norm` with 2.4; vendors' images have older ones.
_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """LayerNorm where there is a bias (gpt), else RMSNorm (llama)."""
    if bias is not None:
        return functional.layer_norm(x, weight.shape, weight, bias, NORM_EPSILON)
    if _TORCH >= (2, 4):
        return functional.rms_norm(x, weight.shape, weight, NORM_EPSILON)
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPSILON)
    return scaled.to(x.dtype) * weight


def rotary_tables(s: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [s, head_dim / 2] of rotary positions."""
    half = head_dim // 2
    exponents = torch.arange(half, dtype=torch.float32, device=like.device) / half
    places = torch.arange(s, dtype=torch.float32, device=like.device)
    angles = torch.outer(places, ROTARY_BASE**-exponents)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def attention(qkv: Tensor, query: int, head_dim: int, tables: Any = None) -> Tensor:
    """Causal attention of a rank's heads: [b, s, q + 2 kv] -> [b, s, q]; `tables`: rotary."""
    b, s, width = qkv.shape
    kv = (width - query) // 2
    parts = torch.split(qkv, [query, kv, kv], dim=-1)
    q, k, v = (part.view(b, s, -1, head_dim).transpose(1, 2) for part in parts)
    if tables is not None:
        q, k = rotate(q, *tables), rotate(k, *tables)
    grouped: dict[str, Any] = {}
    if query != kv and _TORCH >= (2, 5):
        grouped = {"enable_gqa": True}
    elif query != kv:
        k, v = (part.repeat_interleave(query // kv, dim=1) for part in (k, v))
    context = functional.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)
    return context.transpose(1, 2).reshape(b, s, query)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions applied to the last dimension."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class CrossEntropy(torch.autograd.Function):
    """Mean loss of logits [b, s, vocabulary slice] against targets [b, s], in float32.

    `all_reduce(tensor, largest)` takes the maximum or the sum over a tensor-parallel group.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, first: int, all_reduce: Any = None
    ) -> Tensor:
        """The loss; `first` is the rank's first word of the vocabulary."""
        reduce = all_reduce or (lambda tensor, largest: None)
        largest = logits.detach().amax(dim=-1, keepdim=True).float()
        reduce(largest, True)
        softmax = logits.float() - largest
        local = targets - first
        mine = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
        target_logit = softmax.gather(-1, local) * mine.unsqueeze(-1)
        softmax.exp_()
        sums = torch.stack((softmax.sum(dim=-1, keepdim=True), target_logit))
        reduce(sums, False)
        softmax.div_(sums[0])
        ctx.save_for_backward(softmax, local, mine)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient of the logits; autograd refuses a second pass over it."""
        softmax, local, mine = ctx.saved_tensors
        softmax.scatter_add_(-1, local, -mine.unsqueeze(-1).to(softmax.dtype))
        softmax.mul_(gradients[0] / mine.numel())
        return softmax.to(ctx.dtype), None, None, None


class LayerSlice(torch.nn.Module):
    """Rank 0's slice of one layer; `row` is a row of `TASK["layers"]` with its model's sizes."""

    def __init__(self, row: dict[str, Any], device: torch.device) -> None:
        super().__init__()
        self.row, self.is_gpt = row, row["architecture"] == "gpt"
        h, tp, d = row["hidden_size"], row["tp"], row["head_dim"]
        self.query = row["num_attention_heads"] * d // tp
        kv, ffn = max(1, row["num_kv_heads"] // tp) * d, row["ffn_hidden_size"] // tp
        vocabulary = -(-row["vocab_size"] // tp)
        shapes: Any = {
            "transformer": [
                ("norm1", h), ("norm1_bias", h), ("qkv", self.query + 2 * kv, h),
                ("qkv_bias", self.query + 2 * kv), ("out", h, self.query), ("out_bias", h),
                ("norm2", h), ("norm2_bias", h), ("gate", ffn, h), ("up", ffn, h),
                ("up_bias", ffn), ("down", h, ffn), ("down_bias", h),
            ],
            "embedding": [("weight", vocabulary, h), ("positions", row["max_sequence_length"], h)],
            "head": [("norm", h), ("norm_bias", h), ("weight", vocabulary, h)],
        }[row["layer"]]  # fmt: skip
        for name, *shape in shapes:
            is_other = name == "gate" if self.is_gpt else "bias" in name or name == "positions"
            value = torch.empty(shape, dtype=DTYPES[row["precision"]], device=device)
            value.normal_(0.0, INITIAL_STD)
            self.register_parameter(name, None if is_other else torch.nn.Parameter(value))

    def inputs(self, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Arguments of `forward`, and the gradient of its result (None for the scalar loss)."""
        row = self.row
        shape = (row["microbatch_size"], row["sequence_length"])
        return layer_inputs(
            row["layer"], shape, row["hidden_size"], row["vocab_size"], row["precision"], device
        )

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Tokens [b, s] -> [b, s, h]; [b, s, h] -> [b, s, h]; or [b, s, h] -> loss."""
        own: Any = self  # its parameters have no types
        if self.row["layer"] == "embedding":
            return self._embedding(x)
        if self.row["layer"] == "head":
            logits = functional.linear(norm(x, own.norm, own.norm_bias), own.weight)
            loss: Tensor = CrossEntropy.apply(logits, targets, 0)  # type: ignore[no-untyped-call]
            return loss
        y = norm(x, own.norm1, own.norm1_bias)
        qkv = functional.linear(y, own.qkv, own.qkv_bias)
        tables = None if self.is_gpt else self._tables(x)
        y = attention(qkv, self.query, self.row["head_dim"], tables)
        x = x + functional.linear(y, own.out, own.out_bias)
        y = norm(x, own.norm2, own.norm2_bias)
        if self.is_gpt:
            y = functional.gelu(functional.linear(y, own.up, own.up_bias))
        else:
            y = functional.silu(functional.linear(y, own.gate)) * functional.linear(y, own.up)
        return x + functional.linear(y, own.down, own.down_bias)

    def _embedding(self, tokens: Tensor) -> Tensor:
        own: Any = self
        rows = own.weight.shape[0]
        if self.row["tp"] == 1:
            x = functional.embedding(tokens, own.weight)
        else:
            vectors = functional.embedding(tokens.clamp(0, rows - 1), own.weight)
            x = vectors * (tokens < rows).unsqueeze(-1)
        return x + own.positions[: tokens.shape[1]] if self.is_gpt else x

    def _tables(self, x: Tensor) -> Any:
        if not hasattr(self, "_kept_tables"):
            self._kept_tables = rotary_tables(x.shape[1], self.row["head_dim"], x)
        return self._kept_tables


def layer_inputs(
    layer: str,
    shape: tuple[int, int],
    hidden: int,
    vocabulary: int,
    precision: str,
    device: torch.device,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """What a layer takes, and the gradient of its result; `shape` is [b, s]."""
    tokens = torch.randint(0, vocabulary, shape, device=device)
    stream = torch.randn((*shape, hidden), dtype=DTYPES[precision], device=device)
    if layer == "embedding":
        return (tokens,), stream
    if layer == "head":
        return (stream.requires_grad_(), tokens), None
    return (stream.requires_grad_(),), torch.randn_like(stream)


def time_layer(
    layer: torch.nn.Module,
    arguments: tuple[Tensor, ...],
    gradient: Tensor | None,
    backend: Any,
    limits: TimingLimits,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[tuple[Timing, float, float]]:
    """Forward, then backward: its timing, bytes kept for backward, peak bytes (0: not told)."""

    def one_pass(mark: Callable[[], None]) -> None:
        for argument in arguments:
            argument.grad = None
        mark()
        result = layer(*arguments)
        mark()
        result.backward(gradient)
        mark()

    timings = measure(one_pass, backend, limits, clock=clock)
    parameters = {each.untyped_storage().data_ptr() for each in layer.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def peak(run: Callable[[], Any]) -> tuple[Any, float]:
        is_told = backend.reset_peak_memory()
        result = run()
        backend.synchronise()
        return result, backend.peak_memory_bytes() if is_told else 0.0

    for argument in arguments:
        argument.grad = None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result, forward_peak = peak(lambda: layer(*arguments))
    yield timings[0], float(sum(kept.values())), forward_peak
    yield timings[1], 0.0, peak(lambda: result.backward(gradient))[1]


# The update is as hetplan's trainer does it: one vector, in bfloat16 with a float32 copy. Constants
# of GPT-3 and Llama (arXiv 2005.14165, appendix B; 2302.13971, section 2.3).
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def time_update(
    optimizer: str, values: Tensor, backend: Any, limits: TimingLimits
) -> tuple[Timing, float]:
    """Timing of one update of this vector of parameters, and its peak bytes."""
    gradients = torch.randn_like(values) * INITIAL_STD
    is_exact = values.dtype == torch.float32
    updated = torch.nn.Parameter(values if is_exact else values.float())
    updated.grad = gradients if is_exact else torch.empty_like(updated)
    rule: Any = (
        torch.optim.AdamW([updated], **ADAMW)  # type: ignore[arg-type]
        if optimizer == "adamw"
        else torch.optim.SGD([updated], lr=0.1)
    )

    def update(mark: Callable[[], None]) -> None:
        mark()
        if not is_exact:
            updated.grad.copy_(gradients)  # type: ignore[union-attr]
        rule.step()
        if not is_exact:
            values.copy_(updated.detach())
        mark()

    (timing,) = measure(update, backend, limits)
    if not backend.reset_peak_memory():
        return timing, 0.0
    update(lambda: None)
    backend.synchronise()
    return timing, backend.peak_memory_bytes()
