"""The lock-step replay of interleaving is the general one; a row's step is that of its plan."""

from __future__ import annotations

import numpy as np
import pytest
from interleaved_cases import Case, cuts, every_row, random_case, step_of
from random_cases import seeds
from replay_cases import over_own_wires

from hetplan.cost.arrays import Floats
from hetplan.cost.replay.ends import step_ends
from hetplan.cost.replay.times import Exchange, PipelineTimes
from hetplan.search.interleaved.rows import lockstep_applies, lockstep_ends, row_of


def times_of(forward: Floats, backward: Floats, hops: Floats, m: int) -> PipelineTimes:
    """A pipeline with Megatron-LM's exchange; hops [4, P] repeat for every chunk."""
    slots, chunks = forward.shape
    hop = hops[:, np.arange(slots * chunks - 1) % slots]
    return over_own_wires(
        forward, backward, hop, m, schedule="interleaved-1f1b", exchange=Exchange.MEGATRON
    )


def random_pipeline(seed: int) -> tuple[Floats, Floats, Floats, int]:
    """Forward, backward, hops and microbatches of a pipeline that ticks in lock-step."""
    rng = np.random.default_rng(seed)
    slots, chunks = int(rng.integers(3, 8)), int(rng.integers(2, 5))
    m = slots * int(rng.integers(2, 6))
    forward = rng.uniform(0.1, 1.0, (slots, chunks))
    backward = rng.uniform(0.1, 2.0, (slots, chunks))
    return forward, backward, rng.uniform(0, 1, (4, slots)) * rng.choice([0, 0.01, 0.3, 1]), m


@pytest.mark.parametrize("seed", seeds(60))
def test_lockstep_replay_is_the_general_replay(seed: int) -> None:
    forward, backward, hops, m = random_pipeline(seed)
    assert lockstep_applies(len(forward), m)
    ends = step_ends((times_of(forward, backward, hops, m),), rendezvous=True)[0]
    found = lockstep_ends(forward, backward, hops, m)
    np.testing.assert_allclose(found, ends, rtol=1e-12, atol=0)


@pytest.mark.parametrize("seed", seeds(40))
def test_step_of_a_row_is_that_of_its_plan(seed: int) -> None:
    case: Case = random_case(seed)
    rng = np.random.default_rng(1000 + seed)
    numbers, layers = case.space, case.space.num_layers
    for mesh in list(every_row(case))[:6]:
        most = case.most_units(mesh)
        row = row_of(numbers, mesh, most, case.family.virtual_stages, case.exchange)
        listed = list(cuts(layers, len(mesh), case.family.virtual_stages))
        units = listed[int(rng.integers(len(listed)))]
        variant = rng.integers(0, case.room.shape[0], len(mesh))
        seconds = row.seconds(variant, np.array(units))
        if all(n <= most[s, variant[s]] for s, n in enumerate(units)):
            assert seconds == pytest.approx(step_of(case, mesh, variant, units), rel=1e-12)
        else:
            assert seconds >= 1e29
