"""`hetplan convert weights` at the terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command_line import run

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from weights_cases import saved

CONFIGS = Path(__file__).parents[2] / "configs"
JOB = """
schema: hetplan.job/4
name: tiny
global_batch_size: 8
sequence_length: 16
precision: float32
optimizer: adamw
target: {target}
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("models") / "llama")


def plan_file(folder: Path, llama: Path, target: str) -> Path:
    (folder / "job.yaml").write_text(JOB.format(target=target))
    done = run(
        "estimate",
        *("--model", str(llama / "config.json")),
        *("--cluster", str(CONFIGS / "clusters" / "this-machine.yaml")),
        *("--job", str(folder / "job.yaml")),
        *("--tp", "2", "--out", str(folder / "plan.json")),
    )
    assert done.exit_code == 0, done.stderr
    return folder / "plan.json"


def test_to_native_and_back(llama: Path, tmp_path: Path) -> None:
    there, back = str(tmp_path / "native"), str(tmp_path / "back")
    done = run("convert", "weights", str(llama), there, "--to", "native")
    assert done.exit_code == 0, done.stderr
    assert "llama: 39 weights" in done.stdout
    assert "optimizer state is not converted" in done.stdout
    assert done.stderr == f"wrote {there}\n"
    again = run("convert", "weights", there, back, "--to", "huggingface", "--json")
    told = json.loads(again.stdout)
    assert told["schema"] == "hetplan.converted/1"
    assert (told["source_format"], told["out_format"]) == ("native", "huggingface")
    refused = run("convert", "weights", str(llama), there, "--to", "native")
    assert refused.exit_code == 2
    assert "exists; nothing was changed" in refused.stderr
    assert run("convert", "weights", str(llama), there, "--to", "native", "--force").exit_code == 0


def test_a_plans_vocabulary(llama: Path, tmp_path: Path) -> None:
    plan = plan_file(tmp_path, llama, "megatron")
    out = str(tmp_path / "megatron")
    done = run("convert", "weights", str(llama), out, "--to", "megatron", "--plan", str(plan))
    assert done.exit_code == 0, done.stderr
    assert "vocabulary padded to 256" in done.stdout  # 61 up to a multiple of 128 times tp 2
    assert "--rotary-base 10000" in done.stdout


def test_a_plan_of_another_trainer_or_model(llama: Path, tmp_path: Path) -> None:
    plan = plan_file(tmp_path, llama, "native")
    out = tmp_path / "megatron"
    arguments = ("convert", "weights", str(llama), str(out), "--to", "megatron")
    done = run(*arguments, "--plan", str(plan))
    assert done.exit_code == 2
    assert f"{plan}: plan.target: the plan is for native" in done.stderr
    other = saved("llama", tmp_path / "wide", intermediate_size=64)
    plan = plan_file(tmp_path, other, "megatron")
    done = run(*arguments, "--plan", str(plan))
    assert done.exit_code == 2
    assert "the plan is for wide, whose shape is not that of llama" in done.stderr
    assert not out.exists()


def test_wrong_words(llama: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    for arguments, word in (
        (("optimizer", str(llama), out, "--to", "native"), "what can be converted is weights"),
        (("weights", str(llama), out, "--to", "torch"), "known: huggingface, native, megatron"),
        (("weights", str(llama), out, "--to", "native", "--dtype", "int8"), "known: float32"),
        (("weights", str(llama), out, "--to", "native", "--iteration", "3"), "--to megatron"),
        (("weights", out, out + "2", "--to", "native"), "there is no such folder"),
    ):
        done = run("convert", *arguments)
        assert done.exit_code == 2
        assert word in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_differs_is_said(tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "llama", rms_norm_eps=1e-6)
    arguments = ("convert", "weights", str(source), str(tmp_path / "out"), "--to", "native")
    done = run(*arguments)
    assert done.exit_code == 2
    assert "the norms' epsilon is 1e-06, here 1e-05: the reference trainer would" in done.stderr
    done = run(*arguments, "--inexact")
    assert done.exit_code == 0
    assert "not alike, so logits differ:" in done.stdout
