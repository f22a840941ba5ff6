"""Passes of the stages of all meshes of a family, as arrays.

Of a stage on several islands the slowest part counts, and both of its passes. Where that is
another part for few units than for many, times are no line in the units: then the part with the
longer unit is taken, its constant lowered so far that no number of units costs more than it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.search.costs.placed import ROLES, Passes, Placed
from hetplan.search.families.family import Family, Mesh
from hetplan.search.families.space import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageArrays:
    """As the fields of the same names in `hetplan.search.families.space.Space`."""

    forward: Floats
    backward: Floats
    extra_forward: Floats
    extra_backward: Floats
    slowest: Ints
    """[M] the part that the others wait for."""


def stage_arrays(placed: Placed, family: Family) -> StageArrays:
    """Of all meshes of the family."""
    each = [_mesh(placed, family, mesh) for mesh in family.meshes]
    passes = [one for one, _ in each]
    return StageArrays(
        forward=np.stack([one.forward for one in passes], axis=1),
        backward=np.stack([one.backward for one in passes], axis=1),
        extra_forward=np.stack([one.extra_forward for one in passes], axis=2),
        extra_backward=np.stack([one.extra_backward for one in passes], axis=2),
        slowest=np.array([part for _, part in each], dtype=np.int64),
    )


def _mesh(placed: Placed, family: Family, mesh: Mesh) -> tuple[Passes, int]:
    parts = [
        placed.passes(island, shape, family.recompute)
        for island, shape in zip(mesh.islands, mesh.shapes, strict=True)
    ]
    if len(parts) == 1:
        return parts[0], 0
    slowest = int(np.argmax([part.forward[0] + part.backward[0] for part in parts]))
    return _of_slowest(parts, slowest, placed.units.count), slowest


def _of_slowest(parts: Sequence[Passes], slowest: int, most: int) -> Passes:
    """The slowest part's passes, lowered where another one is slower for some numbers of units."""
    own = parts[slowest]
    n = np.arange(1, most + 1)
    extra = [own.extra_forward.copy(), own.extra_backward.copy()]
    for v in range(own.forward.size):
        for role in range(ROLES):
            forward, backward = (
                np.array(
                    [
                        getattr(part, name)[v] * n + getattr(part, f"extra_{name}")[role, v]
                        for part in parts
                    ]
                )
                for name in ("forward", "backward")
            )
            # `max` keeps the first of equal ones, as the plan's price does.
            who = (forward + backward).argmax(axis=0)
            for found, rows in zip(extra, (forward, backward), strict=True):
                found[role, v] += min(0.0, float((rows[who, n - 1] - rows[slowest]).min()))
    return Passes(
        forward=own.forward,
        backward=own.backward,
        extra_forward=extra[0],
        extra_backward=extra[1],
    )
