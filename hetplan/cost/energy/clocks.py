"""The clocks at which stages that wait lose no time, and the energy that this would save.

The idea is Perseus' (arXiv 2312.06902): passes off the critical path may run slower. Here every
pass fills the wait behind it as far as no other pass, and no end of a wait, comes later: what it
sends, and what it makes room for, may be late by as much as those who wait for it would wait
anyway. Nothing else of the step moves, so all passes may do so together. Messages that share a wire
stay where they are, and waits at the end of the step are left.

A pass at the clock f, over the one it has, is taken to last 1 / f times as long, its transfers
included, which is more than a lower clock does to them. Of the watts that computing adds to
communicating there remain, by the law of capped clocks (`hetplan.cluster.devices`), f max(f, v)^2
with v the least voltage. So a pass of t seconds saves

    (computing - communicating watts) x t x (1 - max(f, v)^2),

and clocks below v would save nothing more. This is a model: no clock was set, and no watt measured
at one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import numpy as np

from hetplan.cluster.devices import MIN_VOLTAGE
from hetplan.cluster.power import power_law
from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Floats
from hetplan.cost.energy.energy import JOULES_PER_KWH
from hetplan.cost.replay.ends import replayed
from hetplan.cost.replay.programs import Message, Receive, Send, Step, Wait, programs_of
from hetplan.cost.replay.times import PipelineTimes, beyond_transient
from hetplan.cost.step_model.plan import sends_wait
from hetplan.cost.step_model.pricer import Pricer
from hetplan.plans.plan import Plan, Replica
from hetplan.plans.v_schedules import Pass

_ROUNDING = 1e-9
"""Of the step: sums in another order are no wait."""
_MOST_PASSES = 40_000
"""Forward passes of a step that are looked at one by one: 3 kB each by tracemalloc, at the peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageClock:
    """What the passes of one stage could do without."""

    pipeline: int
    stage: int
    mean_clock: float
    """Of its passes, by time; over the clock that it has. 1: no pass may be slower."""
    kwh_saved: float | None
    """Per step, all its devices, at the meter; None: their power is not known."""


def stage_clocks(pricer: Pricer, plan: Plan) -> tuple[StageClock, ...]:
    """Of every stage, all together."""
    work = pricer.step(plan).work
    every = slower_of([each.times() for each in work], rendezvous=sends_wait(plan))
    found = []
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            seconds, slower, saved = (float(each) for each in every[p][s])
            watts = _more_watts(pricer.cluster, stage.replicas)
            found.append(
                StageClock(
                    pipeline=p,
                    stage=s,
                    mean_clock=seconds / slower,
                    kwh_saved=None if watts is None else watts * saved / JOULES_PER_KWH,
                )
            )
    return tuple(found)


def slower_of(
    pipelines: Sequence[PipelineTimes], *, rendezvous: bool, most_passes: int = _MOST_PASSES
) -> list[Floats]:
    """Of every pipeline [stage, (seconds of all passes, at their clocks, saved of full watts)].

    After its transient a pipeline is periodic (a max-plus system), so what all passes of a long
    step come to is on the line through two shorter ones.
    """
    counts = [each.num_microbatches for each in pipelines]
    whole = sum(each.forward.size * each.num_microbatches for each in pipelines)
    few = [_fewer(each, most_passes / whole / 4.0) for each in pipelines]
    if whole <= most_passes or any(2 * n >= m for n, m in zip(few, counts, strict=True)):
        return _slower(pipelines, rendezvous)
    short, longer = (
        _slower(
            [
                replace(each, num_microbatches=factor * n)
                for each, n in zip(pipelines, few, strict=True)
            ],
            rendezvous,
        )
        for factor in (1, 2)
    )
    return [
        two + (two - one) * ((m - 2 * n) / n)
        for one, two, m, n in zip(short, longer, counts, few, strict=True)
    ]


def _fewer(times: PipelineTimes, part: float) -> int:
    """So great a part of the microbatches, but beyond the transient."""
    deepest = max(times.forward.size, *times.warmup)
    return beyond_transient(times.num_stages, deepest, int(part * times.num_microbatches))


def _slower(pipelines: Sequence[PipelineTimes], rendezvous: bool) -> list[Floats]:
    found = []
    for stages in slack_of(pipelines, rendezvous=rendezvous):
        rows = []
        for seconds, slack in stages:
            clock = np.maximum(MIN_VOLTAGE, seconds / (seconds + slack))
            rows.append((seconds.sum(), (seconds / clock).sum(), (seconds * (1 - clock**2)).sum()))
        found.append(np.array(rows))
    return found


def _more_watts(cluster: Cluster, replicas: Sequence[Replica]) -> float | None:
    """What all devices of a stage draw more in passes than in waits; None: not known."""
    watts = 0.0
    for each in replicas:
        island = cluster.island_of_device(each.devices[0].start)
        law = power_law(cluster, island)
        if law is None:
            return None
        watts += law.meter_watts(each.num_devices) - law.meter_watts(each.num_devices, 0.0)
    return watts


_Stage = tuple[Floats, Floats]
"""Seconds of every pass of a stage in its order, and by how much it may take longer."""


def slack_of(pipelines: Sequence[PipelineTimes], *, rendezvous: bool) -> list[list[_Stage]]:
    """Of every stage of every pipeline, with which the step is not longer."""
    whole = replayed(pipelines, rendezvous)
    step = max(float(ends.max()) for ends in whole.ends)
    found = []
    for p, times in enumerate(pipelines):
        written = programs_of(times, rendezvous)
        replay = _Replay(times, whole.start[p], whole.left[p])
        for s, program in enumerate(written):
            replay.read(s, program)
        found.append([replay.slack(s, _ROUNDING * step) for s in range(times.num_stages)])
    return found


@dataclass(slots=True)
class _Replay:
    """One pipeline's programs with the time of each of their steps."""

    times: PipelineTimes
    start: Floats
    """[direction, hop, microbatch] when a message takes its way."""
    left: Floats
    _steps: list[list[tuple[Step, float, float]]] = field(default_factory=list)
    """Of every stage (step, when it begins, when it ends)."""
    _late: dict[Message, float] = field(default_factory=dict)
    """By how much a message may leave later."""

    def __post_init__(self) -> None:
        for direction, wires in enumerate((self.times.link_forward, self.times.link_backward)):
            for hop, row in enumerate(self.start[direction]):
                order = [int(at) for at in np.argsort(row, kind="stable") if row[at] >= 0]
                for one, two in zip_longest(order, order[1:]):
                    free = math.inf if two is None else row[two] - self.left[direction, hop, one]
                    # On a shared wire it keeps its turn.
                    own = -math.inf if wires[hop] >= 0 else max(0.0, float(free))
                    self._late[direction, hop, one] = own

    def read(self, s: int, program: Sequence[Step]) -> None:
        """Time the steps of a stage, and bind messages to those who wait for them."""
        now, steps = 0.0, []
        for step in program:
            begins = now
            if isinstance(step, Pass):
                now += self._seconds(s, step)
            elif isinstance(step, Wait):
                until = {each: float(self.left[each]) for each in step.sent}
                for each in step.received:
                    until[each] = float(self.left[each] + self.times.wire_latency[each[1]])
                now = max([now, *until.values()])
                for each, when in until.items():
                    self._late[each] = min(self._late[each], max(0.0, now - when))
            steps.append((step, begins, now))
        self._steps.append(steps)

    def _seconds(self, s: int, one: Pass) -> float:
        of_kind = {"F": self.times.forward, "B": self.times.backward, "W": self.times.weight}
        return sum(float(of_kind[part][s, one.chunk]) for part in one.kind)

    def slack(self, s: int, rounding: float) -> _Stage:
        """Of the passes of a stage, once all stages are read."""
        steps, seconds, slack = self._steps[s], [], []
        for at, (step, begins, ends) in enumerate(steps):
            if isinstance(step, Pass):
                own = min(self._until_next(steps, at + 1), default=0.0)
                seconds.append(ends - begins)
                slack.append(own if rounding < own < math.inf else 0.0)
        return np.array(seconds), np.array(slack)

    def _until_next(
        self, steps: Sequence[tuple[Step, float, float]], first: int
    ) -> Iterator[float]:
        """By how much everything may be late that follows a pass, up to the wait behind it."""
        for at in range(first, len(steps)):
            step, begins, ends = steps[at]
            if isinstance(step, Send | Receive):
                yield self._late_post(step, begins)
            else:
                yield ends - begins if isinstance(step, Wait) else 0.0
                return
        yield 0.0

    def _late_post(self, step: Send | Receive, posted: float) -> float:
        """A message starts when both sides have posted it."""
        late = self._late[step.message]
        if late < 0.0:
            return 0.0
        begins = float(self.start[step.message])
        if isinstance(step, Receive):
            begins -= float(self.times.rendezvous_extra[step.message[1]])
        return late + max(0.0, begins - posted)
