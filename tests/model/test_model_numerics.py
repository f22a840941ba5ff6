"""What a model computes with its weights, from a config.json and from model files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_configs import CONFIGS, SMALL, load
from transformers import AutoConfig

from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.model.numerics import RotaryScaling, RotaryScalingKind, Router
from hetplan.model.spec import ModelSpec

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
}


CASES = {
    **{name: CONFIGS[name] for name in CONFIGS if name.endswith("-defaults")},
    "llama-3.1": {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "transformers 5": {
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_parameters": LLAMA3 | {"rope_theta": 500000.0},
    },
    "linear": {"model_type": "qwen2", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "yarn": {"model_type": "deepseek_v3", "rope_scaling": YARN},
    "qwen3-moe": {"model_type": "qwen3_moe", "norm_topk_prob": True, "rope_theta": 1e6},
    "neox": {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 20000},
    "mixtral": {"model_type": "mixtral", "router_aux_loss_coef": 0.02, "rms_norm_eps": 1e-5},
    "gpt2": {"model_type": "gpt2", "activation_function": "gelu", "layer_norm_epsilon": 1e-6},
}
_NAMES = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


@pytest.mark.parametrize("name", CASES)
def test_a_configuration_says_what_transformers_reads_in_it(name: str, tmp_path: Path) -> None:
    stated = CASES[name]
    model = load(tmp_path, stated)
    given = {key: value for key, value in stated.items() if key != "model_type"}
    theirs = AutoConfig.for_model(stated["model_type"], **json.loads(json.dumps(given)))
    epsilon = [
        getattr(theirs, key)
        for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
        if hasattr(theirs, key)
    ]
    # OPT's configuration has none; its layers have torch's own.
    assert model.norm_epsilon == (epsilon[0] if epsilon else 1e-5)
    words = ("hidden_activation", "hidden_act", "activation_function")
    word = next(getattr(theirs, key) for key in words if hasattr(theirs, key))
    assert model.activation == _NAMES.get(word, word)
    rope = getattr(theirs, "rope_parameters", None)
    if not rope or "full_attention" in rope:
        assert model.rotary_base is None
        assert model.rotary_scaling is None
        return
    assert model.rotary_base == rope["rope_theta"]
    assert (model.rotary_fraction or 1) == rope.get("partial_rotary_factor", 1)
    if rope["rope_type"] == "default":
        assert model.rotary_scaling is None
        return
    found = model.rotary_scaling
    assert found is not None
    assert (found.kind, found.factor) == (rope["rope_type"], rope["factor"])
    assert found.low_frequency_factor == rope.get("low_freq_factor")
    assert found.high_frequency_factor == rope.get("high_freq_factor")
    assert found.mscale_all_dim == rope.get("mscale_all_dim")
    if "original_max_position_embeddings" in rope:
        assert found.original_length == rope["original_max_position_embeddings"]


def test_routers(tmp_path: Path) -> None:
    third = load(tmp_path, {"model_type": "deepseek_v3", "aux_loss_alpha": 1e-4, "seq_aux": True})
    assert third.router == Router(
        score_function="sigmoid",  # type: ignore[arg-type]
        normalized=True,
        scaling_factor=2.5,
        num_groups=8,
        groups_per_token=4,
        group_experts=2,
        correction_bias=True,
        loss_coefficient=1e-4,
        loss_per_sequence=True,
    )
    grouped = {"model_type": "deepseek_v2", "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3}
    greedy = load(tmp_path, grouped).router
    assert greedy is not None
    assert (greedy.num_groups, greedy.normalized) == (None, False)
    second = load(tmp_path, grouped | {"topk_method": "group_limited_greedy"}).router
    assert second is not None
    assert (second.num_groups, second.groups_per_token, second.group_experts) == (8, 3, 1)
    qwen = load(tmp_path, {"model_type": "qwen3_moe", "norm_topk_prob": True}).router
    assert qwen is not None
    assert (qwen.normalized, qwen.loss_coefficient) == (True, 0.001)
    assert load(tmp_path, {"model_type": "qwen3_moe", "num_experts": 0}).router is None


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"rope_theta": "big"}, "rope_theta", "write a number"),
        ({"rope_scaling": LLAMA3 | {"factor": 0}}, "rope_scaling.factor", "above 0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor", "at most 1"),
    ],
)
def test_faults_name_their_key(
    change: dict[str, Any], field: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, {"model_type": "llama"} | change)
    (fault,) = caught.value.faults
    assert fault.field == field
    assert says in fault.message


# ---- model files


def test_files_say_it(tmp_path: Path) -> None:
    scaling = "{kind: llama3, factor: 8, original_length: 8192, low_frequency_factor: 1}"
    model = load(
        tmp_path,
        f"{SMALL}norm_epsilon: 1e-6\nrotary_base: 5e5\nactivation: silu\n"
        f"rotary_scaling: {scaling}\n",
    )
    assert (model.norm_epsilon, model.rotary_base, model.activation) == (1e-6, 500000.0, "silu")
    assert model.rotary_scaling == RotaryScaling(
        kind=RotaryScalingKind.LLAMA3, factor=8.0, original_length=8192, low_frequency_factor=1.0
    )
    path = tmp_path / "value.json"
    path.write_text(encode(model, schema="hetplan.model-value/3"))
    assert decode(read_document(path), ModelSpec, schema="hetplan.model-value/3") == model


@pytest.mark.parametrize(
    ("line", "field", "says"),
    [
        ("norm_epsilon: 0", "norm_epsilon", "more than 0"),
        ("rotary: false\nrotary_base: 10000", "rotary_base", "no rotary positions"),
        ("router: {score_function: sigmoid}", "router", "no experts"),
        (
            "experts: {num_experts: 8, experts_per_token: 2, ffn_hidden_size: 8}\n"
            "router: {num_groups: 4}",
            "router",
            "belong together",
        ),
    ],
)
def test_files_that_say_it_wrongly(line: str, field: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, f"{SMALL}{line}\n")
    (fault,) = caught.value.faults
    assert fault.field == field
    assert says in fault.message, fault.message
    assert fault.line > 9


# ---- hetplan's own layers
