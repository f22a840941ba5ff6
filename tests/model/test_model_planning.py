"""What plan, estimate and profile do with models that are not hetplan's own."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from model_configs import CONFIGS

from hetplan.cluster.load import load_cluster
from hetplan.cost.estimate import estimate
from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.shipped import shipped_folder
from hetplan.job.load import load_job
from hetplan.job.spec import Pins, Precision
from hetplan.model.layers import Experts, LatentAttention
from hetplan.model.load import load_model
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


def config(folder, name, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIGS[name] | changes))
    return load_model(path)


EQUAL = {
    "mixtral-small": {},
    "opt-350m-form": {"max_position_embeddings": 256},
    "deepseek-v2-lite-form": {"first_k_dense_replace": 0},
}


@pytest.mark.parametrize("name", EQUAL)
def test_models_of_equal_layers_are_planned_and_priced(tmp_path, name):
    model = config(tmp_path, name, **EQUAL[name])
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
    model = config(tmp_path, name)
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
    model = config(tmp_path, "mixtral-small")
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
    plain = predictor.layer(device, query(config(tmp_path, "llama-3.1-8b"), 64))
    assert plain.extrapolating == ()
    mixtral = query(config(tmp_path, "mixtral-small"), 64)
    sparse = predictor.layer(device, replace(mixtral, is_backward=True))
    (note,) = sparse.extrapolating
    assert note.startswith("layers with attention window 16, 5 experts not measured")
    assert sparse.log_halfwidth == datasheet.MATRIX_LOG_HALFWIDTH > plain.log_halfwidth
    covered = predictor.layer(device, query(config(tmp_path, "mistral-window"), 16))
    assert covered.extrapolating == ()


def test_the_datasheet_charges_every_part_a_launch(tmp_path):
    def seconds(model):
        return datasheet.layer(CLUSTER.islands[0].device, query(model, 16)).seconds

    plain = config(tmp_path, "llama-null-heads-own-width")
    layer = plain.layer_runs[0].layer
    run = plain.layer_runs[0]

    def other(**changes):
        return replace(plain, layer_runs=(replace(run, layer=replace(layer, **changes)),))

    latent = LatentAttention(
        num_heads=6,
        query_rank=8,
        kv_rank=8,
        nope_head_dim=8,
        rope_head_dim=8,
        value_head_dim=16,
    )
    experts = Experts(num_experts=4, experts_per_token=2, expert_ffn_hidden_size=208)
    longer = [
        other(num_norms=4),
        other(attention=replace(layer.attention, qk_norm=True)),
        other(attention=latent),
        other(attention=replace(latent, query_rank=None)),
        other(mlp=experts),
        other(mlp=replace(experts, shared_ffn_hidden_size=208)),
    ]
    assert all(seconds(model) > seconds(plain) for model in longer)


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
    model = config(tmp_path, name)
    path = tmp_path / "value.json"
    text = encode(model, schema="hetplan.model-value/3")
    path.write_text(text)
    assert decode(read_document(path), ModelSpec, schema="hetplan.model-value/3") == model
    wrong = json.loads(text)
    wrong["layer_runs"][0]["layer"]["attention"]["windw"] = 3
    path.write_text(json.dumps(wrong))
    with pytest.raises(InputError, match="unknown key"):
        decode(read_document(path), ModelSpec, schema="hetplan.model-value/3")
