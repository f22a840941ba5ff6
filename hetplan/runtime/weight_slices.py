"""Where the part of a layer that one rank holds lies in the full weights.

A full weight is a weight of one of the trainer's layers before it is cut or fused
(`hetplan.profiling.weights`). A rank's parameters are slices of full weights, some fused (one above
the other), some filled up with padding. Of slices that several tensor-parallel ranks hold alike
(norms, copied key-value heads) the lowest rank's is the first. A tied head has no vocabulary matrix
of its own: it is the embedding's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetplan.model.layers import Experts
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.plan import LayerRange
from hetplan.profiling.weights import (
    ALL_EXPERTS,
    Cut,
    ExpertShare,
    ParameterSlice,
    parameter_slices,
)

VOCABULARY = "vocabulary"
"""Name of the matrix of embedding and head in `hetplan.profiling.weights`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One full weight of one layer."""

    position: int
    """Of its layer in `ModelSpec.layers`."""
    name: str
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """Its name in a checkpoint."""
        return f"layers.{self.position}.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Where rows of one parameter lie in their full weight."""

    position: int
    """Of the layer that has the parameter."""
    name: str
    """Attribute of the layer's module."""
    row: int
    """First row in the parameter."""
    rows: int
    """Rows in the parameter, padding included."""
    weight: Weight
    offsets: tuple[int, ...]
    """In the full weight."""
    shape: tuple[int, ...]
    """Without padding; a side may be 0."""
    first: bool
    """No rank of lower tp_index, and no other layer, holds the same part."""
    expert: bool
    """Of a routed expert."""


def slices_of(model: ModelSpec, layers: LayerRange, cut: Cut) -> Iterator[Slice]:
    """Every slice that a rank holds of these layers."""
    lower = replace(cut, tp_rank=max(0, cut.tp_rank - 1))
    for position in range(layers.start, layers.stop):
        kind = model.layers[position]
        mine = parameter_slices(model, position, cut)
        below = parameter_slices(model, position, lower)
        for parameter, lower_parameter in zip(mine, below, strict=True):
            row = 0
            for part, lower_part in zip(parameter.parts, lower_parameter.parts, strict=True):
                tied = part.name == VOCABULARY and _is_tied_head(model, kind)
                offsets, shape = [0] * len(part.full_shape), list(part.shape)
                offsets[part.dim] = part.start
                whole = part.full_shape[part.dim]
                shape[part.dim] = max(0, min(part.length, whole - part.start))
                yield Slice(
                    position=position,
                    name=parameter.name,
                    row=row,
                    rows=part.shape[0],
                    weight=Weight(
                        position=0 if tied else position, name=part.name, shape=part.full_shape
                    ),
                    offsets=tuple(offsets),
                    shape=tuple(shape),
                    # Slices of equal start follow each other: starts never fall with tp_index.
                    first=not tied and (cut.tp_rank == 0 or lower_part.start != part.start),
                    expert=parameter.expert is not None,
                )
                row += part.shape[0]


def weights_of(model: ModelSpec) -> tuple[Weight, ...]:
    """Every full weight once, layer by layer.

    An InputError where the trainer's layers are not those of the model.
    """
    layers = LayerRange(start=0, stop=len(model.layers))
    slices = slices_of(model, layers, Cut())
    return tuple(part.weight for part in slices if part.first)


def _is_tied_head(model: ModelSpec, kind: LayerKind) -> bool:
    return kind is LayerKind.HEAD and model.tied_embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """Which weights of layers a sum is about."""

    dense: bool = True
    """Those that belong to no routed expert."""
    experts: ExpertShare | None = ALL_EXPERTS
    """None: no routed expert's."""

    def has(self, model: ModelSpec, position: int, parameter: ParameterSlice) -> bool:
        """Whether this parameter of the layer is one of them."""
        if parameter.expert is None:
            return self.dense
        mlp = model.layer_at(position).mlp
        if self.experts is None or not isinstance(mlp, Experts):
            return False
        return parameter.expert in self.experts.of(mlp.num_experts)


ALL_WEIGHTS = Summed()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPart:
    """Rows or columns of one parameter of a rank."""

    position: int
    """Of the layer."""
    name: str
    dim: int
    start: int
    length: int


def common_parts(
    model: ModelSpec,
    position: int,
    cut: Cut,
    *,
    cuts: Sequence[tuple[int, int]],
    of: Summed = ALL_WEIGHTS,
) -> Iterator[ParameterPart]:
    """What a rank's part of a layer has in common with all of these (tp, tp_rank), as far as it is
    `of` these weights.

    In the order of the layer's parameters; where a part is a whole parameter, it is one part.
    """

    def slices(tp: int, tp_rank: int) -> list[ParameterSlice]:
        found = parameter_slices(model, position, replace(cut, tp=tp, tp_rank=tp_rank))
        return [each for each in found if of.has(model, position, each)]

    own, others = slices(cut.tp, cut.tp_rank), [slices(*each) for each in cuts]
    for number, parameter in enumerate(own):
        if set(cuts) <= {(cut.tp, cut.tp_rank)}:
            rows = parameter.shape[0]
            yield ParameterPart(position=position, name=parameter.name, dim=0, start=0, length=rows)
            continue
        row = 0
        for piece, part in enumerate(parameter.parts):
            same = [part, *(other[number].parts[piece] for other in others)]
            start = max(copy.start for copy in same)
            stop = min(copy.start + copy.length for copy in same)
            if start < stop:
                yield ParameterPart(
                    position=position,
                    name=parameter.name,
                    dim=part.dim,
                    start=start - part.start + (row if part.dim == 0 else 0),
                    length=stop - start,
                )
            row += part.shape[0]
