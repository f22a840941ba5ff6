"""The search under Sailor's formula: its numbers are never above the formula's, nor its bounds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from test_search import REFERENCE, needs_reference

from evaluation.search.cases import USUAL_FILE, Case, case_inputs, read_cases
from evaluation.search.family_order import ProfilePredictor, SailorJudge, families_of
from evaluation.search.peers import files_of
from evaluation.search.sailor_search import SailorMaker
from evaluation.search.sailor_tables import Tables, tables_of
from hetplan.cost.arrays import Ints
from hetplan.search.one_f_one_b.rows import Slots, step_seconds
from hetplan.search.one_f_one_b.solver import chosen_of_row
from hetplan.search.result import Inputs
from hetplan.search.space.row import NEVER


def _asked(at: int, batch: int) -> tuple[Inputs, list[Tables], SailorJudge]:
    case: Case = read_cases(REFERENCE / USUAL_FILE)[at].model_copy(
        update={"global_batch_size": batch}
    )
    files = files_of(case, REFERENCE)
    inputs = case_inputs(case, files)
    wide = replace(inputs, job=replace(inputs.job, target="any"))
    judge = SailorJudge(files=files, cluster=inputs.cluster, global_batch_size=batch)
    return wide, tables_of(case, files), judge


def _maker(inputs: Inputs, tables: Tables, judge: SailorJudge) -> SailorMaker:
    return SailorMaker(
        model=inputs.model, cluster=inputs.cluster, job=inputs.job,
        predictor=ProfilePredictor(files=judge.files), tables=tables, price=judge.seconds,
    )  # fmt: skip


def _random_row(
    draw: np.random.Generator, most: Ints, masks: Ints, layers: int
) -> tuple[Ints, Ints]:
    """Meshes of disjoint islands, stages of each next to each other, and a cut."""
    mesh: list[int] = []
    used = 0
    for m in draw.permutation(len(most)).tolist():
        if not used & int(masks[m]) and draw.random() < 0.8:
            used |= int(masks[m])
            mesh += [m] * int(draw.integers(1, min(4, int(most[m])) + 1))
    mesh = (mesh or [0])[:layers]
    ends = np.sort(draw.choice(np.arange(1, layers), len(mesh) - 1, replace=False))
    return np.array(mesh), np.diff(ends, prepend=0, append=layers)


@needs_reference
@pytest.mark.parametrize("at", [0, 1, 2])
def test_no_number_of_the_space_is_above_the_formula(at: int) -> None:
    inputs, every, judge = _asked(at, 256)
    draw, compared = np.random.default_rng(at), 0
    names = [island.name for island in inputs.cluster.islands]
    for tables in every:
        maker = _maker(inputs, tables, judge)
        for family in families_of(inputs, tables):
            space = maker.space(family)
            order_free = maker.order_free(family)
            for _ in range(20):
                mesh, units = _random_row(
                    draw, space.max_stages, space.island_mask, space.num_layers
                )
                nothing = np.zeros_like(mesh)
                said = judge.seconds(
                    chosen_of_row(family, space, names, Slots(mesh, nothing, units, nothing))
                )
                if said == math.inf:
                    continue
                step = step_seconds(space, Slots(mesh, nothing, units, nothing))
                assert step < NEVER
                assert step <= said * (1 + 1e-9)
                assert order_free.bound_seconds <= said * (1 + 1e-9)
                compared += 1
    assert compared > 100
