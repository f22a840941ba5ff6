"""Limits of sites: no plan breaks one, loose ones change nothing, and reports name them."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from oracle_instances import Instance, axes_of, listed
from reference_search import Problem, solve
from search_jobs import cluster, island, job, model

from hetplan.cluster.spec import Cluster, Site
from hetplan.cost.energy.energy import energy_of
from hetplan.cost.step_model.pricer import Pricer
from hetplan.errors import InfeasibleError, InputError, LimitError
from hetplan.files.encoding import to_plain
from hetplan.plans.check import check_plan
from hetplan.plans.limits import limits_of, unlimited, with_limit
from hetplan.plans.pieces import used_devices
from hetplan.predict.fit import FittedPredictor
from hetplan.reports.explained import idle_lines
from hetplan.reports.summary import summarize
from hetplan.search.journal import JournalFile, read_journal
from hetplan.search.result import LIMITS_LEFT_OUT, Question, SearchResult
from hetplan.whatif import no_plan
from hetplan.whatif.ask import searched
from hetplan.whatif.baselines import _alone
from hetplan.whatif.idle import idle_reasons
from hetplan.whatif.no_plan import _enough, with_reasons
from hetplan.whatif.smaller_questions import Answers
from hetplan.whatif.within_limits import (
    OverLimitsError,
    full_limits,
    keeps_limits,
    splits,
    within_limits,
)

_PREDICTOR = FittedPredictor.datasheet_only()
_PLAIN = {"islands", "stages", "layers", "dp", "tp", "microbatch", "recompute", "sharding"}


def two_sites(**limits: float) -> Cluster:
    """Two islands whose devices draw 500 W, each at a site of its own; the first has the limits."""
    first = replace(island("a", nodes=4), power_watts=500.0, region="north")
    second = replace(
        island("b", kind="other", teraflops=60, nodes=3), power_watts=500.0, region="south"
    )
    sites = (
        Site(name="A", regions=("north",), **limits),  # type: ignore[arg-type]
        Site(name="B", regions=("south",)),
    )
    return replace(cluster(first, second), sites=sites)


def nodes_of(found: SearchResult) -> dict[str, int]:
    used = used_devices(found.plan, found.inputs.cluster)
    return {each.name: int(mine.any(axis=1).sum()) for each, mine in used}


def best(within: Cluster, **settings: object) -> SearchResult:
    asked = Question(model=model(6), cluster=within, job=replace(job(8), **settings))  # type: ignore[arg-type]
    return searched(asked, _PREDICTOR)


@pytest.mark.parametrize("seed", range(20))
def test_splits_are_the_maximal_counts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    most = [int(n) for n in rng.integers(0, 4, size=int(rng.integers(1, 4)))]
    weights = [float(w) for w in rng.integers(1, 4, size=len(most))]
    limit = float(rng.integers(0, 10))
    within = [
        each
        for each in product(*(range(n + 1) for n in most))
        if sum(w * n for w, n in zip(weights, each, strict=True)) <= limit
    ]
    maximal = {
        one
        for one in within
        if not any(
            two != one and all(b >= a for a, b in zip(one, two, strict=True)) for two in within
        )
    }
    assert set(splits(most, weights, limit)) == maximal
    assert splits([3], [math.inf], 60.0) == [(0,)]


def small_jobs() -> list[Instance]:
    rows = [row for row in listed() if row.plans <= 400 and {*row.wanted} <= _PLAIN]
    made = [row.instance() for row in rows]
    return [each for each in made if axes_of(each) <= _PLAIN and len(each.cluster.islands) > 1]


@pytest.mark.parametrize("at", range(6))
def test_the_best_plan_on_few_nodes_is_that_of_the_reference_search(at: int) -> None:
    made = small_jobs()[at]
    usable = sum(len(each.usable_nodes) for each in made.cluster.islands)
    for most in range(1, usable + 1):
        few = replace(made.cluster, max_nodes=most)
        expected = solve(Problem(Pricer(made.model, few, made.job, _PREDICTOR)))
        asked = Question(model=made.model, cluster=few, job=made.job)
        try:
            found = searched(asked, _PREDICTOR)
        except (InfeasibleError, InputError):
            assert expected is None
            continue
        assert expected is not None
        assert found.estimate.step_seconds == pytest.approx(expected.step_seconds, rel=1e-8)
        assert not check_plan(found.plan, made.model, few, made.job)
        assert found.certificate is not None
        assert found.certificate.lower_bound_seconds <= found.estimate.step_seconds


@pytest.mark.parametrize("watts", [2100.0, 1500.0, 1100.0, 600.0])
def test_no_plan_draws_more_than_its_site_may(watts: float) -> None:
    within = two_sites(power_limit_watts=watts)
    found = best(within)
    energy = energy_of(found.plan, found.estimate, within)
    assert energy is not None
    drawn = sum(each.mean_watts for each in energy.islands if each.site == "A")
    assert drawn <= watts
    # One more node would draw at least what those in use do on the mean.
    nodes = nodes_of(found)["a"]
    assert nodes == 4 or drawn + 0.5 * drawn / max(1, nodes) > watts - 500.0


def test_limits_far_away_change_nothing_to_the_byte() -> None:
    far = two_sites(power_limit_watts=1e7, max_nodes=100)
    free = best(two_sites())
    found = best(replace(far, max_nodes=100))
    for part in ("plan", "estimate", "certificate"):
        assert to_plain(getattr(found, part)) == to_plain(getattr(free, part))


def test_a_site_and_the_whole_cluster_keep_to_their_nodes() -> None:
    few = best(two_sites(max_nodes=2))
    assert nodes_of(few)["a"] <= 2
    assert sum(nodes_of(best(replace(two_sites(), max_nodes=3))).values()) <= 3
    assert few.certificate is not None
    assert few.certificate.space.endswith(LIMITS_LEFT_OUT)
    assert full_limits(few, "a") == ["max_nodes of A"]
    text = "\n".join(summarize(few).lines(width=200))
    assert "no room for more of them within max_nodes of A" in text
    (line,) = [each for each in idle_lines(idle_reasons(few, _PREDICTOR), few) if "a, " in each]
    assert line == "a, 2 of 4 devices idle: max_nodes of A has no room for more of them"


def test_nodes_without_the_cores_for_their_devices_stay_out() -> None:
    poor = two_sites()
    poor = poor.with_island(replace(poor.island("a"), cpu_cores=7))
    assert nodes_of(best(poor))["a"] > 0
    assert nodes_of(best(poor, cpu_cores_per_device=7))["a"] > 0
    assert nodes_of(best(poor, cpu_cores_per_device=8))["a"] == 0


def test_no_plan_names_the_limit_and_what_would_do() -> None:
    one = replace(cluster(island("a", nodes=4, gigabytes=1.2)), sites=())
    one = replace(
        one.with_island(replace(one.island("a"), power_watts=500.0)),
        sites=(Site(name="A", regions=("here",), power_limit_watts=600.0),),
    )
    asked = Question(model=model(8), cluster=one, job=job(4))
    with pytest.raises(OverLimitsError, match="power_limit of A: 600 W"):
        searched(asked, _PREDICTOR)
    with pytest.raises(InfeasibleError) as told, with_reasons(asked, _PREDICTOR):
        searched(asked, _PREDICTOR)
    first, second, *_ = told.value.reasons
    assert first == "plans were found, and none of them within this limit:"
    words = re.fullmatch(r"  power_limit of A: 600 W; (\d+) W would be enough", second)
    assert words is not None
    enough = replace(one.sites[0], power_limit_watts=float(words[1]))
    searched(asked.changed(cluster=replace(one, sites=(enough,))), _PREDICTOR)


def test_limits_of_which_nothing_was_known_in_time_are_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Question(model=model(6), cluster=two_sites(max_nodes=1), job=job(8))

    def none(*_: object) -> SearchResult:
        raise LimitError("none in time")

    monkeypatch.setattr(no_plan, "ask", none)
    (line,) = no_plan.why_no_plan(asked, _PREDICTOR, over=True)
    assert line.startswith("left out for the time limit: which demands")


def test_hosts_with_fewer_cores_than_a_device_needs_are_named_without_a_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(no_plan, "ask", None)
    one = replace(island("a", nodes=2, per_node=2), cpu_cores=64)
    asked = Question(
        model=model(6), cluster=cluster(one), job=replace(job(8), cpu_cores_per_device=65)
    )
    assert no_plan.why_no_plan(asked, _PREDICTOR, over=True) == (
        "no host has the cores of one device:",
        "  cpu_cores of a: 64; 65 would be enough",
    )


def test_a_plan_that_takes_nothing_of_a_limit_says_the_least_of_it() -> None:
    asked = Question(model=model(6), cluster=two_sites(max_nodes=1), job=job(8))
    without = searched(asked.without_islands("a"), _PREDICTOR)
    (limit,) = limits_of(asked.cluster, asked.job)
    assert _enough(asked, limit, lambda _: without) == 1


@pytest.mark.slow
@pytest.mark.parametrize("most", [(1, 1, 5), (1, 3, 2), (1, 1, 2), (3, 1, 2)])
def test_no_plan_names_the_smallest_set_of_limits(most: tuple[int, int, int]) -> None:
    own = [island(name, nodes=3, gigabytes=1.2) for name in "ab"]
    placed = [replace(own[0], region="north"), replace(own[1], region="south")]
    sites = (
        Site(name="A", regions=("north",), max_nodes=most[0]),
        Site(name="B", regions=("south",), max_nodes=most[1]),
    )
    within = replace(cluster(*placed), sites=sites, max_nodes=most[2])
    asked = Question(model=model(14), cluster=within, job=job(4))
    limits = {each.name: each for each in limits_of(within, asked.job)}

    def has_plan(changed: dict[str, int | None]) -> bool:
        others = within
        for name, value in changed.items():
            others = with_limit(others, limits[name], value)
        try:
            return bool(searched(asked.changed(cluster=others), _PREDICTOR))
        except InfeasibleError:
            return False

    with pytest.raises(InfeasibleError) as told, with_reasons(asked, _PREDICTOR):
        searched(asked, _PREDICTOR)
    found = {
        words[1]: words[2]
        for line in told.value.reasons
        if (words := re.fullmatch(r"  (max_nodes.*): \d; (.*) enough", line))
    }
    without = [
        {*kept}
        for size in range(1, len(limits) + 1)
        for kept in combinations(limits, size)
        if not has_plan(dict.fromkeys({*limits} - {*kept}))
    ]
    assert {*found} in without
    assert min(map(len, without)) == len(found)
    for name, words in found.items():
        least = next((n for n in range(1, 7) if has_plan({name: n})), None)
        expected = "no value of it alone was found to be" if least is None else f"{least} would be"
        assert words == expected


@pytest.mark.parametrize(("nodes", "kept"), [(6, True), (2, False)])
def test_a_users_journal_has_no_plan_that_breaks_a_limit(
    tmp_path: Path, nodes: int, kept: bool
) -> None:
    # Six of the seven nodes are enough for the best plan.
    few = replace(two_sites(), max_nodes=nodes)
    asked = Question(model=model(6), cluster=few, job=job(8))
    journal = JournalFile(tmp_path / "journal")
    found = searched(asked, _PREDICTOR, journal=journal)
    assert keeps_limits(found.plan, found.estimate, asked)
    assert (read_journal(journal.path) is not None) == kept
    assert not journal.apart().path.exists()
    assert journal.is_there == kept


@pytest.mark.parametrize("status", ["optimal", "limit"])
def test_a_search_that_was_ended_can_be_resumed(tmp_path: Path, status: str) -> None:
    asked = Question(model=model(6), cluster=two_sites(max_nodes=2), job=job(8))
    journal = JournalFile(tmp_path / "journal")

    def ask(each: Question, book: JournalFile | None) -> SearchResult:
        found = searched(each.changed(cluster=unlimited(each.cluster, each.job)), _PREDICTOR)
        if book is None or found.certificate is None:
            return found
        book.path.touch()
        return replace(found, certificate=replace(found.certificate, status=status))

    within_limits(asked, ask, journal)
    assert journal.is_there == (status != "optimal")
    assert not journal.path.exists()


def test_the_search_without_limits_goes_on_where_its_plan_breaks_none(tmp_path: Path) -> None:
    asked = Question(model=model(6), cluster=two_sites(max_nodes=3), job=job(8))
    asked = asked.with_job(time_limit_seconds=100.0)
    fewer = best(two_sites(max_nodes=1))
    assert fewer.certificate is not None
    cut = replace(fewer, certificate=replace(fewer.certificate, status="limit"))
    told: list[tuple[float, bool]] = []

    def ask(each: Question, journal: JournalFile | None) -> SearchResult:
        assert journal is not None
        told.append((each.job.time_limit_seconds or 0.0, journal.resume))
        if len(told) > 1:
            return fewer
        if tmp_path.name in str(journal.path):
            raise LimitError("nothing yet")
        return cut

    for journal in (None, JournalFile(tmp_path / "journal")):
        told.clear()
        if journal is not None:
            journal.apart().path.touch()
        assert within_limits(asked, ask, journal).plan == fewer.plan
        (half, new), (rest, on) = told
        assert (half, new, on) == (50.0, False, True)
        assert 90.0 < rest <= 100.0


def test_a_kind_alone_has_the_devices_that_limits_allow() -> None:
    of = two_sites(max_nodes=1)
    asked = Question(model=model(6), cluster=of, job=job(8))
    limited = of.island("a")
    alone = _alone(asked, limited.device.kind, Answers(_PREDICTOR))
    assert alone.tokens_per_second > 0
    assert alone.devices <= limited.devices_per_node
