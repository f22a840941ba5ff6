"""Other aims than the shortest step: what a step stays below, money, and a choice of plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from search_jobs import cluster, island, job, model
from sweep_files import plan_command, sweep_files

import hetplan
from hetplan.cluster.spec import Cluster
from hetplan.cost.energy.energy import energy_of, rent_usd_per_hour, usd_per_step, whole_run
from hetplan.cost.estimate import step_quantile
from hetplan.cost.goodput.run import goodput
from hetplan.cost.step_model.pricer import Pricer
from hetplan.job.run import KindFailures, Run
from hetplan.job.spec import Forbids, Job, Objective, Pins
from hetplan.plans.check import check_plan
from hetplan.predict.fit import FittedPredictor
from hetplan.search.files import load_legal_plan, save_result
from hetplan.search.result import SearchResult
from hetplan.search.search import search
from hetplan.units import format_brief
from hetplan.whatif.objectives import _beats, by_objective, layout

_PREDICTOR = FittedPredictor.datasheet_only()
_PINS = Pins(cp=1, virtual_stages=1, recompute=False)


def asked(batch: int = 8, **changes: object) -> Job:
    return replace(job(batch, gap=0.1), pin=_PINS, **changes)  # type: ignore[arg-type]


def priced(cheap: float, dear: float) -> Cluster:
    one = replace(island("a", teraflops=60, nodes=2), price_usd_per_device_hour=cheap)
    two = island("b", kind="other", teraflops=100, nodes=2)
    return cluster(one, replace(two, price_usd_per_device_hour=dear))


def islands_of(result: SearchResult) -> set[str]:
    return {stage.island for stage in result.estimate.stages}


def test_a_quantile_plan_is_no_worse_at_its_quantile_and_says_that_nothing_is_proven() -> None:
    calm = island("a", teraflops=60, nodes=2)
    wild = replace(island("b", kind="other", teraflops=80, nodes=2), speed_spread=0.5)
    of = cluster(calm, wild)
    fastest = search(model(6), of, asked(), _PREDICTOR)
    robust = hetplan.plan(model(6), of, asked(quantile=0.9), _PREDICTOR)
    pricer = Pricer(model(6), of, asked(), _PREDICTOR)
    at = [step_quantile(pricer, each.plan, 0.9) for each in (robust, fastest)]
    assert at[0] <= at[1] * (1 + 1e-12)
    assert robust.objective.startswith("p90 of the step: ")
    assert "no certificate goes with this aim" in robust.objective
    # The bound that stands beside it is still one of the step time.
    assert robust.certificate is not None
    assert robust.certificate.lower_bound_seconds <= fastest.estimate.step_seconds * (1 + 1e-9)
    assert robust.estimate.step_seconds >= fastest.certificate.lower_bound_seconds
    assert fastest.objective == ""


def test_dear_devices_stay_out_where_money_is_the_aim() -> None:
    of = priced(cheap=1.0, dear=50.0)
    fast = hetplan.plan(model(6), of, asked(), _PREDICTOR)
    cheap = hetplan.plan(model(6), of, asked(objective=Objective.COST_PER_TOKEN), _PREDICTOR, top=3)
    assert "b" in islands_of(fast)
    assert islands_of(cheap) == {"a"}
    costs = [usd_per_step(r.plan, r.estimate, model(6), of, asked()) for r in (cheap, fast)]
    assert None not in costs
    assert costs[0] < costs[1]
    rent = rent_usd_per_hour(cheap.plan, of)
    assert rent in (1.0, 2.0)
    assert costs[0] == pytest.approx(rent / 3600 * cheap.estimate.step_seconds)
    per_million = costs[0] / (8 * 1024) * 1e6
    assert cheap.objective.startswith(f"cost per token: {per_million:.4g} USD per 1M")


def test_alternatives_are_legal_unlike_and_none_is_beaten(tmp_path: Path) -> None:
    of = priced(cheap=1.0, dear=3.0)
    found = hetplan.plan(model(6), of, asked(), _PREDICTOR, top=5)
    assert 1 <= len(found.alternatives) <= 4
    layouts = [layout(found.plan), *(layout(each.plan) for each in found.alternatives)]
    assert len(set(layouts)) == len(layouts)
    figures = []
    for each in found.alternatives:
        assert check_plan(each.plan, model(6), of, asked()) == ()
        assert each.quantile == 0.9
        assert each.step_seconds >= found.estimate.step_seconds * (1 - 1e-9)
        figures.append((each.step_seconds, each.quantile_seconds, each.usd_per_step, each.devices))
    for one in figures:
        for two in figures:
            assert one is two or any(a > b for a, b in zip(one, two, strict=True))
    save_result(found, tmp_path / "plan.json")
    assert load_legal_plan(tmp_path / "plan.json") == found
    assert hetplan.plan(model(6), of, asked(), _PREDICTOR, top=5) == found


def test_no_plan_of_the_pool_beats_a_point_of_the_front_or_passes_its_gaps() -> None:
    plain = priced(cheap=1.0, dear=3.0)
    of = replace(
        plain,
        islands=tuple(
            replace(each, device=replace(each.device, max_power_watts=watts))
            for each, watts in zip(plain.islands, (400.0, 700.0), strict=True)
        ),
    )
    fastest = hetplan.plan(model(6), of, asked(), _PREDICTOR)
    found = by_objective(fastest, _PREDICTOR, front=True)
    assert found.is_front
    assert not fastest.is_front
    points = found.alternatives
    assert len(points) > 1
    assert points[0].step_seconds == min(each.step_seconds for each in points)
    figures = [(p.step_seconds, p.usd_per_step, p.kwh_per_step, p.devices) for p in points]
    for one, gaps in zip(figures, points, strict=True):
        for two in figures:
            assert one is two or any(a < b for a, b in zip(one, two, strict=True))
            assert two[1] >= one[1] * (1 - gaps.usd_gap)
            assert two[2] >= one[2] * (1 - gaps.kwh_gap)
        assert 0 <= gaps.gap < 1
    quick, cheap = points[0], min(points, key=lambda each: each.usd_per_step or 0.0)
    assert not _beats(quick, cheap)
    assert not _beats(replace(quick, usd_per_step=None, devices=1), cheap)  # its run never ends
    energetic = asked(objective=Objective.ENERGY_PER_TOKEN)
    least = by_objective(
        replace(fastest, inputs=replace(fastest.inputs, job=energetic)),
        _PREDICTOR,
    )
    energies = [energy_of(r.plan, r.estimate, of).kwh_per_step for r in (least, fastest)]
    assert energies[0] == min(kwh for _, _, kwh, _ in figures)
    assert energies[0] <= energies[1]
    assert "no plan of them takes less than" in least.objective


def test_an_island_that_must_stay_out_needs_no_price_for_a_bound() -> None:
    of = priced(cheap=1.0, dear=3.0)
    of = of.with_island(replace(of.island("b"), price_usd_per_device_hour=None))
    alone = asked(objective=Objective.COST_PER_TOKEN, forbid=Forbids(islands=("b",)))
    found = hetplan.plan(model(6), of, alone, _PREDICTOR)
    assert "USD (gap " in found.objective


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--objective", "cost"), "no price"),
        (("--objective", "fame"), "objective"),
        (("--set", "quantile=2"), "--set quantile: found 2; it must be at most"),
        (("--set", "objective=cost_per_token"), "no price"),
        (("--top", "0"), "--top"),
    ],
)
def test_aims_that_make_no_sense_exit_with_2(
    tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    sweep_files(tmp_path)
    done = plan_command(tmp_path, "--no-native", *options)
    assert done.exit_code == 2
    assert words in done.stderr
    assert not (tmp_path / "p.json").exists()


def test_the_days_of_a_run_choose_fewer_devices_where_these_fail() -> None:
    """One island of two often fails: with the other alone the run is shorter, the step longer."""
    frail = island("b", kind="frail", teraflops=100, nodes=2)
    of = cluster(island("a", teraflops=100, nodes=2), frail)
    rates = (KindFailures(kind="frail", probability=1 - 1e-13),)
    run = Run(kind_failures=rates, restart_seconds=30 * 86400.0)
    job_of = asked(total_tokens=10**12, run=run)
    fast = hetplan.plan(model(6), of, job_of, _PREDICTOR)
    short = hetplan.plan(model(6), of, replace(job_of, objective=Objective.DAYS), _PREDICTOR, top=3)
    assert "b" in islands_of(fast)
    assert islands_of(short) == {"a"}
    assert short.estimate.step_seconds > fast.estimate.step_seconds
    days = [
        goodput(each.plan, each.estimate, model(6), of, job_of).seconds for each in (short, fast)
    ]
    assert days[0] < days[1]
    assert short.objective.startswith(f"days: {format_brief(days[0])}; best of ")
    # Its proof: no run is shorter than its steps, and no step than the certificate's bound.
    assert short.certificate is not None
    least = 10**12 / (8 * 1024) * short.certificate.lower_bound_seconds
    assert f"no plan ends before {format_brief(least)}, its steps alone" in short.objective
    assert all(
        each.run_seconds is None or each.run_seconds >= days[0] for each in short.alternatives
    )


def test_lost_time_counts_in_money_where_the_run_is_known() -> None:
    """An island that is cheaper by the hour and often fails is dearer by the run."""
    of = priced(cheap=1.0, dear=2.5)
    frail = of.island("a")
    of = of.with_island(replace(frail, device=replace(frail.device, kind="frail")))
    run = Run(
        kind_failures=(KindFailures(kind="frail", probability=1 - 1e-13),),
        restart_seconds=30 * 86400.0,
    )
    by_step = asked(objective=Objective.COST_PER_TOKEN, run=run)
    whole = replace(by_step, total_tokens=10**12)
    cheap, steady = (hetplan.plan(model(6), of, each, _PREDICTOR) for each in (by_step, whole))
    assert islands_of(cheap) == {"a"}
    assert islands_of(steady) == {"b"}
    runs = [whole_run(each.plan, each.estimate, model(6), of, whole) for each in (cheap, steady)]
    assert runs[1].usd < runs[0].usd
    assert "with lost time; best of" in steady.objective
    assert steady.run == runs[1]
    assert steady.run.days == runs[1].goodput.seconds / 86400
    assert cheap.run is None
    per_million = runs[1].usd / 1e12 * 1e6
    assert steady.objective.startswith(f"cost per token: {per_million:.4g} USD per 1M")
