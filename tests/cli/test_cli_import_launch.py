"""`hetplan import megatron|flagscale|torchtitan`: a launch is priced, and becomes a plan file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Outcome, run
from launches_handwritten import HETERO, LLAMA, TITAN

from hetplan.cluster.load import load_cluster
from hetplan.job.load import load_job
from hetplan.model.load import load_model
from hetplan.search.files import load_legal_plan

CLUSTER = """\
schema: hetplan.cluster/3
name: two-kinds
regions:
  - name: here
    islands:
      - name: A100
        device: nvidia-a100-80gb-sxm
        nodes: 2
        node_names: ["a[0-1]"]
        devices_per_node: 8
        intra_node: {bandwidth: 300 GB/s, latency: 3 us}
        inter_node: {bandwidth: 25 GB/s, latency: 5 us}
      - name: H100
        device: nvidia-h100-80gb-sxm
        nodes: 2
        node_names: ["h[0-1]"]
        devices_per_node: 8
        intra_node: {bandwidth: 450 GB/s, latency: 3 us}
        inter_node: {bandwidth: 50 GB/s, latency: 5 us}
links:
  - between: [A100, H100]
    bandwidth_shared: 100 Gbit/s
    round_trip: 1 ms
"""
JOB = """\
schema: hetplan.job/4
name: ours
global_batch_size: 64
sequence_length: 8192
precision: bfloat16
optimizer: adamw
target: megatron
memory_reserve_fraction: 0.05
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name, text in (
        ("run.sh", LLAMA),
        ("hetero.yaml", HETERO),
        ("titan.sh", TITAN),
        ("cluster.yaml", CLUSTER),
        ("job.yaml", JOB),
    ):
        (tmp_path / name).write_text(text)
    return tmp_path


def refused(*arguments: str) -> str:
    outcome = run("import", "launch", *arguments)
    assert outcome.exit_code == 2, outcome.stderr + outcome.stdout
    assert "Traceback" not in outcome.stderr
    assert not outcome.stdout
    return outcome.stderr


def read(*arguments: str) -> Outcome:
    outcome = run("import", "launch", *arguments)
    assert outcome.exit_code == 0, outcome.stderr
    return outcome


def test_a_launch_is_priced_and_written(folder: Path) -> None:
    outcome = read("megatron", "run.sh", "--cluster", "cluster.yaml", "--out", "now.json")
    first = outcome.stdout.splitlines()[0]
    assert first == (
        "megatron: 8 ranks, tp 2 dp 2 pp 2, microbatches of 1; 64 microbatches, batch 128 x 8192 "
        "tokens"
    )
    assert "tokens/s" in outcome.stdout
    assert "wrote now.json" in outcome.stderr
    assert '"$@"' not in outcome.stderr
    assert "run.sh:19: $@ may hold further flags" in outcome.stderr
    result = load_legal_plan("now.json")
    assert result.certificate is None
    assert [stage.num_layers for stage in result.plan.pipelines[0].stages] == [16, 18]
    assert [name for name, _ in result.inputs.sha256] == ["cluster", "launch", "predictor"]
    # The same code prices it.
    again = run("estimate", "now.json", "--json")
    assert json.loads(again.stdout)["step_seconds"] == result.estimate.step_seconds
    assert result.inputs.cluster == load_cluster("cluster.yaml")


def test_the_question_can_be_planned_and_set_against_the_launch(folder: Path) -> None:
    read(
        *("megatron", "run.sh", "--cluster", "cluster.yaml", "--out", "now.json"),
        *("--draft-model", "model.yaml", "--draft-job", "job2.yaml"),
    )
    assert load_job("job2.yaml").global_batch_size == 128
    assert load_model("model.yaml").num_layers == 32
    asked = ("--model", "model.yaml", "--cluster", "cluster.yaml", "--job", "job2.yaml")
    planned = run(
        "estimate", *asked, "--tp", "2", "--layers", "16,16", "--dp", "2",
        "--islands", "H100", "--recompute", "--out", "other.json",
    )  # fmt: skip
    assert planned.exit_code == 0, planned.stderr
    against = run("explain", "against", "other.json", "now.json")
    assert against.exit_code == 0, against.stderr
    assert "the other one" in against.stdout
    assert "A100" in against.stdout
    # The drafts are what the launch was read as: only the plan differs.
    assert "inputs" not in against.stderr


def test_hosts_islands_job_and_settings_are_the_users(folder: Path) -> None:
    (folder / "hosts").write_text("h1 slots=4\na1 slots=4\n")
    asked = ("megatron", "run.sh", "--cluster", "cluster.yaml")
    read(*asked, "--hosts", "hosts", "--target", "any", "--out", "hosts.json")
    stages = load_legal_plan("hosts.json").plan.pipelines[0].stages
    assert [stage.replicas[0].devices[0].start for stage in stages] == [24, 8]
    read(*asked, "--island", "H100", "--set", "TP=4", "--out", "island.json")
    (replica,) = load_legal_plan("island.json").plan.pipelines[0].stages[0].replicas
    assert (replica.devices[0].start, replica.tp) == (16, 4)
    outcome = read(*asked, "--job", "job.yaml", "--out", "job.json")
    assert load_legal_plan("job.json").inputs.job.memory_reserve_fraction == 0.05
    assert "global_batch_size of the job, 64, is not the launch's: 128 is priced" in outcome.stderr


def test_meshes_and_json(folder: Path) -> None:
    outcome = read("flagscale", "hetero.yaml", "--cluster", "cluster.yaml", "--json")
    estimate = json.loads(outcome.stdout)
    assert len(estimate["stages"]) == 3
    assert [each["island"] for each in estimate["stages"]] == ["A100", "H100", "H100"]


def test_a_plan_that_does_not_fit_is_priced_all_the_same(folder: Path) -> None:
    text = LLAMA.replace("--recompute-granularity full --recompute-method block", "").replace(
        "--recompute-num-layers 4", ""
    )
    (folder / "big.sh").write_text(text.replace("--seq-length 8192", "--seq-length 131072"))
    outcome = run(
        "import", "launch", "megatron", "big.sh", "--cluster", "cluster.yaml", "--out", "big.json",
        "--set", "max-position-embeddings=131072",
    )  # fmt: skip
    assert outcome.exit_code == 3, outcome.stderr
    assert "stage" in outcome.stderr
    assert (folder / "big.json").exists()


def test_what_is_there_is_kept(folder: Path) -> None:
    (folder / "now.json").write_text("notes")
    asked = ("megatron", "run.sh", "--cluster", "cluster.yaml", "--out", "now.json")
    assert "now.json is there already" in refused(*asked)
    assert (folder / "now.json").read_text() == "notes"
    read(*asked, "--force")
    assert load_legal_plan("now.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("megatron", "nothing.sh", "--cluster", "cluster.yaml"), "there is no such file"),
        (("torchtitan", "titan.sh", "--cluster", "cluster.yaml"), "give --model FILE"),
        (("megatron", ".", "--cluster", "cluster.yaml"), "is a folder without start-here.sh"),
        (("megatron", "run.sh", "--cluster", "cluster.yaml", "--set", "TP"), "write NAME=VALUE"),
        (("megatron", "run.sh", "--cluster", "cluster.yaml", "--set", "T=2"), "no such variable"),
        (("megatron", "run.sh", "--cluster", "run.sh"), "run.sh:"),
        (("megatron", "run.sh", "--cluster", "cluster.yaml", "--target", "x"), "unknown target"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(*arguments)
