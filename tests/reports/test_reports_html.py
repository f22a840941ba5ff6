"""The report: what it draws are the result's fields, names stay text, nothing is loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import pytest
from command_line import run
from report_pages import (
    ALONE,
    PREDICTOR,
    PRICES,
    RESULTS,
    Page,
    page_of,
    run_text,
    searched,
    several_pipelines,
    small_result,
    stages_in,
    view_of,
)
from test_comparison_compare import own_log
from trainer_plans import (
    JOB,
    MODEL,
    cluster,
    island,
    one_pipeline,
    plan_of,
    result_of,
    two_regions,
)
from trainer_plans import stage as stage_of

from hetplan.comparison.compare import compare
from hetplan.cost.estimate_values import Estimate
from hetplan.cost.network.segments import LinkScope
from hetplan.cost.replay.step import replay_step
from hetplan.cost.step_model.plan import sends_wait
from hetplan.cost.step_model.pricer import Pricer
from hetplan.cost.traffic import ledger
from hetplan.errors import InputError
from hetplan.predict.fit import FittedPredictor
from hetplan.reports.days import run_of
from hetplan.reports.explained import gains_worth_saying
from hetplan.reports.html import answer as words
from hetplan.reports.html import page as page_module
from hetplan.reports.html.answer import facts
from hetplan.reports.html.charts import NAMES, ROW, WIDTH, drawn
from hetplan.reports.html.page import MEMORY_PARTS, report_text
from hetplan.reports.html.values import PlanView, _with_other_bandwidths, distinct, plan_view
from hetplan.reports.plans import with_node_names
from hetplan.schedulers.launch import EmissionOptions
from hetplan.schedulers.quoting import word
from hetplan.search.files import load_legal_plan, save_result
from hetplan.search.result import SearchResult
from hetplan.trainers import trainer_named
from hetplan.trainers.emission import emission_for
from hetplan.units import format_brief, number_runs
from hetplan.whatif.ask import wider

MAX_BYTES = 5_000_000
CHARTS = ("timeline", "memory", "components", "map", "links", "use", "search")


@pytest.fixture(scope="module", params=RESULTS)
def shown(request: pytest.FixtureRequest) -> tuple[PlanView, Page]:
    view = view_of(RESULTS[request.param]())
    return view, page_of(view)


def test_timelines_are_the_replay(shown: tuple[PlanView, Page]) -> None:
    view, page = shown
    inputs, plan = view.result.inputs, view.result.plan
    pricer = Pricer(inputs.model, inputs.cluster, inputs.job, PREDICTOR)
    times = [each.times() for each in pricer.step(plan).work]
    replayed = replay_step(times, rendezvous=sends_wait(plan)).pipelines
    kinds = {"F": "forward", "B": "backward", "BW": "backward", "W": "weight gradients"}
    found = page.data[0]["timelines"]
    groups = distinct(view.timeline)
    assert len(found) == len(groups)
    assert sorted(chain.from_iterable(numbers for numbers, _ in groups)) == [*range(len(replayed))]
    for (numbers, _), one in zip(groups, found, strict=True):
        for number in numbers:
            for stage, bars in zip(replayed[number].stages, one["stages"], strict=True):
                mine = [bar for bar in bars if NAMES[bar[0]] in kinds.values()]
                assert [NAMES[bar[0]] for bar in mine] == [kinds[o.kind] for o in stage.operations]
                for bar, operation in zip(mine, stage.operations, strict=True):
                    assert bar[1] == operation.microbatch
                    expected = [operation.start_seconds, operation.end_seconds]
                    assert bar[2:4] == pytest.approx(expected, abs=1e-6 * one["step_seconds"])


def test_rectangles_of_the_timeline_are_its_data(shown: tuple[PlanView, Page]) -> None:
    _, page = shown
    paths = [attributes["d"] for tag, attributes in page.tags
             if tag == "path" and " t-" in attributes.get("class", "")]  # fmt: skip
    boxes = [tuple(map(int, box)) for d in paths
             for box in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-\d+z", d)]  # fmt: skip
    bars = [
        (s, bar, one["step_seconds"])
        for one in page.data[0]["timelines"]
        for s, stage in enumerate(one["stages"])
        for bar in stage
    ]
    assert len(boxes) == len(bars)
    rows = sorted((y // ROW, x) for x, y, *_ in boxes)
    expected = sorted((s, round(bar[2] / step * WIDTH)) for s, bar, step in bars)
    for (row, x), (stage, place) in zip(rows, expected, strict=True):
        assert row == stage
        assert abs(x - place) <= 1
    assert all(x + width <= WIDTH + 1 for x, _, width, _ in boxes)


def test_memory_components_kinds_and_bounds_are_the_estimates(
    shown: tuple[PlanView, Page],
) -> None:
    view, page = shown
    data, estimate = page.data[0], view.result.estimate
    stages: dict[tuple[int, int], dict[str, float]] = {}
    for row in data["memory"]:
        for pipeline in row["pipelines"]:
            for s in range(row["stages"][0], row["stages"][1] + 1):
                stages[pipeline, s] = row
    places = [(p, s) for p, each in enumerate(view.result.plan.pipelines)
              for s in range(len(each.stages))]  # fmt: skip
    assert sorted(stages) == places
    for place, stage in zip(places, estimate.stages, strict=True):
        for name, value in stages[place].items():
            if name.endswith("bytes"):
                assert value == getattr(stage.memory, name)
    assert data["components"] == [
        {"component": e.component.value, "seconds": e.seconds, "hidden_seconds": e.hidden_seconds}
        for e in estimate.components
    ]
    assert data["use"] == [
        {"device": e.device, "mfu": e.mfu, "flops_per_second": e.flops_per_second}
        for e in estimate.kinds
    ]
    certificate = view.result.certificate
    assert (data["search"] is None) == (certificate is None)
    if certificate is not None:
        assert data["search"]["lower_bound_seconds"] == certificate.lower_bound_seconds
        assert data["search"]["step_seconds"] == estimate.step_seconds
    assert [each["step_seconds"] for each in data["alternatives"]] == [
        each.step_seconds for each in view.result.alternatives
    ]


def test_bars_of_memory_are_as_wide_as_their_bytes(shown: tuple[PlanView, Page]) -> None:
    view, page = shown
    rects = [a for tag, a in page.tags if tag == "rect" and a.get("class", "").startswith("m-")]
    assert len(rects) == len(MEMORY_PARTS) * len(view.rows)
    widths = {float(a["data-value"]): int(a["width"]) for a in rects}
    largest = max(widths)
    scale = widths[largest] / largest
    for value, width in widths.items():
        assert width == pytest.approx(value * scale, abs=2)


def test_links_carry_the_ledgers_bytes(shown: tuple[PlanView, Page]) -> None:
    view, page = shown
    inputs = view.result.inputs
    counted = ledger(view.result.plan, inputs.model, inputs.cluster, inputs.job, PREDICTOR)
    found = {row["link"]: row for row in page.data[0]["links"]}
    assert set(found) == {str(link) for link in counted.links}
    for link in counted.links:
        row = found[str(link)]
        assert row["bytes_per_step"] == pytest.approx(counted.over(link))
        assert sum(row["carried"].values()) == pytest.approx(counted.over(link))
        assert (row["share"] is None) == (link.scope is LinkScope.STORAGE)


def test_how_full_a_link_is_comes_from_its_senders() -> None:
    result = small_result(sizes=(8, 8))
    use = next(u for u in view_of(result).links if u.link.scope is LinkScope.ISLANDS)
    link = result.inputs.cluster.link_between(use.link.left, use.link.right)
    room = (8 + 8) * link.bandwidth_bytes_per_second
    assert link.shared_bandwidth_bytes_per_second is None
    assert use.bytes_per_second == room
    assert use.share(2.0) == pytest.approx(use.bytes_per_step / room / 2.0)
    shared = replace(link, shared_bandwidth_bytes_per_second=3e9)
    links = tuple(replace(each, link=shared) for each in result.inputs.cluster.links)
    inputs = replace(result.inputs, cluster=replace(result.inputs.cluster, links=links))
    use = next(u for u in view_of(replace(result, inputs=inputs)).links
               if u.link.scope is LinkScope.ISLANDS)  # fmt: skip
    assert (use.bytes_per_second, use.senders) == (6e9, 0)


def test_half_and_twice_the_bandwidth_of_a_link_are_priced() -> None:
    result = small_result(sizes=(8, 8))
    inputs, uses = result.inputs, view_of(result).links
    for use in uses:
        if use.link.scope is LinkScope.STORAGE:
            assert use.at_half is use.at_twice is None
            continue
        assert use.at_half is not None
        assert use.at_twice is not None
        assert use.at_half >= -1e-9
        assert use.at_twice <= 1e-9
    use = next(use for use in uses if use.link.scope is LinkScope.ISLANDS)
    link = inputs.cluster.links[0].link
    half = replace(link, bandwidth_bytes_per_second=0.5 * link.bandwidth_bytes_per_second)
    slower = replace(inputs.cluster, links=(replace(inputs.cluster.links[0], link=half),))
    priced = Pricer(inputs.model, slower, inputs.job, PREDICTOR).step(result.plan).step_seconds
    assert use.at_half == pytest.approx(priced / result.estimate.step_seconds - 1.0)
    assert use.at_half > 0.001
    measured = replace(link, samples="wan")
    known = replace(inputs.cluster, links=(replace(inputs.cluster.links[0], link=measured),))
    assert _with_other_bandwidths(use, result.plan, replace(inputs, cluster=known),
                                  PREDICTOR, 1.0) is use  # fmt: skip


def test_every_chart_is_there_and_every_table_has_names(shown: tuple[PlanView, Page]) -> None:
    _, page = shown
    assert {a["data-chart"] for _, a in page.with_attribute("data-chart")} >= set(CHARTS)
    tables = [tag for tag, _ in page.tags if tag == "table"]
    assert len([tag for tag, _ in page.tags if tag == "caption"]) == len(tables) > 5
    assert all("scope" in a for tag, a in page.tags if tag == "th")
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 2 for before, after in pairwise(levels))
    ids = [a["id"] for _, a in page.with_attribute("id")]
    assert len(ids) == len({*ids})
    assert {a["href"][1:] for tag, a in page.tags if tag == "a"} <= {*ids}
    named = [a for _, a in page.with_attribute("aria-labelledby")]
    assert all(a["aria-labelledby"] in ids for a in named)


def test_nothing_is_loaded(shown: tuple[PlanView, Page]) -> None:
    _, page = shown
    assert not page.with_attribute("src")
    assert [a["href"] for tag, a in page.tags if tag == "link"] == ["data:,"]
    assert "http" not in page.text.replace("http://www.w3.org/2000/svg", "")
    assert "url(" not in page.text


# ---- names and words


def test_names_from_files_stay_text() -> None:
    evil = "<script>alert('x')</script>\"&'"
    result = searched()
    inputs = result.inputs
    island = inputs.cluster.islands[0]
    renamed = replace(inputs.cluster, name=evil, islands=(
        replace(island, region=evil, device=replace(island.device, kind=evil)),
        *inputs.cluster.islands[1:],
    ))  # fmt: skip
    stages = tuple(replace(stage, device=evil, island=evil) for stage in result.estimate.stages)
    estimate = replace(result.estimate, stages=stages, warnings=(f"{evil}: {evil}",))
    result = replace(
        result,
        inputs=replace(inputs, cluster=renamed, model=replace(inputs.model, name=evil)),
        estimate=estimate,
        alternatives=(replace(result.alternatives[0], why=evil),),
        objective=evil,
        prices=(replace(PRICES[0], words=evil), replace(PRICES[1], note=evil)),
        alone=replace(ALONE, target=evil, kind=replace(ALONE.kind, device=evil)),
    )
    calm = page_of(view_of(searched()))
    page = page_of(view_of(result, name=evil))
    scripts = [a for tag, a in page.tags if tag == "script"]
    assert len(scripts) == len([tag for tag, _ in calm.tags if tag == "script"])
    assert {name for _, a in page.tags for name in a} == {name for _, a in calm.tags for name in a}
    assert page.text.count("<script>alert") == 0
    assert page.says.count("alert('x')") > 5


def test_words_have_three_digits_and_one_unit() -> None:
    space = words.SPACE
    assert words.seconds_words(29.0) == f"29.0{space}s"
    assert words.seconds_words(0.0421) == f"42.1{space}ms"
    assert words.seconds_words(104.2, 150.0) == f"1.74{space}min"
    assert words.share_words(0.4123) == f"41.2{space}%"
    assert words.share_words(None) == "not known"
    assert words.bytes_words(1024.0**3 * 157.66) == f"158{space}GiB"
    assert number_runs([0, 2, 3, 4, 7]) == "0, 2-4, 7"
    assert [text for _, text in words.ticks(29.3)] == [f"{n}{space}s" for n in range(0, 30, 5)]


def test_what_does_not_fit_and_what_is_not_known_is_said() -> None:
    assert "DOES NOT FIT" in page_of(view_of(RESULTS["does not fit"]())).says
    older = page_of(view_of(RESULTS["older file"]())).says
    assert "older hetplan" in older
    assert "80\u00a0%" in older or "80 %" in older
    given = page_of(view_of(stages_in("1f1b"))).says
    assert "priced, not searched" in given
    assert "Priced by another predictor" not in given
    found = page_of(view_of(searched())).says
    assert "a, 4 of 8 devices idle: its memory is too small" in found
    assert "fewest devices" in found


def test_a_reader_finds_the_command_for_what_the_page_does_not_hold() -> None:
    bare = replace(searched(), idle=(), prices=(), alone=None)
    says = page_of(view_of(bare, "my plan.json")).says
    command = "hetplan report 'my plan.json' --what-if"
    assert f"{command} plans again with one more node" in says
    assert "finds why devices are idle and from which figure on they would pay" in says
    assert f"One more node not planned yet: {command}" in says
    assert "Not measured everything: predicted from" in says
    assert command not in page_of(view_of(searched())).says
    assert command not in page_of(view_of(stages_in("1f1b"))).says
    aimed = page_of(view_of(replace(bare, objective="cost"), "my plan.json")).says
    assert "why is not known of a plan chosen by cost" in aimed


# ---- ten questions


def test_degrees_stand_beside_the_islands_that_have_them() -> None:
    machines = cluster(island("north", "n"), island("south", "s"))
    stages = one_pipeline(
        stage_of("north", 8, tp=8, dp=1, microbatch_size=2),
        stage_of("south", 4, tp=4, dp=2, microbatch_size=1),
        microbatches=4,
    )
    result = result_of(machines, plan_of(MODEL, machines, JOB, stages))
    wanted = (
        "2 stages: tp 8, microbatch size 2 in stage 0 on north; "
        "tp 4, dp 2, microbatch size 1 in stage 1 on south"
    )
    assert {fact.name: fact.words for fact in facts(view_of(result))}["Layout"] == wanted
    same = {fact.name: fact.words for fact in facts(view_of(two_regions()))}["Layout"]
    assert same == "tp 8, dp 1, 4 stages, microbatch size 1"


def test_half_of_a_link_inside_nodes_is_told_where_the_step_feels_it_more() -> None:
    view, name = view_of(searched()), "Half of a link's bandwidth"
    inside = next(use for use in view.links if use.link.scope is LinkScope.NODE)
    for at_half, told in ((0.5, True), (0.01, False)):
        links = (replace(inside, at_half=at_half),)
        answer = {fact.name: fact.words for fact in facts(replace(view, links=links))}[name]
        assert "-12.5" in answer
        assert (f"with half of {inside.link}" in answer) is told


def test_ten_questions_are_answered_by_the_results_fields() -> None:
    """Each answer's number is on the page, and it is the value's."""
    result = replace(searched(), inputs=replace(searched().inputs, job=replace(
        searched().inputs.job, total_tokens=2 * 10**12)))  # fmt: skip
    view = view_of(result)
    page, estimate = page_of(view), result.estimate
    answers = {fact.name: fact.words for fact in facts(view)}
    for answer in answers.values():
        assert " ".join(answer.split()) in page.says
    gain, change = gains_worth_saying(view.limits)[0]
    step, (low, high, _) = estimate.step_seconds, estimate.step_range
    largest = max(estimate.components, key=lambda each: each.seconds)
    share, link = max((use.share(step) or 0.0, str(use.link)) for use in view.links)
    node, narrower = PRICES
    run = run_of(result)
    assert run is not None
    use = estimate.kinds[0]
    assert result.certificate is not None
    wanted = {
        "What limits it": [f"{largest.component.value} {largest.seconds / step:.0%}",
                           words.share_words(gain), change],
        "Fullest link": [link, words.share_words(share)],
        "Not measured": ["everything", *estimate.sources],
        "One more node": ["+3.12", "+3.75", node.words],
        "Idle devices": [f"{each.island}, {each.idle_devices} of {each.usable_devices} devices "
                         "idle: its memory is too small" for each in result.idle],
        "MFU": [words.share_words(estimate.mfu), words.share_words(use.mfu)],
        "Whole run": [format_brief(run.seconds), "2T"],
        "Lost time": [format_brief(run.seconds - run.work_seconds)],
        "Half of a link's bandwidth": ["-12.5", narrower.words],
        "Step": [words.seconds_words(low, step).split(words.SPACE)[0],
                 words.seconds_words(high, step), "90"],
        "Proof": [words.share_words(result.certificate.gap),
                  words.seconds_words(result.certificate.lower_bound_seconds, step)],
        "Beside one kind": [f"{estimate.tokens_per_second / ALONE.kind.tokens_per_second - 1:.1%}"],
    }  # fmt: skip
    for name, parts in wanted.items():
        for part in parts:
            assert part in answers[name], f"{name}: {part!r} is not in {answers[name]!r}"
    assert [row["least_gain"] for row in page.data[0]["prices"]] == [p.least_gain for p in PRICES]
    assert [row["most_gain"] for row in page.data[0]["prices"]] == [p.most_gain for p in PRICES]


def test_the_course_of_the_search_is_drawn_from_its_points() -> None:
    result = searched()
    page = page_of(view_of(result))
    assert result.certificate is not None
    points = [
        [each.steps, each.best_seconds, each.lower_bound_seconds]
        for each in result.certificate.course
    ]
    assert page.data[0]["search"]["course"] == points
    ways = [a["d"] for tag, a in page.tags if tag == "path" and "line" in a.get("class", "")]
    assert len(ways) == 2
    for way in ways:
        across = [int(x) for x in re.findall(r"[MH](\d+)", way)]
        assert across == [round(steps / points[-1][0] * WIDTH) for steps, *_ in points]
    (best, bound) = ([int(y) for y in re.findall(r"[V ](\d+)", way)] for way in ways)
    assert best == sorted(best)  # the best plan falls, downwards on the page
    assert bound == sorted(bound, reverse=True)


def view_for(target: str, result: SearchResult) -> PlanView:
    inputs = result.inputs
    inputs = replace(inputs, job=replace(inputs.job, target=target))
    plan = replace(result.plan, target=target)
    found = replace(result, plan=plan, inputs=inputs)
    return plan_view("plan.json", found, FittedPredictor.datasheet_only())


@pytest.mark.parametrize("name", ["megatron", "flagscale"])
def test_the_flags_are_those_that_emit_writes(name: str) -> None:
    view = view_for(name, two_regions())
    named, trainer = with_node_names(view.result), trainer_named(name)
    launch = emission_for(named, trainer, EmissionOptions()).launch
    page = page_of(view)
    assert len(launch.arguments) > 10
    for flag in launch.arguments:
        assert " ".join(map(word, flag)) in page.says


def test_a_plan_that_its_trainer_cannot_run_has_the_reason_instead_of_flags() -> None:
    says = page_of(view_for("megatron", small_result())).says
    assert "refuses this plan: plan.padded_vocab_size: 1000" in says
    assert "--tensor-model-parallel-size" not in says
    assert "hetplan launch plan.json trains it" in page_of(view_for("native", small_result())).says


def test_links_without_traffic_cost_nothing_at_half() -> None:
    """As the page says of pairs of islands between which nothing is sent."""
    result = small_result()
    inputs = result.inputs
    pairs = [*page_module._unused_links(view_of(result))]
    assert pairs
    for pair in pairs:
        one, two = pair.split(" and ")
        half = wider(inputs, [(one, two)], 0.5)
        again = Pricer(inputs.model, half.cluster, inputs.job, PREDICTOR).step(result.plan)
        assert again.step_seconds == pytest.approx(result.estimate.step_seconds)


@pytest.mark.parametrize("name", ["searched", "several pipelines"])
def test_words_of_our_own_are_explained_where_they_are_used(name: str) -> None:
    page = page_of(view_of(RESULTS[name]()))
    explained = [*page.explained]
    said = page.says.lower()
    for own in ("island", "region", "kind", "family", "mfu", "bubble", "tp", "dp"):
        if re.search(rf"\b{own}\b", said):
            assert own in explained, own


def test_another_predictor_than_the_files_is_said() -> None:
    result = searched()
    slower = replace(result.estimate, step_seconds=1.5 * result.estimate.step_seconds)
    assert "Priced by another predictor" in page_of(view_of(replace(result, estimate=slower))).says


# ---- size


def test_what_is_left_out_of_a_long_timeline_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    result = stages_in("1f1b", count=64)
    view = view_of(result)
    pipeline = view.timeline.pipelines[0]
    total = sum(len(stage.bars) for stage in pipeline.stages)
    cut = drawn(pipeline, 100)
    kept = sum(map(len, cut.stages))
    assert kept + cut.left_out == total
    assert kept <= 100
    for stage, bars in zip(pipeline.stages, cut.stages, strict=True):
        gone = [bar for bar in stage.bars if bar not in bars]
        assert all(cut.cut_from_seconds <= bar.start_seconds < cut.cut_to_seconds for bar in gone)
    monkeypatch.setattr(page_module, "MAX_BARS", 100)
    page = page_of(view)
    assert f"{cut.left_out:,} passes and transfers between" in page.says
    assert sum(len(s) for s in page.data[0]["timelines"][0]["stages"]) == kept


def test_pipelines_of_equal_times_are_drawn_once() -> None:
    view = view_of(several_pipelines())
    page = page_of(view)
    assert [len(numbers) for numbers, _ in distinct(view.timeline)] == [2, 1]
    assert len(page.data[0]["timelines"]) == 2
    assert "Pipelines 0-1" in page.says
    assert page.data[0]["memory"][0]["pipelines"] == [0, 1]


def test_a_page_of_many_bars_stays_small() -> None:
    """As many as are ever drawn: two plans of 4 stages and 3,000 microbatches."""
    view = view_of(stages_in("1f1b", count=3000))
    assert sum(len(s.bars) for s in view.timeline.pipelines[0].stages) > page_module.MAX_BARS
    assert len(report_text([view, view]).encode()) < MAX_BYTES


# ---- plans and runs together


def with_run(folder: Path) -> tuple[SearchResult, Path]:
    result = small_result()
    log = folder / "train.log"
    log.write_text(run_text(result, added={"forward-compute": 0.5}))
    return result, log


def test_a_run_stands_beside_its_plan(tmp_path: Path) -> None:
    result, log = with_run(tmp_path)
    compared = compare(log, result)
    page = page_of(view_of(result, runs=[compared]))
    data = page.data[0]["comparisons"][0]
    assert data["measured_seconds"] == compared.measured.median_seconds
    assert data["predicted_seconds"] == result.estimate.step_seconds
    assert [p["measured_seconds"] for p in data["parts"]] == [
        p.measured_seconds for p in compared.parts
    ]
    assert "Off most: forward" in page.says


def test_plans_stand_side_by_side() -> None:
    page = page_of(view_of(searched(), "one.json"), view_of(stages_in("zb-h1"), "two.json"))
    assert len(page.data) == 2
    heads = [word for word in page.words if word in ("one.json", "two.json")]
    assert len(heads) > 10
    assert "not given" in page.says  # one of the jobs has no total_tokens


def test_the_command_writes_a_page_and_replaces_nothing_else(tmp_path: Path) -> None:
    result, log = with_run(tmp_path)
    plan, out = tmp_path / "plan.json", tmp_path / "report.html"
    save_result(result, plan)
    (tmp_path / "store").mkdir()  # no fit of the shipped profiles
    store = ("--store", str(tmp_path / "store"))
    assert run("report", str(plan), str(log), "--out", str(out), *store).exit_code == 0
    first = out.read_text()
    assert Page(first).data[0]["comparisons"]
    assert run("report", str(plan), "--out", str(out), *store).exit_code == 0
    assert out.read_text() != first
    own = own_log(tmp_path)
    assert run("report", str(plan), str(own), str(log), "--out", str(out), *store).exit_code == 0
    assert len(Page(out.read_text()).data[0]["comparisons"]) == 2
    assert run("report", str(plan), "--out", str(plan)).exit_code == 2
    done = run("report", str(log), "--out", str(out))
    assert done.exit_code == 2
    assert "is no plan file" in done.stderr
    other = tmp_path / "other.log"
    other.write_text("not a log\n")
    assert run("report", str(plan), str(other), "--out", str(out)).exit_code == 2
    assert run("report", str(tmp_path / "missing.json")).exit_code == 2


def test_every_part_of_the_step_says_what_it_rests_on(shown: tuple[PlanView, Page]) -> None:
    view, page = shown
    assert {(each.cause, each.part) for each in view.result.estimate.causes} <= set(view.sources)
    assert set().union(*view.sources.values()) <= set(page_module.SOURCES)
    assert "not known" not in page.says.partition("What every number rests on")[2]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    done = subprocess.run(
        [sys.executable, "-m", "hetplan", "report", str(pipe)],
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2


@pytest.mark.parametrize(
    "edited",
    [
        lambda e: replace(e, step_seconds=5e-324),
        lambda e: replace(e, components=(replace(e.components[0], hidden_seconds=1e308),)),
        lambda e: replace(e, kinds=(replace(e.kinds[0], device="x"),)),
        lambda e: replace(e, stages=tuple(
            replace(each, memory=replace(each.memory, available_bytes=0)) for each in e.stages
        )),
    ],
)  # fmt: skip
def test_an_estimate_that_was_edited_is_refused(
    edited: Callable[[Estimate], Estimate], tmp_path: Path
) -> None:
    result, plan = searched(), tmp_path / "plan.json"
    save_result(result, plan)
    load_legal_plan(plan)
    save_result(replace(result, estimate=edited(result.estimate)), plan)
    with pytest.raises(InputError, match="estimate"):
        load_legal_plan(plan)


def test_what_turns_or_hides_text_is_written_out() -> None:
    result = searched()
    stages = tuple(replace(each, island="a\u202eb\x1b\x00") for each in result.estimate.stages)
    page = page_of(view_of(replace(result, estimate=replace(result.estimate, stages=stages))))
    assert not {"\u202e", "\x1b", "\x00"} & {*page.text}
    assert "a\\u202eb\\x1b\\x00" in page.says


@pytest.mark.parametrize(
    ("edited", "words"),
    [
        (lambda r: replace(r, certificate=replace(r.certificate, lower_bound_seconds=1e308)),
         "certificate.lower_bound_seconds: 1e+308"),
        (lambda r: replace(r, certificate=replace(r.certificate, lower_bound_seconds=5e-324)),
         "certificate.lower_bound_seconds: 4.94066e-324"),
        (lambda r: replace(r, estimate=replace(r.estimate, stages=r.estimate.stages[:-1])),
         "estimate.stages: has"),
        (lambda r: with_peak(r, 1e308), "1e+308; no plan has a number above"),
        (lambda r: replace(r, alone=replace(ALONE, kind=replace(ALONE.kind, tokens_per_second=0))),
         "alone.kind.tokens_per_second: 0; it is above 0"),
    ],
)  # fmt: skip
def test_figures_that_no_plan_has_are_refused_in_one_line(
    edited: Callable[[SearchResult], SearchResult], words: str, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    save_result(edited(searched()), plan)
    with pytest.raises(InputError) as raised:
        load_legal_plan(plan)
    assert words in str(raised.value)
    for command in ("report", "explain"):
        done = run(command, str(plan))
        assert done.exit_code == 2
        assert "internal fault" not in done.stderr


def with_peak(result: SearchResult, rate: float) -> SearchResult:
    cluster = result.inputs.cluster
    island = cluster.islands[0]
    device = replace(island.device, peak_flops_per_second=(("bfloat16", rate),))
    changed = cluster.with_island(replace(island, device=device))
    return replace(result, inputs=replace(result.inputs, cluster=changed))
