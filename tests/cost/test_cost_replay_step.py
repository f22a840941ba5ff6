"""The replay of every schedule: kernels against each other and a clock, and what it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_cases import (
    SHAPES,
    Shape,
    even_times,
    one_pipeline,
    plain_times,
    random_plain,
    random_shape,
    random_times,
)
from replay_oracle import World

from hetplan.cost.arrays import Floats
from hetplan.cost.replay.ends import replayed, step_ends
from hetplan.cost.replay.kernel import StageTimes, replay_seconds
from hetplan.cost.replay.step import StepReplay, replay_step
from hetplan.cost.replay.times import PipelineTimes
from hetplan.errors import InputError

TRANSFERS = (0.0, 0.1, 2.0)


def ends_of(pipelines: list[PipelineTimes], rendezvous: bool) -> list[list[float]]:
    step = replay_step(pipelines, rendezvous=rendezvous)
    return [[stage.end_seconds for stage in one.stages] for one in step.pipelines]


@settings(max_examples=400, deadline=None)
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


def test_two_stages_with_rendezvous_by_hand() -> None:
    # f 1, b 2, wire 0.5 + latency 0.25, extra 0.25, two microbatches, depths 2 and 1.
    rows = ([1.0, 1.0], [2.0, 2.0], [0.5], [0.5], [0.25], [0.25])
    times = one_pipeline(plain_times(*rows, warmup=[2, 1], microbatches=2))
    step = replay_step((times,), rendezvous=True).pipelines[0]
    spans = {
        (o.stage, o.kind, o.microbatch): (o.start_seconds, o.end_seconds)
        for stage in step.stages
        for o in stage.operations
    }
    # Stage 1 posts at 0, stage 0 at 1 (later than 0 + 0.25): leaves 1.5, arrives 1.75.
    assert spans[1, "F", 0] == (1.75, 2.75)
    # Stage 0 computes microbatch 1 meanwhile, its send has left by then.
    assert spans[0, "F", 1] == (1.0, 2.0)
    assert spans[1, "B", 0] == (2.75, 4.75)
    # Both now exchange. Stage 0 posted at 2, stage 1 at 4.75: its gradient leaves at 5.25 and is
    # there at 5.5; the activations may start at 4.75 + 0.25 and are there at 5.75.
    assert spans[0, "B", 0] == (5.5, 7.5)
    assert spans[1, "F", 1] == (5.75, 6.75)
    assert spans[1, "B", 1] == (6.75, 8.75)
    # Stage 0 posts at 7.5, long before 8.75: leaves 9.25, arrives 9.5.
    assert spans[0, "B", 1] == (9.5, 11.5)
    assert [stage.end_seconds for stage in step.stages] == [11.5, 9.25]


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


@pytest.mark.parametrize("rendezvous", [False, True])
def test_messages_passes_and_times_are_conserved(rendezvous: bool) -> None:
    rng = np.random.default_rng(16)
    for number in range(120):
        pipelines = [
            random_times(rng, random_shape(rng), transfers=0.7, num_wires=number % 3)
            for _ in range(1 + number % 2)
        ]
        step = replay_step(pipelines, rendezvous=rendezvous)
        assert step.end_seconds == max(one.end_seconds for one in step.pipelines)
        for times, one in zip(pipelines, step.pipelines, strict=True):
            m, hops = times.num_microbatches, len(times.send_forward)
            moved = sorted((t.hop, t.direction, t.microbatch) for t in one.transfers)
            if times.num_stages == 1:
                assert moved == []
            else:
                assert moved == sorted(
                    (hop, direction, i)
                    for hop in range(hops)
                    for direction in ("forward", "backward")
                    for i in range(m)
                )
            assert all(t.start_seconds <= t.left_seconds <= t.end_seconds for t in one.transfers)
            for stage in one.stages:
                kinds = "FBW" if times.schedule == "zb-h1" else "FB"
                assert sorted((o.kind, o.chunk, o.microbatch) for o in stage.operations) == sorted(
                    (kind, chunk, i)
                    for kind in kinds
                    for chunk in range(times.virtual_stages)
                    for i in range(m)
                )
                assert all(a.end_seconds <= b.start_seconds for a, b in pairwise(stage.operations))


def test_circles_are_refused_by_both_engines() -> None:
    times = even_times(Shape(schedule="1f1b", stages=2, microbatches=8), 1.0, 1.0, warmup=(4, 1))
    shared = replace(times, link_forward=np.zeros(1, dtype=np.int64))
    for case in (times, shared):
        for engine in (replay_step, step_ends):
            with pytest.raises(InputError, match=r"\[4, 1\] make stage 0 wait for itself"):
                engine((case,), rendezvous=True)
        assert step_ends((case,), rendezvous=False)[0].max() > 0


def test_wrong_shapes_are_refused() -> None:
    times = even_times(Shape(schedule="1f1b", stages=3, microbatches=2), 1.0, 1.0)
    with pytest.raises(InputError, match="an array of hops has shape"):
        replace(times, wire_latency=np.zeros(3))
    with pytest.raises(InputError, match="backward and weight times have shapes"):
        replace(times, weight=np.zeros((2, 1)))
    with pytest.raises(InputError, match="one row per stage"):
        replace(times, forward=np.zeros(3))
    with pytest.raises(InputError, match="only interleaved-1f1b has more than 1"):
        even_times(Shape(schedule="gpipe", stages=2, microbatches=2, chunks=2), 1.0, 1.0)
    with pytest.raises(InputError, match="0 microbatches"):
        replace(times, num_microbatches=0)


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
