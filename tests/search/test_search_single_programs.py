"""The programs over cuts and orders of one family, against all plans of small spaces."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from synthetic_plans import Row, every_row, sigma_and_x, step_of
from synthetic_spaces import Scale, Wanted, large_space, small_space

from hetplan.search.one_f_one_b import order_program
from hetplan.search.one_f_one_b.bound import Walk, prove
from hetplan.search.one_f_one_b.order_program import (
    Order,
    OrderProgram,
    TooLargeError,
    depth_levels,
)
from hetplan.search.one_f_one_b.order_relaxation import NONE
from hetplan.search.space.stage_table import StageTable

FEATURES = {
    "plain": Wanted(),
    "recompute": Wanted(variants=2),
    "meshes": Wanted(meshes_per_island=2, islands=2),
    "unions": Wanted(unions=True, islands=3, layers=5),
    "depths": Wanted(most_extra_depth=2, islands=2, layers=5),
    "pinned ends": Wanted(pinned_ends=True),
    "pinned stages": Wanted(pinned_stages=2),
    "tied ends": Wanted(forbidden_ends=True),
    "norm": Wanted(norm=True, leaving=True, islands=2),
    "eager": Wanted(rendezvous=False, long_links=True, microbatches=8, islands=3, layers=6),
    "eager depths": Wanted(
        rendezvous=False, long_links=True, microbatches=8, islands=2, layers=6, most_extra_depth=2
    ),
    "all": Wanted(
        variants=2, most_extra_depth=1, islands=2, layers=5, meshes_per_island=2, norm=True,
        leaving=True, most_stages=1,
    ),
    "unions and norms": Wanted(unions=True, islands=3, layers=4, norm=True),
    "unions of two regions": Wanted(
        unions=True, islands=3, layers=4, regions=2, norm=True, leaving=True
    ),
}  # fmt: skip


def spaces(name: str, count: int) -> list[StageTable]:
    seed = sorted(FEATURES).index(name)
    return [small_space(np.random.default_rng([seed, k]), FEATURES[name]) for k in range(count)]


def plain(space: StageTable) -> StageTable:
    """The space without what the program over orders relaxes."""

    inside = np.diagonal(space.links, axis1=1, axis2=2)
    return space._replace(
        node_links=inside,
        tied=np.where(np.isfinite(space.tied), 0.0, np.inf),
        clips_gradients=False,
        norm_inside=0.0 * space.norm_inside,
        norm_links=0.0 * space.norm_links,
        norm_node_links=0.0 * space.norm_node_links,
    ).contiguous()


def row_of(order: Order) -> Row:
    return Row(meshes=order.meshes, variants=order.variants, units=order.units, extra=order.extra)


def mesh_boundaries(space: StageTable, row: Row) -> tuple[int, ...]:
    """Where the program over orders may follow the circuit of two slots."""
    if space.rendezvous:
        return ()
    return tuple(s for s, (a, b) in enumerate(pairwise(row.meshes)) if a != b)


def limits(xs: list[float]) -> list[float]:
    return [NONE, *sorted(xs)[:: max(1, len(xs) // 4)]]


@pytest.mark.parametrize("name", FEATURES)
def test_sigma_and_x_are_below_every_replay(name: str) -> None:
    counted = 0
    for space in spaces(name, 4):
        for row in every_row(space):
            sigma, x = sigma_and_x(space, row, together=tuple(range(len(row.meshes) - 1)))
            assert sigma + x <= step_of(space, row) * (1 + 1e-9)
            counted += 1
    assert counted > 4


@pytest.mark.parametrize("name", FEATURES)
def test_the_order_program_is_a_bound_whatever_is_relaxed(name: str) -> None:
    for space in spaces(name, 4):
        program = OrderProgram(space)
        found = [
            sigma_and_x(space, row, together=mesh_boundaries(space, row))
            for row in every_row(space)
        ]
        for limit in limits([x for _, x in found]):
            least = min((s for s, x in found if x <= limit * (1 + 1e-12)), default=NONE)
            assert program.least(limit) <= least * (1 + 1e-9)
            assert program.free(limit) <= least * (1 + 1e-9)


@pytest.mark.parametrize("name", FEATURES)
def test_the_order_program_is_exact_and_its_order_attains_it(name: str) -> None:
    checked = 0
    for space in map(plain, spaces(name, 4)):
        program, careful = OrderProgram(space), OrderProgram(space, prune=False)
        every = list(every_row(space))
        alone = [sigma_and_x(space, row) for row in every]
        whole = [sigma_and_x(space, row, together=mesh_boundaries(space, row)) for row in every]
        for limit in limits([x for _, x in alone]):
            # Circuits of slots are followed at some boundaries, by bucket.
            weak = min((s for s, x in alone if x <= limit * (1 + 1e-12)), default=NONE)
            strong = min((s for s, x in whole if x <= limit * (1 + 1e-12)), default=NONE)
            least = program.least(limit)
            assert weak * (1 - 1e-9) <= least <= strong * (1 + 1e-9)
            assert careful.least(limit) == pytest.approx(least, rel=1e-12)
            order = program.order()
            assert (order is None) == (least >= NONE)
            if order is not None:
                sigma, x = sigma_and_x(space, row_of(order))
                reached = program.limit_of_order()
                assert sigma == pytest.approx(least, rel=1e-9)
                assert x <= min(limit, reached) * (1 + 1e-9)
                again = program.least(reached * (1 + 1e-9))
                assert again >= least * (1 - 1e-9)
                assert again == pytest.approx(least, rel=1e-9) or not space.rendezvous
                assert program.least(limit, least * (1 - 1e-6)) >= NONE
                assert program.least(limit, least * (1 + 1e-6)) == least
                checked += 1
    assert checked > 4


def test_regions_stand_together_where_they_have_to() -> None:
    apart = 0
    for k in range(12):
        rng = np.random.default_rng([77, k])
        space = plain(small_space(rng, Wanted(islands=3, regions=2, layers=5)))
        # The middle island belongs to another region than its neighbours.
        space = space._replace(region=np.array([0, 1, 0]))
        both = [
            OrderProgram(space._replace(regions_apart=apart), prune=bool(k % 2))
            for apart in (True, False)
        ]
        found = [
            [sigma_and_x(space, row) for row in every_row(space, contiguous=c)]
            for c in (True, False)
        ]
        if space.rendezvous:
            for limit in limits([x for _, x in found[1]]):
                least = [
                    min((s for s, x in part if x <= limit * (1 + 1e-12)), default=NONE)
                    for part in found
                ]
                assert [one.least(limit) for one in both] == pytest.approx(least, rel=1e-9)
                apart += least[0] > least[1] * (1 + 1e-9)
    assert apart > 0


def test_equal_islands_are_taken_in_their_order() -> None:
    fewer = 0
    for k in range(10):
        space = plain(small_space(np.random.default_rng([5, k]), Wanted(islands=3, layers=5)))
        space = _twins(space)
        program = OrderProgram(space)
        fewer += len(program.parts[0].states.mesh) < 12
        found = [
            sigma_and_x(space, row, together=mesh_boundaries(space, row))
            for row in every_row(space)
        ]
        for limit in limits([x for _, x in found]):
            least = min((s for s, x in found if x <= limit * (1 + 1e-12)), default=NONE)
            if space.rendezvous:
                assert program.least(limit) == pytest.approx(least, rel=1e-9)
            else:
                assert program.least(limit) <= least * (1 + 1e-9)
    assert fewer == 10


def _twins(space: StageTable) -> StageTable:
    """The second island is a copy of the first one."""
    twins = space.of_meshes(np.array([0, 0, 2]))
    links = twins.links.copy()
    # A boundary between the twins costs the same both ways.
    links[:, 0, 1] = links[:, 1, 0] = space.links[:, 0, 1]
    return twins._replace(links=links, region=space.region, island_mask=space.island_mask)


def test_joined_levels_of_depth_are_a_bound() -> None:
    joined = 0
    ask = Wanted(most_extra_depth=2, islands=2, layers=6, tight=True, microbatches=8)
    for k in range(12):
        space = small_space(np.random.default_rng([9, k]), ask)
        # Every microbatch in flight takes the room of a layer.
        flights = np.arange(space.most_layers.shape[3])
        fitting = np.broadcast_to(np.clip(7 - flights, 0, 6), space.most_layers.shape)
        space = space._replace(most_layers=fitting).contiguous()
        exact = OrderProgram(space)
        coarse = OrderProgram(space, levels=((0, 0), (2, 1)))
        for limit in np.geomspace(0.5, 80.0, 20):
            least = exact.least(float(limit))
            assert coarse.least(float(limit)) <= least * (1 + 1e-12)
            joined += coarse.least(float(limit)) < least * (1 - 1e-9)
    assert joined > 0
    assert depth_levels(2, 10) == ((0, 0), (1, 1), (2, 2))
    assert depth_levels(8, 100) == ((0, 0), (1, 1), (3, 2), (8, 4))
    assert depth_levels(3, 100) == ((0, 0), (1, 1), (3, 2))
    assert depth_levels(0, 100) == ((0, 0),)


@pytest.mark.parametrize("name", FEATURES)
def test_a_proof_is_below_every_plan(name: str) -> None:
    proven = 0
    for space in spaces(name, 4):
        steps = [step_of(space, row) for row in every_row(space)]
        best = min(steps, default=NONE)
        for part in (0.6, 0.95, 1.0, 1.5):
            target = best * part if best < NONE else 10.0
            proof = prove(OrderProgram(space), target)
            assert proof.finished
            assert proof.bound_seconds <= best * (1 + 1e-9)
            assert proof.proven == (proof.bound_seconds >= target)
            if proof.proven:
                proven += 1
                assert all(step >= target * (1 - 1e-9) for step in steps)
            else:
                least = proof.met[0]
                row = row_of(least.order)
                assert step_of(space, row) >= best * (1 - 1e-9)
                assert proof.bound_seconds >= least.bound_seconds * (1 - 2e-4)
        assert prove(OrderProgram(space), NONE).bound_seconds <= best * (1 + 1e-9)
    assert proven > 4


def test_the_bound_of_a_proof_is_the_least_of_the_program() -> None:
    for name in ("recompute", "meshes", "depths"):
        for space in map(plain, spaces(name, 5)):
            if not space.rendezvous:
                continue
            least = min((sum(sigma_and_x(space, row)) for row in every_row(space)), default=NONE)
            proof = prove(OrderProgram(space), least * 1.2 if least < NONE else 10.0)
            assert least * (1 - 1.1e-4) <= proof.bound_seconds <= least * (1 + 1e-9)


class _StopError(Exception):
    pass


def test_a_walk_can_be_stopped_anywhere_and_goes_on() -> None:
    space = large_space(2, Scale(islands=4, regions=2, stages=20, layers=40, microbatches=48))
    whole = prove(OrderProgram(space), 400.0)
    assert whole.finished
    assert not whole.proven
    by_budget = Walk(OrderProgram(space), 400.0)
    parts = [by_budget.run(1.0)]
    while not parts[-1].finished:
        parts.append(by_budget.run(1.0))
    assert len(parts) > 3
    assert all(part.bound_seconds <= whole.bound_seconds * (1 + 1e-4) for part in parts)
    assert parts[-1].bound_seconds == pytest.approx(whole.bound_seconds, rel=2e-4)

    left = 3

    def check() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise _StopError

    stopped = Walk(OrderProgram(space), 400.0, check=check)
    with pytest.raises(_StopError):
        stopped.run()
    assert stopped.proof().bound_seconds <= whole.bound_seconds * (1 + 1e-4)
    left = 10**6
    assert stopped.run().bound_seconds == pytest.approx(whole.bound_seconds, rel=2e-4)


def orders_of(space: StageTable) -> list[tuple[float, Order | None]]:
    """What a fresh program finds at two limits."""
    program = OrderProgram(space)
    return [(program.least(limit), program.order()) for limit in (NONE, 200.0)]


SPACES = [
    large_space(2, Scale(islands=4, regions=2, stages=20, layers=40, microbatches=48)),
    small_space(np.random.default_rng(3), FEATURES["unions"]),
]


@pytest.mark.parametrize("space", SPACES, ids=["large", "small"])
@pytest.mark.parametrize(
    ("name", "value"), [("_SLICE", 1), ("_SLICE", 1000), ("_FIRST_PACKED", 0), ("_KEPT_PACKED", 0)]
)
def test_programs_find_the_same_in_small_portions(
    space: StageTable, name: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = orders_of(space)
    assert found[0][1] is not None
    monkeypatch.setattr(order_program, name, value)
    assert orders_of(space) == found


@pytest.mark.parametrize("name", ["_MOST_PACKED", "_MOST_TRACED"])
def test_a_program_without_room_ends_its_walk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    space = SPACES[0]
    whole = prove(OrderProgram(space), 400.0)
    monkeypatch.setattr(order_program, "_FIRST_PACKED", 0)
    monkeypatch.setattr(order_program, name, 0)
    with pytest.raises(TooLargeError):
        OrderProgram(space).least(NONE)
    proof = prove(OrderProgram(space), 400.0)
    assert not proof.finished
    assert 0.0 < proof.bound_seconds <= whole.bound_seconds * (1 + 1e-4)


@pytest.mark.parametrize(
    ("name", "seed"), [("recompute", 1), ("meshes", 10), ("norm", 0), ("pinned stages", 1)]
)
def test_a_program_whose_trace_had_no_room_can_be_asked_again(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = small_space(np.random.default_rng(seed), FEATURES[name])
    program = OrderProgram(space)
    with monkeypatch.context() as little:
        little.setattr(order_program, "_MOST_TRACED", 0)
        with pytest.raises(TooLargeError):
            program.least(NONE)
    found = [(program.least(limit), program.order()) for limit in (NONE, 200.0)]
    assert found == orders_of(space)


@pytest.mark.parametrize("name", ["_MOST_WORK", "_MOST_AT_ONCE"])
def test_large_tables_have_no_orders(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_program, name, 100)
    assert not OrderProgram(SPACES[0]).has_orders
    assert 0.0 < prove(OrderProgram(SPACES[0]), 400.0).bound_seconds < NONE


@pytest.mark.parametrize("islands", [8, 10, pytest.param(24, marks=pytest.mark.slow)])
def test_large_spaces_are_proven_within_few_operations(islands: int) -> None:
    space = large_space(1, Scale(islands=islands, stages=64, layers=128))
    walk = Walk(OrderProgram(space), 1e5)
    proof = walk.run()
    assert proof.finished
    best = min(step_of(space, row_of(met.order)) for met in proof.met)
    assert proof.bound_seconds >= 0.99 * best
    again = prove(OrderProgram(space), 0.995 * best)
    assert again.proven
    assert again.operations < 30e6
