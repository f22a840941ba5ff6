"""Sizes of public models whose configurations have all that published files have."""

import pytest
from model_configs import load

from hetplan.errors import InputError

QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
GEMMA2 = {"model_type": "gemma2", "vocab_size": 256000, "sliding_window": 4096}
LATENT = {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "vocab_size": 102400,
}


def sizes(hidden, ffn, layers, heads, **more):
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        # what files have beside and what changes no shape; nothing of it is executed
        "auto_map": {"AutoModel": "modeling_evil.Model"},
        "quantization_config": {"quant_method": "fp8"},
        "torch_dtype": "bfloat16",
        "trust_remote_code": True,
        **more,
    }


# Sums of the tensors of the published checkpoints, tied matrices once.
PUBLISHED = {
    "pythia-12b": (
        sizes(5120, 20480, 36, 40, model_type="gpt_neox", vocab_size=50688),
        11846072320,
    ),
    "llama-3.1-405b": (
        sizes(16384, 53248, 126, 128, num_key_value_heads=8, vocab_size=128256)
        | {"model_type": "llama"},
        405853388800,
    ),
    "qwen2.5-32b": (
        sizes(5120, 27648, 64, 40, num_key_value_heads=8, vocab_size=152064)
        | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 131072},
        32763876352,
    ),
    "qwen3-235b-a22b": (
        QWEN3
        | sizes(4096, 12288, 94, 64, num_experts=128, num_experts_per_tok=8)
        | {"model_type": "qwen3_moe", "num_key_value_heads": 4, "moe_intermediate_size": 1536},
        235093634560,
    ),
    "gemma-2-27b": (
        GEMMA2 | sizes(4608, 36864, 46, 32, num_key_value_heads=16, head_dim=128),
        27227128320,
    ),
    "mixtral-8x22b": (
        sizes(6144, 16384, 56, 48, num_key_value_heads=8, num_local_experts=8)
        | {"model_type": "mixtral", "num_experts_per_tok": 2},
        140620634112,
    ),
    "deepseek-v2": (
        LATENT
        | sizes(5120, 12288, 60, 128, moe_intermediate_size=1536, n_routed_experts=160)
        | {"model_type": "deepseek_v2", "q_lora_rank": 1536},
        235741434880,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_sizes(tmp_path, name):
    config, published = PUBLISHED[name]
    assert load(tmp_path, config).parameter_count == published


def test_a_model_type_of_its_own_goes_by_its_class(tmp_path):
    config = LATENT | sizes(64, 48, 3, 4, moe_intermediate_size=16, n_routed_experts=8)
    known = load(tmp_path, config | {"model_type": "deepseek_v3"})
    own = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    assert load(tmp_path, config | own).layer_runs == known.layer_runs
    with pytest.raises(InputError, match="kimi_k2"):
        load(tmp_path, config | {"model_type": "kimi_k2", "architectures": ["Kimi"]})
