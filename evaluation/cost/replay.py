"""How long does a replay take, and how often does a faster shared wire make a step slower?

Replays are timed in CPU seconds of this process, warm (compiled and with the programs of the shape
at hand), called from Python as costs and search call them: the least over `repeats` runs of many
calls. The pipelines are random and uneven, the same on every machine.

Anomalies: first come, first served is not the best order, so with shared wires a step can become
slower when a wire becomes faster (Graham, 1969, on list scheduling). By at most the seconds that
all messages occupy shared wires: a step lies between T0, the wires to itself, and T0 + that sum,
and T0 never grows when a wire becomes faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from hetplan.cost.replay.step import PipelineTimes, replay_seconds, step_ends

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
