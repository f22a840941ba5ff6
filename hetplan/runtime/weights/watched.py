"""Are the values of weights numbers that training can begin with? Looked at as they are moved."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hetplan.errors import Fault, InputError
from hetplan.model.spec import ModelSpec
from hetplan.runtime.weights.numerics import Numerics
from hetplan.runtime.weights.tensors import Weight, WeightSource, listed, weights_of


@dataclass(slots=True, kw_only=True)
class WatchedSource:
    """Another source, whose values are looked at as they are read.

    An InputError where a value is too large for `wanted`: it would become infinite.
    """

    source: WeightSource
    place: str
    """What messages call it."""
    wanted: torch.dtype | None
    """Format that the weights get; None: each as it is kept."""
    odd: dict[str, None] = field(default_factory=dict)
    """Names of weights with values that are no finite numbers."""

    @property
    def model(self) -> ModelSpec:
        """What the weights are of."""
        return self.source.model

    @property
    def numerics(self) -> Numerics:
        """What the model computes."""
        return self.source.numerics

    def dtype(self, weight: Weight) -> torch.dtype:
        """Number format of the weight."""
        return self.source.dtype(weight)

    def read(self, weight: Weight) -> Tensor:
        """The full weight."""
        value = self.source.read(weight)
        if not value.numel():
            return value
        low, high = torch.aminmax(value)
        largest = max(abs(low.item()), abs(high.item()))
        # Either end of a tensor with a NaN is one.
        if not torch.isfinite(low + high):
            self.odd[weight.key] = None
        elif self.wanted is not None and largest > torch.finfo(self.wanted).max:
            name = str(self.wanted).removeprefix("torch.")
            message = f"holds {largest:.3g}, which is infinite as {name}; take bfloat16 or float32"
            raise InputError(Fault(file=self.place, field=weight.key, message=message))
        return value


def watched(source: WeightSource, place: str, wanted: torch.dtype | None) -> WatchedSource:
    """The source with its values watched; an InputError where some are no floating-point numbers.

    Whole numbers are codes of a quantized model, whose scales stand elsewhere.
    """
    codes = [
        weight for weight in weights_of(source.model) if not source.dtype(weight).is_floating_point
    ]
    if codes:
        kinds = sorted({str(source.dtype(weight)).removeprefix("torch.") for weight in codes})
        message = (
            f"{', '.join(kinds)} is no format of weights that are trained: "
            f"{listed([weight.key for weight in codes])}; are they quantized?"
        )
        raise InputError(Fault(file=place, message=message))
    return WatchedSource(source=source, place=place, wanted=wanted)
