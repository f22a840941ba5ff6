"""The work of one operator as torch runs it: a timed body per class, with its passes in order.

A product with weights is three products, each timed alone: forward y = x w^T, the gradient of its
input, and the gradient of its weights added to the one that is there, as from the second microbatch
of a step on. Every other class runs forward with autograd recording, then backward. Tensors are the
same in every repeat, so what fits into a cache is found there: a lower bound for small shapes.

Nothing communicates. Shapes and classes: `hetplan.model.operators`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as functional
from torch import Tensor

from hetplan.model.operators import WITH_WEIGHTS, Operator, OperatorClass
from hetplan.model.spec import Architecture
from hetplan.profiling.layers import NORM_EPSILON
from hetplan.profiling.samples import OperatorPhase
from hetplan.profiling.timing import Body
from hetplan.profiling.weights import INITIAL_STD

DROPOUT = 0.1  # of Megatron-LM's arguments; the time does not depend on it
_TWO_PASSES = (OperatorPhase.FORWARD, OperatorPhase.BACKWARD)
_THREE_PRODUCTS = (
    OperatorPhase.FORWARD,
    OperatorPhase.INPUT_GRADIENT,
    OperatorPhase.WEIGHT_GRADIENT,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where and in which format tensors are made."""

    device: torch.device
    dtype: torch.dtype
    architecture: Architecture
    """GPT has LayerNorm with a bias, Llama RMSNorm."""

    def values(self, *shape: int) -> Tensor:
        """Ordinary numbers: no kernel's time depends on them otherwise."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def leaf(self, *shape: int) -> Tensor:
        """The same, of which autograd makes a gradient."""
        return self.values(*shape).requires_grad_()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """Forward of an operator on tensors that are there, and what flows back."""

    run: Callable[[], Tensor]
    inputs: tuple[Tensor, ...] = ()
    """Whose gradients are made anew in every pass, as those of activations."""
    result: tuple[int, ...] = field(default=())
    """Shape of the result; (): a scalar, whose gradient is 1."""


def operator_phases(op: Operator) -> tuple[OperatorPhase, ...]:
    """The passes that `operator_body` times, in their order."""
    return _THREE_PRODUCTS if op.operator in WITH_WEIGHTS else _TWO_PASSES


def phase_shape(op: Operator, phase: OperatorPhase) -> tuple[int, int, int]:
    """m, n, k of what runs in this pass; only products with weights change theirs."""
    if phase is OperatorPhase.INPUT_GRADIENT:
        return op.m, op.k, op.n
    if phase is OperatorPhase.WEIGHT_GRADIENT:
        return op.n, op.k, op.m
    return op.m, op.n, op.k


def operator_body(op: Operator, place: Place) -> Body:
    """One pass of the operator, with a mark before it and after each of its `operator_phases`."""
    if op.operator is OperatorClass.MATRIX_PRODUCT:
        return _product(op, place)
    if op.operator is OperatorClass.GROUPED_PRODUCT:
        return _grouped(op, place)
    return _recorded(_VENDORS[op.operator](op, place), place)


def _product(op: Operator, place: Place) -> Body:
    x, w = place.values(op.m, op.k), place.values(op.n, op.k) * INITIAL_STD
    g, weights_gradient = place.values(op.m, op.n), torch.zeros_like(w)

    def body(mark: Callable[[], None]) -> None:
        with torch.no_grad():
            mark()
            functional.linear(x, w)
            mark()
            torch.mm(g, w)
            mark()
            torch.addmm(weights_gradient, g.t(), x, out=weights_gradient)
            mark()

    return body


def _grouped(op: Operator, place: Place) -> Body:
    x, w = place.values(op.batch, op.m, op.k), place.values(op.batch, op.k, op.n) * INITIAL_STD
    g, weights_gradient = place.values(op.batch, op.m, op.n), torch.zeros_like(w)

    def body(mark: Callable[[], None]) -> None:
        with torch.no_grad():
            mark()
            torch.bmm(x, w)
            mark()
            torch.bmm(g, w.transpose(1, 2))
            mark()
            torch.baddbmm(weights_gradient, x.transpose(1, 2), g, out=weights_gradient)
            mark()

    return body


def _recorded(work: _Pass, place: Place) -> Body:
    gradient = place.values(*work.result) if work.result else None

    def body(mark: Callable[[], None]) -> None:
        for each in work.inputs:
            each.grad = None
        mark()
        result = work.run()
        mark()
        torch.autograd.backward(result, gradient)
        mark()

    return body


def _score(op: Operator, place: Place) -> _Pass:
    q, k = place.leaf(op.batch, op.m, op.k), place.leaf(op.batch, op.n, op.k)
    shape = (op.batch, op.m, op.n)
    return _Pass(run=lambda: torch.bmm(q, k.transpose(1, 2)), inputs=(q, k), result=shape)


def _context(op: Operator, place: Place) -> _Pass:
    p, v = place.leaf(op.batch, op.m, op.k), place.leaf(op.batch, op.k, op.n)
    return _Pass(run=lambda: torch.bmm(p, v), inputs=(p, v), result=(op.batch, op.m, op.n))


def _fused_attention(op: Operator, place: Place) -> _Pass:
    q = place.leaf(1, op.batch, op.m, op.k)
    k, v = (place.leaf(1, op.batch, op.n, op.k) for _ in range(2))
    return _Pass(
        run=lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        inputs=(q, k, v),
        result=(1, op.batch, op.m, op.k),
    )


def _softmax(op: Operator, place: Place) -> _Pass:
    """Of scores: squares of n, masked above the diagonal; of a router: plain rows."""
    if op.m % op.n:
        x = place.leaf(op.m, op.n)
        return _Pass(run=lambda: torch.softmax(x, dim=-1), inputs=(x,), result=(op.m, op.n))
    x = place.leaf(op.m // op.n, op.n, op.n)
    mask = torch.ones(op.n, op.n, dtype=torch.bool, device=place.device).triu(1)
    least = torch.finfo(place.dtype).min
    return _Pass(
        run=lambda: torch.softmax(x.masked_fill(mask, least), dim=-1),
        inputs=(x,),
        result=(op.m // op.n, op.n, op.n),
    )


def _dropout(op: Operator, place: Place) -> _Pass:
    x = place.leaf(op.m, op.n)
    return _Pass(run=lambda: functional.dropout(x, DROPOUT), inputs=(x,), result=(op.m, op.n))


def _norm(op: Operator, place: Place) -> _Pass:
    x, weight = place.leaf(op.m, op.n), place.leaf(op.n)
    if place.architecture is Architecture.GPT:
        bias = place.leaf(op.n)
        run = lambda: functional.layer_norm(x, (op.n,), weight, bias, NORM_EPSILON)  # noqa: E731
    else:
        run = lambda: functional.rms_norm(x, (op.n,), weight, NORM_EPSILON)  # noqa: E731
    return _Pass(run=run, inputs=(x,), result=(op.m, op.n))


def _activation(op: Operator, place: Place) -> _Pass:
    x = place.leaf(op.m, op.k or op.n)
    if x.shape[1] == 2 * op.n:
        gate, up = (part.detach().contiguous().requires_grad_() for part in x.chunk(2, dim=1))
        return _Pass(run=lambda: functional.silu(gate) * up, inputs=(gate, up), result=(op.m, op.n))
    return _Pass(run=lambda: functional.gelu(x), inputs=(x,), result=(op.m, op.n))


def _addition(op: Operator, place: Place) -> _Pass:
    x, y = place.leaf(op.m, op.n), place.leaf(op.m, op.n)
    bias = place.leaf(op.n)
    runs: dict[int, Callable[[], Tensor]] = {
        0: lambda: x + y,
        1: lambda: x + functional.dropout(y, DROPOUT),
        3: lambda: x + functional.dropout(y + bias, DROPOUT),
    }
    return _Pass(run=runs[op.k], inputs=(x, y), result=(op.m, op.n))


def _rotation(op: Operator, place: Place) -> _Pass:
    x = place.leaf(op.m, op.n)
    half = op.n // 2
    cosine, sine = place.values(op.m, half), place.values(op.m, half)

    def run() -> Tensor:
        first, second = x[:, :half], x[:, half : 2 * half]
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=1)

    return _Pass(run=run, inputs=(x,), result=(op.m, 2 * half))


def _routing(op: Operator, place: Place) -> _Pass:
    """Copies of tokens to their experts' places, and back."""
    x = place.leaf(op.m, op.n)
    order = torch.randperm(op.m, device=place.device)
    back = torch.argsort(order)
    return _Pass(run=lambda: x[order][back], inputs=(x,), result=(op.m, op.n))


def _embedding(op: Operator, place: Place) -> _Pass:
    # The table's gradient is kept from pass to pass: it is added to, as in a step.
    table = place.leaf(op.k, op.n)
    tokens = torch.randint(0, op.k, (op.m,), device=place.device)
    return _Pass(run=lambda: functional.embedding(tokens, table), result=(op.m, op.n))


def _loss(op: Operator, place: Place) -> _Pass:
    logits = place.leaf(op.m, op.n)
    targets = torch.randint(0, op.n, (op.m,), device=place.device)

    def run() -> Tensor:
        rows = logits.float() if op.float32_copy else logits
        return functional.cross_entropy(rows, targets)

    return _Pass(run=run, inputs=(logits,))


_VENDORS: dict[OperatorClass, Callable[[Operator, Place], _Pass]] = {
    OperatorClass.ATTENTION_SCORE: _score,
    OperatorClass.ATTENTION_CONTEXT: _context,
    OperatorClass.FUSED_ATTENTION: _fused_attention,
    OperatorClass.SOFTMAX: _softmax,
    OperatorClass.ATTENTION_DROPOUT: _dropout,
    OperatorClass.NORM: _norm,
    OperatorClass.ACTIVATION: _activation,
    OperatorClass.ADDITION: _addition,
    OperatorClass.ROTATION: _rotation,
    OperatorClass.ROUTING: _routing,
    OperatorClass.EMBEDDING: _embedding,
    OperatorClass.LOSS: _loss,
}
"""Every class that is measured alone, but the products with weights. Layers' samples hold the
optimizer, and what only a backward pass runs (`BACKWARD_ONLY`) is told from other passes' laws."""
