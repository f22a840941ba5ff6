"""Which plans could be the best one, as far as one can tell by predictions that err?

The search gives the plan that is best if every prediction is right. Others are best if a
prediction is wrong. Here are the best plans of

1. every family of plans whose estimate comes near the best step, likeliest first;
2. the question where every prediction of one device kind lies at an end of its interval;
3. the cluster without one of the islands that the best plan uses.

This does not go through `whatif.ask`, which gives one plan and proves it: a rival is the best plan
that its family's solver finds, without a proof, and there are many. Which rivals cannot be told
from the best plan, `hetplan.advice.measurement_order` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress

from hetplan.errors import InputError, OutOfTimeError
from hetplan.kernels import clock
from hetplan.plans.pieces import islands_in_use
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Predictor
from hetplan.search.result import Question
from hetplan.search.solver import Best
from hetplan.search.solvers import solver_of
from hetplan.search.space.family import Family
from hetplan.search.space.forwarding_predictor import ShiftedPredictor
from hetplan.search.table_maker import TableMaker

_MAX_RIVALS = 10  # families that are searched in the first world
_MAX_ELSEWHERE = 3  # and in each other one


def rivals(
    plan: Plan, question: Question, predictor: Predictor, *, seconds: float
) -> tuple[Plan, ...]:
    """Plans that could be better than this best one; each once, none of them it.

    No search begins after so many `seconds`; what was found until then is given.
    """
    deadline = clock() + seconds
    found = dict.fromkeys(_every(plan, question, predictor, deadline))
    return tuple(other for other in found if other != plan)


def _every(plan: Plan, question: Question, predictor: Predictor, deadline: float) -> Iterator[Plan]:
    maker, islands = TableMaker.of(question, predictor), question.cluster.islands
    likeliest = _likeliest(maker, maker.families, _MAX_RIVALS, deadline)
    yield from _best_of(maker, likeliest[:_MAX_ELSEWHERE], deadline)
    kinds = dict.fromkeys(island.device.kind for island in islands)
    if len(kinds) > 1:
        for kind in kinds:
            for sign in (-1.0, 1.0):
                moved = TableMaker.of(question, ShiftedPredictor(predictor, kind, sign))
                there = _likeliest(moved, likeliest, _MAX_ELSEWHERE, deadline)
                yield from _best_of(moved, there, deadline)
    if len(islands) > 1:
        for name in islands_in_use(plan, question.cluster):
            without = TableMaker.of(question.without_islands(name), predictor)
            there = _likeliest(without, without.families, _MAX_ELSEWHERE, deadline)
            yield from _best_of(without, there, deadline)
    yield from _best_of(maker, likeliest[_MAX_ELSEWHERE:], deadline)


def _likeliest(
    maker: TableMaker, families: Sequence[Family], most: int, deadline: float
) -> list[Family]:
    """Those with the shortest estimates, as far as the time allows a look at them."""
    entries: list[tuple[float, Family]] = []
    for family in families:
        if clock() > deadline:
            break
        try:
            known = maker.order_free(family)
        except InputError:
            continue  # a kind without a figure for this precision, which the best plan leaves out
        if known.bound_seconds < math.inf:
            entries.append((known.estimate_seconds, family))
    entries.sort(key=lambda each: each[0])
    return [family for _, family in entries[:most]]


def _best_of(maker: TableMaker, families: Sequence[Family], deadline: float) -> Iterator[Plan]:
    """The best plan of each of these families."""
    for family in families:
        if clock() > deadline:
            return
        best = Best(bounds=[0.0], deadline=deadline, first_plan_by=deadline, seed=maker.job.seed)
        with suppress(OutOfTimeError):
            solver_of(0, family, maker).improve(best)
        found = None if best.chosen is None else maker.evaluator.legal(best.chosen)
        if found is not None:
            yield found
