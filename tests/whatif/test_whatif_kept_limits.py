"""No command gives a plan that breaks a limit: replan, another target, other aims, plan files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from search_jobs import cluster, island, job, model

from hetplan.cluster.spec import Cluster, Site
from hetplan.cost.energy.energy import energy_of
from hetplan.cost.estimate import estimate
from hetplan.errors import InfeasibleError, InputError
from hetplan.job.spec import Objective, Pins
from hetplan.plans.check import check_plan
from hetplan.plans.plan import Plan
from hetplan.predict.fit import FittedPredictor
from hetplan.search.files import save_result
from hetplan.search.result import Question, SearchResult
from hetplan.whatif.ask import searched
from hetplan.whatif.objectives import by_objective
from hetplan.whatif.replan import Terms, replan
from hetplan.whatif.within_limits import keeps_limits

_PREDICTOR = FittedPredictor.datasheet_only()


def site(nodes: int = 4, others: int = 2, **limits: float) -> Cluster:
    """An island of one limited site, and one of another; 500 W a device, two in a node."""
    first = replace(island("a", nodes=nodes, per_node=2), power_watts=500.0, region="north")
    second = replace(island("b", nodes=others, per_node=2), power_watts=500.0, region="south")
    sites = (
        Site(name="A", regions=("north",), **limits),  # type: ignore[arg-type]
        Site(name="B", regions=("south",)),
    )
    return replace(cluster(first, second), sites=sites)


def planned(within: Cluster, **changes: object) -> SearchResult:
    asked = Question(model=model(6), cluster=within, job=replace(job(8, gap=0.05), **changes))  # type: ignore[arg-type]
    return searched(asked, _PREDICTOR)


def drawn(plan: Plan, within: Cluster, found: SearchResult) -> float:
    inputs = found.inputs
    priced = estimate(plan, inputs.model, within, inputs.job, _PREDICTOR)
    energy = energy_of(plan, priced, within)
    assert energy is not None
    return sum(each.mean_watts for each in energy.islands if each.site == "A")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_no_next_plan_breaks_a_limit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes, others = int(rng.integers(2, 5)), int(rng.integers(1, 3))
    before = planned(site(nodes, others))
    watts = float(rng.uniform(0.2, 0.95)) * 1000.0 * nodes
    limits = (
        {"power_limit_watts": watts} if seed % 2 else {"max_nodes": int(rng.integers(1, nodes))}
    )
    left = site(nodes, others, **limits)  # type: ignore[arg-type]
    try:
        found = replan(before, left, _PREDICTOR, Terms(search_seconds=600.0))
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            planned(left)
        return
    inputs = found.result.inputs
    for plan in (found.result.plan, *(each.plan for each in found.others)):
        assert not check_plan(plan, inputs.model, left, inputs.job)
        assert drawn(plan, left, found.result) <= limits.get("power_limit_watts", 1e9) * (1 + 1e-9)
    assert found.result.certificate is not None
    assert found.result.certificate.lower_bound_seconds <= found.best.step_seconds


@pytest.mark.slow
def test_an_old_plan_within_the_limit_goes_on_where_the_search_finds_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = site(max_nodes=1)
    before = planned(left, pin=Pins(pipelines=1))
    one = replan(before, left, _PREDICTOR, Terms(search_seconds=600.0))
    assert keeps_limits(one.result.plan, one.result.estimate, one.result.inputs)
    monkeypatch.setattr("hetplan.whatif.within_limits._MOST_ASKED", 0)
    again = replan(before, left, _PREDICTOR, Terms(search_seconds=600.0))
    assert again.best.words == "the old plan goes on"
    assert keeps_limits(again.result.plan, again.result.estimate, again.result.inputs)


@pytest.mark.slow
def test_other_aims_keep_the_power_limit() -> None:
    asked = planned(site(power_limit_watts=2100.0), objective=Objective.ENERGY_PER_TOKEN)
    found = by_objective(asked, _PREDICTOR)
    for plan in (found.plan, *(each.plan for each in found.alternatives)):
        assert drawn(plan, found.inputs.cluster, found) <= 2100.0 * (1 + 1e-9)


def test_a_plan_file_that_breaks_a_power_limit_is_refused_by_name(tmp_path: Path) -> None:
    free = planned(site())
    limited = replace(free, inputs=replace(free.inputs, cluster=site(power_limit_watts=500.0)))
    file = tmp_path / "plan.json"
    save_result(limited, file)
    for words in (("verify",), ("emit", "--out", str(tmp_path / "out")), ("estimate",)):
        outcome = run(words[0], str(file), *words[1:])
        assert outcome.exit_code == 2
        assert "power_limit of A: 500 W, the plan takes" in outcome.stderr


def test_a_power_limit_over_nodes_of_unknown_power_is_refused() -> None:
    dark = site(power_limit_watts=2100.0)
    dark = dark.with_island(replace(dark.island("a"), power_watts=None))
    with pytest.raises(InputError, match="power of a is not known; say `power` of the island"):
        planned(dark)
    elsewhere = site(power_limit_watts=500.0)
    elsewhere = elsewhere.with_island(replace(elsewhere.island("b"), power_watts=None))
    free = planned(site())
    assert not keeps_limits(free.plan, free.estimate, free.inputs.changed(cluster=elsewhere))
    assert not keeps_limits(free.plan, free.estimate, free.inputs.changed(cluster=dark))
