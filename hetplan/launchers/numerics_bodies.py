"""What one operator computes on a device, of inputs that are the same on every device.

The bodies are those that the profiler times (`hetplan.profiling.operator_bodies`). They draw
their inputs from the device's own generator; here every draw is made on the CPU in float64 from
one seed, rounded to the job's format, and put where the body wants it. The reference is the same
body in float64 on the CPU, of the same rounded inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hetplan.model.operators import WITH_WEIGHTS, Operator, OperatorClass
from hetplan.model.spec import Architecture
from hetplan.profiling.operator_bodies import Place, operator_body

# Gradients in the order in which the bodies make their leaves.
_LEAVES = {
    OperatorClass.ATTENTION_SCORE: ("queries", "keys"),
    OperatorClass.ATTENTION_CONTEXT: ("probabilities", "values"),
    OperatorClass.FUSED_ATTENTION: ("queries", "keys", "values"),
    OperatorClass.NORM: ("input", "weight", "bias"),
    OperatorClass.EMBEDDING: ("table",),
    OperatorClass.LOSS: ("logits",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One tensor that a device computed, on the CPU in float64."""

    tensor: str
    """Which it is, as in `forward` or `gradient of keys`."""
    value: Tensor


class SameDraws(TorchFunctionMode):
    """Inside, random tensors are the same whatever device or format they are asked for in.

    With `exact`, float32 by name (a copy, a table of angles) is float64: the reference's.
    """

    def __init__(self, seed: int, precision: torch.dtype, *, exact: bool) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        self._precision, self._exact = precision, exact
        self.leaves: list[Tensor] = []
        """Tensors of which a gradient is asked, in order."""
        self.last: Tensor | None = None
        """What the last call gave."""
        self.most_equal = 1
        """How often the most frequent of the drawn whole numbers was drawn."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The call, or a draw in place of one."""
        kwargs = dict(kwargs or {})
        if func is torch.randn:
            drawn = torch.randn(args[0], generator=self._generator, dtype=torch.float64)
            drawn = drawn.to(self._precision)
            return drawn.to(device=kwargs.get("device"), dtype=kwargs.get("dtype"))
        if func in (torch.randint, torch.randperm):
            whole = func(*args, generator=self._generator)
            if func is torch.randint:
                self.most_equal = max(self.most_equal, int(torch.bincount(whole.flatten()).max()))
            return whole.to(kwargs.get("device"))
        if self._exact:
            if func is Tensor.float and args[0].dtype == torch.float64:
                return args[0]
            if func is torch.arange and kwargs.get("dtype") == torch.float32:
                kwargs["dtype"] = torch.float64
        result = func(*args, **kwargs)
        if func is Tensor.requires_grad_:
            self.leaves.append(result)
        elif isinstance(result, Tensor):
            self.last = result
        return result


def reference_place(architecture: Architecture) -> Place:
    """Where references are computed."""
    return Place(device=torch.device("cpu"), dtype=torch.float64, architecture=architecture)


def operator_outcomes(
    op: Operator, place: Place, *, seed: int, precision: torch.dtype
) -> tuple[tuple[Outcome, ...], int]:
    """Every result of the operator, and how often its most frequent token is looked up."""
    draws = SameDraws(seed, precision, exact=place.dtype == torch.float64)
    results: list[Tensor | None] = []
    with draws:
        # One launch is enough: the others are of the same shape.
        body = operator_body(replace(op, count=1), place)
        draws.last = None
        body(lambda: results.append(draws.last))
    names = ("forward", "gradient of input", "gradient of weights")
    if op.operator in WITH_WEIGHTS:
        found = tuple(_taken(names, results[1:]))
    else:
        found = tuple(_taken(names[:1], results[1:2])) + tuple(_gradients(op, draws.leaves))
    return found, draws.most_equal


def _taken(names: tuple[str, ...], results: list[Tensor | None]) -> Iterator[Outcome]:
    for name, result in zip(names, results, strict=True):
        if result is not None:
            yield Outcome(tensor=name, value=exact_copy(result))


def _gradients(op: Operator, leaves: list[Tensor]) -> Iterator[Outcome]:
    named = _LEAVES.get(op.operator, ())
    with_gradient = [leaf for leaf in leaves if leaf.grad is not None]
    for at, leaf in enumerate(with_gradient):
        one = "input" if len(with_gradient) == 1 else f"input {at + 1}"
        name = named[at] if at < len(named) else one
        if leaf.grad is not None:
            yield Outcome(tensor=f"gradient of {name}", value=exact_copy(leaf.grad))


def exact_copy(value: Tensor) -> Tensor:
    """The same numbers on the CPU in float64."""
    return value.detach().to(device="cpu", dtype=torch.float64, copy=True)
