from hetplan.model.spec import Architecture, ModelSpec, plain_model

SHAPE: dict[str, object] = {
    "name": "tiny-gpt",
    "architecture": Architecture.GPT,
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 8,
    "vocab_size": 64,
    "max_sequence_length": 16,
}


def gpt(**changes: object) -> ModelSpec:
    return plain_model(**(SHAPE | changes))  # type: ignore[arg-type]


def llama(**changes: object) -> ModelSpec:
    shape = {"name": "tiny-llama", "architecture": Architecture.LLAMA, "num_kv_heads": 2}
    return gpt(**(shape | {"ffn_hidden_size": 48} | changes))


GPT = gpt()
LLAMA = llama()
