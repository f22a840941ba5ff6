"""A world in virtual time for an elastic run: hosts that come and go by a script.

For tests of the decisions alone; what really plans, trains and probes has tests of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hetplan.errors import InfeasibleError
from hetplan.launchers.elastic import (
    ElasticRun,
    Ended,
    Ending,
    HostPlan,
    Phase,
    Progress,
    Rules,
    median_seconds,
)
from hetplan.runtime.measured import StepRecord

PROBE_SECONDS = 0.5
START_SECONDS = 6.0
NOTICE_SECONDS = 2.0
SAVE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Crash:
    """A rank on a host dies although the host is well."""

    host: str
    at: float
    """Not before this time."""
    during_save: bool = False
    """Not before the next save either: it is lost."""


@dataclass
class FakeWorld:
    """Hosts with speeds, down at times; a step takes 1 / (sum of speeds) seconds."""

    speeds: Mapping[str, float]
    down: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """(from, to) by host, in seconds of this world."""
    crashes: Sequence[Crash] = ()
    steps: int = 60
    save_every: int = 5
    least_speed: float = 0.0
    """Slower hosts together cannot hold the model."""
    most_used: int = 100
    """The planner uses the fastest hosts, no more than these."""

    def __post_init__(self) -> None:
        self.now = 0.0
        self.saved = 0
        self.pending = list(self.crashes)
        self.told: list[str] = []
        self.recorded: list[Phase] = []
        self.planned: list[tuple[str, ...]] = []

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self.speeds)

    def up(self, host: str) -> bool:
        return not any(start <= self.now < end for start, end in self.down.get(host, ()))

    def reach(self, hosts: Sequence[str], beside: Sequence[str]) -> tuple[str, ...]:
        self.now += PROBE_SECONDS
        if not all(self.up(host) for host in beside):
            return ()
        return tuple(host for host in hosts if self.up(host))

    def plan(self, hosts: Sequence[str], known: HostPlan | None) -> HostPlan:
        self.planned.append(tuple(hosts))
        used = sorted(hosts, key=lambda host: -self.speeds[host])[: self.most_used]
        speed = sum(self.speeds[host] for host in used)
        if speed < self.least_speed:
            raise InfeasibleError([f"memory: {speed:g} of {self.least_speed:g}"])
        plan = HostPlan(
            used_hosts=tuple(host for host in self.speeds if host in used),
            step_seconds=1 / speed,
            result=None,  # type: ignore[arg-type]
        )
        return known if known is not None and known.step_seconds <= plan.step_seconds else plan

    def run(self, planned: HostPlan, first_step: int, look: Callable[[Progress], bool]) -> Ending:
        assert first_step == self.saved < self.steps
        began, done = self.now, list[StepRecord]()
        start_seconds: float | None = None

        def ending(ended: Ended, message: str = "", blamed: tuple[str, ...] = ()) -> Ending:
            return Ending(
                ended=ended,
                steps=tuple(done),
                start_seconds=start_seconds,
                message=message,
                blamed=blamed,
            )

        self.now += START_SECONDS
        for step in range(first_step, self.steps):
            self.now += planned.step_seconds
            failed = self._failed(planned, saving=False)
            if failed:
                self.now += NOTICE_SECONDS
                return ending(Ended.FAULT, f"{failed[0]} failed", failed)
            done.append(StepRecord(step=step, seconds=planned.step_seconds, loss=float(step)))
            start_seconds = self.now - began if start_seconds is None else start_seconds
            leave = look(
                Progress(
                    steps_done=step + 1,
                    start_seconds=start_seconds,
                    step_seconds=median_seconds(tuple(done)),
                )
            )
            last = step + 1 == self.steps
            if leave or last or (step + 1) % self.save_every == 0:
                self.now += SAVE_SECONDS
                failed = self._failed(planned, saving=True)
                if failed:
                    self.now += NOTICE_SECONDS
                    return ending(Ended.FAULT, f"{failed[0]} failed while it saved", failed)
                self.saved = step + 1
            if leave and not last:
                return ending(Ended.GREW)
        return ending(Ended.FINISHED)

    def _failed(self, planned: HostPlan, *, saving: bool) -> tuple[str, ...]:
        for host in planned.used_hosts:
            if not self.up(host):
                return (host,)
        for crash in self.pending:
            due = self.now >= crash.at and crash.during_save == saving
            if due and crash.host in planned.used_hosts:
                self.pending.remove(crash)
                return (crash.host,)
        return ()

    def record(self, phase: Phase) -> None:
        self.recorded.append(phase)

    def checkpoint_steps(self) -> int:
        return self.saved

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def tell(self, text: str) -> None:
        self.told.append(text)


def elastic(world: FakeWorld, rules: Rules | None = None) -> ElasticRun:
    return ElasticRun(world, rules or Rules(), total_steps=world.steps)
