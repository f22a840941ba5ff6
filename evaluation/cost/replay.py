"""Speed of replays, steps that a faster shared wire makes slower, and tightness of the bounds.

Replays are timed in CPU seconds of this process, warm (compiled and with the programs of the shape
at hand), called from Python as costs and search call them: the least over `repeats` runs of many
calls. The pipelines are random and uneven, the same on every machine.

Anomalies: first come, first served is not the best order, so with shared wires a step can become
slower when a wire becomes faster (Graham, 1969, on list scheduling). By at most the seconds that
all messages occupy shared wires: a step lies between T0, the wires to itself, and T0 + that sum,
and T0 never grows when a wire becomes faster.

Bounds: random uneven pipelines per schedule and length of transfers; step over bound less 1. The
worst cases are tiny (few microbatches, long transfers). Eager sends; with `rendezvous` every send
waits for its receiver.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from evaluation.cost.step_bounds import pipeline_bound_seconds
from hetplan.cost.replay.ends import step_ends
from hetplan.cost.replay.kernel import replay_seconds
from hetplan.cost.replay.times import PipelineTimes
from hetplan.cost.schedules import warmup_depths
from hetplan.plans.plan import SCHEDULES

SEED = 4
FASTER = 0.9
"""Seconds on the faster wire for one on the slower."""
_TARGET_SECONDS = 0.02
"""CPU time of one run, long against the clock's resolution (1 us)."""
_SAME = 1e-9
"""Steps that differ by less than this part are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTiming:
    """CPU time of one replay."""

    what: str
    schedule: str
    stages: int
    microbatches: int
    virtual_stages: int
    rendezvous: bool
    passes: int
    cpu_seconds: float
    """One call, warm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyRow:
    """Random steps of one kind of sends, each with its shared wires slower and faster."""

    rendezvous: bool
    wires: int
    pipelines: int
    """Most pipelines of one step."""
    cases: int
    slower: int
    """Steps that the faster wires made slower."""
    worst_excess: float
    """Largest slow-down, as part of the slower wires' step."""
    worst_of_bound: float
    """Largest slow-down over the proven bound."""

    @property
    def share(self) -> float:
        """Part of the cases that became slower."""
        return self.slower / self.cases


def replay_timings(repeats: int = 5) -> tuple[ReplayTiming, ...]:
    """The search's 1F1B kernel, the schedules without shared wires, and shared wires."""
    rows = []
    for stages, microbatches in ((16, 64), (64, 512)):
        for rendezvous in (False, True):
            rows.append(_fast(stages, microbatches, rendezvous, repeats))
            for schedule, chunks, wires in (
                ("1f1b", 1, 0),
                ("gpipe", 1, 0),
                ("zb-h1", 1, 0),
                ("interleaved-1f1b", 2, 0),
                ("1f1b", 1, 3),
            ):
                times = _random_times(
                    np.random.default_rng(SEED), schedule, stages, microbatches, chunks, wires
                )
                rows.append(_general(times, wires, rendezvous, repeats))
    return tuple(rows)


def anomalies(cases: int = 2000, seed: int = SEED) -> tuple[AnomalyRow, ...]:
    """How often, and how far, steps become slower when all shared wires become faster."""
    return tuple(
        _anomalies(cases, seed, wires, pipelines, rendezvous)
        for rendezvous in (False, True)
        for wires, pipelines in ((1, 1), (2, 2))
    )


def _anomalies(cases: int, seed: int, wires: int, most: int, rendezvous: bool) -> AnomalyRow:
    rng = np.random.default_rng(seed)
    slower, worst, of_bound = 0, 0.0, 0.0
    for _ in range(cases):
        pipelines = [
            _random_times(
                rng,
                "1f1b",
                int(rng.integers(2, 9)),
                int(rng.integers(2, 25)),
                1,
                wires,
            )
            for _ in range(int(rng.integers(1, most + 1)))
        ]
        faster = [
            replace(
                times,
                shared_forward=times.shared_forward * FASTER,
                shared_backward=times.shared_backward * FASTER,
            )
            for times in pipelines
        ]
        before, after = _step(pipelines, rendezvous), _step(faster, rendezvous)
        if after > before * (1 + _SAME):
            slower += 1
            worst = max(worst, after / before - 1)
            of_bound = max(of_bound, (after - before) / sum(map(_occupied_seconds, faster)))
    return AnomalyRow(
        rendezvous=rendezvous,
        wires=wires,
        pipelines=most,
        cases=cases,
        slower=slower,
        worst_excess=worst,
        worst_of_bound=of_bound,
    )


def _step(pipelines: list[PipelineTimes], rendezvous: bool) -> float:
    return max(float(ends.max()) for ends in step_ends(pipelines, rendezvous=rendezvous))


def _occupied_seconds(times: PipelineTimes) -> float:
    """What all messages of the pipeline occupy shared wires."""
    return times.num_microbatches * float(
        times.shared_forward[times.link_forward >= 0].sum()
        + times.shared_backward[times.link_backward >= 0].sum()
    )


def _fast(stages: int, microbatches: int, rendezvous: bool, repeats: int) -> ReplayTiming:
    times = _random_times(np.random.default_rng(SEED), "1f1b", stages, microbatches, 1, 0)
    arguments = (
        np.ascontiguousarray(times.forward[:, 0]),
        np.ascontiguousarray(times.backward[:, 0]),
        times.send_forward,
        times.send_backward,
        times.wire_latency,
        times.rendezvous_extra,
        np.array(times.warmup, dtype=np.int64),
        microbatches,
        np.zeros(stages),
        rendezvous,
    )
    return _row(
        "search kernel",
        times,
        rendezvous,
        _cpu_seconds(lambda: replay_seconds(*arguments), repeats),
    )


def _general(times: PipelineTimes, wires: int, rendezvous: bool, repeats: int) -> ReplayTiming:
    return _row(
        f"{wires} shared wires" if wires else "no shared wire",
        times,
        rendezvous,
        _cpu_seconds(lambda: step_ends((times,), rendezvous=rendezvous), repeats),
    )


def _row(what: str, times: PipelineTimes, rendezvous: bool, seconds: float) -> ReplayTiming:
    kinds = 3 if times.schedule == "zb-h1" else 2
    return ReplayTiming(
        what=what,
        schedule=times.schedule,
        stages=times.num_stages,
        microbatches=times.num_microbatches,
        virtual_stages=times.virtual_stages,
        rendezvous=rendezvous,
        passes=kinds * times.forward.size * times.num_microbatches,
        cpu_seconds=seconds,
    )


def _cpu_seconds(call: Callable[[], object], repeats: int) -> float:
    call()  # compiles and fills the store of programs
    begin = time.process_time()
    call()
    count = max(1, int(_TARGET_SECONDS / max(time.process_time() - begin, 1e-6)))
    best = float("inf")
    for _ in range(repeats):
        begin = time.process_time()
        for _ in range(count):
            call()
        best = min(best, (time.process_time() - begin) / count)
    return best


def _random_times(
    rng: np.random.Generator, schedule: str, stages: int, m: int, chunks: int, wires: int
) -> PipelineTimes:
    """Forward passes of 0.2 to 1, backward 0.8 to 2.6 times that, transfers of up to 0.5.

    Each direction of each hop crosses one of `wires` shared wires, or none of them.
    """
    hops = stages * chunks - 1
    forward = rng.uniform(0.2, 1.0, (stages, chunks))
    send = [rng.uniform(0, 0.5, hops) for _ in range(6)]
    links = [rng.integers(-1, wires, hops) for _ in range(2)]
    return PipelineTimes(
        schedule=schedule,
        num_microbatches=m,
        warmup=tuple(range(stages, 0, -1)),
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
