"""Programs over the parts of a space that a target leaves never bound a family too high."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from search_costs_cases import regions_cluster, unlike_model
from search_jobs import job
from synthetic_plans import every_row, step_of
from synthetic_spaces import Wanted, small_space

from hetplan.predict.fit import fit_populations
from hetplan.search.one_f_one_b.bound import apart, prove, prove_by_any
from hetplan.search.one_f_one_b.enumerate import few_plans
from hetplan.search.one_f_one_b.order_program import OrderProgram
from hetplan.search.one_f_one_b.order_relaxation import NONE
from hetplan.search.one_f_one_b.solver import OneFOneBSolver
from hetplan.search.solver import Best
from hetplan.search.space.allowed import allowed_cluster
from hetplan.search.space.families import Families
from hetplan.search.table_maker import TableMaker

PREDICTOR = fit_populations(())
FEW = 50_000


@pytest.mark.slow
def test_late_slots_bound_every_row() -> None:
    """Ends of the step that are long, and grow with the units, on some of the meshes."""
    seen, higher = 0, 0
    for seed in range(40):
        rng = np.random.default_rng([7, seed])
        wanted = Wanted(
            islands=3, layers=5, unions=seed % 2 == 0, norm=seed % 3 == 0, variants=1 + seed % 2,
            rendezvous=seed % 4 < 2, tied=seed % 5 == 0,
        )  # fmt: skip
        space = small_space(rng, wanted)
        after = space.after.copy()
        some = rng.random(after.shape[1]) < 0.5
        grown = 1.0 + rng.uniform(0.0, 0.5) * np.arange(after.shape[2])
        after[:, some] += rng.uniform(0.3, 6.0, (after.shape[1], 1))[some] * grown
        space = space._replace(after=after).contiguous()
        rows = list(every_row(space))
        steps = [step_of(space, row) for row in rows]
        best = min(steps, default=math.inf)
        if best == math.inf:
            continue
        for more in (0.98, 1.001, 1.3):
            parts = apart(space, more * best)
            by_all, by_late = (
                min((prove_by_any(some(each), more * best).bound_seconds for each, _ in parts),
                    default=NONE)
                for some in (list, lambda programs: programs[-1:])
            )  # fmt: skip
            found = max(by_all, by_late)
            assert found <= max(best, more * best) * (1 + 1e-9)
            assert more > 1.0 or found <= best
            if more > 1.0:
                assert found <= best * (1 + 1e-9)
                assert by_all >= by_late * (1 - 1e-9)
                plain = prove(OrderProgram(space), more * best).bound_seconds
                higher += found > plain * (1 + 1e-6)
            seen += len(parts) > 1
    assert seen > 30
    assert higher > 10


@pytest.mark.slow
def test_bounds_of_the_parts_are_below_the_best_plan() -> None:
    """Unions over slow links between regions have long ends of the step."""
    split, seen = 0, 0
    for seed in range(15):
        rng = np.random.default_rng(seed)
        cluster = regions_cluster(rng, [0, 1, 0] if seed % 2 else [0, 1])
        assert cluster.across_regions is not None
        slow = replace(cluster.across_regions, bandwidth_bytes_per_second=10.0 ** (7 + seed % 3))
        cluster = replace(cluster, across_regions=slow)
        target = ("megatron", "flagscale", "torchtitan")[seed % 3]
        asked = job(16, target=target)
        asked = replace(asked, pin=replace(asked.pin, pipelines=1, virtual_stages=1))
        model = unlike_model("dense", 5, tied=False)
        maker = TableMaker(model=model, cluster=cluster, job=asked, predictor=PREDICTOR)
        allowed = allowed_cluster(cluster, asked)
        every = Families(model=model, cluster=allowed, job=asked).families()
        unions = [each for each in every if any(len(mesh.islands) > 1 for mesh in each.meshes)]
        for at in rng.permutation(len(unions))[:4].tolist():
            solver = OneFOneBSolver(0, unions[at], maker)
            if solver.order_free.bound_seconds == math.inf:
                continue
            if few_plans(solver.space, FEW) is None:
                continue
            solver.__dict__["_priced_whole"] = False
            best = Best(bounds=[0.0])
            solver.improve(best)
            if best.chosen is None or not solver._list(best, np.inf):
                continue
            for more in (1.02, 1.5):
                parts = apart(solver.space, more * best.seconds)
                split += len(parts) > 1
                found = [prove_by_any(programs, more * best.seconds) for programs, _ in parts]
                assert min(each.bound_seconds for each in found) <= best.seconds * (1 + 1e-9)
                seen += 1
    assert seen > 15
    assert split > 5
