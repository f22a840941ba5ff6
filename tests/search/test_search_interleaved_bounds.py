"""No bound of an interleaved row exceeds its best cut, and lists of cuts miss none."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from interleaved_cases import cuts, every_row, random_case
from interleaved_path_bound import path_bound_seconds
from random_cases import seeds
from test_search_interleaved_replay import random_pipeline, times_of

from hetplan.cost.replay.ends import step_ends
from hetplan.search.interleaved.bound import capacity_bound, least_bound
from hetplan.search.interleaved.enumerate import list_cuts
from hetplan.search.interleaved.rows import row_of, row_terms
from hetplan.search.one_f_one_b.replay import NEVER


@pytest.mark.parametrize("seed", seeds(60))
def test_paths_are_below_the_replay(seed: int) -> None:
    forward, backward, hops, m = random_pipeline(seed)
    after = np.random.default_rng(seed).uniform(0, 0.2, len(forward))
    ends = step_ends((times_of(forward, backward, hops, m),), rendezvous=True)[0]
    bound = path_bound_seconds(forward, backward, hops, m, True, after)
    assert bound <= (ends + after).max() * (1 + 1e-12)
    assert bound >= 0.75 * (ends + after).max()


@pytest.mark.parametrize("seed", seeds(120))
def test_row_bounds_are_below_the_best_cut(seed: int) -> None:
    case = random_case(seed)
    numbers, layers, chunks = (
        case.space,
        case.space.num_layers,
        case.family.virtual_stages,
    )
    for mesh in list(every_row(case))[:3]:
        most = case.most_units(case.family, mesh, layers)
        row = row_of(numbers, mesh, most, chunks, case.exchange)
        terms = row_terms(row.arrays, layers)
        steps = {
            (variant, units): row.seconds(np.array(variant), np.array(units))
            for units in cuts(layers, len(mesh), chunks)
            for variant in product(range(case.room.shape[0]), repeat=len(mesh))
        }
        best = min(steps.values())
        assert capacity_bound(row.arrays, terms, layers) <= best * (1 + 1e-12)
        bound, variant, units, _, _ = least_bound(row.arrays, terms, layers, NEVER)
        assert bound <= best * (1 + 1e-12)
        if best >= NEVER:
            assert bound >= NEVER
            continue
        assert row.seconds(variant, units) < NEVER
        limit = best * 1.05
        _, _, _, labels, counts = least_bound(row.arrays, terms, layers, limit)
        listed, count, whole = list_cuts(
            row.arrays, terms, layers, limit, labels, counts, 5000, 1_000_000
        )
        assert whole
        found = {(tuple(cut[0].tolist()), tuple(cut[1].tolist())) for cut in listed[:count]}
        assert len(found) == count
        assert {cut for cut, step in steps.items() if step < limit} <= found
