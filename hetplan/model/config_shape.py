"""What the keys of a config.json say about a model, whatever its family."""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.model.config_numerics import Numerics
from hetplan.model.config_values import ConfigValues
from hetplan.model.layers import Experts, TransformerLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a family's keys say."""

    hidden_size: int
    vocab_size: int
    positions: int
    """max_position_embeddings."""
    layers: tuple[TransformerLayer, ...]
    tied: bool
    learned_positions: int = 0
    embedding_size: int | None = None
    final_norm: bool = True
    num_mtp_layers: int = 0
    numerics: Numerics


def even_heads(values: ConfigValues, hidden: int, heads: int) -> int:
    """Width of a head where the file states none."""
    if hidden % heads:
        values.fault(
            "num_attention_heads",
            f"{heads} does not divide hidden_size {hidden}, and the width of a head follows from "
            "both; change one of them",
            beside=("n_embd", "hidden_size", "n_head"),
        )
        return 1
    return hidden // heads


def experts_of(
    values: ConfigValues,
    *,
    num_experts: int,
    per_token: int,
    ffn: int,
    shared: int = 0,
    shared_gate: bool = False,
) -> Experts:
    """Routed and shared experts, none with biases; a fault where a token goes to too many."""
    key = "num_experts_per_tok"
    if per_token > num_experts:
        values.fault(
            key,
            f"found {per_token}, more than the {num_experts} experts there are",
            beside=("n_routed_experts", "num_experts", "num_local_experts"),
        )
        per_token = num_experts
    return Experts(
        num_experts=num_experts,
        experts_per_token=per_token,
        expert_ffn_hidden_size=ffn,
        shared_ffn_hidden_size=shared,
        shared_gate=shared_gate and shared > 0,
    )
