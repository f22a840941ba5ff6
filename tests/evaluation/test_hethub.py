"""HETHUB's question on mixes small enough to be planned at once."""

from __future__ import annotations

from dataclasses import replace
from math import fsum

import pytest
from typer.testing import CliRunner

from evaluation import hethub
from evaluation.__main__ import app
from evaluation.hethub import Mix, hethub_answer, hethub_rows
from hetplan.cluster.load import load_cluster
from hetplan.cost.model_flops import flops_per_token
from hetplan.files.shipped import shipped_folder
from hetplan.job.load import load_job
from hetplan.job.spec import Pins
from hetplan.model.load import load_model
from hetplan.predict.fit import FittedPredictor

_PREDICTOR = FittedPredictor.datasheet_only()


def small(memory: float = 80e9) -> Mix:
    """One node of 8 each of two kinds, a model of 7B that neither or both can hold."""
    configs = shipped_folder("configs")
    cluster = load_cluster(configs / "clusters" / "four-vendors.yaml")
    islands = tuple(
        replace(each, nodes=1, memory_bytes=min(memory, each.memory_bytes))
        for each in cluster.islands[:2]
    )
    return Mix(
        name="small",
        model=load_model(configs / "models" / "llama-2-7b.yaml"),
        cluster=replace(cluster, islands=islands),
        job=replace(
            load_job(configs / "jobs" / "llama-2-7b.yaml"),
            global_batch_size=16,
            gap=0.2,
            pin=Pins(tp=8, cp=1, microbatch_size=1, virtual_stages=1),
        ),
    )


def test_the_ratios_are_what_their_definitions_say() -> None:
    rows = hethub_rows((small(),), ("megatron",), predictor=_PREDICTOR, progress=print)
    (row,) = rows
    mix = small()
    assert row["reason"] == ""
    assert (row["devices"], row["global_batch_size"], row["target"]) == (16, 16, "megatron")
    tokens = 16 * mix.job.sequence_length
    assert row["tokens_per_second"] == pytest.approx(tokens / row["step_seconds"])
    assert row["homogeneous_sum_ratio"] == pytest.approx(
        row["tokens_per_second"] / fsum(row["kinds_alone"])
    )
    peaks = [dict(each.device.peak_flops_per_second)["bfloat16"] for each in mix.cluster.islands]
    roofline = fsum(8 * peak for peak in peaks) / flops_per_token(mix.model, mix.job)
    assert row["roofline_ratio"] == pytest.approx(row["tokens_per_second"] / roofline)
    assert 0 < row["roofline_ratio"] < 1
    assert 0 <= row["idle_fraction"] < 1
    assert 0 < row["busy_fraction"] <= 1
    assert 0 <= row["gap"] <= 0.2


def test_a_mix_without_a_plan_says_why() -> None:
    rows = hethub_rows((small(1e9),), ("megatron",), predictor=_PREDICTOR, progress=print)
    (row,) = rows
    assert "no plan of" in row["reason"]
    assert row["homogeneous_sum_ratio"] is None
    answer = hethub_answer(rows)
    assert answer.sections[0].table().row_count == 1
    assert any(row["reason"] in line for line in answer.lines)


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hethub, "shipped_mixes", lambda: (small(),))
    done = CliRunner().invoke(app, ["hethub", "--targets", "megatron"])
    assert done.exit_code == 0, done.output
    assert "homogeneous_sum_ratio" in done.stdout
    assert "small for megatron" in done.stderr
    wrong = CliRunner().invoke(app, ["hethub", "--targets", "nonsense"])
    assert wrong.exit_code == 2
    wrong = CliRunner().invoke(app, ["hethub", "--sizes", "16"])
    assert wrong.exit_code == 2
