"""The closed loop's plans are legal and well chosen, and its numbers are what they say."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from evaluation.drawing import check_drawable
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from evaluation.closed_loop import judging, plot
from evaluation.closed_loop.choosing import MUCH_STALLED, choose
from evaluation.closed_loop.files import LoopFiles, open_folder
from evaluation.closed_loop.loop import training_order
from evaluation.closed_loop.pool import FORMS, Drawn, at_most, dealt_out, draw_pool
from evaluation.closed_loop.structures import hosts_of, structures
from evaluation.closed_loop.tables import LoopOptions, loop_lines, loop_tables
from evaluation.closed_loop.values import (
    ClosedLoop,
    Goals,
    LoopPlan,
    LoopRow,
    LoopSpec,
    TrainedPlan,
    Verdict,
)
from hetplan.cluster.load import load_cluster
from hetplan.errors import InputError
from hetplan.job.load import load_job
from hetplan.model.load import load_model
from hetplan.plans.check import check_plan
from hetplan.plans.launch import launch_faults

FILES = LoopFiles(folder=Path("unused"))
CLUSTER, MODEL, JOB = load_cluster(FILES.cluster), load_model(FILES.model), load_job(FILES.job)
SPEEDS = {"fast": 1.0, "medium": 2 / 3, "slow": 1 / 3}


@pytest.fixture(scope="module")
def pool() -> tuple[Drawn, ...]:
    return draw_pool(MODEL, CLUSTER, JOB, speeds=SPEEDS, seed=3, size=60)


def test_structures_are_counted_by_hand_on_two_hosts() -> None:
    assert set(structures(["a", "a"])) == {
        ((("a",), ("a",)),),
        ((("a", "a"),),),
        ((("a",),), (("a",),)),
    }
    found = set(structures(["a", "b"]))
    assert found == {
        ((("a",), ("b",)),),
        ((("b",), ("a",)),),
        ((("a", "b"),),),
        ((("a",),), (("b",),)),
    }


def test_every_structure_has_each_host_at_most_once() -> None:
    hosts = hosts_of(CLUSTER)
    found = structures(hosts)
    assert len(found) == len(set(found))
    for structure in found:
        used = Counter(host for pipeline in structure for stage in pipeline for host in stage)
        assert not used - Counter(hosts)
        assert sum(used.values()) >= 2
    orders = {structure[0] for structure in found if len(structure) == 1 and len(structure[0]) == 4}
    assert len(orders) == 12, "four hosts, two of them alike, stand in 4! / 2 orders"


def test_the_pool_is_legal_and_of_every_form(pool: tuple[Drawn, ...]) -> None:
    assert len(pool) == 60
    assert len({drawn.name for drawn in pool}) == 60
    assert {drawn.form for drawn in pool} == set(FORMS)
    for drawn in pool:
        assert not check_plan(drawn.plan, MODEL, CLUSTER, JOB)
        assert not list(launch_faults(drawn.plan))


def test_the_pool_has_what_a_loop_must_test(pool: tuple[Drawn, ...]) -> None:
    pipelines = [drawn.plan.pipelines for drawn in pool]
    assert any(len({p.num_microbatches for p in each}) > 1 for each in pipelines)
    layers = [[stage.num_layers for p in each for stage in p.stages] for each in pipelines]
    assert any(len(set(each)) > 1 for each in layers)
    assert any(not drawn.plan.unused_devices for drawn in pool)
    slow = CLUSTER.first_device("slow")
    assert any(slow in part.devices() for drawn in pool for part in drawn.plan.unused_devices), (
        "a plan without the slowest host"
    )
    assert any(len(stage.replicas) > 1 for each in pipelines for p in each for stage in p.stages)


def test_a_seed_makes_one_pool(pool: tuple[Drawn, ...]) -> None:
    again = draw_pool(MODEL, CLUSTER, JOB, speeds=SPEEDS, seed=3, size=60)
    assert again == pool
    other = draw_pool(MODEL, CLUSTER, JOB, speeds=SPEEDS, seed=4, size=60)
    assert {drawn.name for drawn in other} != {drawn.name for drawn in pool}


def test_a_pool_of_some_hosts_and_few_microbatches() -> None:
    job = replace(JOB, global_batch_size=64)
    found = draw_pool(
        MODEL,
        CLUSTER,
        job,
        speeds=SPEEDS,
        seed=0,
        size=10,
        most_microbatches=16,
        only=("fast",),
        single=True,
    )
    fast = set(range(CLUSTER.first_device("fast"), CLUSTER.first_device("fast") + 2))
    assert found
    for drawn in found:
        assert at_most(drawn.plan, 16)
        assert len(drawn.plan.pipelines) == 1
        used = {d for r in drawn.plan.replicas for part in r.devices for d in part.devices()}
        assert used == fast


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


def loop_plan(number: int, seconds: float, stalled: float, drawn: Drawn) -> LoopPlan:
    return LoopPlan(
        name=f"plan {number}",
        form=FORMS[number % len(FORMS)],
        plan=drawn.plan,
        predicted_seconds=seconds,
        stalled=stalled,
    )


def priced(pool: tuple[Drawn, ...], stalled_from: float) -> list[LoopPlan]:
    chance = random.Random(1)
    seconds = sorted(1.0 + 4.0 * chance.random() for _ in range(200))
    return [
        loop_plan(number, each, 0.4 if chance.random() > stalled_from else 0.1, pool[0])
        for number, each in enumerate(seconds)
    ]


def test_the_choice_has_the_best_the_searched_and_every_stratum(pool: tuple[Drawn, ...]) -> None:
    plans = priced(pool, 0.8)
    searched = replace(plans[3], name="searched", searched=True, predicted_seconds=1.0)
    found = choose(plans, searched, plans=20, best=5, stalled=8, longest=3.0, seed=0)
    assert found == choose(plans, searched, plans=20, best=5, stalled=8, longest=3.0, seed=0)
    names = [each.name for each in found.plans]
    assert len(set(names)) == 20
    assert names[:5] == ["searched", *(each.name for each in plans[:4])]
    assert sum(each.stalled >= MUCH_STALLED for each in found.plans) >= 8
    kept = [each for each in plans if each.predicted_seconds <= 3.0]
    assert found.left_out_slow == len(plans) - len(kept)
    # From every one of the equal strata one.
    rest = kept[4:]
    for at in range(15):
        stratum = {each.name for each in rest[at * len(rest) // 15 : (at + 1) * len(rest) // 15]}
        assert len(stratum & set(names)) == 1


def test_a_searched_plan_that_is_not_among_the_best_comes_on_top(pool: tuple[Drawn, ...]) -> None:
    plans = priced(pool, 0.5)
    searched = replace(plans[50], name="searched", searched=True)
    found = choose(plans, searched, plans=20, best=5, stalled=8, longest=5.0, seed=0)
    names = [each.name for each in found.plans]
    assert names[:5] == [each.name for each in plans[:5]]
    assert "searched" in names
    assert len(names) == 20


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


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=3, max_size=20))
@settings(max_examples=200, deadline=None)
def test_spearman_is_scipys(pairs: list[tuple[int, int]]) -> None:
    one, other = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    found = judging.spearman(one, other)
    if len(set(one)) == 1 or len(set(other)) == 1:
        assert found == 1.0
    else:
        assert found == pytest.approx(spearmanr(one, other).statistic, abs=1e-12)


def test_totals_by_hand() -> None:
    found = judging.totals(
        rows([(1.0, 1.0), (2.2, 2.0), (2.7, 3.0)]),
        [trained("plan 0", 1.0, 1.0), trained("plan 0", 1.0, 1.02)],
    )
    assert found.mape == pytest.approx((0.0 + 0.1 + 0.1) / 3)
    assert found.worst == pytest.approx(0.1)
    assert found.bias == pytest.approx(0.0)
    assert found.spearman == 1.0
    assert found.regret == 0.0
    assert found.repeats_spread == pytest.approx(0.02)
    assert found.range == pytest.approx(3.0)
    assert found.stalled_plans == 1


def test_verdicts() -> None:
    good = rows([(1.0, 1.0), (2.0, 2.0), (3.0, 3.1)])
    once = [good[0].trained]

    def verdict(found: list[LoopRow], repeats: list[TrainedPlan]) -> tuple[Verdict, str]:
        judged = judging.judge(found, repeats, jitter=0.0, goals=Goals())
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
    profiled_busy = judging.judge(good, once, jitter=0.0, goals=Goals(), profile_excess=0.14)
    assert profiled_busy.verdict is Verdict.INVALID
    assert "14.0%" in profiled_busy.reasons[0]


def test_repeats_of_the_searched_plan_are_spread_over_a_pass(pool: tuple[Drawn, ...]) -> None:
    plans = [loop_plan(n, 1.0 + n, 0.1, pool[0]) for n in range(10)]
    plans[2] = replace(plans[2], searched=True)
    order = training_order(plans, 3)
    assert len(order) == 12
    assert [name for name, plan in order if plan.searched] == ["2", "repeat-1", "repeat-2"]
    assert order[-1][0] == "repeat-2"
    assert len(training_order(plans, 1)) == 10


def test_a_folder_goes_on_with_the_same_loop_only(tmp_path: Path) -> None:
    spec = LoopSpec(plans=4)
    open_folder(tmp_path / "loop", spec)
    open_folder(tmp_path / "loop", spec)
    with pytest.raises(InputError, match="asked otherwise"):
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
        judging.judge(some, [some[0].trained], jitter=jitter, goals=Goals())
        for jitter in (0.0, 0.05)
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
    tables = list(loop_tables(found))
    assert [table.row_count for table in tables] == [5, 5, 2]
    assert any("goals missed" in line for line in loop_lines(found))
    for name in ("one.svg", "two.svg"):
        plot.draw(found, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    with pytest.raises(InputError, match=r"\.svg"):
        check_drawable(tmp_path / "plot.png")
    assert not LoopOptions().any
    assert LoopOptions(seed=0).any
