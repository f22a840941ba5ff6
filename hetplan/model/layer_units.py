"""At which units of transformer layers may a pipeline be cut?

A model whose transformer layers are all alike is cut at every layer. Where they differ, the row

    front layers, unit, unit, ..., unit, back layers

is cut between units only: a unit is one period of a repeating pattern (one layer, where all layers
between front and back are alike). The front layers, one run of equal ones as DeepSeek's dense ones
(arXiv 2412.19437, section 4.2), belong to the first stage, the back layers, one run too, to the
last; multi-token prediction goes with the head. So every stage has costs that are linear in its
number of units.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetplan.model.spec import ModelSpec

MAX_PERIOD = 64
"""Layers of the longest pattern that is looked for: ten times the longest of models that were
published (five layers with a window and one without, arXiv 2503.19786, section 2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerUnits:
    """How the transformer layers of a model are dealt into units."""

    count: int
    """Units."""
    layers_per_unit: int
    front_layers: int
    """Transformer layers before the first unit."""
    back_layers: int
    """The same behind the last one."""

    def layers(self, units: int, *, first: bool, last: bool) -> int:
        """Transformer layers of a stage, or of a chunk, with so many units.

        `first`: it holds the first unit and with it the front layers; `last` likewise.
        """
        return units * self.layers_per_unit + first * self.front_layers + last * self.back_layers

    @property
    def unit_positions(self) -> range:
        """Positions in `ModelSpec.layers` of the first unit."""
        start = 1 + self.front_layers
        return range(start, start + self.layers_per_unit)

    @property
    def front_positions(self) -> range:
        """Positions of the front layers."""
        return range(1, 1 + self.front_layers)

    @property
    def back_positions(self) -> range:
        """Positions of the back layers."""
        start = 1 + self.front_layers + self.count * self.layers_per_unit
        return range(start, start + self.back_layers)


def layer_units(model: ModelSpec, sequence_length: int) -> LayerUnits | None:
    """The units of this model at this length; None where its layers have no such form.

    Of several ways to deal the layers that with most units, then that with fewest layers outside.
    """
    return _units(tuple((run.layer.at(sequence_length), run.count) for run in model.layer_runs))


@lru_cache(maxsize=256)
def _units(runs: tuple[tuple[Hashable, int], ...]) -> LayerUnits | None:
    row: list[int] = []
    known: dict[Hashable, int] = {}
    for layer, count in runs:
        row += [known.setdefault(layer, len(known))] * count
    if len(known) == 1:
        return LayerUnits(count=len(row), layers_per_unit=1, front_layers=0, back_layers=0)
    longest, most_back = _run(row), _run(row[::-1])
    # A pattern that begins inside the first run has less than a period of it.
    fronts = dict.fromkeys((0, *range(max(0, longest - MAX_PERIOD), longest + 1)))
    found = [units for front in fronts for units in _from(row, front, most_back)]
    return max(
        found,
        key=lambda each: (
            each.count,
            -each.front_layers - each.back_layers,
            -each.front_layers,
        ),
        default=None,
    )


def _run(row: Sequence[int]) -> int:
    """How many of the first layers are alike."""
    return next((at for at, kind in enumerate(row) if kind != row[0]), len(row))


def _from(row: Sequence[int], front: int, most_back: int) -> list[LayerUnits]:
    """Units of every period behind so many front layers, two at least, as far as they reach."""
    rest = row[front:]
    found = []
    for period in range(1, min(MAX_PERIOD, len(rest) // 2) + 1):
        alike = period
        while alike < len(rest) and rest[alike] == rest[alike - period]:
            alike += 1
        count = alike // period
        back = len(rest) - count * period
        if count >= 2 and back <= most_back:
            found.append(
                LayerUnits(
                    count=count, layers_per_unit=period, front_layers=front, back_layers=back
                )
            )
    return found
