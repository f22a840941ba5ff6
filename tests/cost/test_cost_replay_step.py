"""The replay of every schedule: kernels against each other and a clock, and what it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_cases import (
    SHAPES,
    Shape,
    even_times,
    one_pipeline,
    random_plain,
    random_shape,
    random_times,
)
from replay_oracle import World

from hetplan.cost.arrays import Floats
from hetplan.cost.replay.ends import replayed, step_ends
from hetplan.cost.replay.step import StepReplay, replay_step
from hetplan.cost.replay.times import (
    PipelineTimes,
    StageTimes,
    ends_of_draws,
    pipeline_ends,
    replay_seconds,
)
from hetplan.errors import InputError

TRANSFERS = (0.0, 0.1, 2.0)


def ends_of(pipelines: list[PipelineTimes], rendezvous: bool) -> list[list[float]]:
    step = replay_step(pipelines, rendezvous=rendezvous)
    return [[stage.end_seconds for stage in one.stages] for one in step.pipelines]


@settings(max_examples=250, deadline=None)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
    transfers=st.sampled_from(TRANSFERS),
    num_wires=st.integers(0, 3),
    deeper=st.booleans(),
    whole=st.booleans(),
    rendezvous=st.booleans(),
)
def test_compiled_ends_are_the_replays(
    shapes: list[Shape],
    seed: int,
    transfers: float,
    num_wires: int,
    deeper: bool,
    whole: bool,
    rendezvous: bool,
) -> None:
    rng = np.random.default_rng(seed)
    pipelines = [
        random_times(
            rng, shape, transfers=transfers, num_wires=num_wires, deeper=deeper, whole=whole
        )
        for shape in shapes
    ]
    expected = ends_of(pipelines, rendezvous)
    assert [list(ends) for ends in step_ends(pipelines, rendezvous=rendezvous)] == expected
    assert [list(ends) for ends in replayed(pipelines, rendezvous).ends] == expected


def test_the_kernel_of_a_search_adds_what_follows_and_knows_what_it_cannot_order() -> None:
    rng = np.random.default_rng(1)
    for index in range(200):
        times, after = random_plain(rng, transfers=TRANSFERS[index % 3], deeper=index % 2 == 1)
        for rendezvous in (False, True):
            (ends,) = replayed((one_pipeline(times),), rendezvous).ends
            step = replay_seconds(times, after, rendezvous)
            assert step == (ends + after).max()
        # The same operations in the same order, and every further wait only delays.
        assert replay_seconds(times, after, False) <= step * (1 + 1e-12)
    nothing = np.zeros(1)
    deep = StageTimes(np.ones(2), np.ones(2), *[nothing] * 4, np.array([4, 1]), 8)
    assert replay_seconds(deep, np.zeros(2), True) == np.inf
    assert np.isfinite(replay_seconds(deep, np.zeros(2), False))


@pytest.mark.parametrize("rendezvous", [False, True])
def test_draws_replayed_together_end_like_each_alone(rendezvous: bool) -> None:
    rng = np.random.default_rng(2)
    for index in range(60):
        times, _ = random_plain(rng, transfers=TRANSFERS[index % 3], deeper=index % 2 == 1)
        draws = np.exp(rng.normal(size=(7, 6)))
        # A draw of zeros: what compiled code takes for a number may be a view of a row here.
        draws[0] = 0.0
        seconds = [np.outer(draws[:, at], each) for at, each in enumerate(times[:6])]
        drawn = StageTimes(*seconds, times.warmup, times.num_microbatches)
        each_alone = [
            pipeline_ends(StageTimes(*(each[d] for each in seconds), *times[6:]), rendezvous)
            for d in range(7)
        ]
        together = StageTimes(*(np.ascontiguousarray(each.T) for each in seconds), *times[6:])
        assert np.array_equal(pipeline_ends.elementwise(together, rendezvous).T, each_alone)
        assert np.array_equal(ends_of_draws(drawn, rendezvous), each_alone)


@pytest.mark.parametrize("rendezvous", [False, True])
def test_a_replay_by_the_clock_agrees(rendezvous: bool) -> None:
    rng = np.random.default_rng(11)
    for number in range(250):
        pipelines = [
            random_times(
                rng,
                random_shape(rng, most_stages=5, most_microbatches=9),
                transfers=(0.3, 2.0)[number % 2],
                num_wires=1 + number % 3,
                deeper=number % 5 == 0,
            )
            for _ in range(1 + number % 3)
        ]
        world = World(pipelines, rendezvous)
        for found, expected in zip(ends_of(pipelines, rendezvous), world.ends, strict=True):
            assert found == pytest.approx(expected, rel=1e-12), (number, pipelines)
        starts = sorted(
            o.start_seconds
            for one in replay_step(pipelines, rendezvous=rendezvous).pipelines
            for stage in one.stages
            for o in stage.operations
        )
        assert starts == pytest.approx(sorted(world.starts), rel=1e-12)


def test_wrong_shapes_are_refused() -> None:
    times = even_times(Shape(schedule="1f1b", stages=3, microbatches=2), 1.0, 1.0)
    with pytest.raises(InputError, match="an array of hops has shape"):
        replace(times, wire_latency=np.zeros(3))
    with pytest.raises(InputError, match="more only with interleaved-1f1b and zb-h1"):
        even_times(Shape(schedule="gpipe", stages=2, microbatches=2, chunks=2), 1.0, 1.0)


def ends_or_refusal(
    times: PipelineTimes, engine: Callable[..., StepReplay | tuple[Floats, ...]]
) -> list[float] | str:
    try:
        # Behind another pipeline, so that the message names the right one.
        step = engine(
            (even_times(Shape(schedule="gpipe", stages=1, microbatches=1), 1.0, 1.0), times),
            rendezvous=True,
        )
    except InputError as error:
        return str(error)
    if isinstance(step, StepReplay):
        return [stage.end_seconds for stage in step.pipelines[1].stages]
    return [float(end) for end in step[1]]


def test_any_depths_end_alike_or_are_refused_alike() -> None:
    rng = np.random.default_rng(20)
    refused = 0
    for number in range(200):
        shape = Shape(
            schedule="1f1b", stages=int(rng.integers(2, 5)), microbatches=int(rng.integers(1, 9))
        )
        depths = sorted((int(d) for d in rng.integers(1, 6, shape.stages)), reverse=True)
        times = replace(
            random_times(rng, shape, transfers=0.5, num_wires=number % 2), warmup=tuple(depths)
        )
        assert list(step_ends((times,), rendezvous=False)[0]) == ends_of([times], False)[0]
        expected, found = ends_or_refusal(times, replay_step), ends_or_refusal(times, step_ends)
        assert expected == found
        refused += isinstance(expected, str)
    assert 20 < refused < 180


def test_times_that_are_none_are_refused() -> None:
    for schedule in ("1f1b", "zb-h1"):
        times = even_times(Shape(schedule=schedule, stages=3, microbatches=4), 1.0, 1.0, 1.0)
        with pytest.raises(InputError, match=r"send_backward times hold -0\.5"):
            replay_step((replace(times, send_backward=np.array([0.0, -0.5])),), rendezvous=False)
        wrong = replace(times, forward=np.full((3, 1), np.nan))
        for engine in (replay_step, step_ends):
            for rendezvous in (False, True):
                with pytest.raises(InputError, match="forward times hold nan"):
                    engine((wrong,), rendezvous=rendezvous)
