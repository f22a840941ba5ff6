"""Transfers between the meshes of a family as arrays."""

from __future__ import annotations

import numpy as np
import pytest
from search_jobs import cluster, island, job, model

from hetplan.predict.fit import FittedPredictor
from hetplan.search.result import Question
from hetplan.search.space.transfers import Transfers
from hetplan.search.table_maker import TableMaker

MAKER = TableMaker.of(
    Question(
        model=model(4),
        cluster=cluster(*[island(name) for name in "abc"], gigabytes_per_second=1.0),
        job=job(8, target="native"),
    ),
    FittedPredictor.datasheet_only(),
)


def test_pairs_that_share_an_island_are_no_neighbours_and_cost_no_less_than_others() -> None:
    unions = [
        each.meshes for each in MAKER.families if any(len(m.islands) > 1 for m in each.meshes)
    ]
    assert unions
    meshes = max(unions, key=len)
    links = Transfers(MAKER.stage_pricer).between(meshes)[0]
    most, shared = links.max(axis=(1, 2)), 0
    for i, one in enumerate(meshes):
        for j, two in enumerate(meshes):
            if i != j and one.mask & two.mask and len(one.islands) + len(two.islands) > 2:
                assert np.array_equal(links[:, i, j], most)
                shared += 1
            elif i != j:
                alone = Transfers(MAKER.stage_pricer).between([one, two])[0]
                assert np.array_equal(links[:, i, j], alone[:, 0, 1])
    assert shared


def test_pricing_all_pairs_looks_at_the_clock() -> None:
    def out_of_time() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        Transfers(MAKER.stage_pricer, out_of_time).between(MAKER.families[0].meshes)
