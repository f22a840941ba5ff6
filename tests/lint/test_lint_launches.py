"""Which files are launches, what of them is not known, and what the command prints."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from hetplan.cli.main import app
from hetplan.lint.reading import LaunchContext, read_all
from hetplan.lint.registry import findings

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nnodes 2 --nproc-per-node 8 --node-rank $NODE_RANK --master-addr a0 pretrain_gpt.py \\
    --tensor-model-parallel-size 2 \\
    --pipeline-model-parallel-size 4 \\
    --num-layers 30 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 \\
    --micro-batch-size 1 --global-batch-size 64
"""
EXPERIMENT = """defaults:
  - train: plan
experiment:
  task: {type: train, backend: megatron, entrypoint: flagscale/train/train_gpt.py}
  runner: {hostfile: HOSTS, rdzv_backend: static}
  envs: {CUDA_DEVICE_MAX_CONNECTIONS: 1}
"""
TRAIN = """system:
  pipeline_model_parallel_size: 2
  hetero:
    enable_hetero: true
    hetero_process_meshes: [2, 1, 1, 2, 1, 1, 1, 1, 4, 1]
    hetero_device_types: [A, B]
    hetero_pipeline_layer_split: [20, 12]
model:
  num_layers: 32
  num_attention_heads: 32
  micro_batch_size: 2
  global_batch_size: 64
  untie_embeddings_and_output_weights: true
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["check", *(str(each) for each in arguments)])


def test_a_script_is_a_launch(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    result = run(script)
    assert result.exit_code == 2
    assert "error: launch-loses-layers (lines 5, 6)" in result.stdout
    assert "28 of 30 layers are on the 4 stages" in result.stdout
    assert "1 file read (megatron launch): 1 error, 0 warnings" in result.stdout
    script.write_text(SCRIPT.replace("--num-layers 30", "--num-layers 32"))
    assert run(script, "--strict").exit_code == 0


def test_sizes_that_only_the_hosts_know_are_said_and_can_be_given(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.replace("-size 4", "-size $PP"))
    result = run(script)
    assert result.exit_code == 0
    assert "note: " in result.stdout
    assert "pipeline-model-parallel-size not known here" in result.stdout
    assert run(script, "--set", "PP=4").exit_code == 2
    assert run(script, "--set", "PP=5").stdout.count("launch-is-refused") == 2
    assert run(script, "--set", "PQ=5").exit_code == 2
    wrong = run(script, "--set", "PP")
    assert wrong.exit_code == 2
    assert "write NAME=VALUE" in wrong.stderr


def test_an_experiment_and_the_files_that_it_includes_are_one_launch(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "hosts").write_text("a0 slots=6 type=A\nb0 slots=2 type=B\n")
    (tmp_path / "run.yaml").write_text(EXPERIMENT.replace("HOSTS", str(tmp_path / "hosts")))
    (tmp_path / "train" / "plan.yaml").write_text(TRAIN)
    result = run(tmp_path / "run.yaml")
    assert result.exit_code == 2
    assert "meshes of type A have 4 ranks, its hosts 6" in result.stdout
    assert str(tmp_path / "train" / "plan.yaml") + "\n  error" in result.stdout
    reading = read_all([tmp_path], LaunchContext())
    assert len(reading.inputs.launches) == 1
    assert {each.rule for each in findings(reading).findings} == {"launch-mesh-types"}


def test_a_cluster_beside_the_launch_counts_and_the_named_one_before_it(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.replace("--num-layers 30", "--num-layers 32"))
    cluster = CONFIGS / "clusters" / "two-regions.yaml"
    for result in (run(script, cluster), run(script, "--cluster", cluster)):
        assert "warning: launch-timeout (whole file)" in result.stdout
    here = CONFIGS / "clusters" / "this-machine.yaml"
    assert "launch-timeout" not in run(script, cluster, "--cluster", here).stdout
