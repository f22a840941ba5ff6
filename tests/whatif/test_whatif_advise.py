"""What could be bought: what it brings, how few meet a deadline, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import run
from oracle_instances import Instance, axes_of, listed
from reference_search import Problem, solve
from search_jobs import cluster, island, job, model

from hetplan.cost.step_model.pricer import Pricer
from hetplan.drafting.candidates import load_candidates
from hetplan.errors import InfeasibleError, InputError
from hetplan.job.run import Run
from hetplan.job.spec import Pins
from hetplan.predict.fit import FittedPredictor
from hetplan.search.files import save_result
from hetplan.search.result import SearchResult
from hetplan.search.search import search
from hetplan.whatif.advise import Candidate, advise, fewest

PREDICTOR = FittedPredictor.datasheet_only()
STEPS_ALONE = Run(
    device_failures=0.0, host_failures=0.0, nic_failures=0.0, link_failures=0.0,
    start_up_seconds=0.0, storage_bytes_per_second=1e18,
)  # fmt: skip


@pytest.fixture(scope="module")
def today() -> SearchResult:
    pins = Pins(cp=1, virtual_stages=1, recompute=False, pipelines=1, depth=0)
    asked = replace(job(24, gap=0.01), pin=pins, total_tokens=24 * 1024 * 1000, run=STEPS_ALONE)
    of = cluster(island("a", nodes=4, per_node=2), island("b", kind="old", teraflops=20.0))
    return search(model(6), of, asked, PREDICTOR)


def more(of: SearchResult, nodes: int) -> Candidate:
    inputs = of.inputs

    def times(count: int):  # type: ignore[no-untyped-def]
        one = inputs.cluster.island("a")
        return inputs.cluster.with_island(replace(one, nodes=one.nodes + count * nodes))

    return Candidate(words=f"{nodes} of a", cluster=times(1), usd_per_hour=10.0 * nodes, more=times)


def test_worths_are_those_of_a_search_best_first_within_the_budget(today: SearchResult) -> None:
    candidates = [more(today, 1), more(today, 4), more(today, 8)]
    found = advise(today, PREDICTOR, candidates, usd_per_hour=40.0)
    assert [each.worth.words for each in found] == ["4 of a", "1 of a"]
    for each, candidate in zip(found, (candidates[1], candidates[0]), strict=True):
        assert each.usd_per_hour == candidate.usd_per_hour
        inputs = today.inputs
        alone = search(inputs.model, candidate.cluster, inputs.job, PREDICTOR)
        gain = today.estimate.step_seconds / alone.estimate.step_seconds - 1
        assert each.worth.least_gain <= each.worth.most_gain
        assert gain <= each.worth.most_gain * (1 + 1e-9)
        assert gain >= each.worth.least_gain - 0.011 * (1 + gain)
    with pytest.raises(InputError, match="no candidate has a price of at most 5"):
        advise(today, PREDICTOR, candidates, usd_per_hour=5.0)


@pytest.mark.slow
def test_the_fewest_nodes_that_meet_a_deadline(today: SearchResult) -> None:
    one = more(today, 1)
    assert one.more is not None
    inputs = today.inputs
    steps = [
        search(inputs.model, one.more(count), inputs.job, PREDICTOR).estimate.step_seconds
        for count in range(5)
    ]
    deadline = 1000 * min(steps[:3]) * 0.97
    found = fewest(today, PREDICTOR, one, deadline_seconds=deadline)
    assert found.times is not None
    assert found.times >= 1
    assert found.seconds is not None
    assert found.seconds <= deadline
    assert -1 <= found.none_with < found.times
    if found.none_with >= 0:
        assert min(steps[: found.none_with + 1]) * 1000 > deadline
    met = fewest(today, PREDICTOR, one, deadline_seconds=1000 * steps[0] * 1.01)
    assert met.times == 0
    never = fewest(today, PREDICTOR, one, deadline_seconds=1.0)
    assert (never.times, never.none_with) == (None, 64)


def test_a_deadline_counts_what_the_run_loses(today: SearchResult) -> None:
    step, one = today.estimate.step_seconds, more(today, 1)
    job = replace(today.inputs.job, run=replace(STEPS_ALONE, start_up_seconds=100 * step))
    slow = replace(today, inputs=replace(today.inputs, job=job))
    met = fewest(slow, PREDICTOR, one, deadline_seconds=1101 * step)
    assert met.times == 0
    assert met.seconds == pytest.approx(1100 * step, rel=1e-6)
    missed = fewest(slow, PREDICTOR, one, deadline_seconds=1099 * step)
    assert missed.times != 0
    assert missed.none_with < 0


REACH = {"islands", "stages", "layers", "dp", "tp", "microbatch", "recompute", "sharding", "shapes",
         "tight", "regions", "limits", "tied"}  # fmt: skip
"""Axes of the oracle's jobs whose best plan the reference planner finds."""


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
def test_no_plan_with_a_candidate_is_faster_than_its_bound(block: int) -> None:
    """One node more, or half as much memory again, by brute force."""
    draw, bounds, wide = random.Random(block), 0, 0
    rows = [row for row in listed() if row.plans <= 300 and {*row.wanted} <= REACH]
    small = [each for each in (row.instance() for row in rows) if axes_of(each) <= REACH]
    for made in small[block::4][:8]:
        found = searched(made)
        if found is None:
            continue
        of = made.cluster
        at = draw.choice(of.islands)
        more = of.with_island(replace(at, nodes=at.nodes + 1, node_names=()))
        roomy = of.with_island(replace(at, memory_bytes=1.5 * at.memory_bytes))
        asked = {"a node": more, "memory": roomy, "nothing": of}
        candidates = [Candidate(words=w, cluster=c, usd_per_hour=None) for w, c in asked.items()]
        for each in advise(found, PREDICTOR, candidates):
            changed = asked[each.worth.words]
            best = solve(Problem(Pricer(made.model, changed, made.job, PREDICTOR)))
            if each.worth.note or best is None:
                continue
            gain = found.estimate.step_seconds / best.step_seconds - 1
            assert gain <= each.worth.most_gain + 1e-9, (made.job, each.worth)
            bounds += 1
            wide += each.worth.most_gain > gain + 0.05 * (1 + gain)
    assert bounds > 6
    assert wide < bounds / 2


def searched(made: Instance) -> SearchResult | None:
    try:
        return search(made.model, made.cluster, made.job, PREDICTOR)
    except (InfeasibleError, InputError):
        return None


def write(folder: Path, text: str) -> Path:
    file = folder / "candidates.yaml"
    file.write_text(f"schema: hetplan.candidates/1\ncandidates:\n{text}")
    return file


def test_a_file_of_candidates_says_what_each_changes(today: SearchResult, tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "  - {link: a b 400Gbit 1ms each, price: 3 USD/h}\n"
        "  - {nodes: 1x8 h100 @here, without: [a-0]}\n",
    )
    with pytest.raises(InputError, match=r"candidates.yaml:4: candidates\[1\]: --gained"):
        load_candidates(file, today.inputs.cluster)
    link, *_ = load_candidates(write(tmp_path, "  - {link: a b 400Gbit 1ms each, price: 3 USD/h}"),
                               today.inputs.cluster)  # fmt: skip
    between = link.cluster.link_between("a", "b")
    assert between.bandwidth_bytes_per_second == 50e9
    assert (between.shared_bandwidth_bytes_per_second, between.latency_seconds) == (None, 5e-4)
    assert (link.usd_per_hour, link.more, link.words) == (3.0, None, "a b 400Gbit 1ms each")


def test_the_price_of_nodes_that_go_is_taken_off(today: SearchResult, tmp_path: Path) -> None:
    """Two devices of a-0 at 3 USD/h are paid no longer; a node that is out was not paid."""
    of = today.inputs.cluster
    one = replace(of.island("a"), price_usd_per_device_hour=3.0, nodes_out=(1,))
    for cluster_of, goes, price in (
        (of.with_island(one), "[a-0]", 44.0),
        (of.with_island(one), "[a-0, a-1]", 44.0),
        (of.with_island(one), "[]", 50.0),
        (of, "[a-0]", 50.0),
    ):
        text = f"  - {{link: a b 400Gbit 1ms each, without: {goes}, price: 50 USD/h}}\n"
        (found,) = load_candidates(write(tmp_path, text), cluster_of)
        assert found.usd_per_hour == price


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("  - {price: 3 USD/h}\n", (), "has neither nodes nor link"),
        ("  - {link: a z 1Gbit 1ms}\n", (), "name two regions or two islands of: here, a, b"),
        ("  - {link: a b 1Gbit 1ms, without: [c-1]}\n", (), "unknown host 'c-1'"),
        ("  []\n", (), "names none"),
        ("  - {link: a b 1Gbit 1ms}\n", ("--budget", "3 EUR"), "--budget"),
        ("  - {link: a b 1Gbit 1ms}\n", ("--budget", "3 USD/h"), "no candidate has a price"),
        ("  - {link: a b 1Gbit 1ms, price: cheap}\n", (), "price"),
        ("  - {link: a b 1Gbit 1ms, price: 3 EUR/h}\n", (), "candidates.yaml:3"),
    ],
)
def test_bad_input_is_one_clear_line(
    today: SearchResult, tmp_path: Path, text: str, options: tuple[str, ...], message: str
) -> None:
    plan = tmp_path / "plan.json"
    save_result(today, plan)
    file = write(tmp_path, text)
    outcome = run("advise", str(plan), "--candidates", str(file), *options)
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert message in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


def test_the_command_says_found_and_most_possible(today: SearchResult, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    save_result(today, plan)
    file = write(tmp_path, "  - {link: a b 400Gbit 1ms each, price: 3 USD/h}\n")
    outcome = run("advise", str(plan), "--candidates", str(file), "--deadline", "1 d")
    assert outcome.exit_code == 0, outcome.stderr
    assert "a b 400Gbit 1ms each, 3 USD/h" in outcome.stdout
    nodes = "  - {nodes: 1x8 h100 @here, price: 90 USD/h}\n"
    of = today.inputs.cluster
    near = replace(of, within_region=of.link_between("a", "b"))
    save_result(replace(today, inputs=replace(today.inputs, cluster=near)), plan)
    dear = write(tmp_path, f"{nodes}  - {{link: a b 400Gbit 1ms each, price: 3 USD/h}}\n")
    options = ("--budget", "5 USD/h", "--deadline", "1 d")
    outcome = run("advise", str(plan), "--candidates", str(dear), *options)
    assert outcome.exit_code == 0, outcome.stderr
    assert "h100" not in outcome.stdout
    machine = run("advise", str(plan), "--candidates", str(file), "--json")
    assert '"schema": "hetplan.advice/1"' in machine.stdout
