"""Transfers between the meshes of a family as arrays."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from search_jobs import cluster, island, job, model

from hetplan.cluster.spec import Link, Transport
from hetplan.cost.step_model.hops import hop_between
from hetplan.plans.chosen import Shape
from hetplan.predict.fit import FittedPredictor
from hetplan.search.result import Question
from hetplan.search.space.family import Mesh
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


def test_no_hop_of_a_mesh_whose_parts_take_turns_in_a_node_costs_less_than_its_own_row() -> None:
    """Two stages of part b share a node, whose links are slower here than the network."""
    slow = Link(
        bandwidth_bytes_per_second=1e9, latency_seconds=5e-6, transport=Transport.DEVICE_DIRECT
    )
    places = (
        island("a", nodes=4, per_node=2),
        replace(island("b", kind="other", nodes=2, per_node=4), intra_node=slow),
    )
    asked, where = model(8), cluster(*places, gigabytes_per_second=1.0)
    wanted, known = job(8, target="native"), FittedPredictor.datasheet_only()
    maker = TableMaker.of(Question(model=asked, cluster=where, job=wanted), known)
    shape = Shape(tp=2, cp=1, dp=1, microbatch_size=1)
    mesh = Mesh(islands=(0, 1), shapes=(shape, shape), max_stages=4)
    links, node_links, *_ = Transfers(maker.stage_pricer).between([mesh])
    stages = [
        [maker.stage_pricer.replica(at, shape, number) for at in (0, 1)] for number in range(4)
    ]
    hops = [hop_between(where, asked, wanted, one, two, known) for one, two in pairwise(stages)]
    real = np.array([[hop.send_forward_seconds, hop.wire_latency_seconds] for hop in hops])
    assert len({*real[:, 0].tolist()}) > 1  # they do take turns
    for own in (links[:, 0, 0], node_links[:, 0]):
        assert own[0] == real[:, 0].min()
        assert own[2] == real[:, 1].min()


def test_pricing_all_pairs_looks_at_the_clock() -> None:
    def out_of_time() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        Transfers(MAKER.stage_pricer, out_of_time).between(MAKER.families[0].meshes)
