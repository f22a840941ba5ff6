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


@pytest.mark.parametrize(("stages", "m"), [(2, 2), (4, 4), (4, 9), (8, 30)])
def test_even_zero_bubble(stages: int, m: int) -> None:
    # (p - 1) (F + B - W) with F = B = W: arXiv 2401.10241, table 2.
    shape = Shape(schedule="zb-h1", stages=stages, microbatches=m)
    (ends,) = step_ends((even_times(shape, 1.0, 1.0, 1.0),), rendezvous=False)
    assert ends.max() == 3 * m + (stages - 1)


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
