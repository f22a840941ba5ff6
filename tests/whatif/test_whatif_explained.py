"""What limits a plan, what a change is worth, why not another plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from search_jobs import cluster, island, job, model

from hetplan.cost.estimate import estimate
from hetplan.job.spec import Pins
from hetplan.predict.fit import FittedPredictor
from hetplan.search.result import Question, SearchResult
from hetplan.search.search import search
from hetplan.whatif.against import against
from hetplan.whatif.ask import Change
from hetplan.whatif.limits import FASTER, limits
from hetplan.whatif.shadow_prices import changes, shadow_prices

_PREDICTOR = FittedPredictor.datasheet_only()


@pytest.fixture(scope="module")
def found() -> SearchResult:
    of = cluster(island("a", nodes=2, per_node=2), island("b", kind="slow", teraflops=60, nodes=2))
    pins = Pins(cp=1, virtual_stages=1)
    return search(model(6), of, replace(job(8, gap=0.05), pin=pins), _PREDICTOR)


def test_all_that_limits_a_plan_adds_up_to_no_more_than_the_step(found: SearchResult) -> None:
    seen = limits(found, _PREDICTOR)
    assert seen.step_seconds == pytest.approx(found.estimate.step_seconds)
    # Passes a tenth shorter save a tenth of a step at most.
    assert 0 < sum(each.gain for each in seen.islands) <= FASTER + 1e-9 or len(seen.islands) > 1
    for each in (*seen.islands, *seen.stages):
        assert 0 <= each.gain <= FASTER + 1e-9
    for boundary in seen.boundaries:
        assert 0 <= boundary.gain < 1
    gains = [each.gain for each in seen.stages]
    assert gains == sorted(gains, reverse=True)


def test_a_faster_device_kind_is_worth_what_its_limit_says(found: SearchResult) -> None:
    """Passes a tenth shorter are those of a clock 1 / 0.9 as fast, communication inside aside."""
    seen = limits(found, _PREDICTOR)
    first = seen.islands[0]
    of = found.inputs.cluster
    faster = replace(
        of,
        islands=tuple(
            replace(each, clock_ratio=each.clock_ratio / (1 - FASTER))
            if each.name == first.island
            else each
            for each in of.islands
        ),
    )
    again = estimate(found.plan, found.inputs.model, faster, found.inputs.job, _PREDICTOR)
    gain = 1 - again.step_seconds / found.estimate.step_seconds
    assert 0 < gain <= first.gain + 1e-9


def test_changes_are_single_and_in_words_and_more_nodes_cost_nothing(found: SearchResult) -> None:
    """Today's layout is where the search with a change begins."""
    asked = Question(model=model(6), cluster=found.inputs.cluster, job=found.inputs.job)
    every = list(changes(asked))
    words = [each.words for each in every]
    assert len(words) == len(set(words))
    assert any("without pin virtual_stages: 1" in each for each in words)
    for each in every:
        assert each.question != asked, each.words
    more = [each for each in every if "more node" in each.words]
    assert len(more) == 2
    for price in shadow_prices(found, _PREDICTOR, asked=more):
        assert price.same_plan_gain == pytest.approx(0.0, abs=1e-9)
        assert price.most_gain >= price.least_gain >= -1e-9


def test_an_unneeded_change_is_worth_nothing_and_a_pin_that_costs_is_found(
    found: SearchResult,
) -> None:
    inputs = found.inputs
    none = Change(words="nothing", question=inputs)
    slower = replace(
        inputs.cluster,
        islands=tuple(replace(each, clock_ratio=0.5) for each in inputs.cluster.islands),
    )
    worse = Change(words="half the clock", question=inputs.changed(cluster=slower))
    best, last = shadow_prices(found, _PREDICTOR, asked=(worse, none))
    assert best.words == "nothing"
    assert -1e-9 <= best.least_gain <= best.most_gain
    assert best.same_plan_gain == pytest.approx(0.0, abs=1e-9)
    assert last.most_gain < -0.1


def test_a_plan_against_itself_and_against_a_worse_one(found: SearchResult) -> None:
    same = against(found, found, _PREDICTOR)
    assert same.choices == ()
    assert same.components == ()
    assert same.found_seconds == same.other_seconds
    inputs = found.inputs
    pinned = replace(inputs.job, pin=replace(inputs.job.pin, recompute=True))
    other = search(inputs.model, inputs.cluster, pinned, _PREDICTOR)
    seen = against(found, other, _PREDICTOR)
    assert seen.illegal == ()
    assert seen.inputs_differ == ("job",)
    assert {each.name for each in seen.choices} >= {"recompute"}
    assert seen.other_seconds is not None
    assert seen.other_seconds >= seen.found_seconds
    more = sum(each.more_seconds for each in seen.components)
    assert more == pytest.approx(seen.other_seconds - seen.found_seconds)
