"""What plan, estimate and profile do with models that are not hetplan's own."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from model_configs import CONFIGS, load

from hetplan.cluster.load import load_cluster
from hetplan.cost.estimate import estimate
from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.shipped import shipped_folder
from hetplan.job.load import load_job
from hetplan.job.spec import Pins
from hetplan.model.spec import Architecture, ModelSpec, plain_model
from hetplan.plans.check import check_plan
from hetplan.plans.layout import Layout, plan_of_layout
from hetplan.predict.fit import FittedPredictor
from hetplan.search.search import search

CONFIG_FOLDER = shipped_folder("configs")
CLUSTER = load_cluster(CONFIG_FOLDER / "clusters" / "mixed-768.yaml")
JOB = replace(
    load_job(CONFIG_FOLDER / "jobs" / "llama-2-7b.yaml"),
    global_batch_size=64,
    sequence_length=128,
    gap=0.5,
    pin=Pins(tp=1, dp=8, pp=3, microbatch_size=1),
)
NOTHING = FittedPredictor.datasheet_only()


EQUAL = {
    "mixtral-small": {},
    "opt-350m-form": {"max_position_embeddings": 256},
    "deepseek-v2-lite-form": {"first_k_dense_replace": 0},
}


@pytest.mark.parametrize("name", EQUAL)
def test_models_of_equal_layers_are_planned_and_priced(tmp_path, name):
    model = load(tmp_path, CONFIGS[name] | EQUAL[name])
    found = search(model, CLUSTER, JOB, NOTHING)
    again = estimate(found.plan, model, CLUSTER, JOB, NOTHING)
    assert again.step_seconds == found.estimate.step_seconds > 0
    assert sum(stage.transformer_layers for stage in again.stages) == model.num_layers


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gemma2-uneven", "transformer layers of 2 shapes"),
        ("qwen3-moe-uneven", "a dense MLP and experts"),
    ],
)
def test_rows_of_unlike_layers_are_not_searched_but_layouts_of_them_are_priced(
    tmp_path, name, says
):
    model = load(tmp_path, CONFIGS[name])
    with pytest.raises(InputError, match=says):
        search(model, CLUSTER, JOB, NOTHING)
    plan = plan_of_layout(Layout(dp=1), model, CLUSTER, JOB)
    assert check_plan(plan, model, CLUSTER, JOB) == ()
    found = estimate(plan, model, CLUSTER, JOB, NOTHING)
    assert sum(stage.transformer_layers for stage in found.stages) == (
        model.num_layers + model.num_mtp_layers
    )
    assert found.step_seconds > 0


FLAT = {
    "schema": "hetplan.model-value/1",
    "name": "old",
    "num_layers": 3,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
    "max_sequence_length": 32,
    "tied_embeddings": True,
}


@pytest.mark.parametrize("architecture", ["gpt", "llama"])
def test_values_of_the_older_form_are_read(tmp_path, architecture):
    path = tmp_path / "value.json"
    path.write_text(json.dumps(FLAT | {"architecture": architecture}))
    read = decode(read_document(path), ModelSpec, schema="hetplan.model-value/3")
    flat = {key: value for key, value in FLAT.items() if key != "schema"}
    assert read == plain_model(**flat | {"architecture": Architecture(architecture)})
    path.write_text(encode(read, schema="hetplan.model-value/3"))
    assert decode(read_document(path), ModelSpec, schema="hetplan.model-value/3") == read
