"""The closed loop's plans are legal and well chosen, and its numbers are what they say."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.closed_loop.plans import (
    FORMS,
    PoolSpace,
    choose,
    dealt_out,
    draw_pool,
    form_of,
    name_of,
)
from evaluation.closed_loop.results import check_drawable, draw, judge, loop_answer, totals
from evaluation.closed_loop.values import (
    CLUSTER_FILE,
    JOB_FILE,
    MIN_STALLED_FRACTION,
    MODEL_FILE,
    ClosedLoop,
    Goals,
    LoopPlan,
    LoopRow,
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
from hetplan.runtime.placement import place_ranks

CLUSTER, MODEL, JOB = load_cluster(CLUSTER_FILE), load_model(MODEL_FILE), load_job(JOB_FILE)
SPEEDS = {"fast": 1.0, "medium": 2 / 3, "slow": 1 / 3}


SPACE = PoolSpace(model=MODEL, cluster=CLUSTER, job=JOB, speeds=SPEEDS)


@pytest.fixture(scope="module")
def pool() -> tuple[Plan, ...]:
    return draw_pool(SPACE, seed=3, size=60)


def test_the_pool_is_legal_and_of_every_form(pool: tuple[Plan, ...]) -> None:
    assert len(pool) == 60
    assert len({name_of(plan, CLUSTER, JOB, MODEL) for plan in pool}) == 60
    assert {form_of(plan) for plan in pool} == set(FORMS)
    singles = draw_pool(replace(SPACE, single=True), seed=3, size=20)
    assert all(len(plan.pipelines) == 1 for plan in singles)
    for plan in pool:
        assert not check_plan(plan, MODEL, CLUSTER, JOB)
        assert not list(launch_faults(plan))


def test_a_pool_of_one_kind_uses_all_of_its_hosts_and_no_others() -> None:
    for island in CLUSTER.islands:
        first = CLUSTER.first_device(island.name)
        devices = set(range(first, first + len(island.usable_nodes)))
        plans = draw_pool(replace(SPACE, only=(island.name,)), seed=1, size=5)
        assert plans
        for plan in plans:
            assert {place.device for place in place_ranks(plan)} == devices


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


def loop_plan(number: int, seconds: float, stalled: float, plan: Plan) -> LoopPlan:
    return LoopPlan(
        name=f"plan {number}",
        form=FORMS[number % len(FORMS)],
        plan=plan,
        predicted_seconds=seconds,
        stalled=stalled,
    )


def priced(pool: tuple[Plan, ...], stalled_from: float) -> list[LoopPlan]:
    chance = random.Random(1)
    seconds = sorted(1.0 + 4.0 * chance.random() for _ in range(200))
    return [
        loop_plan(number, each, 0.4 if chance.random() > stalled_from else 0.1, pool[0])
        for number, each in enumerate(seconds)
    ]


def test_the_choice_has_the_best_the_searched_and_every_stratum(pool: tuple[Plan, ...]) -> None:
    plans = priced(pool, 0.8)
    searched = replace(plans[3], name="searched", searched=True, predicted_seconds=1.0)
    found = choose(plans, searched, plans=20, best=5, stalled=8, longest=3.0, seed=0)
    assert found == choose(plans, searched, plans=20, best=5, stalled=8, longest=3.0, seed=0)
    names = [each.name for each in found.plans]
    assert len(set(names)) == 20
    assert names[:5] == ["searched", *(each.name for each in plans[:4])]
    assert sum(each.stalled >= MIN_STALLED_FRACTION for each in found.plans) >= 8
    kept = [each for each in plans if each.predicted_seconds <= 3.0]
    assert found.left_out_slow == len(plans) - len(kept)
    # From every one of the equal strata one.
    rest = kept[4:]
    for at in range(15):
        stratum = {each.name for each in rest[at * len(rest) // 15 : (at + 1) * len(rest) // 15]}
        assert len(stratum & set(names)) == 1


def trained(name: str, predicted: float, measured: float, **more: float) -> TrainedPlan:
    return TrainedPlan(
        name=name,
        predicted_seconds=predicted,
        measured_seconds=measured,
        step_seconds=(measured, 1.01 * measured),
        losses=(6.2,),
        paced_passes=100,
        overruns=round(more.get("overruns", 0)),
        counted_long_bytes=1e6,
        ledger_long_bytes=1e6,
        carried_long_bytes=5_500_000,
        all_steps=5,
        load_average=more.get("load", 1.0),
        steal=0.0,
    )


def rows(pairs: list[tuple[float, float]], **more: float) -> list[LoopRow]:
    return [
        LoopRow(
            name=f"plan {number}",
            form=FORMS[number % len(FORMS)],
            searched=number == 0,
            stalled=0.3 if number % 2 else 0.1,
            trained=trained(f"plan {number}", *pair, **more),
        )
        for number, pair in enumerate(pairs)
    ]


def test_totals_by_hand() -> None:
    found = totals(
        rows([(1.0, 1.0), (2.2, 2.0), (2.7, 3.0)]),
        [trained("plan 0", 1.0, 1.0), trained("plan 0", 1.0, 1.02)],
    )
    assert found["mape"] == pytest.approx((0.0 + 0.1 + 0.1) / 3)
    assert found["worst"] == pytest.approx(0.1)
    assert found["bias"] == pytest.approx(0.0)
    assert found["spearman"] == 1.0
    assert found["regret"] == 0.0
    assert found["repeats_spread"] == pytest.approx(0.02)
    assert found["range"] == pytest.approx(3.0)
    assert found["stalled_plans"] == 1


def test_verdicts() -> None:
    good = rows([(1.0, 1.0), (2.0, 2.0), (3.0, 3.1)])
    once = [good[0].trained]

    def verdict(found: list[LoopRow], repeats: list[TrainedPlan]) -> tuple[Verdict, str]:
        judged = judge(found, repeats, jitter=0.0, goals=Goals())
        return judged.verdict, "; ".join(judged.reasons)

    assert verdict(good, once) == (Verdict.REACHED, "")
    missed, why = verdict(rows([(1.0, 1.2), (2.0, 1.1), (3.0, 3.1)]), once)
    assert missed is Verdict.MISSED
    assert "MAPE" in why
    assert "Spearman" in why
    assert "regret" in why
    # The machine's fault is never a missed goal.
    busy = rows([(1.0, 1.2), (2.0, 1.1)], overruns=40.0, load=9.0)
    assert verdict(busy, [busy[0].trained])[0] is Verdict.INVALID
    unlike = [trained("plan 0", 1.0, 1.0), trained("plan 0", 1.0, 1.05)]
    invalid, why = verdict(good, unlike)
    assert invalid is Verdict.INVALID
    assert "5.0%" in why
    profiled_busy = judge(good, once, jitter=0.0, goals=Goals(), profile_excess=0.14)
    assert profiled_busy.verdict is Verdict.INVALID
    assert "14.0%" in profiled_busy.reasons[0]


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
    for jitter in (-0.01, 5.0, float("nan")):
        with pytest.raises(InputError, match="jitter is"):
            LoopSpec(jitter=jitter)


def whole_loop() -> ClosedLoop:
    some = rows([(1.0, 1.0), (2.2, 2.0), (2.7, 3.0), (4.0, 4.0), (5.0, 5.0)])
    passes = tuple(
        judge(some, [some[0].trained], jitter=jitter, goals=Goals()) for jitter in (0.0, 0.05)
    )
    return ClosedLoop(
        machine="a machine",
        spec=LoopSpec(),
        weight="",
        passes=passes,
        hethub=None,
        pool=600,
        left_out_slow=10,
    )


def test_tables_and_drawing_show_every_plan(tmp_path: Path) -> None:
    found = whole_loop()
    answer = loop_answer(found)
    assert [section.table().row_count for section in answer.sections] == [5, 5, 2]
    assert any("goals missed" in line for line in answer.lines)
    assert answer.document()["passes"][0]["totals"]["mape"] == found.passes[0].totals["mape"]
    for name in ("one.svg", "two.svg"):
        draw(found, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    with pytest.raises(InputError, match=r"\.svg"):
        check_drawable(tmp_path / "plot.png")
