"""The closed loop's plans are legal and well chosen, and its numbers are what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.closed_loop.loop import loop_answer, totals, verdict_of
from evaluation.closed_loop.plans import (
    FORMS,
    choose,
    dealt_out,
    draw_pool,
    form_of,
    name_of,
)
from evaluation.closed_loop.values import (
    ClosedLoop,
    Goals,
    LoopFiles,
    LoopPlan,
    LoopPlans,
    LoopSpec,
    TrainedPlan,
    Verdict,
    open_folder,
)
from hetplan.cluster.load import load_cluster
from hetplan.errors import InputError
from hetplan.job.load import load_job
from hetplan.model.load import load_model
from hetplan.plans.check import check_plan
from hetplan.plans.plan import Plan
from hetplan.plans.ranks import launch_faults

FILES = LoopFiles(folder=Path("unused"))
CLUSTER, MODEL, JOB = load_cluster(FILES.cluster), load_model(FILES.model), load_job(FILES.job)
SPEEDS = {"fast": 1.0, "medium": 2 / 3, "slow": 1 / 3}


@pytest.fixture(scope="module")
def pool() -> tuple[Plan, ...]:
    return draw_pool(MODEL, CLUSTER, JOB, speeds=SPEEDS, seed=3, size=60)


def test_the_pool_is_legal_and_of_every_form(pool: tuple[Plan, ...]) -> None:
    assert len(pool) == 60
    assert len({name_of(plan, CLUSTER, MODEL) for plan in pool}) == 60
    assert {form_of(plan) for plan in pool} == set(FORMS)
    for plan in pool:
        assert not check_plan(plan, MODEL, CLUSTER, JOB)
        assert not list(launch_faults(plan))


@given(
    st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6),
    st.integers(0, 100),
    st.integers(0, 3),
)
@settings(max_examples=200, deadline=None)
def test_dealt_out_adds_up_and_is_fair(weights: list[float], more: int, least: int) -> None:
    total = least * len(weights) + more
    found = dealt_out(total, weights, least=least)
    assert sum(found) == total
    assert min(found) >= least
    if not least:
        for number, weight in zip(found, weights, strict=True):
            assert abs(number - total * weight / sum(weights)) < 1


def loop_plan(number: int, seconds: float, plan: Plan) -> LoopPlan:
    return LoopPlan(
        name=f"plan {number}",
        form=FORMS[number % len(FORMS)],
        plan=plan,
        predicted_seconds=seconds,
    )


def test_the_choice_has_the_searched_the_best_and_all_ranks(pool: tuple[Plan, ...]) -> None:
    plans = [loop_plan(number, 1.0 + number / 100, pool[0]) for number in range(300)]
    searched = replace(plans[3], name="searched", searched=True, predicted_seconds=0.99)
    found = choose(plans, searched, plans=20, best=5, longest=3.0)
    names = [each.name for each in found.plans]
    assert len(set(names)) == 20
    assert names[:6] == ["searched", *(each.name for each in plans[:5])]
    kept = [each for each in plans if each.predicted_seconds <= 3.0 * 0.99]
    assert found.left_out_slow == len(plans) - len(kept)
    # One of every equal run of rank.
    rest = [each.name for each in kept[5:]]
    ranks = [rest.index(name) * 14 // len(rest) for name in names[6:]]
    assert ranks == list(range(14))


def trained(predicted: float, measured: float, overruns: int = 0) -> TrainedPlan:
    return TrainedPlan(
        name="a plan",
        predicted_seconds=predicted,
        measured_seconds=measured,
        step_seconds=(measured, 1.01 * measured),
        losses=(6.2,),
        paced_passes=100,
        overruns=overruns,
        load_average=1.0,
    )


def whole_loop(
    pool: tuple[Plan, ...], *pairs: tuple[float, float], repeats: tuple[float, ...] = (),
    overruns: int = 0, excess: float = 0.0,
) -> ClosedLoop:  # fmt: skip
    """Plans predicted and measured so; the first one is the searched one."""
    plans = tuple(
        replace(loop_plan(at, predicted, pool[0]), searched=at == 0)
        for at, (predicted, _) in enumerate(pairs)
    )
    done = tuple(trained(*pair, overruns) for pair in pairs)
    again = (done[0], *(trained(1.0, seconds) for seconds in repeats))
    found = totals(plans, done, again)
    verdict, reasons = verdict_of(found, Goals(), excess)
    return ClosedLoop(
        machine="a machine", spec=LoopSpec(), trained=done, repeats=again, totals=found,
        plans=LoopPlans(plans=plans, pool=600, left_out_slow=10), profile_excess=excess,
        verdict=verdict, reasons=reasons,
    )  # fmt: skip


def test_totals_by_hand(pool: tuple[Plan, ...]) -> None:
    loop = whole_loop(pool, (1.0, 1.0), (2.2, 2.0), (2.7, 3.0), repeats=(1.02,))
    found = loop.totals
    assert found.mape == pytest.approx((0.0 + 0.1 + 0.1) / 3)
    assert found.worst == pytest.approx(0.1)
    assert found.bias == pytest.approx(0.0)
    assert found.spearman == pytest.approx(1.0)
    assert found.regret == 0.0
    assert found.repeats_spread == pytest.approx(0.02)
    assert found.range == pytest.approx(3.0)
    rows, whole = loop_answer(loop).sections
    assert (rows.table().row_count, whole.table().row_count) == (3, 1)
    assert [row["error"] for row in loop_answer(loop).document()["rows"]] == pytest.approx(
        [0.0, 0.1, -0.1]
    )


def test_verdicts(pool: tuple[Plan, ...]) -> None:
    good = ((1.0, 1.0), (2.0, 2.0), (3.0, 3.1))
    assert whole_loop(pool, *good).verdict is Verdict.REACHED
    missed = whole_loop(pool, (1.0, 1.2), (2.0, 1.1), (3.0, 3.1))
    assert missed.verdict is Verdict.MISSED
    assert [each.split()[0] for each in missed.reasons] == ["MAPE", "Spearman", "regret"]
    # The machine's fault is never a missed goal.
    for loop, word in (
        (whole_loop(pool, (1.0, 1.2), (2.0, 1.1), overruns=40), "40%"),
        (whole_loop(pool, *good, repeats=(1.05,)), "5.0%"),
        (whole_loop(pool, *good, excess=0.14), "14.0%"),
    ):
        assert loop.verdict is Verdict.INVALID
        assert word in loop.reasons[0]


def test_a_folder_goes_on_with_the_same_loop_only(tmp_path: Path) -> None:
    spec = LoopSpec(plans=4)
    open_folder(tmp_path / "loop", spec)
    open_folder(tmp_path / "loop", spec)
    with pytest.raises(InputError, match="other options"):
        open_folder(tmp_path / "loop", replace(spec, seed=1))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(InputError, match="not empty"):
        open_folder(tmp_path / "other", spec)
    with pytest.raises(InputError, match="plans is 1"):
        LoopSpec(plans=1)
