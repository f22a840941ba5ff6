"""A replay by a clock: what happens at each moment, in the order in which it happens.

Written apart from the replay that it judges: nothing is simulated ahead of the clock, so that a
shared wire simply takes whoever is in its queue first. Only the stages' programs are the same.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from hetplan.cost.replay.programs import Receive, Send, Wait, programs
from hetplan.cost.replay.times import PipelineTimes
from hetplan.plans.v_schedules import Pass


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self.at(self.now + seconds, do)

    def at(self, time: float, do: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, do))

    def run(self) -> None:
        while self.events:
            self.now, _, do = heapq.heappop(self.events)
            do()


class Wire:
    """One message at a time, in order of arrival in the queue."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.queue: deque[tuple[float, Callable[[], None]]] = deque()
        self.busy = False

    def join(self, seconds: float, granted: Callable[[], None]) -> None:
        self.queue.append((seconds, granted))
        self.serve()

    def serve(self) -> None:
        if self.busy or not self.queue:
            return
        seconds, granted = self.queue.popleft()
        self.busy = True
        granted()

        def release() -> None:
            self.busy = False
            self.serve()

        self.clock.after(seconds, release)


class World:
    def __init__(self, pipelines: Sequence[PipelineTimes], rendezvous: bool) -> None:
        self.clock = Clock()
        self.rendezvous = rendezvous
        self.wires: defaultdict[int, Wire] = defaultdict(lambda: Wire(self.clock))
        self.ends = [[-1.0] * times.num_stages for times in pipelines]
        self.starts: list[float] = []
        """Of every pass, in no order."""
        for p, times in enumerate(pipelines):
            Pipe(self, p, times)
        self.clock.run()


class Pipe:
    def __init__(self, world: World, index: int, times: PipelineTimes) -> None:
        self.world, self.index, self.times = world, index, times
        self.sent: dict[object, float] = {}
        self.room: dict[object, float] = {}
        self.left: set[object] = set()
        self.arrived: set[object] = set()
        self.lanes: defaultdict[tuple[int, int], deque] = defaultdict(deque)
        self.moving: set[tuple[int, int]] = set()
        self.programs = programs(
            times.schedule,
            times.num_stages,
            times.num_microbatches,
            times.virtual_stages,
            times.warmup,
            world.rendezvous,
        )
        self.at = [0] * times.num_stages
        self.computing = [False] * times.num_stages
        for stage in range(times.num_stages):
            world.clock.at(0.0, lambda stage=stage: self.go_on(stage))

    def go_on(self, stage: int) -> None:
        program = self.programs[stage]
        while not self.computing[stage] and self.at[stage] < len(program):
            step = program[self.at[stage]]
            if isinstance(step, Wait):
                if not (set(step.sent) <= self.left and set(step.received) <= self.arrived):
                    return
            elif isinstance(step, Pass):
                kinds = {"F": self.times.forward, "B": self.times.backward, "W": self.times.weight}
                seconds = sum(float(kinds[k][stage, step.chunk]) for k in step.kind)
                self.computing[stage] = True
                self.world.starts.append(self.world.clock.now)
                self.world.clock.after(seconds, lambda: self.computed(stage))
                return
            else:
                self.post(step)
            self.at[stage] += 1
        if self.at[stage] == len(program) and self.world.ends[self.index][stage] < 0:
            self.world.ends[self.index][stage] = self.world.clock.now

    def computed(self, stage: int) -> None:
        self.computing[stage] = False
        self.at[stage] += 1
        self.go_on(stage)

    def lane_of(self, message: tuple[int, int, int]) -> tuple[int, int]:
        direction, hop, _ = message
        count = self.times.num_stages
        row = [*range(count)] * self.times.virtual_stages
        if self.times.schedule in ("zbv", "dualpipev", "v-half", "v-min"):
            row = [*range(count), *reversed(range(count))]
        pair = (row[hop], row[hop + 1])
        return pair if direction == 0 else (pair[1], pair[0])

    def post(self, step: Send | Receive) -> None:
        if isinstance(step, Send):
            self.sent[step.message] = self.world.clock.now
            self.lanes[self.lane_of(step.message)].append(step.message)
        else:
            self.room[step.message] = self.world.clock.now
        self.try_lane(self.lane_of(step.message))

    def try_lane(self, lane: tuple[int, int]) -> None:
        if lane in self.moving or not self.lanes[lane]:
            return
        message = self.lanes[lane][0]
        hop = message[1]
        earliest = self.sent[message]
        if self.world.rendezvous:
            if message not in self.room:
                return
            notice = self.room[message] + float(self.times.rendezvous_extra[hop])
            earliest = max(earliest, notice)
        self.moving.add(lane)
        self.lanes[lane].popleft()
        self.world.clock.at(
            max(earliest, self.world.clock.now), lambda: self.take_wire(lane, message)
        )

    def take_wire(self, lane: tuple[int, int], message: tuple[int, int, int]) -> None:
        direction, hop, _ = message
        down = direction == 0
        send = float((self.times.send_forward if down else self.times.send_backward)[hop])
        wire = int((self.times.link_forward if down else self.times.link_backward)[hop])
        if wire < 0:
            self.world.clock.after(send, lambda: self.has_left(lane, message))
            return
        shared = float((self.times.shared_forward if down else self.times.shared_backward)[hop])
        self.world.wires[wire].join(
            shared,
            lambda: self.world.clock.after(max(send, shared), lambda: self.has_left(lane, message)),
        )

    def has_left(self, lane: tuple[int, int], message: tuple[int, int, int]) -> None:
        self.left.add(message)
        self.moving.discard(lane)
        self.try_lane(lane)
        self.go_on(lane[0])
        self.world.clock.after(
            float(self.times.wire_latency[message[1]]), lambda: self.has_arrived(lane[1], message)
        )

    def has_arrived(self, stage: int, message: tuple[int, int, int]) -> None:
        self.arrived.add(message)
        self.go_on(stage)
