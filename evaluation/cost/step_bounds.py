"""How fast can a step of one pipeline be: the bounds that hold for its schedule.

Pipelines that share wires only delay each other: each one's bound holds for a step of several.
"""

from __future__ import annotations

import numpy as np

from evaluation.cost.walk_bounds import (
    walk_bound_seconds,
)
from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.bounds.closed_forms import gpipe_bound_seconds, lower_bound_seconds
from hetplan.cost.replay.times import PipelineTimes


def pipeline_bound_seconds(
    times: PipelineTimes, *, rendezvous: bool, after: Floats | None = None
) -> float:
    """Seconds that one pipeline cannot beat, by the bounds that hold for its schedule."""
    num_stages, m = times.num_stages, times.num_microbatches
    tail = np.zeros(num_stages) if after is None else after
    sends = without_sharing(times)
    if times.virtual_stages > 1 or times.schedule == "zb-h1":
        split = times.schedule == "zb-h1"
        return float(
            walk_bound_seconds(
                times.forward,
                times.backward,
                times.weight if split else np.zeros_like(times.weight),
                *sends,
                _depths(times),
                np.arange(num_stages) * int(split),
                m,
                tail,
            )
        )
    arguments = (times.forward[:, 0], times.backward[:, 0], *sends, times.rendezvous_extra)
    if times.schedule == "gpipe":
        return float(gpipe_bound_seconds(*arguments, m, tail, rendezvous))
    # Interleaved 1F1B of one chunk is 1F1B, but posts its receives early.
    own = times.schedule == "1f1b"
    depth = np.array(times.warmup, np.int64) if own else np.arange(num_stages, 0, -1)
    return float(lower_bound_seconds(*arguments, depth, m, tail, rendezvous and own))


def _depths(times: PipelineTimes) -> Ints:
    """Forward passes before the first backward pass, those counted that fill the last group."""
    left = np.arange(times.num_stages - 1, -1, -1)
    if times.schedule == "interleaved-1f1b":
        return 2 * left + (times.virtual_stages - 1) * times.num_stages + 1
    return np.minimum(left + 1, times.num_microbatches)


def without_sharing(times: PipelineTimes) -> tuple[Floats, Floats, Floats]:
    """Sends and latency of every hop, as if each had its wires for itself."""
    return (
        np.where(
            times.link_forward >= 0,
            np.maximum(times.send_forward, times.shared_forward),
            times.send_forward,
        ),
        np.where(
            times.link_backward >= 0,
            np.maximum(times.send_backward, times.shared_backward),
            times.send_backward,
        ),
        times.wire_latency,
    )
