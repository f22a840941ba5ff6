"""Random pipelines of every schedule for tests of the replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from hetplan.cost.arrays import Floats
from hetplan.cost.replay.times import Exchange, PipelineTimes, StageTimes
from hetplan.plans.plan import SCHEDULES
from hetplan.plans.v_schedules import is_v


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    schedule: str
    stages: int
    microbatches: int
    chunks: int = 1


def fitting(schedule: str, stages: int, microbatches: int, chunks: int) -> Shape:
    """The shape with as many chunks, and microbatches, as the schedule can have."""
    if is_v(schedule):
        chunks = 2
    elif schedule not in ("interleaved-1f1b", "zb-h1"):
        chunks = 1
    more = 2 * stages if schedule == "dualpipev" else 0
    return Shape(schedule=schedule, stages=stages, microbatches=microbatches + more, chunks=chunks)


SHAPES = st.builds(
    fitting,
    st.sampled_from(SCHEDULES),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 3),
)
"""Small shapes of every schedule, for hypothesis."""


def random_shape(
    rng: np.random.Generator, *, most_stages: int = 6, most_microbatches: int = 12
) -> Shape:
    schedule = SCHEDULES[int(rng.integers(0, len(SCHEDULES)))]
    stages = int(rng.integers(1, most_stages + 1))
    microbatches = int(rng.integers(1, most_microbatches + 1))
    return fitting(schedule, stages, microbatches, int(rng.integers(1, 4)))


def random_times(
    rng: np.random.Generator,
    shape: Shape,
    *,
    transfers: float,
    num_wires: int = 0,
    deeper: bool = False,
    whole: bool = False,
) -> PipelineTimes:
    """Uneven passes of 0.2 to 1 (times up to 2.6), transfers up to `transfers`.

    num_wires: hops cross one of as many shared wires, or none. deeper: depths of 1F1B that fall by
    0 or 1, from 1 to 3 at the end. whole: every time a whole number, so that many are equal.
    """
    stages, hops = shape.stages, shape.stages * shape.chunks - 1
    forward = rng.uniform(0.2, 1.0, (stages, shape.chunks))
    warmup = np.arange(stages, 0, -1)
    if deeper:
        steps = np.concatenate(([rng.integers(1, 4)], rng.integers(0, 2, stages - 1)))
        warmup = np.cumsum(steps)[::-1]
    links = [rng.integers(-1, num_wires, hops) for _ in range(2)]
    send = [rng.uniform(0, transfers, hops) for _ in range(6)]
    times = PipelineTimes(
        schedule=shape.schedule,
        num_microbatches=shape.microbatches,
        warmup=tuple(int(depth) for depth in warmup),
        forward=forward,
        backward=forward * rng.uniform(0.8, 2.6, forward.shape),
        weight=forward * rng.uniform(0.5, 1.2, forward.shape),
        send_forward=send[0],
        send_backward=send[1],
        wire_latency=send[2],
        rendezvous_extra=send[3],
        link_forward=links[0],
        link_backward=links[1],
        shared_forward=send[4],
        shared_backward=send[5],
    )
    return scaled(times, 4.0, whole=True) if whole else times


SECONDS = (
    "forward",
    "backward",
    "weight",
    "send_forward",
    "send_backward",
    "wire_latency",
    "rendezvous_extra",
    "shared_forward",
    "shared_backward",
)


def scaled(times: PipelineTimes, factor: float, *, whole: bool = False) -> PipelineTimes:
    """All times by this factor, rounded to whole numbers on request."""
    changed = {name: getattr(times, name) * factor for name in SECONDS}
    return replace(
        times, **{name: np.round(values) if whole else values for name, values in changed.items()}
    )


def even_times(
    shape: Shape,
    forward: float,
    backward: float,
    weight: float = 0.0,
    *,
    warmup: Sequence[int] | None = None,
    send: float = 0.0,
    latency: float = 0.0,
) -> PipelineTimes:
    """Equal passes and equal hops, nothing shared."""
    passes = (shape.stages, shape.chunks)
    hop = np.array([[send], [send], [latency], [0.0]])
    times = over_own_wires(
        np.full(passes, forward),
        np.full(passes, backward),
        np.repeat(hop, shape.stages * shape.chunks - 1, axis=1),
        shape.microbatches,
        schedule=shape.schedule,
        warmup=range(shape.stages, 0, -1) if warmup is None else warmup,
    )
    return replace(times, weight=np.full(passes, weight))


def random_plain(
    rng: np.random.Generator,
    *,
    transfers: float,
    most_stages: int = 8,
    most_microbatches: int = 24,
    deeper: bool = False,
) -> tuple[StageTimes, Floats]:
    """Uneven stages of 1F1B, and what each does after its last pass; `deeper` as above."""
    stages = int(rng.integers(1, most_stages + 1))
    forward = rng.uniform(0.2, 1.0, stages)
    warmup = np.arange(stages, 0, -1, dtype=np.int64)
    if deeper:
        steps = np.concatenate(([rng.integers(1, 4)], rng.integers(0, 2, stages - 1)))
        warmup = np.ascontiguousarray(np.cumsum(steps)[::-1], dtype=np.int64)
    times = StageTimes(
        forward,
        forward * rng.uniform(0.8, 2.6, stages),
        *(rng.uniform(0, transfers, stages - 1) for _ in range(4)),
        warmup,
        int(rng.integers(1, most_microbatches + 1)),
    )
    return times, rng.uniform(0, 1, stages)


def plain_times(*rows: Sequence[float], warmup: Sequence[int], microbatches: int) -> StageTimes:
    """From lists of seconds, in the order of `StageTimes`."""
    return StageTimes(*map(np.array, rows), np.array(warmup), microbatches)


def one_pipeline(times: StageTimes) -> PipelineTimes:
    """1F1B over wires of its own."""
    hops = (times.send_forward, times.send_backward, times.wire_latency, times.rendezvous_extra)
    return over_own_wires(
        times.forward.reshape(-1, 1),
        times.backward.reshape(-1, 1),
        np.array(hops),
        times.num_microbatches,
        warmup=[int(depth) for depth in times.warmup],
    )


def over_own_wires(
    forward: Floats,
    backward: Floats,
    hops: Floats,
    microbatches: int,
    *,
    schedule: str = "1f1b",
    warmup: Sequence[int] | None = None,
    exchange: Exchange = Exchange.TORCH,
) -> PipelineTimes:
    """Passes [P, v] and hops [4, P * v - 1] in the order of `StageTimes`, nothing shared."""
    alone, nothing = np.full(hops.shape[1], -1), np.zeros(hops.shape[1])
    return PipelineTimes(
        schedule=schedule,
        num_microbatches=microbatches,
        warmup=tuple(warmup or [1] * len(forward)),
        forward=forward,
        backward=backward,
        weight=np.zeros_like(forward),
        send_forward=hops[0],
        send_backward=hops[1],
        wire_latency=hops[2],
        rendezvous_extra=hops[3],
        link_forward=alone,
        link_backward=alone,
        shared_forward=nothing,
        shared_backward=nothing,
        exchange=exchange,
    )
