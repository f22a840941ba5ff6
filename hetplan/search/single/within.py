"""What slots may hold in a pipeline whose step is at most so long.

The programs over orders (`orders`) add what the first slot does after its last pass; what a slot
behind it does they leave out. Sums of gradients between regions can take a good part of the step.
Whatever else happens, a slot has m passes of each kind and then its own end of the step:

    m (c + n a) + after(n) <= T

so it holds no more units than that.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetplan.search.families.space import Space


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
