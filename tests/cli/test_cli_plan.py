"""`hetplan plan`: what it writes, prints and exits with."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep_files import sweep_files
from typer.testing import CliRunner, Result

from hetplan.cli.main import app
from hetplan.search.files import load_legal_plan, result_text

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small question, and an empty store: everything is predicted from datasheets."""
    sweep_files(tmp_path)
    (tmp_path / "store").mkdir()
    return tmp_path


def run(folder: Path, *options: str) -> Result:
    files = {"model": "model.yaml", "cluster": "one.yaml", "job": "job.yaml"}
    return plan(folder, {name: folder / file for name, file in files.items()}, *options)


def plan(folder: Path, inputs: dict[str, Path], *options: str) -> Result:
    named = [f"--{name}={path}" for name, path in inputs.items()]
    out = (f"--store={folder / 'store'}", f"--out={folder / 'plan.json'}")
    return CliRunner().invoke(app, ["plan", *named, *out, *options])


@pytest.mark.slow
def test_768_devices_are_planned_within_one_percent(folder: Path) -> None:
    files = {
        "model": "models/llama-140b", "cluster": "clusters/mixed-768", "job": "jobs/llama-140b",
    }  # fmt: skip
    inputs = {name: CONFIGS / f"{file}.yaml" for name, file in files.items()}
    done = plan(folder, inputs, "--no-native")
    assert done.exit_code == 0, done.output
    result = load_legal_plan(folder / "plan.json")
    assert result.certificate.status == "optimal"
    assert result.certificate.gap <= 0.01 + 1e-12
    assert result.estimate.fits
    assert [name for name, _ in result.inputs.sha256] == ["model", "cluster", "job", "predictor"]
    assert "wrote" in done.stderr
    assert "wrote" not in done.stdout


def test_json_on_stdout_is_the_file(folder: Path) -> None:
    done = run(folder, "--json", "--gap", "0.1")
    assert done.exit_code == 0, done.output
    assert done.stdout == (folder / "plan.json").read_text()
    result = load_legal_plan(folder / "plan.json")
    assert result.inputs.job.gap == 0.1
    assert result_text(result) == done.stdout


@pytest.mark.parametrize(("forbidden", "compared"), [("[]", True), ("[b]", False)])
def test_kinds_are_compared_where_the_job_may_use_several(
    folder: Path, forbidden: str, compared: bool
) -> None:
    done = run(folder, "--no-native", "-v", "--set", f"forbid.islands={forbidden}")
    assert done.exit_code == 0, done.output
    assert ("homogeneous-sum ratio" in done.stdout) == compared
    lines = done.stdout.replace(str(folder), "").splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if "forward" in line and "memory, GiB" in line]


def test_the_answer_fits_on_a_screen(folder: Path) -> None:
    done = run(folder)
    assert done.exit_code == 0, done.output
    lines = done.stdout.replace(str(folder), "").splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 80
    assert "searched: " not in done.stdout  # only with -v
    assert [line for line in lines if line.startswith("next: hetplan report")]


def test_no_time_exits_with_4_and_writes_nothing(folder: Path) -> None:
    done = run(folder, "--time-limit", "0 s")
    assert done.exit_code == 4
    assert "time limit" in done.stderr
    assert not (folder / "plan.json").exists()


def test_an_interrupted_search_writes_its_plan_and_exits_with_130(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hetplan.reports.terminal import ProgressLine

    def stop(self: object, finished: int, total: int, left: None, what: str) -> None:
        if what.startswith("best"):
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressLine, "show", stop)
    done = run(folder)
    assert done.exit_code == 130, done.output
    assert load_legal_plan(folder / "plan.json").certificate.status == "interrupted"


def test_an_interrupted_comparison_keeps_the_plan_says_so_and_exits_with_130(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hetplan.reports.terminal import ProgressLine

    def stop(self: object, finished: int, total: int, left: None, what: str) -> None:
        # A comparison begins with what is known already.
        if (folder / "plan.json").exists() and what.startswith("best"):
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressLine, "show", stop)
    done = run(folder, "--gap", "0.1")
    assert done.exit_code == 130, done.output
    assert " interrupted; " in done.output.partition("comparison with ")[2]
    assert load_legal_plan(folder / "plan.json").certificate.status == "optimal"


def test_mixtral_on_four_nodes_gets_expert_parallelism(folder: Path) -> None:
    cluster, job = folder / "four.yaml", folder / "mixtral.yaml"
    island = "{name: a, node: dgx-h100, nodes: 4}"
    cluster.write_text(
        f"schema: hetplan.cluster/2\nname: four\nregions:\n  - name: r\n    islands: [{island}]\n"
    )
    job.write_text(
        "schema: hetplan.job/1\nname: mixtral\nglobal_batch_size: 256\nsequence_length: 4096\n"
        "precision: bfloat16\noptimizer: adamw\ntarget: megatron\n"
    )
    model = CONFIGS / "models" / "mixtral-8x7b.yaml"
    done = plan(folder, {"model": model, "cluster": cluster, "job": job}, "--gap", "0.1")
    assert done.exit_code == 0, done.output
    (pipeline,) = load_legal_plan(folder / "plan.json").plan.pipelines
    assert all(replica.ep > 1 for stage in pipeline.stages for replica in stage.replicas)
