"""Where the part of a layer that one rank holds lies in the layer's full weights.

A rank's parameters are slices of full weights, some fused (one above the other), some filled up
with padding. Of slices that several tensor-parallel ranks hold alike (norms, copied key-value
heads) the lowest one's is the first; a tied head's matrix is the embedding's.

Where ranks share an optimizer, each holds a range of its parameters' elements. The elements of a
tensor from one number to another are a few boxes of it: part of a row, whole rows, part of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import LayerRange
from hetplan.profiling.weights import parameter_slices
from hetplan.runtime.checkpoint_contents import VOCABULARY, Weight, owns_vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Where a part of one parameter lies in its full weight."""

    position: int
    """Of the layer that has the parameter."""
    name: str
    """Attribute of the layer's module."""
    weight: Weight
    local_offsets: tuple[int, ...]
    """In the parameter."""
    offsets: tuple[int, ...]
    """In the full weight."""
    shape: tuple[int, ...]
    """Without padding; a side may be 0."""
    first: bool
    """No rank of lower tp_index holds the same part."""


def slices_of(model: ModelSpec, layers: LayerRange, *, tp: int, tp_index: int) -> Iterator[Slice]:
    """Every slice that tensor-parallel rank `tp_index` of `tp` holds of these layers."""
    for position in range(layers.start, layers.stop):
        kind = model.layers[position]
        lower = max(0, tp_index - 1)
        mine = parameter_slices(model, kind, tp=tp, tp_rank=tp_index)
        below = parameter_slices(model, kind, tp=tp, tp_rank=lower)
        for parameter, other in zip(mine, below, strict=True):
            row = 0
            for piece, lower_piece in zip(parameter.parts, other.parts, strict=True):
                shared = piece.name == VOCABULARY and not owns_vocabulary(model, kind)
                offsets = [0] * len(piece.full_shape)
                offsets[piece.dim] = piece.start
                shape = list(piece.shape)
                whole = piece.full_shape[piece.dim]
                shape[piece.dim] = max(0, min(piece.length, whole - piece.start))
                yield Slice(
                    position=position,
                    name=parameter.name,
                    weight=Weight(
                        position=0 if shared else position,
                        name=piece.name,
                        shape=piece.full_shape,
                    ),
                    local_offsets=(row, *(0,) * (len(shape) - 1)),
                    offsets=tuple(offsets),
                    shape=tuple(shape),
                    # Slices of equal start follow each other: starts never fall with tp_index.
                    first=not shared and (tp_index == 0 or lower_piece.start != piece.start),
                )
                row += piece.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A box of a tensor whose elements follow each other in memory."""

    first: int
    """Number of its first element in the tensor, row by row."""
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that make up the elements `start` to `stop` of a tensor of this shape, in order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield Box(first=start, offsets=(start,), shape=(stop - start,))
        return
    size = math.prod(shape[1:])
    low, high = -(-start // size), stop // size
    if low > high:
        yield from _in_row(shape, high, start, stop)
        return
    yield from _in_row(shape, low - 1, start, low * size)
    if low < high:
        offsets = (low, *(0,) * (len(shape) - 1))
        yield Box(first=low * size, offsets=offsets, shape=(high - low, *shape[1:]))
    yield from _in_row(shape, high, high * size, stop)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    before = row * math.prod(shape[1:])
    for box in boxes(shape[1:], start - before, stop - before):
        yield Box(first=before + box.first, offsets=(row, *box.offsets), shape=(1, *box.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a full weight, and where its elements lie in a vector."""

    weight: Weight
    offsets: tuple[int, ...]
    """In the full weight."""
    shape: tuple[int, ...]
    at: int
    """In the vector: the first element of the box that has the piece."""
    box: tuple[int, ...]
    box_offsets: tuple[int, ...]
    """Of the piece in that box."""
    first: bool
    """As `Slice.first`."""

    def of(self, vector: Tensor) -> Tensor:
        """The piece as a view of the vector."""
        view = vector[self.at : self.at + math.prod(self.box)].view(self.box)
        for dim, (start, length) in enumerate(zip(self.box_offsets, self.shape, strict=True)):
            view = view.narrow(dim, start, length)
        return view


def pieces_of(
    part: Slice, shape: Sequence[int], at: int, *, start: int, stop: int
) -> Iterator[Piece]:
    """What of a slice lies in the elements `start` to `stop` of a vector of parameters.

    The slice's parameter has this shape and begins at element `at` of all parameters; the vector
    begins at `start`.
    """
    total = math.prod(shape)
    for box in boxes(shape, max(0, start - at), min(total, stop - at)):
        low = tuple(map(max, box.offsets, part.local_offsets))
        high = tuple(
            min(one + length, two + other)
            for one, length, two, other in zip(
                box.offsets, box.shape, part.local_offsets, part.shape, strict=True
            )
        )
        if any(one >= two for one, two in zip(low, high, strict=True)):
            continue
        yield Piece(
            weight=part.weight,
            offsets=tuple(
                whole + one - mine
                for whole, one, mine in zip(part.offsets, low, part.local_offsets, strict=True)
            ),
            shape=tuple(two - one for one, two in zip(low, high, strict=True)),
            at=at + box.first - start,
            box=box.shape,
            box_offsets=tuple(one - own for one, own in zip(low, box.offsets, strict=True)),
            first=part.first,
        )
