"""What slots may hold in a pipeline whose step is at most so long.

The programs over orders (`orders`) add what the first slot does after its last pass; what a slot
behind it does they leave out. Sums of gradients between regions can take a good part of the step.
Whatever else happens, a slot has m passes of each kind and then its own end of the step:

    m (c + n a) + after(n) <= T

so it holds no more units than that. Where a mesh q with a long end is in the pipeline, slots in
front of it, which have W microbatches in flight, have begun their last forward pass before q ends,
and slots behind it have ended before; so for every slot

    (m - W) (c + n a + i + g) + after_q(1) <= T

Pipelines with and without such meshes are proven apart (`apart`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetplan.search.families.space import FIRST, LAST, MIDDLE, Floats, Ints, Space
from hetplan.search.single.likely import part_of

_LONG = 0.05
"""Part of the step from which an end of it is long."""


def apart(space: Space, seconds: float) -> tuple[tuple[Space, Ints], ...]:
    """(space, its meshes in the whole one) that together have all pipelines of such a step."""
    every = np.arange(len(space.max_stages))
    ends = space.after[:, :, 1:].min(axis=(0, 2))
    long = ends > _LONG * seconds
    if not long.any() or space.family.most_extra_depth:
        return (_held(space, every, seconds),)
    light = np.flatnonzero(~long)
    found = [_held(_beside(space, seconds, float(ends[long].min())), every, seconds)]
    if len(light):
        if not long[found[0][1]].any():
            # None of them has room: no pipeline has one.
            found.clear()
        found.append(_held(part_of(space, light), light, seconds))
    return tuple(found)


def together(space: Space, seconds: float) -> tuple[Space, Ints]:
    """As `apart`, but one space of all pipelines: half the programs, and a lower bound."""
    return _held(space, np.arange(len(space.max_stages)), seconds)


def _held(space: Space, meshes: Ints, seconds: float) -> tuple[Space, Ints]:
    """The space within the step, of those of its meshes of which a slot can hold a unit."""
    limited = within(space, seconds)
    some = np.flatnonzero(limited.most_layers.max(axis=(0, 1, 3)) > 0)
    if 0 < len(some) < len(meshes):
        return part_of(limited, some), meshes[some]
    return limited, meshes


def _beside(space: Space, seconds: float, end: float) -> Space:
    """For pipelines that have a mesh whose end of the step is at least this long."""
    n, flights = np.arange(1, space.num_layers + 1), np.arange(space.most_layers.shape[3])
    passes = space.forward + space.backward
    left = np.maximum(space.num_microbatches - flights, 0)
    ends = (space.extra_forward + space.extra_backward).swapaxes(0, 1) + _waits(space)
    # [V, 4, M, W + 1]: units for which all but the last passes leave time for that end.
    most = np.zeros(space.most_layers.shape, dtype=np.int64)
    for units in n:
        busy = left * (ends + units * passes[:, None, :])[..., None]
        most += busy + end <= seconds * (1.0 + 1e-9)
    return replace(space, most_layers=np.minimum(space.most_layers, most))


def within(space: Space, seconds: float) -> Space:
    """The same space for pipelines with a step of at most `seconds`, where that limits a slot."""
    passes = space.forward + space.backward
    ends = space.extra_forward + space.extra_backward
    n = np.arange(space.num_layers + 1)
    # [V, 4, M, L + 1]
    busy = (ends.swapaxes(0, 1) + _waits(space))[..., None] + passes[:, None, :, None] * n
    whole = space.num_microbatches * busy + space.after
    allowed = whole <= seconds * (1.0 + 1e-9)
    allowed[..., 0] = True
    most = space.num_layers - np.argmax(allowed[..., ::-1], axis=-1)
    limited = np.minimum(space.most_layers, most[..., None])
    if np.array_equal(limited, space.most_layers):
        return space
    return replace(space, most_layers=limited)


def _waits(space: Space) -> Floats:
    """[4, M] least serial seconds of the transfers of a microbatch that a slot receives."""
    found = np.zeros(space.after.shape[:2])
    if not space.rendezvous:
        return found
    links, nodes = space.links, space.node_links
    apart = (space.island_mask[:, None] & space.island_mask[None, :]) == 0
    inside = space.max_stages > 1
    for wire, node, axis, roles in (
        (links.forward_wire, nodes.forward_wire, 0, (MIDDLE, LAST)),
        (links.backward_wire, nodes.backward_wire, 1, (MIDDLE, FIRST)),
    ):
        least = np.where(apart, wire + links.rendezvous_extra, np.inf).min(axis=axis)
        own = np.diagonal(wire + links.rendezvous_extra)
        own = np.minimum(own, node + nodes.rendezvous_extra)
        least = np.minimum(least, np.where(inside, own, np.inf))
        found[list(roles)] += np.where(np.isfinite(least), least, 0.0)
    return found
