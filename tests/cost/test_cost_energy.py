"""Watts by load, energy at the meter and cost, against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from search_jobs import cluster, island, job, model

from hetplan.cluster.power import PowerLaw, power_law
from hetplan.cluster.spec import Cluster, Island, Site
from hetplan.cost.energy.energy import energy_of, rent_usd_per_hour, usd_per_step, whole_run
from hetplan.cost.estimate import estimate
from hetplan.cost.goodput.values import Cause
from hetplan.errors import InputError
from hetplan.job.run import Run
from hetplan.job.spec import Job, Pins
from hetplan.plans.layout import Layout, plan_of_layout
from hetplan.predict.fit import FittedPredictor

_PREDICTOR = FittedPredictor.datasheet_only()


def board(name: str, watts: float, **changes: object) -> Island:
    plain = island(name, nodes=2, per_node=4)
    kind = replace(plain.device, max_power_watts=watts)
    return replace(plain, device=kind, **changes)  # type: ignore[arg-type]


def law_of(one: Island, *sites: Site) -> PowerLaw | None:
    return power_law(replace(cluster(one), sites=sites), one)


def test_h100_has_the_fitted_watts_and_other_kinds_those_of_their_boards_limit() -> None:
    h100 = board("a", 700.0)
    h100 = replace(h100, device=replace(h100.device, kind="nvidia-h100-80gb-sxm"))
    fitted, other = law_of(h100), law_of(board("a", 350.0))
    assert fitted is not None
    assert other is not None
    assert (fitted.computing_watts, fitted.communicating_watts) == (961.0, 498.0)
    assert fitted.idle_watts == pytest.approx(961.0 - 0.985 * 700 + 0.1 * 700)
    assert other.computing_watts == pytest.approx(fitted.computing_watts / 2)
    assert other.log_halfwidth > fitted.log_halfwidth
    assert "scaled by the board's limit" in other.source
    assert law_of(island("a")) is None


def test_a_cap_and_the_cluster_files_own_power_come_before_the_law() -> None:
    capped = law_of(board("a", 700.0, power_cap_watts=400.0))
    assert capped is not None
    assert capped.computing_watts == pytest.approx(961.0 - 0.985 * 700 + 400)
    said = board("a", 700.0, power_watts=1200.0)
    here = Site(name="s", regions=("here",), pue=1.2)
    for law, loaded in ((law_of(said), 1200.0), (law_of(said, here), 1000.0)):
        assert law is not None
        assert law.computing_watts == pytest.approx(loaded)
        assert law.communicating_watts == pytest.approx(loaded * 498 / 961)
        assert law.source == "`power` of the cluster file"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"idle_watts": -1.0}, "idle_watts is -1.0"),
        ({"computing_watts": float("nan")}, "computing_watts is nan"),
        ({"communicating_watts": 50.0}, "a device that does more draws no less"),
    ],
)
def test_watts_that_cannot_be_are_told(changes: dict[str, float], words: str) -> None:
    right = {"idle_watts": 100.0, "communicating_watts": 200.0, "computing_watts": 300.0}
    with pytest.raises(InputError, match=words):
        PowerLaw(kind="k", log_halfwidth=0.1, source="test", **{**right, **changes})


def test_energy_is_watts_times_seconds_of_every_load_and_cost_follows() -> None:
    site = Site(name="s", regions=("here",), pue=1.5, price_usd_per_joule=2e-8)
    of = replace(cluster(board("a", 700.0, price_usd_per_device_hour=2.0)), sites=(site,))
    asked: Job = replace(job(8), pin=Pins())
    # Six of the eight devices: two of the second node are idle, and its rent is paid.
    plan = plan_of_layout(Layout(tp=1, pp=3, dp=2, microbatch_size=1), model(6), of, asked)
    priced = estimate(plan, model(6), of, asked, _PREDICTOR)
    energy, law = energy_of(plan, priced, of), power_law(of, of.islands[0])
    assert energy is not None
    assert law is not None
    (part,) = energy.islands
    busy = sum(2 * each.busy_seconds for each in priced.stages)
    rest = 6 * priced.step_seconds - busy
    joules = busy * law.computing_watts + rest * law.communicating_watts
    joules += 2 * priced.step_seconds * law.idle_watts
    assert energy.joules_per_step == pytest.approx(1.5 * joules)
    assert part.mean_watts * priced.step_seconds == pytest.approx(energy.joules_per_step)
    assert (part.nodes, part.devices, part.site) == (2, 6, "s")
    low, high = energy.kwh_range
    assert low < energy.joules_per_step / 3.6e6 < high
    assert rent_usd_per_hour(plan, of) == 16.0
    cost = 16.0 * priced.step_seconds / 3600 + 2e-8 * energy.joules_per_step
    assert usd_per_step(plan, priced, model(6), of, asked) == pytest.approx(cost)


def test_without_a_power_there_is_no_energy_and_no_cost_where_it_is_paid() -> None:
    def costs(of: Cluster) -> tuple[bool, float | None]:
        plan = plan_of_layout(Layout(tp=1, pp=1, dp=2, microbatch_size=1), model(6), of, job(8))
        priced = estimate(plan, model(6), of, job(8), _PREDICTOR)
        known = energy_of(plan, priced, of) is not None
        return known, usd_per_step(plan, priced, model(6), of, job(8))

    free = cluster(island("a"))
    site = Site(name="s", regions=("here",), price_usd_per_joule=2e-8)
    assert costs(free) == (False, None)
    assert costs(replace(free, sites=(site,))) == (False, None)
    known, cost = costs(replace(cluster(board("a", 700.0)), sites=(site,)))
    assert known
    assert cost is not None


def test_a_whole_run_pays_idle_watts_while_it_stands_still() -> None:
    """Energy and dollars of the run, summed by cause of lost time."""
    site = Site(name="s", regions=("here",), pue=1.5, price_usd_per_joule=2e-8)
    of = replace(cluster(board("a", 700.0, price_usd_per_device_hour=2.0)), sites=(site,))
    run = Run(device_failures=0.999, storage_bytes_per_second=1e8)
    asked = replace(job(8), run=run, total_tokens=10**10)
    plan = plan_of_layout(Layout(tp=1, pp=3, dp=2, microbatch_size=1), model(6), of, asked)
    priced = estimate(plan, model(6), of, asked, _PREDICTOR)
    found, energy = whole_run(plan, priced, model(6), of, asked), energy_of(plan, priced, of)
    assert found is not None
    assert energy is not None
    lost = {each.cause: each.seconds for each in found.goodput.lost}
    assert lost.keys() == {*Cause} - {Cause.DATA}
    assert all(seconds > 0 for cause, seconds in lost.items() if cause is not Cause.FAILOVER)
    steps = 10**10 / (8 * 1024)
    moving = steps * priced.step_seconds + lost[Cause.LOST_WORK]
    still = sum(seconds for cause, seconds in lost.items() if cause is not Cause.LOST_WORK)
    law = power_law(of, of.islands[0])
    assert law is not None
    joules = energy.mean_watts * moving + 1.5 * 8 * law.idle_watts * still
    assert found.kwh == pytest.approx(joules / 3.6e6)
    assert found.usd == pytest.approx(16.0 / 3600 * (moving + still) + 2e-8 * joules)
    assert found.kwh > steps * energy.kwh_per_step
    assert found.days == pytest.approx((moving + still) / 86400)
    assert whole_run(plan, priced, model(6), of, replace(asked, total_tokens=None)) is None
    endless = replace(
        asked, run=replace(run, restart_seconds=300 * 86400.0, device_failures=0.9999999)
    )
    never = whole_run(plan, priced, model(6), of, endless)
    assert never is not None
    assert (never.kwh, never.usd) == (None, None)
