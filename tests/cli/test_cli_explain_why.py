"""`hetplan explain PLAN`: what limits it, what would help, why not another plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import run

from hetplan.cli.options import read_predictor
from hetplan.cluster.load import load_cluster
from hetplan.files.reading import decode, read_document
from hetplan.files.shipped import shipped_folder
from hetplan.job.load import load_job
from hetplan.job.spec import Pins
from hetplan.model.load import load_model
from hetplan.predict.fit import FittedPredictor
from hetplan.reports.explained import EXPLAIN_SCHEMA, Explained
from hetplan.search.files import load_legal_plan, save_result
from hetplan.search.result import ChangeKind
from hetplan.search.search import search


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`plan.json`, `other.json` with recomputation, and an empty store."""
    found = tmp_path_factory.mktemp("explain")
    configs = shipped_folder("configs")
    cluster = load_cluster(configs / "clusters" / "two-regions.yaml")
    islands = tuple(replace(each, nodes=1) for each in cluster.islands)
    job = replace(
        load_job(configs / "jobs" / "llama-2-7b.yaml"),
        global_batch_size=16,
        gap=0.1,
        pin=Pins(tp=8, cp=1, microbatch_size=1, virtual_stages=1),
    )
    model = load_model(configs / "models" / "llama-2-7b.yaml")
    for name, recompute in (("plan", False), ("other", True)):
        pinned = replace(job, pin=replace(job.pin, recompute=recompute))
        result = search(
            model, replace(cluster, islands=islands), pinned, FittedPredictor.datasheet_only()
        )
        save_result(result, found / f"{name}.json")
    (found / "store").mkdir()
    return found


def explain(folder: Path, *options: str):  # type: ignore[no-untyped-def]
    command, *rest = options or ("limits",)
    store = ("--store", str(folder / "store"))
    return run("explain", command, str(folder / "plan.json"), *rest, *store)


def test_another_plan_is_set_beside_it(folder: Path) -> None:
    done = explain(folder, "against", str(folder / "other.json"))
    assert done.exit_code == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "note: the other plan was made for another job" in text
    assert "% longer" in text
    assert "recompute" in text


def test_shadow_prices_are_a_table_with_what_is_uncertain(folder: Path) -> None:
    done = explain(folder, "prices", "--verbose")
    assert done.exit_code == 0, done.stderr
    text = " ".join(done.stdout.split())
    for words in ("twice the bandwidth between", " to ", "more node", "without pin tp: 8"):
        assert words in text


def test_without_verbose_the_changes_that_are_worth_most_are_ten_lines(folder: Path) -> None:
    done = explain(folder, "prices")
    lines = done.stdout.splitlines()
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 80
    assert lines[1].endswith(": without pin tp: 8")


def test_what_a_report_has_asked_is_kept_and_then_shown_without_planning(folder: Path) -> None:
    path, page = folder / "kept.json", folder / "kept.html"
    other = load_legal_plan(folder / "plan.json")
    store = ("--store", str(folder / "store"))
    predictor, _ = read_predictor(None, [folder / "store"])
    result = search(other.inputs.model, other.inputs.cluster, other.inputs.job, predictor)
    save_result(result, path)
    done = run("report", str(path), "--what-if", "--out", str(page), *store)
    assert done.exit_code == 0, done.stderr
    saved = load_legal_plan(path)
    assert replace(saved, idle=(), prices=()) == result
    assert [each.island for each in saved.idle] == ["a100"]
    assert saved.alone is None  # megatron has one library of collectives
    assert {each.kind for each in saved.prices} >= {ChangeKind.NODE, ChangeKind.NARROWER}
    written = path.read_bytes()
    for command, words in (("limits", "a100, 8 of 8 devices idle: "), ("prices", "one change")):
        shown = run("explain", command, str(path), *store)
        assert words in shown.stdout
        assert "planning" not in shown.stderr
        lines = shown.stdout.splitlines()
        assert len(lines) <= 10
        assert max(map(len, lines)) <= 80
    assert run("report", str(path), "--what-if", "--out", str(page), *store).exit_code == 0
    assert path.read_bytes() == written
    save_result(other, path)
    done = run("report", str(path), "--what-if", "--out", str(page), *store)
    assert done.exit_code == 2
    assert "priced by another predictor" in done.stderr


def test_what_takes_a_search_is_named_and_asked_by_a_command_of_its_own(folder: Path) -> None:
    path = folder / "idle.json"
    save_result(load_legal_plan(folder / "plan.json"), path)
    store = ("--store", str(folder / "store"))
    at_once = run("explain", str(path), *store)
    assert f"a100: `hetplan explain idle {path}` plans" in " ".join(at_once.stdout.split())
    assert "planning" not in at_once.stderr
    assert load_legal_plan(path).idle == ()
    asked = run("explain", "idle", str(path), *store)
    assert "a100, 8 of 8 devices idle: " in asked.stdout
    again = run("explain", str(path), *store)
    assert asked.stdout in again.stdout
    assert "explain idle" not in again.stdout


def test_json_is_the_whole_answer(folder: Path) -> None:
    done = explain(folder, "against", str(folder / "other.json"), "--json")
    assert done.exit_code == 0, done.stderr
    path = folder / "explained.json"
    path.write_text(done.stdout)
    found = decode(read_document(path), Explained, schema=EXPLAIN_SCHEMA)
    assert found.limits.step_seconds == found.against.found_seconds
    assert json.loads(done.stdout)["schema"] == EXPLAIN_SCHEMA


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("against", "nowhere.json"), "there is no such file"),
        (("prices", "--time-limit", "5 GB"), "5 GB"),
    ],
)
def test_wrong_questions_exit_with_2(folder: Path, options: tuple[str, ...], words: str) -> None:
    done = explain(folder, *options)
    assert done.exit_code == 2, done.stdout
    assert words in done.stderr
