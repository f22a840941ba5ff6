"""Where the part of a layer that one rank holds lies in the full weights.

A full weight is a weight of one of the trainer's layers before it is cut or fused
(`hetplan.profiling.weights`). A rank's parameters are slices of full weights, some fused (one above
the other), some filled up with padding. Of slices that several tensor-parallel ranks hold alike
(norms, copied key-value heads) the lowest rank's is the first. A tied head has no vocabulary matrix
of its own: it is the embedding's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.plan import LayerRange
from hetplan.profiling.weights import parameter_slices

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


def slices_of(model: ModelSpec, layers: LayerRange, *, tp: int, tp_index: int) -> Iterator[Slice]:
    """Every slice that tensor-parallel rank `tp_index` of `tp` holds of these layers."""
    for position in range(layers.start, layers.stop):
        kind = model.layers[position]
        lower = max(0, tp_index - 1)
        mine = parameter_slices(model, kind, tp=tp, tp_rank=tp_index)
        below = parameter_slices(model, kind, tp=tp, tp_rank=lower)
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
                    first=not tied and (tp_index == 0 or lower_part.start != part.start),
                )
                row += part.shape[0]


def weights_of(model: ModelSpec) -> tuple[Weight, ...]:
    """Every full weight once, layer by layer.

    An InputError where the trainer's layers are not those of the model.
    """
    layers = LayerRange(start=0, stop=len(model.layers))
    slices = slices_of(model, layers, tp=1, tp_index=0)
    return tuple(part.weight for part in slices if part.first)


def _is_tied_head(model: ModelSpec, kind: LayerKind) -> bool:
    return kind is LayerKind.HEAD and model.tied_embeddings


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
    model: ModelSpec, position: int, *, tp: int, tp_index: int, cuts: Sequence[tuple[int, int]]
) -> Iterator[ParameterPart]:
    """What slice `tp_index` of `tp` of a layer has in common with all of these (tp, tp_index).

    In the order of the layer's parameters; where a part is a whole parameter, it is one part.
    """
    kind = model.layers[position]
    own = parameter_slices(model, kind, tp=tp, tp_rank=tp_index)
    others = [parameter_slices(model, kind, tp=degree, tp_rank=at) for degree, at in cuts]
    for number, parameter in enumerate(own):
        if set(cuts) <= {(tp, tp_index)}:
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
