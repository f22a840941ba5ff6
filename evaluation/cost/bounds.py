"""How close do the lower bounds on a step come to its replay?

Random uneven pipelines per schedule and length of transfers; step over bound less 1. The worst
cases are tiny (few microbatches, long transfers). Eager sends; with `rendezvous` every send waits
for its receiver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evaluation.cost.step_bounds import pipeline_bound_seconds
from hetplan.cost.replay.step import step_ends
from hetplan.cost.replay.times import PipelineTimes
from hetplan.cost.schedules import warmup_depths
from hetplan.plans.plan import SCHEDULES

TRANSFERS = (("none", 0.0), ("small", 0.1), ("long", 1.0))
"""Name, and longest send and latency of a hop; a forward pass takes 0.2 to 1."""

ROUNDING = 1e-9
"""Relative; bound and replay add the same times in another order."""

_MAX_STAGES = 16
_MAX_MICROBATCHES = 96
_PER_SHAPE = 25
"""Cases of one number of stages, chunks and microbatches; a new shape is compiled anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundRow:
    """Tightness of the best bound in one regime; shares of the bound."""

    schedule: str
    transfers: str
    cases: int
    mean: float
    p99: float
    worst: float
    violations: int
    """Cases in which the bound was above the replay; each is a fault of hetplan."""


def bound_rows(
    *,
    cases: int = 1000,
    seed: int = 0,
    rendezvous: bool = False,
    schedules: Sequence[str] = SCHEDULES,
) -> tuple[BoundRow, ...]:
    """One row per schedule and length of transfers, `cases` pipelines each."""
    rows: list[BoundRow] = []
    for schedule in schedules:
        for name, longest in TRANSFERS:
            rng = np.random.default_rng([seed, len(rows)])
            over = np.array(
                [
                    _over(times, rendezvous)
                    for times in _cases(schedule, longest, cases, rng, rendezvous)
                ]
            )
            rows.append(
                BoundRow(
                    schedule=schedule,
                    transfers=name,
                    cases=len(over),
                    mean=float(over.mean()),
                    p99=float(np.quantile(over, 0.99)),
                    worst=float(over.max()),
                    violations=int((over < -ROUNDING).sum()),
                )
            )
    return tuple(rows)


def _over(times: PipelineTimes, rendezvous: bool) -> float:
    (ends,) = step_ends([times], rendezvous=rendezvous)
    return float(ends.max()) / pipeline_bound_seconds(times, rendezvous=rendezvous) - 1.0


def _cases(
    schedule: str, longest: float, cases: int, rng: np.random.Generator, rendezvous: bool
) -> list[PipelineTimes]:
    found: list[PipelineTimes] = []
    while len(found) < cases:
        stages = int(rng.integers(1, _MAX_STAGES + 1))
        chunks = int(rng.integers(2, 5)) if schedule == "interleaved-1f1b" else 1
        m = int(rng.integers(1, _MAX_MICROBATCHES + 1))
        warmup = np.array(warmup_depths(schedule, stages, m, chunks))
        if schedule == "1f1b" and rng.random() < 0.3:
            # Deeper before some boundary, as to hide a long link behind it; a rendezvous schedule
            # waits for itself where neighbours' depths differ by more than one.
            extra = 0 if rendezvous else int(rng.integers(1, 4))
            warmup[: int(rng.integers(0, stages + 1))] += extra
        depths = tuple(int(depth) for depth in warmup)
        found.extend(
            _times(schedule, stages, chunks, m, depths, longest, rng)
            for _ in range(min(_PER_SHAPE, cases - len(found)))
        )
    return found


def _times(
    schedule: str,
    stages: int,
    chunks: int,
    m: int,
    warmup: tuple[int, ...],
    longest: float,
    rng: np.random.Generator,
) -> PipelineTimes:
    shape, hops = (stages, chunks), stages * chunks - 1
    # Chunks of a stage run on the same devices and differ by some layers only.
    forward = rng.uniform(0.2, 1.0, (stages, 1)) * rng.uniform(0.8, 1.25, shape)
    backward = forward * rng.uniform(1.3, 2.6, shape)
    # About half of a backward pass is for the weights (arXiv 2401.10241, table 1).
    weight = backward * 0.5 * (schedule == "zb-h1")
    send_forward, send_backward, latency, extra = rng.uniform(0.0, longest, (4, hops))
    own = np.full(hops, -1)
    return PipelineTimes(
        schedule=schedule,
        num_microbatches=m,
        warmup=warmup,
        forward=forward,
        backward=backward - weight,
        weight=weight,
        send_forward=send_forward,
        send_backward=send_backward,
        wire_latency=latency,
        rendezvous_extra=extra,
        link_forward=own,
        link_backward=own,
        shared_forward=np.zeros(hops),
        shared_backward=np.zeros(hops),
    )
