"""`hetplan import launch`: a launch is priced, and becomes a plan file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer
from launches_handwritten import HETERO, LLAMA, TITAN
from typer.testing import CliRunner, Result

from hetplan.cli.import_launch import launch
from hetplan.cli.main import app as hetplan_app
from hetplan.cli.main import guarded
from hetplan.cluster.load import load_cluster
from hetplan.files.locks import Lock
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


def run(*arguments: str, code: int = 0) -> Result:
    app = typer.Typer()
    app.command()(guarded(launch))
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == code, outcome.stderr + outcome.stdout
    assert "Traceback" not in outcome.stderr
    return outcome


ON = ("--cluster", "cluster.yaml")


def test_a_launch_is_priced_and_written(folder: Path) -> None:
    outcome = run("run.sh", *ON, "--out", "now.json", "--drafts", "drafts", "--verbose")
    assert outcome.stdout.splitlines()[0] == (
        "megatron: 8 ranks, tp 2 dp 2 pp 2, microbatches of 1; 64 microbatches, batch 128 x 8192 "
        "tokens"
    )
    assert "run.sh:19: $@ may hold further flags" in outcome.stderr
    result = load_legal_plan("now.json")
    assert result.certificate is None
    assert [stage.num_layers for stage in result.plan.pipelines[0].stages] == [16, 18]
    assert [name for name, _ in result.inputs.sha256] == ["cluster", "launch", "predictor"]
    assert result.inputs.cluster == load_cluster("cluster.yaml")
    # The same code prices it.
    again = CliRunner().invoke(hetplan_app, ["estimate", "now.json", "--json"])
    assert json.loads(again.stdout)["step_seconds"] == result.estimate.step_seconds
    # The question can be planned again.
    assert load_job("drafts/job.yaml") == result.inputs.job
    assert load_model("drafts/model.yaml").num_layers == 32


def test_the_folder_of_drafts_is_of_one(folder: Path) -> None:
    with Lock(folder / "now.json").take():
        refused = run("run.sh", *ON, "--out", "now.json", "--drafts", "drafts", code=2)
    assert f"process {os.getpid()} on " in " ".join(refused.stderr.split())
    with Lock(folder / "drafts").take():
        refused = run("run.sh", *ON, "--out", "now.json", "--drafts", "drafts", code=2)
    assert f"process {os.getpid()} on " in " ".join(refused.stderr.split())
    assert not list(folder.glob("drafts/*.yaml"))
    assert not (folder / "now.json").exists()


def test_a_folder_that_hetplan_emitted_is_its_plan(folder: Path) -> None:
    run("run.sh", *ON, "--out", "now.json")
    (folder / "emitted").mkdir()
    (folder / "now.json").rename(folder / "emitted" / "plan.json")
    outcome = run("emitted", "--out", "again.json", "--verbose")
    assert "emitted by hetplan" in outcome.stdout
    before, after = load_legal_plan("emitted/plan.json"), load_legal_plan("again.json")
    assert after.plan == before.plan
    assert after.estimate.step_seconds == before.estimate.step_seconds


def test_hosts_islands_job_and_settings_are_the_users(folder: Path) -> None:
    (folder / "hosts").write_text("h1 slots=4\na1 slots=4\n")
    run("run.sh", *ON, "--hosts", "hosts", "--target", "any", "--out", "hosts.json")
    stages = load_legal_plan("hosts.json").plan.pipelines[0].stages
    assert [stage.replicas[0].devices[0].start for stage in stages] == [24, 8]
    run("run.sh", *ON, "--island", "H100", "--set", "TP=4", "--out", "island.json")
    (replica,) = load_legal_plan("island.json").plan.pipelines[0].stages[0].replicas
    assert (replica.devices[0].start, replica.tp) == (16, 4)
    outcome = run("run.sh", *ON, "--job", "job.yaml", "--out", "job.json")
    assert load_legal_plan("job.json").inputs.job.memory_reserve_fraction == 0.05
    assert "global_batch_size of the job, 64, is not the launch's: 128 is priced" in outcome.stderr


@pytest.mark.parametrize(("word", "on"), [("true", True), ("On", True), ("False", False)])
def test_a_given_flag_is_switched_by_a_word(folder: Path, word: str, on: bool) -> None:
    run("run.sh", *ON, "--set", f"overlap-param-gather={word}", "--out", "now.json")
    options = load_legal_plan("now.json").inputs.job.trainer
    assert bool(options.overlap_param_gather) is on


def test_wrong_options_are_refused(folder: Path) -> None:
    for arguments, message in (
        (("run.sh",), "give --cluster FILE"),
        (("nothing.sh", *ON), "there is no such file"),
        (("titan.sh", *ON), "give --model FILE"),
        ((".", *ON), "is a folder without plan.json"),
        (("run.sh", *ON, "--set", "TP"), "write NAME=VALUE"),
        (("run.sh", *ON, "--set", "T=2"), "no such variable"),
        (("run.sh", "--cluster", "run.sh"), "run.sh:"),
        (("run.sh", *ON, "--trainer", "x"), "unknown trainer"),
        (("cluster.yaml", *ON), "is not recognised as a launch"),
        (("run.sh", *ON, "--hosts", "hosts", "--island", "A100"), "give one"),
    ):
        assert message in run(*arguments, code=2).stderr, arguments
