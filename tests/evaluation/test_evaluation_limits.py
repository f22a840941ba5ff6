"""Random questions are the same every time, within their bounds, and files that hetplan reads.

And the questions that were once seen to take too long, or too much memory, by CPU seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas
import pytest

from evaluation import limits
from hetplan.cluster.load import load_cluster
from hetplan.model.load import load_model

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("seed", range(12))
def test_a_question_is_within_the_bounds_and_can_be_read(seed: int, tmp_path: Path) -> None:
    asked = limits.question(seed)
    assert asked == limits.question(seed) != limits.question(seed + 1)
    words = asked.words(tmp_path)
    cluster, model = load_cluster(tmp_path / "cluster.yaml"), load_model(tmp_path / "model.yaml")
    assert len(cluster.islands) == asked.islands <= limits.MOST_ISLANDS
    assert len({each.device.kind for each in cluster.islands}) == asked.kinds <= limits.MOST_KINDS
    assert cluster.num_devices == asked.devices
    assert asked.devices <= max(limits.MOST_DEVICES, 8 * asked.islands)
    assert len(model.layers) - 2 == asked.layers <= limits.MOST_LAYERS
    assert asked.batch <= limits.MOST_BATCH
    assert f"{asked.limit_seconds} s" in words


def test_a_limit_may_be_overrun_by_a_tenth_or_a_second() -> None:
    assert limits.overrun(5.0, 4.0, 1.0)["overrun_seconds"] == 0.0
    late = limits.overrun(30.0, 34.0, 1e9)
    assert (late["overrun_seconds"], late["allowed_seconds"]) == (4.0, 3.0)
    assert limits.overrun(2.0, 2.5, 1.0)["allowed_seconds"] == 1.0


def test_a_journal_is_gone_on_with_where_a_kill_cut_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def answered(question: limits.Question) -> dict[str, object]:
        asked.append(question.seed)
        return question.sizes | limits.overrun(1.0, 1.5, 2e8) | {"ended": "plan"}

    monkeypatch.setattr(limits, "answered", answered)
    journal = tmp_path / "journal"
    said: list[str] = []
    whole = limits.limits(3, 0, journal, said.append)
    assert len(said) == 3
    text = journal.read_text()
    journal.write_text(text[:-20])
    again = limits.limits(4, 0, journal, said.append)
    assert asked == [0, 1, 2, 2, 3]
    assert [json.loads(line)["seed"] for line in journal.read_text().splitlines()] == [0, 1, 2, 3]
    pandas.testing.assert_frame_equal(again.sections[0].frame[:3], whole.sections[0].frame)
    monkeypatch.setattr(limits, "question", lambda seed: replace(_QUESTION(seed), batch=7))
    limits.limits(1, 0, journal, said.append)
    assert asked[-1] == 0


_QUESTION: Callable[[int], limits.Question] = limits.question
_ON_768 = (
    "plan",
    *("--model", str(CONFIGS / "models/llama-140b.yaml")),
    *("--cluster", str(CONFIGS / "clusters/mixed-768.yaml")),
    *("--seq", "4096", "--no-native", "--target", "any"),
)


def _took(folder: Path, *words: str) -> tuple[int, float, float]:
    """(exit code, CPU seconds, bytes) of a command in a process of its own."""
    command = [*(sys.executable, "-m", "evaluation.limits"), *words, "--out", f"{folder}/plan.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    told = json.loads(done.stderr.splitlines()[-1])
    return done.returncode, told["seconds"], told["bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "limit"), [(2048, 1), (10_000_000, 5)])
def test_a_limit_on_768_devices_is_kept_in_time_and_memory(
    batch: int, limit: int, tmp_path: Path
) -> None:
    words = (*_ON_768, "--batch", str(batch), "--time-limit", f"{limit} s")
    code, seconds, most = _took(tmp_path, *words)
    assert code in (0, 4)  # with a plan or without one, never "an illegal plan"
    assert seconds < limit + 2.0
    assert most < limits.MOST_BYTES


@pytest.mark.slow
def test_a_thousand_stages_of_one_microbatch_keep_to_a_limit(tmp_path: Path) -> None:
    """Took 90 s over: every slot had room for all layers, and gave them back one by one."""
    asked = limits.question(28)
    assert (asked.devices, asked.layers, asked.limit_seconds) == (131_072, 1000, 2)
    _, seconds, most = _took(tmp_path, *asked.words(tmp_path)[:-2])
    assert seconds < 2 + 3.0
    assert most < limits.MOST_BYTES


@pytest.mark.slow
def test_compilation_does_not_count_against_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a fresh machine kernels are compiled for a minute; a limit of 3 s finds a plan."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "none"))
    words = (*_ON_768, "--batch", "2048", "--target", "megatron", "--time-limit", "3 s")
    code, seconds, _ = _took(tmp_path, *words)
    assert code == 0
    assert seconds < 3 + 2.0
