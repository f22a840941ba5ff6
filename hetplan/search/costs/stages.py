"""Passes of the stages of all meshes of a family, as arrays.

Of a stage on several islands the part with the longest passes counts: the others wait for it. Where
that is another part for few units than for many, times are no line in the units: then the part with
the longer unit is taken, its constant lowered so far that no number of units costs more than the
part that is waited for then. Which part that is decides the end of the step too: `waited_for` has
all that it may be, so that the least of them is a lower value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetplan.plans.targets import target
from hetplan.search.costs.placed import ROLES, Passes, Placed
from hetplan.search.families.family import Family, Mesh
from hetplan.search.families.space import Floats

Bools = npt.NDArray[np.bool_]

_TOGETHER = 1e-9
"""Parts that differ by less of their passes may change places in sums of another order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageArrays:
    """As the fields of the same names in `hetplan.search.families.space.Space`."""

    forward: Floats
    backward: Floats
    extra_forward: Floats
    extra_backward: Floats
    waited_for: tuple[Bools, ...]
    """Of every mesh [parts, 4, L + 1], by role and units: whether the others may wait for it."""


def stage_arrays(placed: Placed, family: Family) -> StageArrays:
    """Of all meshes of the family."""
    sure = family.virtual_stages == 1 and alike_padded(placed, family)
    each = [_mesh(placed, family, mesh, sure=sure) for mesh in family.meshes]
    passes = [one for one, _ in each]
    return StageArrays(
        forward=np.stack([one.forward for one in passes], axis=1),
        backward=np.stack([one.backward for one in passes], axis=1),
        extra_forward=np.stack([one.extra_forward for one in passes], axis=2),
        extra_backward=np.stack([one.extra_backward for one in passes], axis=2),
        waited_for=tuple(waited for _, waited in each),
    )


def alike_padded(placed: Placed, family: Family) -> bool:
    """Whether the vocabulary of every plan is padded as that of each of its meshes alone."""
    degrees = {shape.tp for mesh in family.meshes for shape in mesh.shapes}
    trainer, size = target(placed.job.target), placed.model.vocab_size
    return len({trainer.padded_vocab_size(size, tp) for tp in (*degrees, math.lcm(*degrees))}) == 1


def _mesh(placed: Placed, family: Family, mesh: Mesh, *, sure: bool) -> tuple[Passes, Bools]:
    """`sure`: the passes that are known here are those of the plans, and of whole stages."""
    count = placed.units.count
    parts = [
        placed.passes(island, shape, family.recompute)
        for island, shape in zip(mesh.islands, mesh.shapes, strict=True)
    ]
    if len(parts) == 1:
        return parts[0], np.ones((1, ROLES, count + 1), dtype=np.bool_)
    n = np.arange(count + 1)
    # [parts, 4, V, L + 1]
    forward, backward = (
        np.stack(
            [
                getattr(part, f"extra_{name}")[..., None] + getattr(part, name)[:, None] * n
                for part in parts
            ]
        )
        for name in ("forward", "backward")
    )
    both = forward + backward
    waited = both >= both.max(axis=0) * (1.0 - _TOGETHER)
    if not sure:
        waited[:] = True
    for k in range(1, len(parts)):
        # Of parts that are alike the first one counts, in plans as well.
        waited[k] &= not any(np.array_equal(both[k], both[j]) for j in range(k))
    slowest = int(np.argmax([part.forward[0] + part.backward[0] for part in parts]))
    own = parts[slowest]
    lines = Passes(
        forward=own.forward,
        backward=own.backward,
        extra_forward=own.extra_forward + _lower(forward, slowest, waited),
        extra_backward=own.extra_backward + _lower(backward, slowest, waited),
    )
    return lines, waited.any(axis=2)


def _lower(rows: Floats, slowest: int, waited: Bools) -> Floats:
    """[4, V] at most 0: how far other parts that are waited for are below the slowest one."""
    below = np.where(waited, rows - rows[slowest], 0.0)[..., 1:]
    found: Floats = below.min(axis=(0, 3))
    return found
