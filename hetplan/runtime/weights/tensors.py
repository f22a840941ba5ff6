"""Which weights a model has, whatever file, trainer or plan they are kept under.

Every format is read as, and written from, the same full weights: those of the reference trainer's
layers before they are cut or fused (`hetplan.profiling.weights`). A weight is named by the layer's
position in `ModelSpec.layers` and its own name, so no plan stands in its name. A tied head has no
vocabulary matrix of its own: it is the embedding's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from hetplan.errors import Fault, InputError
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.profiling.weights import parameter_slices
from hetplan.runtime.weights.numerics import Numerics

VOCABULARY = "vocabulary"
"""Name of the matrix of embedding and head in `hetplan.profiling.weights`."""
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Number formats that weights are converted to."""
_CONSTANTS = (
    *("norm_epsilon", "activation", "rotary_base", "rotary_fraction", "rotary_scaling"),
    "router",
)
"""Fields of ModelSpec that say what is computed, not which weights there are."""
_MAX_NAMED = 12
"""Tensors that one message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One full weight of one layer."""

    position: int
    """Of its layer in `ModelSpec.layers`."""
    name: str
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """Its name in the reference trainer's checkpoints."""
        return f"layers.{self.position}.{self.name}"


class WeightSource(Protocol):
    """A checkpoint whose weights can be read one after the other."""

    @property
    def model(self) -> ModelSpec:
        """What the weights are of."""

    @property
    def numerics(self) -> Numerics:
        """What a forward pass computes with them beyond the shapes."""

    def dtype(self, weight: Weight) -> torch.dtype:
        """Number format that the weight is kept in."""

    def read(self, weight: Weight) -> Tensor:
        """The full weight on the CPU, in the format it is kept in."""


def weights_of(model: ModelSpec) -> tuple[Weight, ...]:
    """Every weight once, layer by layer; an InputError where hetplan's own layers lack the model's.

    `hetplan.profiling.weights` has what every layer's weights are and their order.
    """
    return tuple(_weights(model))


def _weights(model: ModelSpec) -> Iterator[Weight]:
    for position, kind in enumerate(model.layers):
        for parameter in parameter_slices(model, kind, tp=1, tp_rank=0):
            for part in parameter.parts:
                if part.name == VOCABULARY and not owns_vocabulary(model, kind):
                    continue
                yield Weight(position=position, name=part.name, shape=part.full_shape)


def owns_vocabulary(model: ModelSpec, kind: LayerKind) -> bool:
    """Whether a layer of this kind has a vocabulary matrix that is not another layer's."""
    return kind is not LayerKind.HEAD or not model.tied_embeddings


def by_layer(model: ModelSpec) -> tuple[tuple[Weight, ...], ...]:
    """The same, one tuple per position."""
    layers: list[list[Weight]] = [[] for _ in model.layers]
    for weight in weights_of(model):
        layers[weight.position].append(weight)
    return tuple(tuple(layer) for layer in layers)


def unlike_parts(one: ModelSpec, two: ModelSpec) -> tuple[str, ...]:
    """In what two models are unlike: `shape`, or constants that both say; empty: in nothing.

    Names of models may differ, and what one of them does not say.
    """
    bare = [
        replace(model, name="", **dict.fromkeys(_CONSTANTS))  # type: ignore[arg-type]
        for model in (one, two)
    ]
    if bare[0] != bare[1]:
        return ("shape",)
    said = ((name, getattr(one, name), getattr(two, name)) for name in _CONSTANTS)
    return tuple(name for name, left, right in said if None not in (left, right) and left != right)


def check_names(
    file: str,
    *,
    found: Iterable[str],
    wanted: Iterable[str],
    what: str = "tensor",
    passed_over: Iterable[str] = (),
) -> None:
    """An InputError that lists missing and unknown tensors, unless both sets of names agree.

    `passed_over` are names that are known to hold no weight of the model.
    """
    present, expected = set(found), set(wanted)
    faults = [
        Fault(file=file, message=f"{word} {what}s: {listed(sorted(names))}; {mend}")
        for word, names, mend in (
            (
                "missing",
                expected - present,
                "the model that is converted has them; is it the model of these weights?",
            ),
            (
                "unknown",
                present - expected - set(passed_over),
                "nothing would be done with them; is it the model of these weights?",
            ),
        )
        if names
    ]
    if faults:
        raise InputError(*faults)


def check_shape(file: str, name: str, found: Iterable[int], wanted: Iterable[int]) -> list[Fault]:
    """A fault where the two shapes differ."""
    have, want = tuple(found), tuple(wanted)
    if have == want:
        return []
    return [Fault(file=file, field=name, message=f"has shape {have}; the model's is {want}")]


def listed(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _MAX_NAMED:,} more" if len(names) > _MAX_NAMED else ""
    # Names come from files: nothing of them may move a terminal's cursor.
    short = (name if name.isprintable() else ascii(name) for name in names[:_MAX_NAMED])
    return ", ".join(short) + more


def converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor in this format, rounded to nearest; None: as it is."""
    return tensor if dtype is None else tensor.to(dtype)
