"""Layers and operators as torch runs them, and the rows of samples that timing them gives.

Layers: `LayerBody` is the forward pass of a tensor-parallel slice. `LayerSlice` is rank 0's without
its group, which is what is measured; `hetplan.profiling.layers` adds what the group communicates,
which is what is trained. Symbols: b microbatch, s sequence, h hidden.

Operators: a product with weights is three products, each timed alone: forward, the gradient of its
input, and the gradient of its weights, added to the one that is there. Every other class runs
forward with autograd recording, then backward. Tensors are the same in every repeat, so what fits
into a cache is found there: a lower bound for small shapes. Classes and shapes:
`hetplan.model.operators`.

Part of the stand-alone measure.py: Python 3.8 and torch 2.1 only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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


def attention(qkv: Tensor, query: int, head_dim: int, tables: Any, scales: Any = None) -> Tensor:
    """Causal attention of heads, [b, s, q + 2 kv] -> [b, s, q]; rotary tables, scales of norms."""
    b, s, width = qkv.shape
    kv = (width - query) // 2
    parts = torch.split(qkv, [query, kv, kv], dim=-1)
    q, k, v = (part.view(b, s, -1, head_dim).transpose(1, 2) for part in parts)
    if scales is not None:
        q, k = norm(q, scales[:head_dim], None), norm(k, scales[head_dim:], None)
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


class LayerBody(torch.nn.Module):
    """Forward passes of a rank's slice of a layer; parameters are attributes, None where absent.
    The methods up to `row_product` communicate in a trained layer; alone nothing is communicated.
    """

    is_gpt: bool
    tp: int
    tp_rank: int
    query: int
    """Width of the rank's queries."""
    head_dim: int

    def replicated(self, x: Tensor) -> Tensor:
        """The input of a column-parallel product, which every rank has whole."""
        return x

    def summed(self, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors."""
        return x

    def shared_kv(self, parameter: Tensor | None) -> Tensor | None:
        """A fused query-key-value parameter, whose key-value heads several ranks may hold."""
        return parameter

    def row_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A row-parallel product, whose partial results are summed."""
        return functional.linear(x, weight, bias)

    def embedding(self, tokens: Tensor) -> Tensor:
        """[b, s] -> [b, s, h]; each rank looks up the tokens of its part of the vocabulary."""
        own: Any = self  # its parameters have no types
        if self.tp == 1:
            x = functional.embedding(tokens, own.weight)
        else:
            rows = own.weight.shape[0]
            local = tokens - self.tp_rank * rows
            mine = (local >= 0) & (local < rows)
            vectors = functional.embedding(local.clamp(0, rows - 1), own.weight)
            x = self.summed(vectors * mine.unsqueeze(-1))
        return x + own.position_weight[: tokens.shape[1]] if self.is_gpt else x

    def transformer(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h], pre-norm.

        gpt: LayerNorm, biases, GELU; llama: RMSNorm, rotary positions, gated SiLU.
        """
        own: Any = self
        x = x + self.attend(norm(x, own.attention_norm_weight, own.attention_norm_bias))
        return x + self.mlp(norm(x, own.mlp_norm_weight, own.mlp_norm_bias))

    def attend(self, y: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]: attention with its projections."""
        own: Any = self
        y = self.replicated(y)
        weight, bias = self.shared_kv(own.qkv_weight), self.shared_kv(own.qkv_bias)
        qkv = functional.linear(y, weight, bias)  # type: ignore[arg-type]
        tables = None if self.is_gpt else self._rotary(qkv)
        scales = getattr(self, "qk_norm_weight", None)
        scales = None if scales is None else self.replicated(scales)
        y = attention(qkv, self.query, self.head_dim, tables, scales)
        return self.row_product(y, own.out_weight, own.out_bias)

    def mlp(self, y: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]: a dense MLP."""
        own: Any = self
        y = self.replicated(y)
        if self.is_gpt:
            y = functional.gelu(functional.linear(y, own.up_weight, own.up_bias))
        else:
            gate = functional.silu(functional.linear(y, own.gate_weight))
            y = gate * functional.linear(y, own.up_weight)
        return self.row_product(y, own.down_weight, own.down_bias)

    def logits(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, rows of the vocabulary that the rank has]."""
        own: Any = self
        y = self.replicated(norm(x, own.norm_weight, own.norm_bias))
        return functional.linear(y, own.weight)

    def _rotary(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary tables, computed once per sequence length."""
        kept: Any = getattr(self, "_rotary_tables", None)
        key = (like.shape[1], like.dtype, like.device)
        if kept is None or (len(kept[0]), kept[0].dtype, kept[0].device) != key:
            kept = self._rotary_tables = rotary_tables(like.shape[1], self.head_dim, like)
        return kept  # type: ignore[no-any-return]


ONLY_GPT = frozenset(
    ("attention_norm_bias", "qkv_bias", "out_bias", "mlp_norm_bias", "up_bias", "down_bias",
     "norm_bias", "position_weight")
)  # fmt: skip
"""Parameters that llama has not; gpt has no `gate_weight`."""


class LayerSlice(LayerBody):
    """Rank 0's slice of one layer; `row` is a row of `TASK["layers"]` with its model's sizes."""

    def __init__(self, row: dict[str, Any], device: torch.device) -> None:
        super().__init__()
        self.row, self.is_gpt = row, row["architecture"] == "gpt"
        h, tp, d = row["hidden_size"], row["tp"], row["head_dim"]
        self.tp, self.tp_rank, self.head_dim = tp, 0, d
        self.query = row["num_attention_heads"] * d // tp
        kv, ffn = max(1, row["num_kv_heads"] // tp) * d, row["ffn_hidden_size"] // tp
        vocabulary = -(-row["vocab_size"] // tp)
        shapes: Any = {
            "transformer": [
                ("attention_norm_weight", h), ("attention_norm_bias", h),
                ("qkv_weight", self.query + 2 * kv, h), ("qkv_bias", self.query + 2 * kv),
                ("out_weight", h, self.query), ("out_bias", h), ("mlp_norm_weight", h),
                ("mlp_norm_bias", h), ("gate_weight", ffn, h), ("up_weight", ffn, h),
                ("up_bias", ffn), ("down_weight", h, ffn), ("down_bias", h),
            ],
            "embedding": [("weight", vocabulary, h),
                          ("position_weight", row["max_sequence_length"], h)],
            "head": [("norm_weight", h), ("norm_bias", h), ("weight", vocabulary, h)],
        }[row["layer"]]  # fmt: skip
        for name, *shape in shapes:
            is_absent = name == "gate_weight" if self.is_gpt else name in ONLY_GPT
            value = torch.empty(shape, dtype=DTYPES[row["precision"]], device=device)
            value.normal_(0.0, INITIAL_STD)
            self.register_parameter(name, None if is_absent else torch.nn.Parameter(value))

    def inputs(self, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Arguments of `forward`, and the gradient of its result (None for the scalar loss)."""
        row = self.row
        shape = (row["microbatch_size"], row["sequence_length"])
        tokens = torch.randint(0, row["vocab_size"], shape, device=device)
        dtype = DTYPES[row["precision"]]
        stream = torch.randn((*shape, row["hidden_size"]), dtype=dtype, device=device)
        if row["layer"] == "embedding":
            return (tokens,), stream
        if row["layer"] == "head":
            return (stream.requires_grad_(), tokens), None
        return (stream.requires_grad_(),), torch.randn_like(stream)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """The layer's pass; the head's with its loss, a scalar."""
        if self.row["layer"] == "embedding":
            return self.embedding(x)
        if self.row["layer"] == "transformer":
            return self.transformer(x)
        loss: Tensor = CrossEntropy.apply(self.logits(x), targets, 0)  # type: ignore[no-untyped-call]
        return loss


def time_layer(
    layer: torch.nn.Module,
    arguments: tuple[Tensor, ...],
    gradient: Tensor | None,
    backend: Any,
    limits: TimingLimits,
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

    timings = measure(one_pass, backend, limits)
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
# of GPT-3 and Llama (arXiv 2005.14165, appendix B; 2302.13971, section 2.3); epsilon is torch's,
# the rate five times the largest of those papers: this trainer's models are far smaller.
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


TIMES = ("median_seconds", "p10_seconds", "p90_seconds", "repeats", "outliers")
"""Columns of a sample that its `Timing` gives."""


def timing_columns(timing: Timing) -> dict[str, Any]:
    """The columns of a sample that say how long it took."""
    return {name: getattr(timing, name) for name in (*TIMES, "steady")}


def layer_passes(row: dict[str, Any]) -> list[tuple[str, int]]:
    """Phase and copies of every sample of a layer: both passes, then its updates."""
    updates = [(f"optimizer:{name}", copies) for name, copies in row["updates"]]
    return [("forward", 1), ("backward", 1), *updates]


def layer_rows(
    row: dict[str, Any],
    backend: Any,
    limits: TimingLimits,
    wrap: Callable[[torch.nn.Module], torch.nn.Module] = lambda layer: layer,
) -> Iterator[dict[str, Any]]:
    """`row` with the results of each of its passes: the columns of a layer's samples.

    `wrap` may slow the layer down (`pacing`).
    """
    layer = LayerSlice(row, backend.device())
    arguments, gradient = layer.inputs(backend.device())
    timed = time_layer(wrap(layer), arguments, gradient, backend, limits)
    for phase, (timing, kept, peak) in zip(("forward", "backward"), timed):  # noqa: B905
        values = {**row, **timing_columns(timing), "phase": phase, "copies": 1}
        values.update(activation_bytes=kept, peak_memory_bytes=peak)
        yield {**values, "clock_hertz": backend.clock_hertz()}
    count = sum(each.numel() for each in layer.parameters())
    del layer, timed
    for phase, copies in layer_passes(row)[2:]:
        dtype = DTYPES[row["precision"]]
        vector = torch.randn(copies * count, device=backend.device(), dtype=dtype) * INITIAL_STD
        timing, peak = time_update(phase.partition(":")[2], vector, backend, limits)
        values = {**row, **timing_columns(timing), "phase": phase, "copies": copies}
        values.update(activation_bytes=0.0, peak_memory_bytes=peak)
        yield {**values, "clock_hertz": backend.clock_hertz()}


DROPOUT = 0.1  # of Megatron-LM's arguments; the time does not depend on it
WITH_WEIGHTS = ("matrix_product", "grouped_product")


@dataclass(frozen=True)
class Place:
    """Where and in which format an operator's tensors are made."""

    device: torch.device
    dtype: torch.dtype
    architecture: str
    """gpt has LayerNorm with a bias, llama RMSNorm."""

    def values(self, *shape: int) -> Tensor:
        """Ordinary numbers: no kernel's time depends on them otherwise."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def leaf(self, *shape: int) -> Tensor:
        """Values of which autograd makes a gradient."""
        return self.values(*shape).requires_grad_()


def operator_shapes(op: Any) -> dict[str, tuple[int, int, int]]:
    """m, n, k of every pass that `operator_body` times, in their order."""
    shape = (op.m, op.n, op.k)
    if op.operator not in WITH_WEIGHTS:
        return {"forward": shape, "backward": shape}
    input_gradient, weight_gradient = (op.m, op.k, op.n), (op.n, op.k, op.m)
    return {
        "forward": shape, "input_gradient": input_gradient, "weight_gradient": weight_gradient,
    }  # fmt: skip


def operator_body(op: Any, place: Place) -> Callable[[Callable[[], None]], None]:
    """One pass of the operator, with a mark before it and after each of `operator_shapes`."""
    if op.operator in WITH_WEIGHTS:
        return _product(op, place)
    run, inputs, result_shape = _OPERATORS[str(op.operator)](op, place)
    gradient = place.values(*result_shape) if result_shape else None

    def body(mark: Callable[[], None]) -> None:
        for each in inputs:
            each.grad = None
        mark()
        result = run()
        mark()
        torch.autograd.backward(result, gradient)
        mark()

    return body


def _product(op: Any, place: Place) -> Callable[[Callable[[], None]], None]:
    batch = (op.batch,) if op.operator == "grouped_product" else ()
    x, g = place.values(*batch, op.m, op.k), place.values(*batch, op.m, op.n)
    w = (place.values(*batch, op.k, op.n) if batch else place.values(op.n, op.k)) * INITIAL_STD
    total = torch.zeros_like(w)

    def body(mark: Callable[[], None]) -> None:
        with torch.no_grad():
            mark()
            torch.bmm(x, w) if batch else functional.linear(x, w)
            mark()
            torch.bmm(g, w.transpose(1, 2)) if batch else torch.mm(g, w)
            mark()
            if batch:
                torch.baddbmm(total, x.transpose(1, 2), g, out=total)
            else:
                torch.addmm(total, g.t(), x, out=total)
            mark()

    return body


# Each gives: the forward pass, tensors whose gradients are made anew, shape of the result (none: a
# scalar).


def _score(op: Any, place: Place) -> Any:
    q, k = place.leaf(op.batch, op.m, op.k), place.leaf(op.batch, op.n, op.k)
    return lambda: torch.bmm(q, k.transpose(1, 2)), (q, k), (op.batch, op.m, op.n)


def _context(op: Any, place: Place) -> Any:
    p, v = place.leaf(op.batch, op.m, op.k), place.leaf(op.batch, op.k, op.n)
    return lambda: torch.bmm(p, v), (p, v), (op.batch, op.m, op.n)


def _fused_attention(op: Any, place: Place) -> Any:
    q = place.leaf(1, op.batch, op.m, op.k)
    k, v = place.leaf(1, op.batch, op.n, op.k), place.leaf(1, op.batch, op.n, op.k)
    run = functional.scaled_dot_product_attention
    return lambda: run(q, k, v, is_causal=True), (q, k, v), (1, op.batch, op.m, op.k)


def _softmax(op: Any, place: Place) -> Any:
    """Of scores: squares of n, masked above the diagonal; of a router: plain rows."""
    if op.m % op.n:
        x = place.leaf(op.m, op.n)
        return lambda: torch.softmax(x, dim=-1), (x,), (op.m, op.n)
    x = place.leaf(op.m // op.n, op.n, op.n)
    mask = torch.ones(op.n, op.n, dtype=torch.bool, device=place.device).triu(1)
    least = torch.finfo(place.dtype).min
    return lambda: torch.softmax(x.masked_fill(mask, least), dim=-1), (x,), tuple(x.shape)


def _dropout(op: Any, place: Place) -> Any:
    x = place.leaf(op.m, op.n)
    return lambda: functional.dropout(x, DROPOUT), (x,), (op.m, op.n)


def _norm(op: Any, place: Place) -> Any:
    x, weight = place.leaf(op.m, op.n), place.leaf(op.n)
    bias = place.leaf(op.n) if place.architecture == "gpt" else None
    return lambda: norm(x, weight, bias), (x,), (op.m, op.n)


def _activation(op: Any, place: Place) -> Any:
    if op.k == 2 * op.n:
        gate, up = place.leaf(op.m, op.n), place.leaf(op.m, op.n)
        return lambda: functional.silu(gate) * up, (gate, up), (op.m, op.n)
    x = place.leaf(op.m, op.k or op.n)
    return lambda: functional.gelu(x), (x,), (op.m, op.n)


def _addition(op: Any, place: Place) -> Any:
    x, y, bias = place.leaf(op.m, op.n), place.leaf(op.m, op.n), place.leaf(op.n)
    runs: dict[int, Any] = {
        0: lambda: x + y,
        1: lambda: x + functional.dropout(y, DROPOUT),
        3: lambda: x + functional.dropout(y + bias, DROPOUT),
    }
    return runs[op.k], (x, y), (op.m, op.n)


def _rotation(op: Any, place: Place) -> Any:
    x, half = place.leaf(op.m, op.n), op.n // 2
    cosine, sine = place.values(op.m, half), place.values(op.m, half)
    return lambda: rotate(x[:, : 2 * half], cosine, sine), (x,), (op.m, 2 * half)


def _routing(op: Any, place: Place) -> Any:
    """Copies of tokens to their experts' places, and back."""
    x, order = place.leaf(op.m, op.n), torch.randperm(op.m, device=place.device)
    back = torch.argsort(order)
    return lambda: x[order][back], (x,), (op.m, op.n)


def _embedding(op: Any, place: Place) -> Any:
    """The table's gradient is kept from pass to pass: it is added to, as in a step."""
    table = place.leaf(op.k, op.n)
    tokens = torch.randint(0, op.k, (op.m,), device=place.device)
    return lambda: functional.embedding(tokens, table), (), (op.m, op.n)


def _loss(op: Any, place: Place) -> Any:
    logits = place.leaf(op.m, op.n)
    targets = torch.randint(0, op.n, (op.m,), device=place.device)

    def run() -> Tensor:
        return functional.cross_entropy(logits.float() if op.float32_copy else logits, targets)

    return run, (logits,), ()


_OPERATORS: dict[str, Callable[[Any, Place], Any]] = {
    "attention_score": _score,
    "attention_context": _context,
    "fused_attention": _fused_attention,
    "softmax": _softmax,
    "attention_dropout": _dropout,
    "norm": _norm,
    "activation": _activation,
    "addition": _addition,
    "rotation": _rotation,
    "routing": _routing,
    "embedding": _embedding,
    "loss": _loss,
}
"""Every class that is measured alone, but the products with weights."""


def operator_passes(op: Any, precision: str) -> list[dict[str, Any]]:
    """What the samples of every pass of an operator are of: their columns but device and times.

    A loss in float32 says so by its output; gradients of weights are as wide as the weights here.
    """
    is_wide = op.operator == "loss" and op.float32_copy
    common = {"operator": str(op.operator), "precision": precision, "batch": op.batch}
    common["output_precision"] = "float32" if is_wide else precision
    return [
        {**common, "phase": phase, "m": m, "n": n, "k": k}
        for phase, (m, n, k) in operator_shapes(op).items()
    ]


def operator_rows(
    op: Any,
    precision: str,
    architecture: str,
    backend: Any,
    limits: TimingLimits,
) -> Iterator[dict[str, Any]]:
    """The columns of an operator's samples, but for the device."""
    place = Place(backend.device(), DTYPES[precision], architecture)
    timings: Sequence[Timing] = measure(operator_body(op, place), backend, limits)
    for keys, timing in zip(operator_passes(op, precision), timings):  # noqa: B905
        yield {**keys, **{name: getattr(timing, name) for name in TIMES}}
