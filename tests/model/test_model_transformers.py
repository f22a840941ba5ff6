"""Parameter counts and operations against the transformers package and torch."""

from __future__ import annotations

import os
import warnings

import pytest
from model_configs import CONFIGS, LLAMA, MOE, load

from hetplan.model.spec import LayerKind
from hetplan.model.work import layer_work

os.environ["HF_HUB_OFFLINE"] = "1"
with warnings.catch_warnings():
    # Importing the package warns about its own and its dependencies' old names; what a test does
    # with it afterwards must not.
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", FutureWarning)
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM


def theirs(config, device):
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def numel(module):
    return sum(parameter.numel() for parameter in module.parameters())


def transformer_layers(module):
    lists = [part for part in module.modules() if isinstance(part, torch.nn.ModuleList)]
    return max(lists, key=len)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_layer_and_the_whole_have_the_packages_parameters(tmp_path, name):
    config = CONFIGS[name]
    model, module = load(tmp_path, config), theirs(config, "meta")
    layers = transformer_layers(module)
    counted = [model.parameters_at(i, 1) for i in range(1, model.num_layers + 1)]
    assert counted == [numel(layer) for layer in layers]
    assert model.parameter_count == numel(module)
    ends = numel(module) - sum(counted)
    tied = model.vocabulary_matrix() if model.tied_embeddings else 0
    assert model.parameters(LayerKind.EMBEDDING) + model.parameters(LayerKind.HEAD) - tied == ends


def test_published_totals(tmp_path):
    # Sums of the tensors of the published checkpoints.
    assert load(tmp_path, CONFIGS["llama-defaults"]).parameter_count == 6_738_415_616  # 2 7B
    assert load(tmp_path, CONFIGS["llama-3.1-8b"]).parameter_count == 8_030_261_248
    mixtral = load(tmp_path, CONFIGS["mixtral-defaults"])  # the class's defaults are the 8x7B
    assert mixtral.parameter_count == 46_702_792_704
    qwen = load(tmp_path, CONFIGS["qwen3-30b-a3b"])
    assert round(qwen.parameter_count / 1e9, 1) == 30.5  # its model card
    v3 = load(tmp_path, CONFIGS["deepseek_v3-defaults"])
    # arXiv 2412.19437: 671 B in all
    assert int(v3.parameter_count / 1e9) == 671


def flops(module, tokens):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(tokens, use_cache=False)
    counts = counter.get_flop_counts()["Global"]
    attention = sum(
        count for op, count in counts.items() if "attention" in str(op) or "bmm" in str(op)
    )
    return sum(counts.values()) - attention, attention


@pytest.mark.parametrize(
    "config",
    [
        LLAMA | {"num_key_value_heads": 2},
        LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2},
        CONFIGS["gpt2-inner-untied"],
        CONFIGS["pythia-like"],
        CONFIGS["gemma2-uneven"] | {"num_hidden_layers": 1, "sliding_window": 64},
        CONFIGS["opt-350m-form"],
    ],
    ids=lambda config: config["model_type"],
)
def test_operations_are_what_torch_counts(tmp_path, config):
    model = load(tmp_path, config)
    b, s = 2, 32
    eager = AutoConfig.for_model(**config, attn_implementation="eager")
    module = AutoModelForCausalLM.from_config(eager)
    matrix, square = flops(module, torch.zeros((b, s), dtype=torch.long))
    works = [layer_work(model, kind, b, s) for kind in model.layers]
    assert sum(work.matrix_flops for work in works) == matrix
    # Eager attention computes the whole square, a causal kernel half of it.
    assert 2 * sum(work.attention_flops for work in works) == square


@pytest.mark.parametrize(
    "config",
    [
        LLAMA | {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4},
        MOE
        | {"model_type": "qwen2_moe", "num_key_value_heads": 2, "num_experts": 6}
        | {"shared_expert_intermediate_size": 40, "max_window_layers": 0},
        CONFIGS["deepseek-v3-small-biased"]
        | {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "attention_bias": False},
    ],
    ids=lambda config: config["model_type"],
)
def test_experts_and_latent_attention_cost_what_torch_counts(tmp_path, config):
    model = load(tmp_path, config)
    b, s = 1, 16
    eager = AutoConfig.for_model(
        **config, attn_implementation="eager", experts_implementation="eager"
    )
    module = AutoModelForCausalLM.from_config(eager)
    matrix, square = flops(module, torch.arange(s).reshape(b, s))
    works = [layer_work(model, kind, b, s) for kind in model.layers]
    assert sum(work.matrix_flops for work in works) == matrix
    assert 2 * sum(work.attention_flops for work in works) == square
