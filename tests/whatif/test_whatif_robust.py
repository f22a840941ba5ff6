"""Plans under bandwidths and speeds that vary: draws, the worst tenth, and what users say wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from search_jobs import cluster, island, job, model

import hetplan
from hetplan.cluster.spec import Cluster, RegionLink
from hetplan.cost.step_model.pricer import Pricer
from hetplan.errors import InputError
from hetplan.files.encoding import to_plain
from hetplan.job.spec import Job, Objective, Pins, Variation
from hetplan.plans.check import check_plan
from hetplan.plans.pieces import islands_in_use
from hetplan.predict.fit import FittedPredictor
from hetplan.search.files import load_legal_plan, save_result
from hetplan.search.result import Question, SearchResult
from hetplan.search.search import search
from hetplan.search.space.forwarding_predictor import VariedPredictor
from hetplan.whatif.objectives import by_objective
from hetplan.whatif.robust import (
    Worlds,
    read_variations,
    risk_of,
    risks,
    said_variation,
)

PREDICTOR = FittedPredictor.datasheet_only()
LINK, SPEED = ("a", "b"), ("other",)
COUNT = 40
"""Of draws, where a property holds for any."""


def asked(*vary: Variation, **changes: object) -> Job:
    pins = Pins(cp=1, virtual_stages=1, recompute=False)
    return replace(job(8, gap=0.05), pin=pins, vary=vary, **changes)  # type: ignore[arg-type]


def two(gigabytes_per_second: float = 0.5) -> Cluster:
    return cluster(
        island("a", teraflops=60, gigabytes_per_second=1.0),
        island("b", kind="other", teraflops=60, gigabytes_per_second=1.0),
        gigabytes_per_second=gigabytes_per_second,
    )


def varying(spread: float, of: tuple[str, ...] = LINK) -> Variation:
    return Variation(of=of, spread=spread)


@pytest.fixture(scope="module")
def nominal() -> SearchResult:
    """Both islands, over a link that carries it but just."""
    found = search(model(6), two(), asked(varying(0.6), objective=Objective.ROBUST), PREDICTOR)
    assert {*islands_in_use(found.plan, found.inputs.cluster)} == {"a", "b"}
    return found


def test_no_spread_gives_the_nominal_plan_to_the_byte() -> None:
    plain = hetplan.plan(model(6), two(), asked(), PREDICTOR)
    still = asked(varying(0.0), varying(0.0, SPEED), objective=Objective.ROBUST)
    calm = hetplan.plan(model(6), two(), still, PREDICTOR)
    for name in ("plan", "estimate", "certificate", "objective", "alternatives"):
        assert to_plain(getattr(calm, name)) == to_plain(getattr(plain, name))


def test_a_larger_spread_never_lowers_the_worst_tenth_of_a_plan(nominal: SearchResult) -> None:
    inputs = nominal.inputs
    for vary in (((LINK, 1.0),), ((LINK, 1.0), (SPEED, 0.3))):
        worst = []
        for spread in (0.0, 0.05, 0.2, 0.5, 0.9):
            said = tuple(varying(spread * part, of) for of, part in vary)
            there = inputs.changed(job=replace(inputs.job, vary=said))
            steps = Worlds.of(there, PREDICTOR, COUNT).seconds(nominal.plan, range(COUNT))
            worst.append(risk_of(steps).worst_seconds)
        assert worst == sorted(worst)
        assert worst[0] == pytest.approx(nominal.estimate.step_seconds, rel=1e-12)
        assert worst[-1] > 1.5 * worst[0]


def test_draws_have_the_spread_that_was_said_and_are_the_seeds_alone(nominal: SearchResult) -> None:
    samples = tuple(np.linspace(2.0, 6.0, 21))
    said = (varying(0.4), varying(0.1, SPEED), Variation(of=("a",), samples=samples))
    question = nominal.inputs.changed(job=asked(*said))
    found = Worlds.of(question, PREDICTOR).factors
    assert np.array_equal(found, Worlds.of(question, PREDICTOR).factors)
    other = question.changed(job=replace(question.job, seed=1))
    assert not np.array_equal(found, Worlds.of(other, PREDICTOR).factors)
    for row, low in zip(found, (0.6, 0.9, 0.5), strict=True):
        assert np.median(row) == pytest.approx(1.0, rel=1e-4)
        below = 0.05 if low > 0.5 else 0.0
        assert np.mean(row < low) == pytest.approx(below)
    # Two variations do not go together.
    assert abs(np.corrcoef(found[:2])[0, 1]) < 0.2


def test_a_world_is_the_cluster_with_other_bandwidth_and_clock(nominal: SearchResult) -> None:
    of, plan = nominal.inputs.cluster, nominal.plan
    question = nominal.inputs.changed(job=asked(varying(0.5), varying(0.5, SPEED)))
    worlds = Worlds.of(question, PREDICTOR)

    def step(cluster: Cluster) -> float:
        return Pricer(question.model, cluster, question.job, PREDICTOR).step(plan).step_seconds

    def world(*factors: float) -> Cluster:
        return worlds.world(factors)[0].cluster

    assert world(1.0, 1.0) == of
    assert step(world(0.5, 1.0)) == step(two(gigabytes_per_second=0.25))
    slower = of.with_island(replace(of.island("b"), clock_ratio=0.8))
    assert world(1.0, 0.8) == slower
    assert world(1.0, 3.0).island("b").clock_ratio == 1.5
    # The same link as one of two regions, and as the usual one across regions.
    link = of.link_between("a", "b")
    apart = tuple(replace(each, region=each.name.upper()) for each in of.islands)
    bare = replace(of, islands=apart, links=())
    for regional in (
        replace(bare, region_links=(RegionLink(between=("B", "A"), link=link),)),
        replace(bare, across_regions=link),
    ):
        for ends in (("A", "B"), ("a", "b")):
            job_of = asked(varying(0.5, ends))
            there = Worlds.of(Question(model=model(6), cluster=regional, job=job_of), PREDICTOR)
            assert step(there.world((0.5,))[0].cluster) == step(two(gigabytes_per_second=0.25))
            assert not there.world((0.5,))[0].cluster.lists_link("a", "b")


def test_a_measured_link_keeps_its_samples_and_takes_longer(nominal: SearchResult) -> None:
    link = replace(nominal.inputs.cluster.link_between("a", "b"), samples="wan")
    slow = VariedPredictor(PREDICTOR, {"wan": 0.5})
    for message in (1e3, 1e8):
        law, usual = (each.send(link, message, nodes=2) for each in (slow, PREDICTOR))
        assert law == replace(usual, seconds_per_byte=2 * usual.seconds_per_byte)
        sums = [
            each.collective(link, "all_reduce", 4, message, nodes=2) for each in (slow, PREDICTOR)
        ]
        assert sums[0].seconds == 2 * sums[1].seconds
    of = nominal.inputs.cluster
    of = replace(of, links=tuple(replace(each, link=link) for each in of.links))
    there, predictor = Worlds.of(nominal.inputs.changed(cluster=of), PREDICTOR).world((0.5,))
    assert there.cluster.link_between("a", "b").samples == "wan"
    assert predictor.send(link, 1e8, nodes=2) == slow.send(link, 1e8, nodes=2)


def test_the_robust_plan_loses_least_and_says_what_it_costs(
    nominal: SearchResult, tmp_path: Path
) -> None:
    robust = by_objective(nominal, PREDICTOR, top=3)
    assert robust == by_objective(nominal, PREDICTOR, top=3)
    worlds = Worlds.of(nominal.inputs, PREDICTOR)
    every = range(worlds.factors.shape[1])
    own, other = (risk_of(worlds.seconds(p.plan, every)) for p in (robust, nominal))
    assert own.worst_seconds < other.worst_seconds
    assert own.median_seconds >= other.median_seconds
    assert len(islands_in_use(robust.plan, nominal.inputs.cluster)) == 1
    less = own.worst_seconds / other.worst_seconds - 1.0
    more = own.median_seconds / other.median_seconds - 1.0
    assert robust.objective.startswith(
        f"worst tenth of draws: {own.worst_seconds:.4g} s instead of {other.worst_seconds:.4g} s "
        f"({less:+.1%}), median {own.median_seconds:.4g} s instead of {other.median_seconds:.4g} s "
        f"({more:+.1%}); best of "
    )
    assert robust.objective.endswith("at the cluster's figures, not of that tenth")
    for each in (robust, *robust.alternatives):
        assert not check_plan(each.plan, model(6), nominal.inputs.cluster, nominal.inputs.job)
    save_result(robust, tmp_path / "plan.json")
    assert load_legal_plan(tmp_path / "plan.json") == robust


def test_plans_that_are_not_priced_in_every_world_are_no_better(nominal: SearchResult) -> None:
    parts = [nominal.inputs, *(nominal.inputs.without_islands(name) for name in "ab")]
    pins = [nominal.inputs.with_pins(pp=count) for count in (2, 3)]
    found = [nominal, *(search(model(6), q.cluster, q.job, PREDICTOR) for q in (*parts, *pins))]
    plans = {each.plan: each.estimate.step_seconds for each in found}
    worlds = Worlds.of(nominal.inputs, PREDICTOR, COUNT)
    known = risks(worlds, plans)
    worst = {plan: risk_of(worlds.seconds(plan, range(COUNT))).worst_seconds for plan in plans}
    best = min(plans, key=lambda plan: worst[plan])
    assert min(known, key=lambda plan: known[plan].worst_seconds) == best
    assert known[best].worst_seconds == pytest.approx(worst[best], rel=1e-12)
    assert nominal.plan in known


def test_the_search_on_bad_days_is_asked_first(nominal: SearchResult) -> None:
    question = nominal.inputs.changed(job=asked(varying(0.6), varying(0.1, SPEED)))
    bad = list(Worlds.of(question, PREDICTOR).bad_days())
    assert [change.words for change, _ in bad] == [
        "a bad day of a b", "a bad day of other", "a bad day of all that varies",
    ]  # fmt: skip
    links = [each.question.cluster.link_between("a", "b") for each, _ in bad]
    rates = [each.bandwidth_bytes_per_second / 0.5e9 for each in links]
    assert rates[0] == rates[2] == pytest.approx(0.4 ** (1.2816 / 1.6449), rel=0.01)
    assert rates[1] == 1.0


HEADER = "from,to,bandwidth_gbit_per_s"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--vary", "A B 200%"), "--vary 'A B 200%': write two regions, or a kind, and 0%"),
        (("--vary", "A B -3%"), "--vary 'A B -3%'"),
        (("--vary", "A B"), "--vary 'A B'"),
        (("--vary", "A Z 30%"), "--vary 'A Z 30%': A Z: name two regions or two islands of: A, B"),
        (("--vary", "A A 30%"), "--vary 'A A 30%': A A: name two regions"),
        (("--vary", "b200 5%"), "--vary 'b200 5%': b200: name a kind or island of: "),
        (("--vary", "A B 5%", "--vary", "B A 6%"), "--vary 'B A 6%': B A: is there twice"),
        ((), "objective: robust: say what varies, as in --vary"),
        (("--set", "vary=[{of: [A, B]}]"), "--set vary.[0]: A B: give either a spread"),
        (("--set", "vary=[{of: [A, B], spread: 2}]"), "--set vary.[0].spread: found 2"),
        (f"{HEADER}\n" + "A,B,0\n", "s.csv:2: 'A,B,0': give two names and a number above 0"),
        (f"{HEADER}\n\nA,B,-1\n", "s.csv:3: 'A,B,-1'"),
        (f"{HEADER}\nA,B,fast\n", "s.csv:2: 'A,B,fast'"),
        (f"{HEADER}\nA,B\n", "s.csv:2: 'A,B,None'"),
        (f"{HEADER}\n", "s.csv: holds no samples"),
        ("from,to,gbit\nA,B,1\n", "s.csv:1: needs the columns from, to and bandwidth"),
        ("", "s.csv: the file is empty"),
        (f"{HEADER}\n" + "A,B,1\n" * 9, "s.csv:2: A B: 9 samples; give 10"),
        (f"{HEADER}\n" + "A,B,1\n" * 10 + "A,Z,1\n" * 10, "s.csv:12: A Z: name two regions"),
    ],
)
def test_bad_input_is_one_clear_line(
    tmp_path: Path, options: tuple[str, ...] | str, message: str
) -> None:
    if isinstance(options, str):
        (tmp_path / "s.csv").write_text(options)
        options = ("--vary-file", str(tmp_path / "s.csv"))
    out = tmp_path / "p.json"
    done = run(
        "plan", "--nodes", "1x8 h100 @A", "--nodes", "1x8 a100 @B", "--between", "A B 10Gbit 30ms",
        "--model", "gpt-tiny", "--batch", "8", "--seq", "64", "--objective", "robust",
        "--out", str(out), *options,
    )  # fmt: skip
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert len([line for line in done.stderr.splitlines() if "assumed" not in line]) <= 2
    assert not out.exists()


def test_a_variation_that_cannot_be_is_refused_in_python_too() -> None:
    for spread in (2.0, -0.1, float("nan")):
        with pytest.raises(InputError, match="spread"):
            asked(varying(spread))
    wrong = (varying(0.1, ()), varying(0.1, (*LINK, "c")), Variation(of=LINK, samples=(0.0,) * 10))
    for each in wrong:
        with pytest.raises(InputError, match=r"vary\[0\]|vary\.\[0\]"):
            hetplan.plan(model(6), two(), asked(each), PREDICTOR)


def test_what_is_said_is_read(tmp_path: Path) -> None:
    assert said_variation(" A  B 30% ") == varying(0.3, ("A", "B"))
    assert said_variation("h100 0%") == varying(0.0, ("h100",))
    file = tmp_path / "s.csv"
    rows = [f"us-east,{1 + k / 10},eu" for k in range(10)]
    file.write_text("from,bandwidth_mbit,to\n" + "\n".join(rows))
    ((found, line),) = list(read_variations(file))
    assert (found.of, line) == (("eu", "us-east"), 2)
    assert found.samples == tuple(1 + k / 10 for k in range(10))
    with pytest.raises(InputError, match="no such file"):
        list(read_variations(tmp_path / "none.csv"))
