"""Models of unlike layers as a person writes them, and how plans refuse what cannot be planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
from model_configs import CONFIGS, SMALL, faults, load

from hetplan.errors import InputError
from hetplan.files.shipped import shipped_folder
from hetplan.model.layer_units import planning_faults
from hetplan.model.load import load_model

MODELS = shipped_folder("configs") / "models"


def test_the_shipped_example_is_the_published_model(tmp_path):
    written = load_model(MODELS / "deepseek-v3.yaml")
    balance = {"aux_loss_alpha": 0.0001, "seq_aux": True}
    read = load(tmp_path, CONFIGS["deepseek_v3-defaults"] | balance)
    assert replace(written, name="") == replace(read, name="")
    assert [run.count for run in written.layer_runs] == [3, 58]


PUBLISHED = {
    # config.json of mistralai/Mixtral-8x7B-v0.1 and Qwen/Qwen3-235B-A22B.
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.02,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    "qwen3-235b-a22b": {
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_models_with_experts_are_the_published_ones(tmp_path, name):
    written, read = load_model(MODELS / f"{name}.yaml"), load(tmp_path, PUBLISHED[name])
    assert replace(written, name="") == replace(read, name="")


YAML_OF = {
    "gemma3-uneven": """schema: hetplan.model/3
name: x
architecture: llama
num_layers: 8
hidden_size: 96
ffn_hidden_size: 208
num_attention_heads: 6
num_kv_heads: 2
head_dim: 16
vocab_size: 503
max_sequence_length: 128
qk_norm: true
norms_per_layer: 4
layers: [{count: 5, window: 16}, {}]
repeat_layers: true
norm_epsilon: 1e-06
activation: gelu_tanh
""",
    "opt-350m-form": """schema: hetplan.model/3
name: x
architecture: gpt
num_layers: 3
hidden_size: 96
ffn_hidden_size: 200
num_attention_heads: 6
vocab_size: 503
max_sequence_length: 64
learned_positions: 66
embedding_size: 48
final_norm: false
tied_embeddings: true
norm_epsilon: 1e-05
activation: relu
""",
    "deepseek-v3-small-biased": """schema: hetplan.model/3
name: x
architecture: llama
num_layers: 5
hidden_size: 96
ffn_hidden_size: 208
num_attention_heads: 6
vocab_size: 503
max_sequence_length: 128
latent_attention: {query_rank: 40, kv_rank: 24, nope_head_dim: 12, rope_head_dim: 4,
                   value_head_dim: 10, bias: true}
layers:
  - count: 2
  - count: 3
    experts: {num_experts: 7, experts_per_token: 3, ffn_hidden_size: 56, shared_ffn_hidden_size: 56}
multi_token_prediction: {num_layers: 2}
norm_epsilon: 1e-06
activation: silu
rotary_base: 10000
router: {score_function: sigmoid, normalized: true, scaling_factor: 2.5, correction_bias: true}
""",
}


@pytest.mark.parametrize("name", YAML_OF)
def test_both_forms_describe_the_same_model(tmp_path, name):
    written, read = load(tmp_path, YAML_OF[name]), load(tmp_path, CONFIGS[name])
    assert replace(written, name="") == replace(read, name="")


@pytest.mark.parametrize(
    ("extra", "line", "field", "says"),
    [
        ("layers: [{count: 5}]\n", 10, "layers", "add up to 5, num_layers is 6"),
        (
            "layers: [{num_attention_heads: 7}, {count: 5}]\n",
            10,
            "layers[0].num_attention_heads",
            "not",
        ),
        ("layers: [{count: 6, windw: 4}]\n", 10, "layers[0].windw", "did you mean window?"),
        (
            "experts: {num_experts: 4, experts_per_token: 5, ffn_hidden_size: 8}\n",
            10,
            "experts",
            "experts_per_token is 5",
        ),
        (
            "num_kv_heads: 2\nlatent_attention: {kv_rank: 8, nope_head_dim: 4, rope_head_dim: 2, "
            "value_head_dim: 4}\n",
            11,
            "latent_attention",
            "leave those out",
        ),
    ],
)
def test_faults_of_unlike_layers(tmp_path, extra, line, field, says):
    found = faults(tmp_path, SMALL + extra)
    assert (line, field) in [entry[:2] for entry in found]
    assert any(says in message for _, _, message in found), found


def test_a_dense_layer_needs_a_width(tmp_path):
    text = SMALL.replace("ffn_hidden_size: 200\n", "")
    assert "ffn_hidden_size is missing" in faults(tmp_path, text)[0][2]


def test_models_of_unlike_layers_cannot_be_planned(tmp_path):
    (fault,) = planning_faults(load(tmp_path, CONFIGS["gemma2-uneven"]), 64)
    assert (
        "shapes at sequence length 64: layers 1 and 2 differ in attention.window (16 and none)"
        in (fault)
    )
    # A window that covers the sequence is none.
    assert planning_faults(load(tmp_path, CONFIGS["gemma2-uneven"]), 16) == ()
    assert planning_faults(load(tmp_path, CONFIGS["mistral-window"]), 64) == ()
    # Two dense layers and one of experts behind them, which goes with the prediction layers.
    assert planning_faults(load(tmp_path, CONFIGS["deepseek-v3-small-biased"]), 64) == ()
    with pytest.raises(InputError, match="mlp"):
        load(tmp_path, CONFIGS["deepseek-v3-small-biased"]).common_layer()
