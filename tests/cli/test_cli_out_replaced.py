"""What `--out` may replace: an older result of its own kind, visibly, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import run

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = (
    *("--model", str(CONFIGS / "models" / "gpt-tiny.yaml")),
    *("--cluster", str(CONFIGS / "clusters" / "this-machine.yaml")),
    *("--job", str(CONFIGS / "jobs" / "gpt-tiny.yaml")),
)
FOREIGN = {
    "notes": b"mine\n",
    "other JSON": b'{"schema": "hetplan.predictor/2"}',
    "a list": b"[1]",
    "damaged": b'{"schema": "hetplan.plan/4", \xff',
    "a number": b"4",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No samples: a fit of it takes no time."""
    return tmp_path_factory.mktemp("store")


@pytest.mark.parametrize("content", FOREIGN.values(), ids=list(FOREIGN))
@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_a_plan_replaces_nothing_but_a_plan(tmp_path: Path, command: str, content: bytes) -> None:
    target = tmp_path / "plan.json"
    target.write_bytes(content)
    done = run(command, *TINY, "--out", str(target))
    assert done.exit_code == 2, done.stderr
    assert "plan.json: exists and is no plan; nothing was changed" in done.stderr
    assert target.read_bytes() == content


def test_a_plan_that_is_replaced_is_told(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    target.write_text("")  # as mktemp leaves it
    first = run("estimate", *TINY, "--out", str(target))
    assert first.exit_code == 0, first.stderr
    assert f"wrote {target}\n" in first.stderr
    again = run("estimate", str(target), "--out", str(target))
    assert f"wrote {target}, replacing the plan that was there\n" in again.stderr
    assert json.loads(target.read_text())["schema"].startswith("hetplan.plan/")


def test_a_fit_replaces_nothing_but_a_predictor(tmp_path: Path, store: Path) -> None:
    target = tmp_path / "predictor.json"
    target.write_text("mine\n")
    done = run("fit", "--store", str(store), "--out", str(target))
    assert done.exit_code == 2
    assert "exists and is no predictor" in done.stderr
    assert target.read_text() == "mine\n"
