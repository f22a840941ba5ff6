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
from hetplan.job.spec import Pins, Precision
from hetplan.model.spec import Architecture, LayerKind, ModelSpec, plain_model
from hetplan.plans.check import check_plan
from hetplan.plans.layout import Layout, plan_of_layout
from hetplan.predict import datasheet
from hetplan.predict.fit import FittedPredictor
from hetplan.predict.law_parts import MeasuredRange
from hetplan.predict.laws import FittedLaws, LayerLaw, Term, range_names
from hetplan.predict.predictor import LayerQuery
from hetplan.profiling.grid import job_grid
from hetplan.profiling.layers import build_layer
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


def test_trainer_and_profiler_refuse_layers_that_they_lack(tmp_path):
    model = load(tmp_path, CONFIGS["mixtral-small"])
    with pytest.raises(InputError, match="5 experts"):
        job_grid(model, replace(JOB, pin=Pins()))
    with pytest.raises(InputError, match="5 experts"):
        build_layer(model, 1, tp=1, tp_rank=0, group=None, seed=0, dtype=None, device="cpu")


def _law(phase):
    return LayerLaw(
        device="measured",
        precision="bfloat16",
        layer="transformer",
        phase=phase,
        terms=(Term(column="flops", coefficient=1e-14),),
        ranges=tuple(
            MeasuredRange(quantity=name, least=1.0, most=1e9) for name in range_names("transformer")
        ),
        log_halfwidth=0.01,
        calibration="none",
        rows=1,
        points=1,
        validation=None,
        notes=(),
    )


def query(model, sequence_length):
    return LayerQuery(
        model=model,
        layer=LayerKind.TRANSFORMER,
        microbatch_size=1,
        sequence_length=sequence_length,
        tp=1,
        precision=Precision.BFLOAT16,
    )


def test_laws_of_plain_layers_say_what_was_not_measured(tmp_path):
    laws = FittedLaws(
        hetplan_version="0",
        layers=(_law("forward"), _law("backward")),
        links=(),
        populations=(),
        notes=(),
    )
    predictor = FittedPredictor(laws)
    device = replace(CLUSTER.islands[0].device, kind="measured")
    plain = predictor.layer(device, query(load(tmp_path, CONFIGS["llama-3.1-8b"]), 64))
    assert plain.extrapolating == ()
    mixtral = query(load(tmp_path, CONFIGS["mixtral-small"]), 64)
    sparse = predictor.layer(device, replace(mixtral, is_backward=True))
    (note,) = sparse.extrapolating
    assert note.startswith("layers with attention window 16, 5 experts not measured")
    assert sparse.log_halfwidth == datasheet.MATRIX_LOG_HALFWIDTH > plain.log_halfwidth
    covered = predictor.layer(device, query(load(tmp_path, CONFIGS["mistral-window"]), 16))
    assert covered.extrapolating == ()


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


@pytest.mark.parametrize("name", ["deepseek-v3-small-biased", "qwen2-moe-uneven", "opt-350m-form"])
def test_values_of_unlike_layers_are_written_and_read(tmp_path, name):
    model = load(tmp_path, CONFIGS[name])
    path = tmp_path / "value.json"
    text = encode(model, schema="hetplan.model-value/3")
    path.write_text(text)
    assert decode(read_document(path), ModelSpec, schema="hetplan.model-value/3") == model
    wrong = json.loads(text)
    wrong["layer_runs"][0]["layer"]["attention"]["windw"] = 3
    path.write_text(json.dumps(wrong))
    with pytest.raises(InputError, match="unknown key"):
        decode(read_document(path), ModelSpec, schema="hetplan.model-value/3")
