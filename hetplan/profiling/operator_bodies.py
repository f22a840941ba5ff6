"""The work of one operator as torch runs it: a timed body per class, with its passes in order.

A product with weights is three products, each timed alone: forward, the gradient of its input, and
the gradient of its weights, added to the one that is there. Every other class runs forward with
autograd recording, then backward. Tensors are the same in every repeat, so what fits into a cache
is found there: a lower bound for small shapes. Classes and shapes: `hetplan.model.operators`.

Part of the stand-alone measure.py: Python 3.8 and torch 2.1 only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from hetplan.profiling.layer_slices import INITIAL_STD, norm, rotate

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
