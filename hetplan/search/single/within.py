"""What slots may hold in a pipeline whose step is at most so long.

The programs over orders (`orders`) add what the first slot does after its last pass; what a slot
behind it does they leave out. Sums of gradients between regions can take a good part of the step.
Whatever else happens, a slot has m passes of each kind and then its own end of the step:

    m (c + n a) + after(n) <= T

so it holds no more units than that. Where a mesh q with a long end is in the pipeline, slots in
front of it, which have W microbatches in flight, have begun their last forward pass before q ends,
and slots behind it have ended before; so for every slot

    (m - W) (c + n a) + after_q(1) <= T

Pipelines with and without such meshes are proven apart (`apart`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetplan.search.families.space import Ints, Space
from hetplan.search.single.likely import part_of

_LONG = 0.05
"""Part of the step from which an end of it is long."""


def apart(space: Space, seconds: float) -> tuple[tuple[Space, Ints], ...]:
    """(space, its meshes in the whole one) that together have all pipelines of such a step."""
    every = np.arange(len(space.max_stages))
    ends = space.after[:, :, 1:].min(axis=(0, 2))
    long = ends > _LONG * seconds
    if not long.any() or space.family.most_extra_depth:
        return ((within(space, seconds), every),)
    light = np.flatnonzero(~long)
    found = [(_beside(space, seconds, float(ends[long].min())), every)]
    if len(light):
        found.append((part_of(space, light), light))
    return tuple([(within(each, seconds), meshes) for each, meshes in found])


def _beside(space: Space, seconds: float, end: float) -> Space:
    """For pipelines that have a mesh whose end of the step is at least this long."""
    n, flights = np.arange(1, space.num_layers + 1), np.arange(space.most_layers.shape[3])
    passes = space.forward + space.backward
    left = np.maximum(space.num_microbatches - flights, 0)
    ends = (space.extra_forward + space.extra_backward).swapaxes(0, 1)
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
    busy = ends.swapaxes(0, 1)[..., None] + passes[:, None, :, None] * n
    whole = space.num_microbatches * busy + space.after
    allowed = whole <= seconds * (1.0 + 1e-9)
    allowed[..., 0] = True
    most = space.num_layers - np.argmax(allowed[..., ::-1], axis=-1)
    limited = np.minimum(space.most_layers, most[..., None])
    if np.array_equal(limited, space.most_layers):
        return space
    return replace(space, most_layers=limited)
