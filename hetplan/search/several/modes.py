"""By which mixtures of the inequalities of a bottleneck is a pipeline weighed?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetplan.search.families.space import FIRST, MIDDLE
from hetplan.search.several.ticks import Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """Which of the inequalities a stage downstream of the bottleneck is weighed by."""

    down: float
    bonus: float


NO_FILL = Mode(down=0.0, bonus=0.0)
"""(a) alone."""


def modes_of(tick: Tick) -> tuple[Mode, ...]:
    """(c), (b), half of each, and (a) of `hetplan.search.several.bound`."""
    turn = _largest_turn(tick, waits=tick.rendezvous)
    return (
        Mode(down=2.0, bonus=1.0),
        Mode(down=1.0, bonus=turn),
        Mode(down=1.5, bonus=0.5 * (1.0 + turn)),
        NO_FILL,
    )


def _largest_turn(tick: Tick, *, waits: bool) -> float:
    """Of all stages but last ones, the largest part of a turn that its shorter pass takes."""
    layers = np.arange(1, tick.num_layers + 1)
    largest = 0.0
    for role in (FIRST, MIDDLE):
        forward, backward = tick.extra_forward[role], tick.extra_backward[role]
        if waits:
            forward = forward + (0.0 if role == FIRST else tick.arrive_forward)
            backward = backward + tick.arrive_backward
        forward = forward[:, None] + tick.forward[:, None] * layers
        backward = backward[:, None] + tick.backward[:, None] * layers
        shorter = np.minimum(forward, backward)
        largest = max(largest, float((shorter / (forward + backward)).max()))
    return largest
