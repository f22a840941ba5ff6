"""Passes of the stages of all meshes of a family, as arrays.

Of a stage on several islands the part with the longest passes counts: the others wait for it. Where
that is another part for few units than for many, times are no line in the units: then the part with
the longer unit is taken, by recomputation, its constant lowered so far that no number of units
costs more than the part that is waited for then. Which part that is decides the end of the step
too: `waited_for` has all that it may be, so that the least of them is a lower value.

A plan may pad the vocabulary further than the tp of a part asks, by up to the least common multiple
of its tps: a part may be waited for where it could be the longest so. Chunks of interleaved stages
are no whole stages, and what stages leave each other is not known here: there any part may count,
and every number is the least of all parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hetplan.cluster.spec import Island
from hetplan.cost.arrays import Floats, Ints
from hetplan.job.spec import SPLIT_WEIGHTS
from hetplan.plans.chosen import Shape
from hetplan.plans.targets import target
from hetplan.search.space.family import Family, Mesh
from hetplan.search.space.stage_pricer import Passes, StagePricer
from hetplan.search.space.stage_table import ROLES

Bools = npt.NDArray[np.bool_]

_TOGETHER = 1e-9
"""Parts that differ by less of their passes may change places in sums of another order."""


def stage_passes(placed: StagePricer, family: Family) -> tuple[Passes, tuple[Bools, ...]]:
    """Passes of all meshes of the family, the meshes as the last axis; and of every mesh, [parts,
    4, L + 1] by role and units, whether the other parts may wait for a part.
    """
    padded_for = 0 if alike_padded(placed, family) else math.lcm(*_degrees(family))
    passes, waited = zip(
        *[_mesh(placed, family, mesh, padded_for) for mesh in family.meshes], strict=True
    )
    return Passes(*(np.stack(column, axis=-1) for column in zip(*passes, strict=True))), waited


def part_passes(
    placed: StagePricer, family: Family, mesh: Mesh, part: int, padded_for: int = 0
) -> Passes:
    """Passes of one part of a mesh, with what its ranks reduce and gather in them."""
    sharing = None
    if family.sharding in SPLIT_WEIGHTS:
        sharing = (family.sharding, family.shards(mesh, part)[0])
    return placed.passes(
        mesh.islands[part], mesh.shapes[part], family.recompute, padded_for, sharing
    )


def alike_padded(placed: StagePricer, family: Family) -> bool:
    """Whether the vocabulary of every plan is padded as that of each of its meshes alone."""
    degrees = _degrees(family)
    trainer, size = target(placed.job.target), placed.model.vocab_size
    return len({trainer.padded_vocab_size(size, tp) for tp in (*degrees, math.lcm(*degrees))}) == 1


def _degrees(family: Family) -> list[int]:
    return sorted({shape.tp for mesh in family.meshes for shape in mesh.shapes})


def _sure(placed: StagePricer, family: Family, mesh: Mesh) -> bool:
    """Whether the passes that are known here are those of whole stages, whatever is beside them."""
    return family.virtual_stages == 1 and all(
        _alone(placed.cluster.islands[at], shape)
        for at, shape in zip(mesh.islands, mesh.shapes, strict=True)
    )


def _alone(island: Island, shape: Shape) -> bool:
    """Whether groups that communicate in a pass cross nothing that other stages' groups cross:
    they lie inside nodes that are the stage's own, or have no switches.
    """
    size = island.filled_node
    inside = shape.ep == 1 and shape.tp * shape.cp <= size
    return inside and (shape.num_devices % size == 0 or not island.switch_of_device)


def _mesh(placed: StagePricer, family: Family, mesh: Mesh, padded_for: int) -> tuple[Passes, Bools]:
    """`padded_for`: tp that the vocabulary of plans is padded for at most; 0: as of every part."""
    count = placed.units.count
    parts, padded = (
        [part_passes(placed, family, mesh, part, tp) for part in range(len(mesh.islands))]
        for tp in (0, padded_for)
    )
    if len(parts) == 1:
        return parts[0], np.ones((1, ROLES, count + 1), dtype=np.bool_)
    forward, backward = _rows(parts, count)
    both, most = forward + backward, np.add(*_rows(padded, count))
    alike = [
        [np.array_equal(both[k], both[j]) and np.array_equal(most[k], most[j]) for j in range(k)]
        for k in range(len(parts))
    ]
    # Of parts that are alike the first one counts, in plans as well.
    first = np.array([not any(row) for row in alike])[:, None, None, None]
    if not _sure(placed, family, mesh):
        waited = np.ones(both.shape, dtype=np.bool_) & first
        least = Passes(*(np.min(column, axis=0) for column in zip(*parts, strict=True)))
        return least, waited.any(axis=2)
    waited = (np.maximum(both, most) >= both.max(axis=0) * (1.0 - _TOGETHER)) & first
    # Whose units are the longest, by recomputation.
    slowest = np.argmax([part.forward + part.backward for part in parts], axis=0)
    lines = Passes(
        forward=_of(slowest, [part.forward for part in parts]),
        backward=_of(slowest, [part.backward for part in parts]),
        extra_forward=_of(slowest, [part.extra_forward for part in parts])
        + _lower(forward, slowest, waited),
        extra_backward=_of(slowest, [part.extra_backward for part in parts])
        + _lower(backward, slowest, waited),
    )
    return lines, waited.any(axis=2)


def _rows(parts: Sequence[Passes], count: int) -> tuple[Floats, Floats]:
    """Both passes [parts, 4, V, L + 1] of stages with so many units."""
    n = np.arange(count + 1)
    return (
        np.stack([part.extra_forward[..., None] + part.forward[:, None] * n for part in parts]),
        np.stack([part.extra_backward[..., None] + part.backward[:, None] * n for part in parts]),
    )


def _of(part: Ints, each: Sequence[Floats]) -> Floats:
    """[..., V] of the part that counts, by recomputation."""
    found: Floats = np.stack([each[k][..., v] for v, k in enumerate(part.tolist())], axis=-1)
    return found


def _lower(rows: Floats, slowest: Ints, waited: Bools) -> Floats:
    """[4, V] at most 0: how far other parts that are waited for are below the slowest one."""
    own = np.stack([rows[k, :, v] for v, k in enumerate(slowest.tolist())], axis=1)
    below = np.where(waited, rows - own, 0.0)[..., 1:]
    found: Floats = below.min(axis=(0, 3))
    return found
