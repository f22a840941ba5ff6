"""What every replay must obey: closed forms, monotony, scaling, and what shared wires may cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_cases import SECONDS, SHAPES, Shape, even_times, random_times

from hetplan.cost.replay.ends import step_ends


@pytest.mark.parametrize("rendezvous", [False, True])
def test_even_1f1b_and_gpipe_have_the_same_step(rendezvous: bool) -> None:
    for schedule in ("1f1b", "gpipe"):
        for stages, m in [(1, 1), (1, 5), (4, 2), (4, 4), (6, 30)]:
            times = even_times(Shape(schedule=schedule, stages=stages, microbatches=m), 1.0, 2.0)
            (ends,) = step_ends((times,), rendezvous=rendezvous)
            assert ends[0] == ends.max() == (m + stages - 1) * 3.0


@pytest.mark.parametrize(
    ("stages", "groups", "chunks"), [(2, 1, 2), (4, 1, 2), (4, 3, 2), (3, 4, 5)]
)
def test_even_interleaving_divides_the_bubble(stages: int, groups: int, chunks: int) -> None:
    shape = Shape(
        schedule="interleaved-1f1b", stages=stages, microbatches=groups * stages, chunks=chunks
    )
    (ends,) = step_ends((even_times(shape, 1.0, 2.0),), rendezvous=False)
    # (p - 1) (F + B) / v with F and B of a whole stage: arXiv 2104.04473, section 2.2.
    assert ends.max() == (groups * stages * chunks + stages - 1) * 3.0


def test_a_last_group_that_is_smaller_costs_at_most_its_missing_passes() -> None:
    # Calculon (arXiv 2306.00120, its code for the bubble) charges (v - 1) (p - m % p) whole chunk
    # passes. That is an upper bound: most missing forward passes fall into the warm-up of others.
    rng = np.random.default_rng(12)
    for _ in range(150):
        stages, chunks = int(rng.integers(2, 8)), int(rng.integers(2, 5))
        m = int(rng.integers(1, 4 * stages))
        forward, backward = float(rng.integers(1, 4)), float(rng.integers(1, 6))
        shape = Shape(schedule="interleaved-1f1b", stages=stages, microbatches=m, chunks=chunks)
        (ends,) = step_ends((even_times(shape, forward, backward),), rendezvous=False)
        missing = (chunks - 1) * (-m % stages)
        even = (m * chunks + stages - 1) * (forward + backward)
        if missing == 0:
            assert ends.max() == even
        else:
            assert even < ends.max() <= even + missing * (forward + backward)
            assert ends.max() >= even + missing * min(forward, backward)


@pytest.mark.parametrize(("stages", "m"), [(2, 2), (4, 4), (4, 9), (8, 30)])
def test_even_zero_bubble(stages: int, m: int) -> None:
    # (p - 1) (F + B - W) with F = B = W: arXiv 2401.10241, table 2.
    shape = Shape(schedule="zb-h1", stages=stages, microbatches=m)
    (ends,) = step_ends((even_times(shape, 1.0, 1.0, 1.0),), rendezvous=False)
    assert ends.max() == 3 * m + (stages - 1)


def test_more_in_flight_hides_a_long_link() -> None:
    # Two stages of f 1, b 2, 7 seconds there and 7 back: a round trip of 20 from stage 0.
    shapes = [Shape(schedule="1f1b", stages=2, microbatches=m) for m in (400, 520)]
    for depth in range(2, 12):
        steps = [
            step_ends(
                (even_times(shape, 1.0, 2.0, warmup=(depth, 1), latency=7.0),), rendezvous=False
            )[0].max()
            for shape in shapes
        ]
        # Its cycle is the round trip over the microbatches in flight, until compute is longer.
        assert (steps[1] - steps[0]) / 120 == pytest.approx(max(3.0, 20.0 / depth), rel=0.01)


@settings(max_examples=600, deadline=None)
@given(
    shape=SHAPES,
    seed=st.integers(0, 2**32 - 1),
    faster=st.sampled_from(SECONDS),
    rendezvous=st.booleans(),
)
def test_shorter_times_are_never_slower_where_nothing_is_shared(
    shape: Shape, seed: int, faster: str, rendezvous: bool
) -> None:
    rng = np.random.default_rng(seed)
    times = random_times(rng, shape, transfers=1.0)
    values = getattr(times, faster)
    better = replace(times, **{faster: values * rng.uniform(0, 1, values.shape)})
    (ends,) = step_ends((times,), rendezvous=rendezvous)
    (better_ends,) = step_ends((better,), rendezvous=rendezvous)
    assert (better_ends <= ends * (1 + 1e-12)).all()


@settings(max_examples=300, deadline=None)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
    rendezvous=st.booleans(),
)
def test_shared_wires_cost_at_most_what_all_messages_occupy_them(
    shapes: list[Shape], seed: int, rendezvous: bool
) -> None:
    """T0 <= T <= T0 + S: T0 with the wires to themselves, S seconds of all messages on them.

    Walk back from the end along what each event waited for. Every moment is a pass or a transfer
    of a chain that T0 has too, or a wait in the queue of a busy wire; queues on the way do not
    overlap, and all wires together are busy for S. So a faster wire makes a step slower by at most
    its S.
    """
    rng = np.random.default_rng(seed)
    pipelines = [random_times(rng, shape, transfers=1.0, num_wires=2) for shape in shapes]
    alone = [
        replace(
            times,
            send_forward=np.where(
                times.link_forward >= 0,
                np.maximum(times.send_forward, times.shared_forward),
                times.send_forward,
            ),
            send_backward=np.where(
                times.link_backward >= 0,
                np.maximum(times.send_backward, times.shared_backward),
                times.send_backward,
            ),
            link_forward=np.full_like(times.link_forward, -1),
            link_backward=np.full_like(times.link_backward, -1),
        )
        for times in pipelines
    ]
    occupied = sum(
        times.num_microbatches
        * float(
            times.shared_forward[times.link_forward >= 0].sum()
            + times.shared_backward[times.link_backward >= 0].sum()
        )
        for times in pipelines
    )
    step = max(ends.max() for ends in step_ends(pipelines, rendezvous=rendezvous))
    least = max(ends.max() for ends in step_ends(alone, rendezvous=rendezvous))
    assert least <= step * (1 + 1e-12)
    assert step <= (least + occupied) * (1 + 1e-12)
