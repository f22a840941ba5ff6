"""When does every stage end: the compiled twin of `hetplan.cost.replay.step.replay_step`.

Programs depend only on shapes (schedule, stages, chunks, microbatches, depths); they are written as
integers once per shape (`hetplan.cost.replay.interpreter`) and kept. Pipelines that share no wire
are run one by one, 1F1B with one chunk by its own kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.events import waits_for_itself
from hetplan.cost.replay.interpreter import (
    ARRIVED,
    COMPUTE,
    LEFT,
    RECEIVE,
    SEND,
    Programs,
    WayTimes,
    eager_ends,
    interpreted_ends,
)
from hetplan.cost.replay.kernel import pipeline_ends
from hetplan.cost.replay.programs import DOWN, Message, Send, Wait, ends_of_hop, programs
from hetplan.cost.replay.times import Exchange, PipelineTimes
from hetplan.cost.schedules import Pass
from hetplan.errors import InputError

_Shape: TypeAlias = tuple[str, int, int, int, tuple[int, ...] | None, Exchange]
"""Schedule, stages, microbatches, chunks per stage, depths (1f1b only), exchange."""


def step_ends(pipelines: Sequence[PipelineTimes], *, rendezvous: bool) -> tuple[Floats, ...]:
    """End of every stage of every pipeline, in seconds; equal to those of `replay_step`.

    InputError where rendezvous sends make stages wait for each other in a circle. Negative times
    are not looked for.
    """
    if not any(times.shares for times in pipelines):
        return tuple(_alone(p, times, rendezvous) for p, times in enumerate(pipelines))
    return tuple(
        _checked(p, times, ends)
        for p, (times, ends) in enumerate(
            zip(pipelines, interpreted(pipelines, rendezvous), strict=True)
        )
    )


def interpreted(pipelines: Sequence[PipelineTimes], rendezvous: bool) -> tuple[Floats, ...]:
    """`step_ends` by the general interpreter, whatever is shared; -1 instead of a refusal."""
    code = _compiled(tuple(map(_shape, pipelines)), rendezvous)
    wire, num_wires = _dense(
        np.concatenate([part for t in pipelines for part in (t.link_forward, t.link_backward)])
    )
    ends = interpreted_ends(
        code.programs,
        WayTimes(
            send=_both([(t.send_forward, t.send_backward) for t in pipelines]),
            latency=_both([(t.wire_latency, t.wire_latency) for t in pipelines]),
            extra=_both([(t.rendezvous_extra, t.rendezvous_extra) for t in pipelines]),
            wire=wire,
            shared=_both([(t.shared_forward, t.shared_backward) for t in pipelines]),
        ),
        _seconds(pipelines),
        code.num_messages,
        num_wires,
        rendezvous,
    )
    return tuple(np.split(ends, np.cumsum([times.num_stages for times in pipelines])[:-1]))


def _alone(index: int, times: PipelineTimes, rendezvous: bool) -> Floats:
    if times.schedule == "1f1b" and times.exchange is not Exchange.DEEPSPEED:
        ends: Floats = pipeline_ends(
            times.forward[:, 0],
            times.backward[:, 0],
            times.send_forward,
            times.send_backward,
            times.wire_latency,
            times.rendezvous_extra,
            np.array(times.warmup, dtype=np.int64),
            times.num_microbatches,
            rendezvous,
        )
        # Infinite where neighbouring depths differ by more than that kernel can order.
        if not np.isinf(ends[0]):
            return _checked(index, times, ends)
    if rendezvous:
        return _checked(index, times, interpreted((times,), rendezvous)[0])
    code = _compiled((_shape(times),), rendezvous)
    return _checked(
        index,
        times,
        eager_ends(
            code.programs,
            code.num_messages,
            _seconds((times,)),
            np.concatenate((times.send_forward, times.send_backward)),
            np.concatenate((times.wire_latency, times.wire_latency)),
        ),
    )


def _checked(index: int, times: PipelineTimes, ends: Floats) -> Floats:
    if not ends.min() >= 0:  # a number that is none as well
        times.check_seconds()
        raise InputError(waits_for_itself(times, index, int(np.argmin(ends))))
    return ends


def _shape(times: PipelineTimes) -> _Shape:
    return (
        times.schedule,
        times.num_stages,
        times.num_microbatches,
        times.virtual_stages,
        times.warmup if times.schedule == "1f1b" else None,
        times.exchange,
    )


def _seconds(pipelines: Sequence[PipelineTimes]) -> Floats:
    return np.concatenate(
        [part.ravel() for t in pipelines for part in (t.forward, t.backward, t.weight)]
    )


def _both(pairs: Sequence[tuple[Floats, Floats]]) -> Floats:
    """By way: activations of every hop of the first pipeline, then gradients, then the next."""
    return np.concatenate([part for pair in pairs for part in pair])


def _dense(wire: Ints) -> tuple[Ints, int]:
    """Wires numbered from 0 without gaps, and how many there are."""
    known = np.unique(wire[wire >= 0])
    return np.where(wire >= 0, np.searchsorted(known, wire), -1), len(known)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Code:
    """Programs of several pipelines as integers."""

    programs: Programs
    num_messages: int


_KINDS = {"F": 0, "B": 1, "W": 2}


@lru_cache(maxsize=64)  # 16 x 64 takes 150 KB, 64 x 512 about 5 MB
def _compiled(shapes: tuple[_Shape, ...], rendezvous: bool) -> _Code:
    writer = _Writer()
    for shape in shapes:
        writer.add(shape, rendezvous)
    return writer.code()


@dataclass(slots=True)
class _Writer:
    """Programs while they are written, pipeline after pipeline."""

    rows: list[tuple[int, int, int]] = field(default_factory=list)
    first: list[int] = field(default_factory=lambda: [0])
    sources: list[int] = field(default_factory=list)
    """Sending stage of each way."""
    targets: list[int] = field(default_factory=list)
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    """(message, way) in the order in which they are sent, by sending and receiving stage."""
    durations: int = 0
    messages: int = 0

    def add(self, shape: _Shape, rendezvous: bool) -> None:
        """The stages of one more pipeline."""
        schedule, num_stages, m, v, depths, exchange = shape
        base, hops, ways = len(self.first) - 1, num_stages * v - 1, len(self.sources)
        for way in range(2 * hops):
            source, target = ends_of_hop((way // hops, way % hops, 0), num_stages)
            self.sources.append(base + source)
            self.targets.append(base + target)
        before = self.messages

        def number(message: Message) -> tuple[int, int]:
            way = (0 if message[0] == DOWN else hops) + message[1]
            return before + way * m + message[2], ways + way

        written = programs(schedule, num_stages, m, v, depths, rendezvous, exchange)
        for stage, program in enumerate(written):
            for step in program:
                if isinstance(step, Pass):
                    kind = _KINDS[step.kind] * num_stages * v
                    duration = self.durations + kind + stage * v + step.chunk
                    self.rows.append((COMPUTE, duration, 0))
                elif isinstance(step, Wait):
                    self.rows.extend((LEFT, *number(message)) for message in step.sent)
                    self.rows.extend((ARRIVED, *number(message)) for message in step.received)
                elif isinstance(step, Send):
                    what, way = number(step.message)
                    lane = self.sources[way], self.targets[way]
                    self.lanes.setdefault(lane, []).append((what, way))
                    self.rows.append((SEND, what, way))
                else:
                    self.rows.append((RECEIVE, *number(step.message)))
            self.first.append(len(self.rows))
        self.durations += 3 * num_stages * v
        self.messages += 2 * hops * m

    def code(self) -> _Code:
        """Everything that was written, as arrays."""
        places = sorted(self.lanes)
        queues = [self.lanes[place] for place in places]
        number_of = {place: at for at, place in enumerate(places)}
        ends = zip(self.sources, self.targets, strict=True)
        numbers = Programs(
            rows=np.array(self.rows, dtype=np.int32).reshape(-1, 3),
            first=np.array(self.first, dtype=np.int64),
            source=np.array(self.sources, dtype=np.int64),
            target=np.array(self.targets, dtype=np.int64),
            lane=np.array([number_of.get(place, -1) for place in ends], dtype=np.int64),
            queue=np.array([what for queue in queues for what, _ in queue], dtype=np.int64),
            queue_first=np.array([0, *np.cumsum([len(queue) for queue in queues])], dtype=np.int64),
            queue_way=np.array([way for queue in queues for _, way in queue], dtype=np.int64),
        )
        return _Code(programs=numbers, num_messages=self.messages)
