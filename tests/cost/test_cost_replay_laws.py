"""What every replay must obey: closed forms, monotony, scaling, and what shared wires may cost."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_cases import SECONDS, SHAPES, Shape, even_times, random_times

from hetplan.cost.replay.ends import step_ends
from hetplan.cost.schedules import passes


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


@pytest.mark.parametrize(("stages", "m"), [(2, 2), (4, 4), (4, 9), (8, 30)])
def test_even_zero_bubble(stages: int, m: int) -> None:
    # (p - 1) (F + B - W) with F = B = W: arXiv 2401.10241, table 2.
    shape = Shape(schedule="zb-h1", stages=stages, microbatches=m)
    (ends,) = step_ends((even_times(shape, 1.0, 1.0, 1.0),), rendezvous=False)
    assert ends.max() == 3 * m + (stages - 1)


def even_v(schedule: str, stages: int, m: int) -> tuple[list[float], list[float]]:
    """(ends of the stages less their own work, most of a stage's activations over those that
    stage 0 keeps under 1f1b), with F = B = W = 1 of a whole stage."""
    shape = Shape(schedule=schedule, stages=stages, microbatches=m, chunks=2)
    (ends,) = step_ends((even_times(shape, 0.5, 0.5, 0.5),), rendezvous=False)
    kept = []
    for s in range(stages):
        order = passes(schedule, stage=s, num_stages=stages, num_microbatches=m, virtual_stages=2)
        steps = [1 if one.kind == "F" else -1 if one.kind != "W" else 0 for one in order]
        kept.append(max(accumulate(steps)) / (2 * stages))
    return list(ends - 3 * m), kept


@pytest.mark.parametrize(("stages", "m"), [(2, 4), (4, 8), (4, 19), (8, 32)])
def test_even_zbv_has_no_bubble_and_the_memory_of_1f1b(stages: int, m: int) -> None:
    # Stage s starts after s passes of half a stage, and never waits: arXiv 2401.10241, section 6.
    late, kept = even_v("zbv", stages, m)
    assert late == pytest.approx([s / 2 for s in range(stages)])
    assert max(kept) == 1


@pytest.mark.parametrize("stages", [4, 5, 6, 8, 9, 12])
def test_controllable_memory(stages: int) -> None:
    # arXiv 2405.15362, table 3: activations 1/2 and 1/3 of 1F1B's, and a bubble of about half and
    # two thirds of it, (P - 1) (F + B + W); both grow by what the passes in a period must give way.
    bubble = 3 * (stages - 1)
    half_late, half = even_v("v-half", stages, 4 * stages)
    least_late, least = even_v("v-min", stages, 4 * stages)
    assert 1 / 2 <= max(half) <= 1 / 2 + 1 / stages
    assert 1 / 3 <= max(least) < 1 / 3 + 1.01 / stages
    assert bubble / 2 <= max(half_late) <= 0.62 * bubble
    assert bubble / 2 <= max(least_late) <= 0.72 * bubble


@pytest.mark.parametrize(("stages", "m"), [(2, 4), (4, 8), (8, 32)])
def test_even_dualpipev_has_the_bubble_of_zb_h1(stages: int, m: int) -> None:
    # Without hidden transfers. Memory: one chunk more than P whole stages (DeepSeek's README of
    # DualPipe: PP + 1 chunks of half a stage twice).
    late, kept = even_v("dualpipev", stages, m)
    assert max(late) == stages - 1
    assert max(kept) == (2 * stages + 1) / (2 * stages)


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
