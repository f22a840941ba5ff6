"""Configurations of every family, as a config.json would hold them; sizes are made up or public."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetplan.errors import InputError
from hetplan.model.load import load_model
from hetplan.model.spec import ModelSpec

LLAMA = {
    "model_type": "llama",
    "vocab_size": 503,
    "hidden_size": 96,
    "intermediate_size": 208,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
}
MOE = LLAMA | {"moe_intermediate_size": 56, "num_experts_per_tok": 3}
LATENT = LLAMA | {
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 7,
    "moe_intermediate_size": 56,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 5,
}
OPT = {
    "model_type": "opt",
    "vocab_size": 503,
    "hidden_size": 96,
    "ffn_dim": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
}
NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": 500,
    "hidden_size": 96,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
}
TYPES = ["sliding_attention", "full_attention", "full_attention"]

CONFIGS: dict[str, dict[str, object]] = {
    # every family with its class's own defaults
    **{
        f"{name}-defaults": {"model_type": name}
        for name in [
            "gpt2",
            "gpt_neox",
            "opt",
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma",
            "gemma2",
            "gemma3_text",
            "mixtral",
            "qwen2_moe",
            "qwen3_moe",
            "deepseek_v3",
        ]
    },
    "deepseek_v2-defaults": {"model_type": "deepseek_v2", "num_experts_per_tok": 6},
    # GPT-2, NeoX, OPT
    "gpt2-xl": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "gpt2-inner-untied": {
        "model_type": "gpt2",
        "n_embd": 60,
        "n_layer": 2,
        "n_head": 5,
        "n_inner": 77,
        "n_positions": 33,
        "vocab_size": 101,
        "tie_word_embeddings": False,
    },
    "gpt2-other-names": {"model_type": "gpt2", "hidden_size": 48, "num_hidden_layers": 2},
    "pythia-like": NEOX,
    "neox-serial-without-bias": NEOX
    | {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True},
    "opt-like": OPT,
    "opt-350m-form": OPT
    | {"word_embed_proj_dim": 48, "do_layer_norm_before": False, "max_position_embeddings": 64},
    "opt-350m": {
        "model_type": "opt",
        "hidden_size": 1024,
        "ffn_dim": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "word_embed_proj_dim": 512,
        "do_layer_norm_before": False,
    },
    "opt-without-bias-and-scales": OPT
    | {"enable_bias": False, "layer_norm_elementwise_affine": False},
    "opt-without-final-norm-untied": OPT
    | {"_remove_final_layer_norm": True, "tie_word_embeddings": False},
    # Llama and its like
    "llama-grouped-biased-tied": LLAMA
    | {
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama-null-heads-own-width": LLAMA | {"num_key_value_heads": None, "head_dim": 20},
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "mistral-window": LLAMA
    | {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 16},
    "mistral-null-window": LLAMA
    | {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None},
    "qwen2-windows-above": LLAMA
    | {
        "model_type": "qwen2",
        "num_key_value_heads": 3,
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 2,
    },
    "qwen3-biased": LLAMA
    | {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 24}
    | {"attention_bias": True, "layer_types": TYPES, "use_sliding_window": True},
    "gemma-wide-heads": LLAMA
    | {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 24, "attention_bias": True},
    "gemma2-uneven": LLAMA
    | {"model_type": "gemma2", "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16},
    "gemma3-uneven": LLAMA
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 16,
        "tie_word_embeddings": False,
    },
    # experts
    "mixtral-small": LLAMA
    | {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 5}
    | {"num_experts_per_tok": 2, "sliding_window": 16},
    "qwen2-moe-uneven": MOE
    | {
        "model_type": "qwen2_moe",
        "num_key_value_heads": 2,
        "num_experts": 9,
        "shared_expert_intermediate_size": 88,
        "decoder_sparse_step": 2,
        "qkv_bias": False,
    },
    "qwen3-moe-uneven": MOE
    | {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "num_experts": 9,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "head_dim": 24,
        "attention_bias": True,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "deepseek-v2-lite-form": LATENT
    | {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "num_key_value_heads": 6,
    },
    "deepseek-v3-small-biased": LATENT
    | {
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 2,
        "n_shared_experts": 1,
        "attention_bias": True,
        "num_key_value_heads": 6,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 2,
    },
}


def load(folder: Path, content: dict[str, Any] | str) -> ModelSpec:
    """The model of a config.json, or of a file in hetplan's own form."""
    path = folder / ("config.json" if isinstance(content, dict) else "model.yaml")
    path.write_text(json.dumps(content, indent=1) if isinstance(content, dict) else content)
    return load_model(path)


def faults(folder: Path, content: dict[str, Any] | str) -> list[tuple[int, str, str]]:
    """(line, field, message) of every fault of the file."""
    with pytest.raises(InputError) as caught:
        load(folder, content)
    found = caught.value.faults
    assert {Path(fault.file).parent for fault in found} == {folder}
    return [(fault.line, fault.field, fault.message) for fault in found]


SMALL = """schema: hetplan.model/3
name: small
architecture: llama
num_layers: 6
hidden_size: 96
ffn_hidden_size: 200
num_attention_heads: 6
vocab_size: 101
max_sequence_length: 64
"""
