"""`hetplan explain`: traffic and ranks of plan files, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import run
from one_pipeline import StageChoice, build_plan
from plans_of_many import Case, small_cluster, small_island, small_job, small_model

from hetplan.cost.estimate import estimate
from hetplan.files.reading import decode, read_document
from hetplan.plans.chosen import Shape
from hetplan.predict.fit import FittedPredictor
from hetplan.reports.explained import TRAFFIC_SCHEMA, TrafficReport
from hetplan.search.files import SCHEMA, save_result
from hetplan.search.result import Inputs, SearchResult


def one_pipeline() -> Case:
    """Two stages of tp 2, dp 2 for Megatron-LM."""
    model, job = small_model(), small_job(8, "megatron")
    cluster = small_cluster(small_island("a", 1, 4), small_island("b", 1, 4))
    choices = [StageChoice(island=name, transformer_layers=4) for name in "ab"]
    plan = build_plan(model, cluster, job, choices, Shape(tp=2, dp=2, microbatch_size=1))
    return Case(plan=plan, model=model, cluster=cluster, job=job)


def saved(case: Case, folder: Path) -> str:
    inputs = (case.model, case.cluster, case.job)
    result = SearchResult(
        schema=SCHEMA,
        hetplan_version="0",
        seed=0,
        inputs=Inputs(model=case.model, cluster=case.cluster, job=case.job, sha256=()),
        plan=case.plan,
        estimate=estimate(case.plan, *inputs, FittedPredictor.datasheet_only()),
        certificate=None,
    )
    path = folder / "plan.json"
    save_result(result, path)
    return str(path)


def test_traffic_by_link_and_class(tmp_path: Path) -> None:
    path = saved(one_pipeline(), tmp_path)
    found = run("explain", "traffic", path, "--tokens", "25600")
    assert found.exit_code == 0, found.stderr
    for words in (
        "a to b",
        "a, inside a node",
        "all links",
        "25,600 tokens, 100 steps: ",
        "of 51.2 Tbit/s each",
        "no checkpoints are counted",
    ):
        assert words in " ".join(found.stdout.split())
    assert [line[-8:] for line in found.stdout.splitlines() if "bit/s, " in line] == [
        "1 switch"
    ] * 2
    assert "give --tokens" in run("explain", "traffic", path).stdout


def test_traffic_as_json_is_read_back(tmp_path: Path) -> None:
    case = one_pipeline()
    case = replace(case, job=replace(case.job, checkpoint_interval_steps=10, total_tokens=2560))
    path = saved(case, tmp_path)
    found = run("explain", "traffic", path, "--json")
    assert found.exit_code == 0, found.stderr
    file = tmp_path / "traffic.json"
    file.write_text(found.stdout)
    report = decode(read_document(file), TrafficReport, schema=TRAFFIC_SCHEMA)
    assert report.ledger.steps == 10
    bits = {each.island: each.bits_per_second for each in report.switching}
    size = report.ledger.switched("a")
    assert bits["a"] == pytest.approx(8 * size / report.step_seconds)
    assert size > 0


def test_every_rank_has_a_line(tmp_path: Path) -> None:
    path = saved(one_pipeline(), tmp_path)
    lines = run("explain", "ranks", path).stdout.splitlines()
    assert lines[0].split() == [
        *("rank", "device", "island", "node", "local", "stage", "dp", "cp", "tp")
    ]
    assert len(lines) == 9
    assert lines[7].split() == ["6", "6", "b", "0", "2", "1", "1", "0", "0"]
    found = json.loads(run("explain", "ranks", path, "--json").stdout)
    assert found["schema"] == "hetplan.ranks/1"
    assert [row["rank"] for row in found["ranks"]] == list(range(8))
    assert found["ranks"][7] == {
        "rank": 7,
        "device": 7,
        "island": "b",
        "node": 0,
        "node_name": None,
        "local": 3,
        "pipeline": 0,
        "stage": 1,
        "dp": 1,
        "cp": 0,
        "tp": 1,
        "ep": 0,
        "etp": 0,
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["traffic", "plan.json", "--model", "tree"], "known: ring, priced"),
        (["traffic", "plan.json", "--store", "x"], "belong to --model priced"),
        (["missing.json"], "there is no such file"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], words: str) -> None:
    found = run("explain", *arguments)
    assert found.exit_code == 2
    assert words in found.stderr


def test_a_plan_that_breaks_a_rule_is_named_with_its_line(tmp_path: Path) -> None:
    path = Path(saved(one_pipeline(), tmp_path))
    right = run("check", str(path))
    assert right.exit_code == 0, right.stdout
    data = json.loads(path.read_text())
    data["plan"]["pipelines"][0]["stages"][0]["chunks"][0]["stop"] += 1
    path.write_text(json.dumps(data, indent=2))
    lines = path.read_text().splitlines()
    wrong = next(at for at, line in enumerate(lines, 1) if '"pipelines": [' in line) + 1
    said = "plan.pipelines[0]: more than one stage holds layers 5 "
    for words in (("explain", "ranks", str(path)), ("estimate", str(path))):
        refused = run(*words)
        assert refused.exit_code == 2
        assert f"plan.json:{wrong}: {said}" in refused.stderr
    checked = run("check", str(path))
    assert checked.exit_code == 2
    assert said in checked.stdout
    assert f"file-is-wrong (line {wrong})" in checked.stdout


@pytest.mark.parametrize("name", ["a\x1b[31m", "a\u202eb", "a\nb", "", "x" * 300])
def test_a_name_that_no_terminal_should_print_is_refused(tmp_path: Path, name: str) -> None:
    path = Path(saved(one_pipeline(), tmp_path))
    data = json.loads(path.read_text())
    cluster = data["inputs"]["cluster"]
    cluster["islands"][0]["name"] = cluster["links"][0]["between"][0] = name
    path.write_text(json.dumps(data))
    for words in (("explain", "ranks", str(path)), ("estimate", str(path)), ("check", str(path))):
        refused = run(*words)
        assert refused.exit_code == 2
        said = refused.stdout + refused.stderr
        assert "inputs.cluster.islands[0]: has the name " in said
        assert "\x1b" not in said
        assert "\u202e" not in said
