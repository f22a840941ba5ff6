"""What a plan's whole price may differ from the search's by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hetplan.cost.step_model.pricer import Pricer
from hetplan.plans.chosen import ChosenPlan
from hetplan.plans.plan import Plan
from hetplan.search.final_pricing import WrongOfferError, _agreeing
from hetplan.search.solver import Offer


def agreeing(seconds: float, *, parts: int) -> float:
    """The whole price of a plan of 1 s that the search offers at so many seconds."""
    unit = SimpleNamespace(replica=SimpleNamespace(tp=1))
    stage = SimpleNamespace(unit=unit, units=(unit,) * parts)
    step = SimpleNamespace(step_seconds=1.0, work=[SimpleNamespace(stages=[stage], shares=False)])
    plan = cast(Plan, SimpleNamespace(overlap=SimpleNamespace(reduction=False)))
    pricer = cast(Pricer, SimpleNamespace(step=lambda plan: step))
    offer = Offer(0, seconds, cast(ChosenPlan, cast(Any, None)))
    return _agreeing(offer, plan, pricer).step_seconds


def test_stages_of_one_kind_cost_what_the_search_says() -> None:
    assert agreeing(1.0 + 1e-7, parts=1) == 1.0
    for seconds in (1.0 + 5e-6, 1.0 - 5e-6):
        with pytest.raises(WrongOfferError):
            agreeing(seconds, parts=1)


def test_parts_of_unlike_kinds_may_cost_a_little_less_and_never_much() -> None:
    assert agreeing(1.0 + 5e-6, parts=2) == 1.0
    with pytest.raises(WrongOfferError):
        agreeing(1.0 + 1e-3, parts=2)
