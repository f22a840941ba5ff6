"""What of a layer's work and traffic is there only because of how the model is cut or loaded.

Key-value heads: with k heads on t > k ranks each is held by t / k of them (arXiv 2305.13245); a
rank has one head where an even split would give it k / t of one.
Experts: ranks of an expert-parallel group wait for the one with most tokens. With tokens f times
the mean on it, its experts' products, its side of the all_to_all and what it keeps are f times the
mean; one of e ranks cannot have more than all tokens, so f <= e.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.job.spec import Job
from hetplan.model.layers import Attention, Experts, LatentAttention, TransformerLayer
from hetplan.model.work import transformer_work

# ---- gradients of the weights


def accumulation_bytes(
    weight_bytes: int, gradient_bytes: int, *, fused: bool, float32_sums: bool = False
) -> int:
    """Memory traffic per weight and microbatch of adding up gradients, beyond that of the product.

    Fused: the product reads and writes the sum (2 gradient bytes). Its own time has that of float32
    sums if it was measured with them, otherwise that of a sum as wide as the weights. Products of
    equal shape on B200 with float32 and with bfloat16 sums: 3.9 B per weight at the memory's full
    rate apart, median of 82 (SimuMax's tables); by the traffic it is 4. Not fused: a pass of its
    own reads both and writes the sum (Megatron-LM, `--no-gradient-accumulation-fusion`:
    megatron/core/distributed/distributed_data_parallel.py; autograd's own sum likewise).
    """
    if fused:
        return max(0, 2 * gradient_bytes - (8 if float32_sums else 2 * weight_bytes))
    return weight_bytes + 2 * gradient_bytes


# ---- key-value heads


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedHeads:
    """Key-value heads that several tensor-parallel ranks hold."""

    copies: int
    """Ranks that hold the same head; 1: none is copied."""
    parameters: float
    """What one rank holds of one layer beyond an even share."""
    time_fraction: float
    """Part of the layer's operations on one rank that an even share would not have."""


def copied_heads(
    layer: TransformerLayer, hidden: int, sequence_length: int, tp: int
) -> CopiedHeads:
    """What copies of key-value heads cost a layer under this tp; nothing for latent attention."""
    attention = layer.attention
    if not isinstance(attention, Attention) or tp <= attention.num_kv_heads:
        return CopiedHeads(copies=1, parameters=0.0, time_fraction=0.0)
    # Keys and values: of one head each, where the share would be k / t of one.
    beyond = 2.0 * attention.head_dim * (1.0 - attention.num_kv_heads / tp)
    work = transformer_work(layer, hidden, 1, sequence_length, tp)
    return CopiedHeads(
        copies=tp // attention.num_kv_heads,
        parameters=beyond * (hidden + (1 if attention.qkv_bias else 0)),
        time_fraction=2.0 * sequence_length * hidden * beyond / work.flops,
    )


# ---- experts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """How much more than the mean the busiest expert-parallel rank has."""

    factor: float
    """Its tokens over the mean: scales its experts' time, its all_to_all and what it keeps."""
    note: str = ""


def expert_load(layer: TransformerLayer, job: Job, ep: int) -> ExpertLoad:
    """The job's load factor as it holds for this many expert-parallel ranks."""
    if not isinstance(layer.mlp, Experts):
        return ExpertLoad(factor=1.0, note="the layers have no experts")
    if ep == 1:
        return ExpertLoad(factor=1.0, note="every rank holds all experts")
    if job.expert_load_factor == 1:
        return ExpertLoad(factor=1.0, note="equal loads, as the job says")
    factor = min(job.expert_load_factor, float(ep))
    # Top-k experts differ, so a rank gets at most min(k, its experts) copies of each token.
    held = layer.mlp.num_experts / ep
    copies = min(float(layer.mlp.experts_per_token), held)
    factor = max(1.0, min(factor, ep * copies / layer.mlp.experts_per_token))
    return ExpertLoad(
        factor=factor, note=f"the busiest of {ep} ranks has {factor:g} times the mean"
    )


# ---- what tensor parallelism moves


def attention_widths(layer: TransformerLayer, tp: int) -> tuple[float, float, float, float]:
    """Elements of a token's queries, keys, values and result on one tensor-parallel rank."""
    attention = layer.attention
    one, two = map(float, attention.slice_sizes(tp))
    if isinstance(attention, LatentAttention):
        return one, one, two, two
    return one, two, two, one


def products_by_columns(layer: TransformerLayer, experts_like_rest: bool) -> int:
    """Inputs of a layer that tensor parallelism gathers: attention's, the MLP's or shared experts'.

    Routed experts that are not cut like the rest get theirs from the exchange of tokens.
    """
    if not isinstance(layer.mlp, Experts) or experts_like_rest:
        return 2
    return 1 if layer.mlp.shared is None else 2
