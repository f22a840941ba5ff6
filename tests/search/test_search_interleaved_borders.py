"""No plan is faster than its own boundaries allow, and the program over islands uses that."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from interleaved_cases import Case, every_plan, random_case
from random_cases import seeds

from hetplan.cost.replay.times import Exchange
from hetplan.search.interleaved.enumerate import stage_counts
from hetplan.search.interleaved.island_bound import borders_of, island_program
from hetplan.search.one_f_one_b.replay import NEVER


@pytest.mark.parametrize("seed", seeds(60))
def test_no_plan_is_faster_than_its_boundaries(seed: int) -> None:
    case = random_case(seed, most_layers=9)
    chunks = case.family.virtual_stages
    borders = {
        stages: borders_of(case.space, chunks, case.exchange, stages)
        for stages in stage_counts(case.space, case.family)
    }
    for row, _, _, step in every_plan(case):
        beside, above = borders[len(row)], step * (1 + 1e-12)
        assert beside.around[row[-1], row[0]] <= above
        for one, two in pairwise(row):
            assert beside.between[one, two] <= above
            assert not beside.blocked(above)[one, two]
        assert beside.rings(above)[row[-1], row[0]]


def slow_links(case: Case, seconds: float) -> Case:
    """Every transfer between two meshes takes so long besides."""
    links = case.space.links
    apart = seconds * (1.0 - np.eye(len(case.space.max_stages)))
    slow = np.stack((links[0] + apart, links[1] + apart, links[2], links[3]))
    return replace(case, space=case.space._replace(links=slow))


@pytest.mark.parametrize("exchange", [Exchange.MEGATRON, Exchange.TORCH])
def test_slow_boundaries_are_denied_alone(exchange: Exchange) -> None:
    """Where no mesh holds all units by itself, a long boundary closes the family below it; boundary
    by boundary no sum of hops, which all come once a microbatch at most, does that."""
    closed = 0
    for seed in range(40):
        case = replace(random_case(seed, most_layers=9), exchange=exchange)
        if len(case.space.max_stages) < 2:
            continue
        least = math.inf
        for row, _, _, step in every_plan(case):
            least = min(least, step) if len(set(row)) == 1 else least
        messages = case.space.num_microbatches * case.family.virtual_stages
        slow = slow_links(case, 2.0 * case.space.num_microbatches)
        for stages in stage_counts(case.space, case.family):
            program = island_program(slow.space, slow.family, slow, slow.exchange, stages)
            limit = min(1.9 * messages * case.space.num_microbatches, least)
            free = replace(
                program,
                borders=program.borders._replace(
                    between=np.where(program.borders.between >= NEVER, NEVER, 0.0),
                    around=np.where(program.borders.around >= NEVER, NEVER, 0.0),
                ),
            )
            assert program.below(limit).none >= free.below(limit).none
            closed += program.below(limit).none > free.below(limit).none
    assert closed > 0
