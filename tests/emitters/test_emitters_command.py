"""`hetplan emit` from a plan file to the other tool's file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hetplan.benchmarks.search.instances import INSTANCES, instance_inputs
from hetplan.cli.emit import emit
from hetplan.cluster.catalogue import load_catalogue
from hetplan.errors import InputError
from hetplan.job.spec import Pins
from hetplan.model.spec import Architecture, plain_model
from hetplan.predict.fit import FittedPredictor
from hetplan.search.files import save_result
from hetplan.search.search import search

MODEL = plain_model(
    name="small",
    architecture=Architecture.GPT,
    num_layers=4,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_attention_heads=16,
    num_kv_heads=16,
    head_dim=64,
    vocab_size=1024,
    max_sequence_length=4096,
)


def plan_file(folder: Path, *, sharded: bool) -> Path:
    """The best plan of two islands of 8 A100."""
    inputs = instance_inputs(INSTANCES[0], "megatron", 0.05, 30.0)
    kind = next(each for each in load_catalogue() if each.kind == "nvidia-a100-80gb-sxm")
    islands = tuple(replace(island, device=kind) for island in inputs.cluster.islands)
    pin = Pins(
        recompute=False,
        cp=1,
        virtual_stages=1,
        sequence_parallel=False,
        sharded_optimizer=sharded,
        dp=8,
    )
    result = search(
        MODEL,
        replace(inputs.cluster, islands=islands),
        replace(inputs.job, pin=pin),
        FittedPredictor.datasheet_only(),
    )
    path = folder / "plan.json"
    save_result(result, path)
    return path


def test_a_searched_plan_is_written(tmp_path: Path) -> None:
    out = tmp_path / "sailor.json"
    emit(plan_file(tmp_path, sharded=False), target="sailor", out=out)
    (pipeline,) = json.loads(out.read_text())["pipeline_list"]
    assert [layer for layers in pipeline["layers_per_stage"] for layer in layers] == list(range(6))
    assert set(pipeline["dp"]) == {8}


def test_a_plan_that_sailor_cannot_say_leaves_no_file(tmp_path: Path) -> None:
    out = tmp_path / "sailor.json"
    plan = plan_file(tmp_path, sharded=True)
    with pytest.raises(InputError, match=r"plan.json: plan.sharding: optimizer; Sailor knows none"):
        emit(plan, target="sailor", out=out)
    assert not out.exists()


def test_other_tools_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing is written for that"):
        emit(tmp_path / "plan.json", target="word", out=tmp_path / "out")


def test_a_file_that_is_there_is_kept_unless_forced(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, sharded=False)
    before = plan.read_bytes()
    with pytest.raises(InputError, match=r"is there already; .* --force"):
        emit(plan, target="sailor", out=plan)
    assert plan.read_bytes() == before
    out = tmp_path / "sailor.json"
    out.write_text("mine")
    emit(plan, target="sailor", out=out, force=True)
    assert "pipeline_list" in json.loads(out.read_text())
