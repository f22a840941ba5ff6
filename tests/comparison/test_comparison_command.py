"""`hetplan compare` as a user runs it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import run
from compare_cases import run_text, small_result
from test_launchers_run_log import RANK, RUN
from training_logs_rendered import megatron_line

from hetplan.launchers.run_log import append_run
from hetplan.search.files import save_result


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    result = small_result()
    plan, log = tmp_path / "plan.json", tmp_path / "train.log"
    save_result(result, plan)
    log.write_text(run_text(result, added={"all-grads-sync": result.estimate.step_seconds}))
    return log, plan


def test_inputs_can_be_replaced_and_must_fit_the_plan(tmp_path: Path) -> None:
    configs = Path(__file__).parents[2] / "configs"
    model, cluster, job = (
        str(configs / folder / name)
        for folder, name in (
            ("models", "gpt-tiny.yaml"),
            ("clusters", "two-regions.yaml"),
            ("jobs", "gpt-tiny.yaml"),
        )
    )
    plan, log, store = tmp_path / "plan.json", tmp_path / "train.log", tmp_path / "store"
    store.mkdir()
    inputs = ("--model", model, "--cluster", cluster, "--job", job, "--store", str(store))
    priced = run("estimate", *inputs, "--out", str(plan), "--json")
    assert priced.exit_code == 0, priced.stderr
    log.write_text("\n".join(megatron_line(at, 50.0, batch=32) for at in range(1, 9)) + "\n")
    asked = ("compare", str(log), "--plan", str(plan), "--store", str(store))
    slower = tmp_path / "job.yaml"
    slower.write_text(Path(job).read_text() + "data_loading: 2 s\n")
    done = run(*asked, "--job", str(slower), "--json")
    assert done.exit_code == 0, done.stderr
    before = json.loads(priced.stdout)["step_seconds"]
    assert json.loads(done.stdout)["predicted_step_seconds"] == pytest.approx(before + 2)
    wrong = run(*asked, "--model", str(configs / "models/llama-2-7b.yaml"))
    assert wrong.exit_code == 2
    assert wrong.stdout == ""


def listed(folder: Path, factors: list[float]) -> tuple[str, ...]:
    """Arguments of a calibration by runs that took so many times what was predicted."""
    (folder / "store").mkdir()
    rows = []
    for at, factor in enumerate(factors):
        cut, sizes = ((6, (4, 4)), (6, (2, 2)), (6, (8, 8)), (6, (1, 1)))[at]
        result = small_result(cut, sizes)
        save_result(result, folder / f"{at}.json")
        (folder / f"{at}.log").write_text(run_text(result, timers=False, factor=factor))
        rows.append(f"  - {{log: {at}.log, plan: {at}.json}}")
    runs = folder / "runs.yaml"
    runs.write_text("\n".join(["schema: hetplan.runs/1", "runs:", *rows]) + "\n")
    out = str(folder / "out.json")
    return ("--runs", str(runs), "--store", str(folder / "store"), "--out", out)


def test_a_calibration_that_helps_is_written_and_makes_runs_better(tmp_path: Path) -> None:
    arguments = listed(tmp_path, [1.25] * 4)
    done = run("compare", "calibrate", *arguments)
    assert done.exit_code == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "better on what was held back (one layout after the other)" in said
    out = tmp_path / "out.json"
    assert f"wrote {out}" in done.stderr
    compare = ("compare", str(tmp_path / "0.log"), "--plan", str(tmp_path / "0.json"), "--json")
    before = json.loads(run(*compare).stdout)
    after = json.loads(run(*compare, "--predictor", str(out)).stdout)
    assert abs(after["relative_error"]) < 0.3 * abs(before["relative_error"])
    # Once more with the calibrated predictor: its factors do not stand in the way of new ones.
    again = run("compare", "calibrate", *arguments[:2], "--predictor", str(out), "--out", str(out))
    assert again.exit_code == 0, again.stderr
    assert "calibration by 4 runs is replaced" in again.stderr


def test_a_calibration_that_does_not_help_is_not_written_but_by_force(tmp_path: Path) -> None:
    arguments = listed(tmp_path, [1.3, 0.75, 1.0, 0.7])
    out = tmp_path / "out.json"
    done = run("compare", "calibrate", *arguments)
    assert done.exit_code == 0, done.stderr
    assert "NOT better" in done.stdout
    assert "was not written" in done.stderr
    assert not out.exists()
    data = json.loads(run("compare", "calibrate", *arguments, "--json").stdout)
    assert data["schema"] == "hetplan.calibration-trial/1"
    assert data["helped"] is False
    forced = run("compare", "calibrate", *arguments, "--force")
    assert forced.exit_code == 0, forced.stderr
    assert "by --force: it did NOT help" in forced.stderr
    assert out.exists()


@pytest.mark.parametrize("target", ["train.log", "damaged.json"])
def test_a_calibration_replaces_nothing_but_a_predictor(
    files: tuple[Path, Path], tmp_path: Path, target: str
) -> None:
    (tmp_path / "damaged.json").write_bytes(b'{"schema": "hetplan.predictor/2", \xff')
    before = (tmp_path / target).read_bytes()
    log, plan = map(str, files)
    done = run(
        "compare", "calibrate", log, "--plan", plan, "--force", "--out", str(tmp_path / target)
    )
    assert done.exit_code == 2, done.stderr
    assert f"{target}: exists and is no predictor" in done.stderr
    assert (tmp_path / target).read_bytes() == before


def test_runs_of_several_plans_in_one_run_log_are_told_apart_when_priced_again(
    tmp_path: Path,
) -> None:
    """The plan file's own hash says which run is its, not that of the plan priced again."""
    log, rows = tmp_path / "runs.jsonl", []
    for at, seconds in enumerate((1.0, 2.0, 4.0)):
        result = small_result(6, ((4, 4), (2, 2), (8, 8))[at])
        save_result(result, tmp_path / f"{at}.json")
        named = {"model": "small", "cluster": "two", "job": "job"}
        digest = hashlib.sha256((tmp_path / f"{at}.json").read_bytes()).hexdigest()
        steps = tuple(replace(RUN.steps[0], step=n, seconds=seconds) for n in range(5))
        told = replace(RUN, **named, ranks=(RANK,), plan_sha256=digest, steps=steps)
        append_run(log, told)
        rows.append(f"  - {{log: runs.jsonl, plan: {at}.json}}")
    runs = tmp_path / "runs.yaml"
    runs.write_text("\n".join(["schema: hetplan.runs/1", "runs:", *rows]) + "\n")
    (tmp_path / "store").mkdir()
    done = run("compare", "--runs", str(runs), "--store", str(tmp_path / "store"), "--json")
    assert done.exit_code == 0, done.stderr
    found = [each["measured"]["median_seconds"] for each in json.loads(done.stdout)["runs"]]
    assert found == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run",), "name the run's log files"),
        (("LOG", "--plan", "PLAN", "--runs", "PLAN"), "leave LOGS and --plan out"),
        (("PLAN", "--plan", "PLAN"), "no line of a finished step"),
        (("none.log", "--plan", "PLAN"), "No such file"),
        (("LOG", "--plan", "PLAN", "--trainer", "keras"), "known: megatron, nemo"),
        (("LOG", "--plan", "PLAN", "--warmup", "-1"), "at least 0"),
    ],
)
def test_what_is_wrong_is_said_and_ends_with_2(
    files: tuple[Path, Path], arguments: tuple[str, ...], message: str
) -> None:
    names = {"LOG": str(files[0]), "PLAN": str(files[1])}
    done = run("compare", *(names.get(word, word) for word in arguments))
    assert done.exit_code == 2, done.stderr
    assert message in done.stderr
    assert done.stdout == ""
