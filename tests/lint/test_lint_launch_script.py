"""Scripts whose arguments end early, functions that call themselves, folders of hetplan's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parents[1] / "emitters"))
from emit_cases import two_regions

from hetplan.cli.emit import emit
from hetplan.cli.main import app
from hetplan.search.files import save_result

BLANK = " "
SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nnodes 8 --nproc-per-node 8 --node-rank $NODE_RANK --master-addr a0 pretrain_gpt.py \\
    --tensor-model-parallel-size 4 --sequence-parallel \\
    --pipeline-model-parallel-size 4 \\
    --num-layers 32 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 \\
    --micro-batch-size 1 --global-batch-size 64
"""


def check(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["check", *(str(each) for each in arguments)])


def written(folder: Path, text: str) -> Path:
    script = folder / "run.sh"
    script.write_text(text)
    return script


def test_what_was_understood_of_a_launch_is_said(tmp_path: Path) -> None:
    script = written(tmp_path, SCRIPT)
    out = check(script, "--strict")
    assert out.exit_code == 0
    line = "megatron: 64 ranks, tp 4 dp 4 pp 4, microbatches of 1; 16 microbatches, batch 64 x 2048"
    assert f"launch: {script}: {line} tokens" in out.stdout
    written(tmp_path, SCRIPT.replace("--nnodes 8", "--nnodes $N").replace("th 2048", "th $L"))
    out = check(script)
    assert f"launch: {script}: megatron: layers 32, tp 4, pp 4, cp 1, microbatches of 1" in (
        out.stdout
    )
    assert "; not known: ranks, dp" in out.stdout


def test_a_blank_after_a_backslash_ends_the_arguments(tmp_path: Path) -> None:
    script = written(
        tmp_path, SCRIPT.replace("--sequence-parallel \\", "--sequence-parallel \\" + BLANK)
    )
    out = check(script)
    assert out.exit_code == 2
    assert "error: launch-flag-is-a-command (line 5)" in out.stdout
    assert "bash runs --pipeline-model-parallel-size as a command of its own" in out.stdout
    assert (
        "no --num-layers and no --hidden-size among the arguments of pretrain_gpt.py" in out.stdout
    )
    written(tmp_path, SCRIPT.replace("pretrain_gpt.py \\", "\\ \n pretrain_gpt.py \\"))
    out = check(script)
    assert out.exit_code == 2
    assert "error: launch-flag-is-a-command (line 3)" in out.stdout
    assert "a blank follows the backslash at the end of this line" in out.stdout


def test_a_list_with_line_breaks_in_a_shells_script_ends_the_arguments(tmp_path: Path) -> None:
    text = """MODEL="
  --num-layers 32
  --hidden-size 1024
  --num-attention-heads 16
"
srun bash -c "torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --micro-batch-size 1 $MODEL"
"""
    out = check(written(tmp_path, text))
    assert out.exit_code == 2
    assert "bash runs --num-layers, --hidden-size, --num-attention-heads as a comm" in out.stdout
    assert "warning: launch-without-sizes (line 6)" in out.stdout


@pytest.mark.parametrize("more", ["--yaml-cfg model.yaml", "--use-checkpoint-args", "$MODEL_ARGS"])
def test_sizes_may_come_from_elsewhere(tmp_path: Path, more: str) -> None:
    text = SCRIPT.replace("--num-layers 32 --hidden-size 1024", more)
    assert "launch-without-sizes" not in check(written(tmp_path, text)).stdout


def test_arguments_that_end_before_the_program_are_said(tmp_path: Path) -> None:
    text = SCRIPT.replace("--node-rank $NODE_RANK", "\n  --node-rank $NODE_RANK")
    out = check(written(tmp_path, text))
    assert (
        "line 4: starts no trainer that is known here: bash runs --node-rank as a c" in out.stdout
    )


def test_functions_that_call_each_other_are_followed_once(tmp_path: Path) -> None:
    functions = "".join(f"f{at}() {{ p; f{at + 1}; }}\n" for at in range(40))
    text = SCRIPT.replace("export", "a() { p; b; }\nb() { a; }\na\n" + functions + "f0\nexport")
    out = check(written(tmp_path, text), "--strict")
    assert out.exit_code == 0, out.stdout
    assert "64 ranks" in out.stdout


def plan_file(folder: Path) -> Path:
    save_result(two_regions(), folder / "plan.json")
    return folder / "plan.json"


def test_a_folder_that_was_emitted_is_read_with_its_environment(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    emit(plan_file(tmp_path), target="megatron", out=folder)
    out = check(folder)
    assert out.exit_code == 0, out.stdout
    assert "megatron: 32 ranks" in out.stdout
    assert "launch-device-connections" not in out.stdout
    # A value that only some agents have stands in the table.
    script = folder / "start-here.sh"
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    script.write_text(script.read_text().replace(f"export {name}=1\n", ""))
    assert "launch-device-connections" in check(folder).stdout
    with (folder / "agents-environment.tsv").open("a") as table:
        table.write(f"0\t{name}=1\n1\t{name}=1\n")
    assert "launch-device-connections" not in check(folder).stdout


@pytest.mark.parametrize("target", ["megatron-bridge", "deepspeed"])
def test_a_folder_of_another_target_is_skipped_with_the_reason(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "run"
    emit(plan_file(tmp_path), target="megatron", out=folder)
    manifest = folder / "hetplan-emitted.json"
    manifest.write_text(manifest.read_text().replace('"megatron"', f'"{target}"'))
    out = check(folder)
    assert out.exit_code == 0, out.stdout
    assert f"skipped: {folder}: was emitted for {target}, and launches of megatron, f" in out.stdout
    got = CliRunner().invoke(
        app,
        [
            "import",
            "launch",
            "megatron",
            str(folder),
            "--cluster",
            "configs/clusters/two-regions.yaml",
        ],
    )
    assert got.exit_code == 2
    assert f"was emitted for {target}, and launches of megatron" in got.stderr
