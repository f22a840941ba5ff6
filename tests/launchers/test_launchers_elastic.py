"""An elastic run decides right: scripts of faults in a world with virtual time.

What really plans, trains and probes has tests of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.errors import InfeasibleError
from hetplan.launchers.elastic import (
    ElasticRun,
    Ended,
    Ending,
    GaveUpError,
    Grow,
    History,
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


FOUR = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}
ALWAYS = Rules(grow=Grow.ALWAYS)


def check_history(history: History, world: FakeWorld, *, finished: bool = True) -> None:
    """What holds of every run: phases join, no step is missing, the end is the last step's."""
    saved = 0
    for phase in history.phases:
        assert phase.first_step == saved
        assert phase.checkpoint_step >= saved
        assert phase.steps_done >= phase.checkpoint_step
        saved = phase.checkpoint_step
    assert [step.step for step in history.steps] == list(range(len(history.steps)))
    assert world.recorded == list(history.phases)
    if finished:
        assert [phase.ended for phase in history.phases].count(Ended.FINISHED) == 1
        assert history.phases[-1].ended is Ended.FINISHED
        assert len(history.steps) == world.steps == world.saved


def hosts_of(history: History) -> list[str]:
    return ["".join(phase.hosts) for phase in history.phases]


SCENES = {
    # Goes on with three hosts from the last checkpoint, and grows.
    "a host comes back": (
        {"down": {"d": [(9.1, 30.0)]}, "steps": 200},
        Rules(),
        ["abcd", "abc", "abcd"],
        "d came back: predicted 0.25 s per step instead of 0.3333 s",
    ),
    # Back at 30, grown for at 41, and gone while the larger run starts.
    "lost again while the run grows": (
        {"down": {"d": [(8.0, 30.0), (42.0, 1000.0)]}, "steps": 200},
        Rules(),
        ["abcd", "abc", "abcd", "abc"],
        "d came back",
    ),
    "a fault during a save": (
        {"crashes": [Crash(host="b", at=9.0, during_save=True)]},
        Rules(),
        ["abcd", "abcd"],
        "",
    ),
    "all are waited for": (
        {"down": {name: [(9.0, 40.0)] for name in FOUR}},
        Rules(wait_seconds=60.0),
        ["abcd", "abcd"],
        "no host answers; looking for hosts",
    ),
    "not faster enough": (
        {"speeds": {"a": 1.0, "b": 1.0, "c": 0.03}, "down": {"c": [(0.0, 20.0)]}, "steps": 200},
        Rules(),
        ["ab"],
        "not more than 2% faster",
    ),
    "too few steps left": (
        {"down": {"d": [(8.0, 20.0)]}},
        Rules(),
        ["abcd", "abc"],
        "a restart takes",
    ),
    "two faults in a row of one host": (
        {"crashes": [Crash(host="b", at=7.0), Crash(host="b", at=10.0)], "steps": 300},
        Rules(),
        ["abcd", "abcd", "acd", "abcd"],
        "b is left out, two faults in a row were its own",
    ),
}


@pytest.mark.parametrize(("world", "rules", "hosts", "words"), SCENES.values(), ids=SCENES)
def test_phases_of_a_scene(world: dict, rules: Rules, hosts: list[str], words: str) -> None:
    made = FakeWorld(**({"speeds": FOUR} | world))
    history = elastic(made, rules).train()
    check_history(history, made)
    assert hosts_of(history) == hosts
    assert any(words in text for text in made.told)


def test_a_host_that_flaps_is_asked_for_twice_as_many_answers_each_time() -> None:
    down = [(20.0 * at, 20.0 * at + 14.0) for at in range(1, 40)]
    world = FakeWorld(FOUR, down={"d": down}, steps=1000)
    history = elastic(world, ALWAYS).train()
    check_history(history, world)
    # Up for six seconds of twenty: three answers fit into that, six (each 1.5 s) do not.
    grown = [phase for phase in history.phases if phase.ended is Ended.GREW]
    assert len(grown) == 1


def test_no_plan_for_what_is_left_says_why() -> None:
    world = FakeWorld(FOUR, down={"d": [(9.1, math.inf)]}, least_speed=3.5)
    run = elastic(world)
    with pytest.raises(GaveUpError, match=r"there is no plan for a, b, c: memory: 3 of 3\.5"):
        run.train()
    assert world.saved == 5
    assert run.history.phases[-1].checkpoint_step == 5


def test_a_host_without_a_rank_that_is_gone_is_not_planned_with() -> None:
    """No fault tells of a host that holds no rank: it is asked before the run grows with it."""
    speeds = {"a": 4.0, "b": 3.0, "c": 1.0, "d": 2.0}
    world = FakeWorld(
        speeds, down={"c": [(3.0, math.inf)], "d": [(0.0, 15.0)]}, steps=400, most_used=2
    )
    run = elastic(world, ALWAYS)
    history = run.train()
    check_history(history, world)
    assert ("a", "b", "c", "d") not in world.planned


def test_a_fault_after_the_last_checkpoint_is_no_fault() -> None:
    class Late(FakeWorld):
        def run(self, planned: HostPlan, first_step: int, look: object) -> object:  # type: ignore[override]
            ending = super().run(planned, first_step, look)  # type: ignore[arg-type]
            return replace(ending, ended=Ended.FAULT, message="a rank died while it left")

    world = Late(FOUR)
    history = elastic(world).train()
    check_history(history, world)


intervals = st.lists(
    st.tuples(st.floats(0.0, 120.0), st.floats(0.1, 60.0)).map(lambda it: (it[0], it[0] + it[1])),
    max_size=4,
)


@settings(max_examples=100, deadline=None)
@given(
    down=st.fixed_dictionaries({}, optional={name: intervals for name in FOUR}),
    crashes=st.lists(
        st.builds(
            Crash,
            host=st.sampled_from("abcd"),
            at=st.floats(0.0, 100.0),
            during_save=st.booleans(),
        ),
        max_size=8,
    ),
    save_every=st.integers(1, 20),
    least_speed=st.sampled_from([0.0, 1.5, 3.5]),
    rules=st.builds(
        Rules,
        max_restarts=st.integers(0, 4),
        grow=st.sampled_from(Grow),
        wait_seconds=st.sampled_from([0.0, 30.0]),
    ),
)
def test_any_script_ends_in_bounded_time_with_phases_that_join(
    down: dict[str, Sequence[tuple[float, float]]],
    crashes: list[Crash],
    save_every: int,
    least_speed: float,
    rules: Rules,
) -> None:
    world = FakeWorld(
        FOUR, down=down, crashes=crashes, save_every=save_every, least_speed=least_speed
    )
    run = elastic(world, rules)
    try:
        history = run.train()
        check_history(history, world)
    except GaveUpError:
        history = run.history
        check_history(history, world, finished=False)
        # It gives up for one of two reasons.
        stuck = [phase.checkpoint_step for phase in history.phases[-rules.max_restarts - 1 :]]
        assert world.told[-1].endswith("looking for hosts that come back") or len(set(stuck)) == 1
    assert world.now < 3600
    # Phases that brought nothing are never more in a row than the limit allows.
    row = 0
    for phase in history.phases:
        row = 0 if phase.checkpoint_step > phase.first_step else row + 1
        assert row <= rules.max_restarts + 1
