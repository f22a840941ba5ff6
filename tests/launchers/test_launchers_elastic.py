"""An elastic run decides right: scripts of faults in a world with virtual time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from elastic_world import Crash, FakeWorld, elastic
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.errors import InputError
from hetplan.launchers.elastic import Ended, GaveUpError, Grow, History, HostPlan, Rules

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


def test_a_run_that_is_done_already_is_refused() -> None:
    world = FakeWorld(FOUR)
    world.saved = 60
    with pytest.raises(InputError, match="60 steps are done"):
        elastic(world).train()


def test_a_fault_after_the_last_checkpoint_is_no_fault() -> None:
    class Late(FakeWorld):
        def run(self, planned: HostPlan, first_step: int, look: object) -> object:  # type: ignore[override]
            from dataclasses import replace

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
