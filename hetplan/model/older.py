"""Models that were written to disk before their layers could differ, in today's form."""

from __future__ import annotations

_LAYER = ("ffn_hidden_size", "num_attention_heads", "num_kv_heads", "head_dim", "num_layers")


def flat_to_runs(data: dict[str, object]) -> dict[str, object]:
    """The same model with `layer_runs`; data that has them already, or is no model, unchanged.

    Values are only moved: whether they are right is found by the form that reads them.
    """
    if "layer_runs" in data or "architecture" not in data or any(key not in data for key in _LAYER):
        return data
    gpt = data["architecture"] == "gpt"
    norm = "layer_norm" if gpt else "rms_norm"
    layer = {
        "attention": {
            "num_heads": data["num_attention_heads"],
            "num_kv_heads": data["num_kv_heads"],
            "head_dim": data["head_dim"],
            "qkv_bias": gpt,
            "output_bias": gpt,
            "rotary": not gpt,
        },
        "mlp": {"ffn_hidden_size": data["ffn_hidden_size"], "gated": not gpt, "bias": gpt},
        "norm": norm,
    }
    rest = {key: value for key, value in data.items() if key not in (*_LAYER, "architecture")}
    return {
        **rest,
        "layer_runs": [{"count": data["num_layers"], "layer": layer}],
        "final_norm": norm,
        "learned_positions": data.get("max_sequence_length", 0) if gpt else 0,
    }
