"""When does every pass run and every message move: the replay itself, event by event.

Every stage runs its program (`hetplan.cost.replay.programs`). A message may start when it has been
posted by its sender and, with rendezvous sends, rendezvous_extra after its receiver has. Messages
from one stage to another leave one after the other in the order in which the sender posts them:
both directions at once, chunks one behind the other. A message that starts at t has left at
t + send and has arrived wire_latency later.

A shared wire serves one message at a time, whoever is ready first. A message that takes the wire at
t occupies it for shared seconds and has left at t + max(send, shared). It is ready when it may
start and the messages before it, from the same stage to the same stage, have left. Equally ready:
the lower pipeline first, then the lower sending stage, then the lower receiving stage.

Serving in order of readiness takes care in a simulation, because a message that is found later may
be ready earlier. So all stages run until each waits for a message, and only then the pending
message that was ready first takes its wire: whatever is posted later is ready later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from hetplan.cost.replay.programs import (
    DOWN,
    Message,
    Receive,
    Send,
    Step,
    Wait,
    ends_of_hop,
    programs,
)
from hetplan.cost.replay.times import PipelineTimes
from hetplan.cost.schedules import Pass
from hetplan.errors import InputError

Key: TypeAlias = tuple[int, Message]
"""A message of a pipeline."""


@dataclass(slots=True)
class StageRun:
    """One stage on its way through its program."""

    pipeline: int
    stage: int
    times: PipelineTimes
    program: tuple[Step, ...]
    at: int = 0
    now: float = 0.0
    passes: list[tuple[Pass, float, float]] = field(default_factory=list)
    """Pass, start, end."""
    exposed: float = 0.0
    """Waited although everything waited for had been ready to move."""

    def seconds_of(self, one: Pass) -> float:
        """How long the pass takes."""
        kinds = {"F": self.times.forward, "B": self.times.backward, "W": self.times.weight}
        return float(kinds[one.kind][self.stage, one.chunk])


@dataclass(slots=True)
class _Lane:
    """Everything that one stage sends to another one."""

    waiting: deque[Key] = field(default_factory=deque)
    """In the order in which the sender posted them, not yet on their way."""
    free: float = 0.0


@dataclass(slots=True)
class Events:
    """All pipelines of one step, as far as they have come."""

    pipelines: Sequence[PipelineTimes]
    rendezvous: bool
    sent: dict[Key, float] = field(default_factory=dict)
    room: dict[Key, float] = field(default_factory=dict)
    """When the receiver has posted."""
    start: dict[Key, float] = field(default_factory=dict)
    left: dict[Key, float] = field(default_factory=dict)
    arrived: dict[Key, float] = field(default_factory=dict)
    lanes: dict[tuple[int, int, int], _Lane] = field(default_factory=dict)
    """By pipeline, sending stage, receiving stage."""
    wire_free: dict[int, float] = field(default_factory=dict)
    awake: list[tuple[int, int]] = field(default_factory=list)
    """Stages (by pipeline) that may be able to go on."""

    def run(self) -> list[list[StageRun]]:
        """Every stage after its last step, by pipeline; InputError where they wait for nothing."""
        stages = [
            [StageRun(p, s, times, program) for s, program in enumerate(self._programs(times))]
            for p, times in enumerate(self.pipelines)
        ]
        every = [stage for pipeline in stages for stage in pipeline]
        self.awake = [(stage.pipeline, stage.stage) for stage in every]
        while True:
            while self.awake:
                p, s = self.awake.pop()
                self._advance(stages[p][s])
            pending = [
                (self._ready(lane), place)
                for place, lane in self.lanes.items()
                if lane.waiting and self._may_start(lane.waiting[0])
            ]
            if not pending:
                break
            _, place = min(pending)
            self._leave(place)
            self._move(place)
        for stage in every:
            if stage.at < len(stage.program):
                raise InputError(waits_for_itself(stage.times, stage.pipeline, stage.stage))
        return stages

    def _programs(self, times: PipelineTimes) -> tuple[tuple[Step, ...], ...]:
        return programs(
            times.schedule,
            times.num_stages,
            times.num_microbatches,
            times.virtual_stages,
            times.warmup,
            self.rendezvous,
            times.exchange,
        )

    def _advance(self, stage: StageRun) -> None:
        """Go on until a message is missing."""
        while stage.at < len(stage.program):
            step = stage.program[stage.at]
            if isinstance(step, Wait):
                if not self._wait(stage, step):
                    return
            elif isinstance(step, Pass):
                end = stage.now + stage.seconds_of(step)
                stage.passes.append((step, stage.now, end))
                stage.now = end
            else:
                self._post(stage, step)
            stage.at += 1

    def _wait(self, stage: StageRun, step: Wait) -> bool:
        sent = [(stage.pipeline, message) for message in step.sent]
        received = [(stage.pipeline, message) for message in step.received]
        if any(key not in self.left for key in sent) or any(
            key not in self.arrived for key in received
        ):
            return False
        keys = [*sent, *received]
        until = max(
            [self.left[key] for key in sent] + [self.arrived[key] for key in received] + [0]
        )
        if until > stage.now:
            ready = [max(self.sent[key], self.room.get(key, 0.0)) for key in keys]
            stage.exposed += max(0.0, until - max(stage.now, *ready))
            stage.now = until
        return True

    def _post(self, stage: StageRun, step: Send | Receive) -> None:
        source, target = ends_of_hop(step.message, stage.times.num_stages)
        place = (stage.pipeline, source, target)
        lane = self.lanes.setdefault(place, _Lane())
        key = (stage.pipeline, step.message)
        if isinstance(step, Send):
            self.sent[key] = stage.now
            lane.waiting.append(key)
        else:
            self.room[key] = stage.now
        self._move(place)

    def _may_start(self, key: Key) -> bool:
        return not self.rendezvous or key in self.room

    def _move(self, place: tuple[int, int, int]) -> None:
        """Let go what needs no shared wire and is not behind what needs one."""
        lane = self.lanes[place]
        while lane.waiting and self._may_start(lane.waiting[0]) and self._wire(lane.waiting[0]) < 0:
            self._leave(place)

    def _wire(self, key: Key) -> int:
        times, (direction, hop, _) = self.pipelines[key[0]], key[1]
        return int((times.link_forward if direction == DOWN else times.link_backward)[hop])

    def _ready(self, lane: _Lane) -> float:
        key = lane.waiting[0]
        ready = self.sent[key]
        if self.rendezvous:
            extra = self.pipelines[key[0]].rendezvous_extra[key[1][1]]
            ready = max(ready, self.room[key] + float(extra))
        return max(ready, lane.free)

    def _leave(self, place: tuple[int, int, int]) -> None:
        """The first message of the lane takes its way."""
        lane = self.lanes[place]
        start = self._ready(lane)
        key = lane.waiting.popleft()
        times, (direction, hop, _) = self.pipelines[key[0]], key[1]
        send = float((times.send_forward if direction == DOWN else times.send_backward)[hop])
        wire = self._wire(key)
        if wire >= 0:
            shared = float(
                (times.shared_forward if direction == DOWN else times.shared_backward)[hop]
            )
            start = max(start, self.wire_free.get(wire, 0.0))
            self.wire_free[wire] = start + shared
            send = max(send, shared)
        self.start[key] = start
        self.left[key] = lane.free = start + send
        self.arrived[key] = lane.free + float(times.wire_latency[hop])
        self.awake += [(key[0], place[1]), (key[0], place[2])]


def waits_for_itself(times: PipelineTimes, pipeline: int, stage: int) -> str:
    """What to say of a pipeline whose stages wait for each other in a circle."""
    depths = [int(depth) for depth in times.warmup]
    return (
        f"with rendezvous sends the warm-up depths {depths} make stage {stage} wait for itself "
        f"(pipeline {pipeline}); let neighbouring stages differ by at most 1"
    )
