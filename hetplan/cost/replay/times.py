"""What a replay needs to know of one pipeline: its schedule and how long everything takes.

Virtual stage k is chunk k // P of stage k % P, but for V schedules (`hetplan.plans.v_schedules`);
hop k leads from virtual stage k to k + 1. P stages, v chunks on each.

Also here: the compiled replay of 1F1B with one chunk per stage, which the search calls.

`pipeline_ends` computes for 1F1B what `hetplan.cost.replay.ends` does for any program (both send
semantics and their sources: `hetplan.cost.replay.step`). A property test holds the two equal, bit
by bit.

Order of evaluation. Eager: round j runs, stage by stage downstream, every forward pass up to
microbatch j + warmup[s], then the backward pass of microbatch j stage by stage upstream; each
value is final when it is computed. Rendezvous: the warm-up microbatch by microbatch, then in
round j the backward passes of microbatch j upstream and the forward passes that follow them
downstream. That order is possible because with depths w[s] = w[s + 1] + 1 the fused pair j of
stage s ("send activations w[s] - 1 + j, receive gradient j") meets the fused pair j of stage s + 1
("send gradient j, receive activations w[s + 1] + j"); with w[s] = w[s + 1], which fewer
microbatches than stages bring about, the activations have moved one round earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.schedules import check_shape
from hetplan.errors import InputError
from hetplan.kernels import compiler_is_loaded, kernel

_SECONDS = (
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


_MAX_ALL_AT_ONCE = 20_000
"""Stages times microbatches of draws that are replayed together in numpy, at 20 microseconds each:
as long as loading the compiled replay takes."""
_PORTION = 10_000_000
"""Passes of draws in one call of the compiled replay: 0.06 CPU s, after which Ctrl-C is heard."""


class Exchange(StrEnum):
    """Trainers whose rendezvous sends and receives are known (`hetplan.cost.replay.programs`)."""

    TORCH = "torch"
    MEGATRON = "megatron"
    """As torch's but for interleaving."""
    DEEPSPEED = "deepspeed"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineTimes:
    """Seconds of every pass and transfer of one pipeline.

    Stage arrays are [P, v], hop arrays [P * v - 1]; float64, int64 where they count.
    """

    schedule: str
    """One of `hetplan.plans.plan.SCHEDULES`."""
    num_microbatches: int
    warmup: tuple[int, ...]
    """Forward passes of each stage before its first backward pass; read for 1f1b only."""
    forward: Floats
    backward: Floats
    """Whole backward pass; where the schedule splits it, the part for the inputs."""
    weight: Floats
    """Gradients of the weights; read only where the schedule splits the backward pass."""
    send_forward: Floats
    """How long one message of this hop occupies the sender's way to the receiver."""
    send_backward: Floats
    wire_latency: Floats
    """From the moment a message has left until it has arrived."""
    rendezvous_extra: Floats
    """How much later a message starts because the receiver's notice has to travel first."""
    link_forward: Ints
    """Number of the shared wire that this hop's activations cross, -1 for none."""
    link_backward: Ints
    shared_forward: Floats
    """How long one message of this hop occupies the shared wire."""
    shared_backward: Floats
    exchange: Exchange = Exchange.TORCH
    """Whose order of sends and receives, where sends are rendezvous."""

    def __post_init__(self) -> None:
        if self.forward.ndim != 2:
            raise InputError(
                f"forward times have shape {self.forward.shape}; give one row per stage and one "
                "column per virtual stage"
            )
        num_stages, chunks = self.forward.shape
        check_shape(self.schedule, num_stages, self.num_microbatches, chunks, self.warmup)
        if self.backward.shape != self.forward.shape or self.weight.shape != self.forward.shape:
            raise InputError(
                f"backward and weight times have shapes {self.backward.shape} and "
                f"{self.weight.shape}; forward times have {self.forward.shape}"
            )
        for values in self._hop_arrays():
            if values.shape != (num_stages * chunks - 1,):
                raise InputError(
                    f"an array of hops has shape {values.shape}; {num_stages} stages of {chunks} "
                    f"virtual stages have {num_stages * chunks - 1} hops"
                )

    def _hop_arrays(self) -> tuple[Floats | Ints, ...]:
        return (
            self.send_forward,
            self.send_backward,
            self.wire_latency,
            self.rendezvous_extra,
            self.link_forward,
            self.link_backward,
            self.shared_forward,
            self.shared_backward,
        )

    def check_seconds(self) -> None:
        """InputError where a time is negative, infinite or not a number.

        A pass over every array, so it is left to those who keep every event; `step_ends` looks only
        where no end comes out.
        """
        for name in _SECONDS:
            values: Floats = getattr(self, name)
            if not (np.isfinite(values).all() and (values >= 0).all()):
                raise InputError(
                    f"{name} times hold {values[~(np.isfinite(values) & (values >= 0))][0]}; every "
                    "time is a finite number of seconds, 0 or more"
                )

    def plain(self) -> StageTimes:
        """What the replay of 1F1B with one chunk per stage takes; shared wires are left out."""
        return StageTimes(
            self.forward[:, 0],
            self.backward[:, 0],
            self.send_forward,
            self.send_backward,
            self.wire_latency,
            self.rendezvous_extra,
            np.array(self.warmup, dtype=np.int64),
            self.num_microbatches,
        )

    @property
    def num_stages(self) -> int:
        """Stages, P."""
        return int(self.forward.shape[0])

    @property
    def virtual_stages(self) -> int:
        """Chunks of each stage, v."""
        return int(self.forward.shape[1])

    @property
    def shares(self) -> bool:
        """Whether any hop crosses a shared wire."""
        return bool((self.link_forward >= 0).any() or (self.link_backward >= 0).any())


class StageTimes(NamedTuple):
    """A 1F1B pipeline with one chunk per stage, over wires of its own; seconds.

    Arrays of stages have P entries, arrays of boundaries P - 1. (A NamedTuple: numba takes no
    dataclass.)
    """

    forward: Floats
    backward: Floats
    send_forward: Floats
    send_backward: Floats
    wire_latency: Floats
    rendezvous_extra: Floats
    warmup: Ints
    """Forward passes of each stage before its first backward pass; does not grow downstream."""
    num_microbatches: int


@kernel
def replay_seconds(times: StageTimes, after: Floats, rendezvous: bool) -> float:
    """Seconds of one step whose stage s takes after[s] more when it has left the pipeline.

    Nothing is checked here; infinity as for `pipeline_ends`.
    """
    end = pipeline_ends(times, rendezvous)
    step = 0.0
    for s in range(end.shape[0]):
        step = max(step, end[s] + after[s])
    return step


@kernel
def pipeline_ends(times: StageTimes, rendezvous: bool) -> Floats:
    """When each stage leaves the pipeline.

    With rendezvous sends all are infinite unless neighbouring depths, capped at the number of
    microbatches, are equal or one apart (other depths may make the schedule wait for itself;
    `step_ends` tells).
    """
    if rendezvous:
        return _rendezvous_ends(times)
    return _eager_ends(times)


def ends_of_draws(times: StageTimes, rendezvous: bool) -> Floats:
    """`pipeline_ends` of one pipeline in many draws, [draws, stages].

    The seconds of `times` have the draws as their first axis.
    """
    num_stages = times.forward.shape[1]
    names = times._fields[:6]
    if compiler_is_loaded() or num_stages * times.num_microbatches > _MAX_ALL_AT_ONCE:
        count = max(1, _PORTION // (num_stages * times.num_microbatches))
        found = [
            _ends_one_by_one(
                times._replace(**{name: getattr(times, name)[at : at + count] for name in names}),
                rendezvous,
            )
            for at in range(0, len(times.forward), count)
        ]
        return np.concatenate(found)
    seconds: dict[str, Any] = {name: np.ascontiguousarray(getattr(times, name).T) for name in names}
    every: Floats = pipeline_ends.elementwise(times._replace(**seconds), rendezvous).T
    return every


@kernel
def _ends_one_by_one(times: StageTimes, rendezvous: bool) -> Floats:
    count, num_stages = times.forward.shape
    found = np.empty((count, num_stages))
    for d in range(count):
        drawn = StageTimes(
            times.forward[d],
            times.backward[d],
            times.send_forward[d],
            times.send_backward[d],
            times.wire_latency[d],
            times.rendezvous_extra[d],
            times.warmup,
            times.num_microbatches,
        )
        found[d] = pipeline_ends(drawn, rendezvous)
    return found


@kernel
def _eager_ends(times: StageTimes) -> Floats:
    forward, backward, send_forward, send_backward, wire_latency, _, warmup, m = times
    num_stages = forward.shape[0]
    arrived = np.empty((m, *forward.shape))  # activations of microbatch i at stage s
    end = np.zeros_like(forward)
    down_free = np.zeros_like(forward)
    up_free = np.zeros_like(forward)
    done = np.zeros(num_stages, np.int64)
    for j in range(m):
        for s in range(num_stages):
            stop = min(j + warmup[s], m)
            for i in range(done[s], stop):
                start = end[s]
                if s > 0:
                    start = max(start, arrived[i, s])
                end[s] = start + forward[s]
                if s < num_stages - 1:
                    left = max(end[s], down_free[s]) + send_forward[s]
                    down_free[s] = left
                    arrived[i, s + 1] = left + wire_latency[s]
            done[s] = max(done[s], stop)
        gradient = 0.0
        for s in range(num_stages - 1, -1, -1):
            end[s] = max(end[s], gradient) + backward[s]
            if s > 0:
                left = max(end[s], up_free[s - 1]) + send_backward[s - 1]
                up_free[s - 1] = left
                gradient = left + wire_latency[s - 1]
    return end


@kernel
def _rendezvous_ends(times: StageTimes) -> Floats:
    forward, backward, send_forward, send_backward, wire_latency, extra, warmup, m = times
    last = forward.shape[0] - 1
    depth = np.minimum(warmup, m)
    now = np.zeros_like(forward)
    for s in range(last):
        if depth[s] - depth[s + 1] > 1 or depth[s] < depth[s + 1]:
            now[:] = np.inf
            return now
    posted_up = np.zeros_like(forward)  # when stage s posts the gradient it has just computed
    left_down = np.zeros_like(send_forward)  # latest departure over boundary s, activations
    left_up = np.zeros_like(send_forward)  # and gradients

    # Warm-up. Stage s posts its receive of microbatch j when it has sent j - 2 and computed j - 1.
    for j in range(depth[0]):
        for s in range(last + 1):
            if j >= depth[s]:
                break
            if s > 0:
                ready = max(now[s - 1], now[s] + extra[s - 1])
                left_down[s - 1] = max(ready, left_down[s - 1]) + send_forward[s - 1]
                now[s] = max(now[s], left_down[s - 1] + wire_latency[s - 1])
            now[s] += forward[s]
            if s < last and j > 0:
                now[s] = max(now[s], left_down[s])

    for j in range(m):
        # Backward passes of microbatch j, upstream. Before it stage s posts, together, its send of
        # activations depth[s] - 1 + j (while there are any left) and its receive of gradient j.
        for s in range(last, -1, -1):
            if s < last:
                posted = now[s] + 0.0  # no view of a row, which changes below
                ready = max(posted_up[s + 1], posted + extra[s])
                left_up[s] = max(ready, left_up[s]) + send_backward[s]
                now[s] = max(posted, left_up[s] + wire_latency[s])
                if j <= m - depth[s]:
                    # One deeper than the next stage: it meets that stage's fused pair j. As deep:
                    # the next stage has taken these activations already.
                    if depth[s] > depth[s + 1]:
                        ready = max(posted, posted_up[s + 1] + extra[s])
                        left_down[s] = max(ready, left_down[s]) + send_forward[s]
                    now[s] = max(now[s], left_down[s])
            now[s] += backward[s]
            if s > 0 and j > m - depth[s]:
                now[s] = max(now[s], left_up[s - 1])  # of gradient j - 1: it has not moved yet
            posted_up[s] = now[s]
        # Forward passes of microbatch depth[s] + j, downstream.
        for s in range(last + 1):
            if depth[s] + j >= m:
                continue
            if s > 0:
                if depth[s - 1] == depth[s]:
                    ready = max(now[s - 1], posted_up[s] + extra[s - 1])
                    left_down[s - 1] = max(ready, left_down[s - 1]) + send_forward[s - 1]
                arrived = left_down[s - 1] + wire_latency[s - 1]
                now[s] = max(now[s], max(arrived, left_up[s - 1]))
            now[s] += forward[s]
    for s in range(1, last + 1):
        now[s] = max(now[s], left_up[s - 1])
    return now


def beyond_transient(stages: int, deepest: int, wanted: int) -> int:
    """About so many microbatches, but enough that a pipeline has become periodic, and a multiple of
    the stages, as interleaving needs. deepest: most passes that a stage begins with.
    """
    return -(-max(2 * deepest, wanted) // stages) * stages
