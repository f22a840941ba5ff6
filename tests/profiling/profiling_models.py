from dataclasses import replace

from hetplan.model.spec import Architecture, ModelSpec

GPT = ModelSpec(
    name="tiny-gpt",
    architecture=Architecture.GPT,
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_kv_heads=4,
    head_dim=8,
    vocab_size=64,
    max_sequence_length=16,
)
LLAMA = replace(
    GPT, name="tiny-llama", architecture=Architecture.LLAMA, num_kv_heads=2, ffn_hidden_size=48
)
