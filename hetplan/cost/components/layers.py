"""What of a layer's work and traffic is there only because of how the model is cut or loaded.

Key-value heads: with k heads on t > k ranks each is held by t / k of them (arXiv 2305.13245); a
rank has one head where an even split would give it k / t of one.
Experts: ranks of an expert-parallel group wait for the one with most tokens. With tokens f times
the mean on it, its experts' products, its side of the all_to_all and what it keeps are f times the
mean; one of e ranks cannot have more than all tokens, so f <= e.

What sequences of unlike lengths cost, against rows that are full: padded, or packed.

A row has s tokens. Everything but the attention core costs the same per token; the core costs the
query-key pairs, l^2 / 2 of a sequence of l tokens (`hetplan.model.work.attended`; windows cut
them). With shares p_l of the sequences:

    padded   one sequence per row, computed like a full one: time 1, useful tokens E[l] / s
    packed   rows are filled with whole sequences, each of which attends only to itself:
             useful tokens = fill, core = pairs of a row's sequences / pairs of s tokens

Rows are filled as first-fit decreasing does it with many sequences (Johnson et al., SIAM Journal on
Computing 3, 1974): row after row takes, of the sequences that are left, the longest that still
fit. Rows of one pattern are filled until one of its lengths runs out, so there are no more patterns
than lengths. Trainers that pack from a small buffer fill less, those that cut sequences fill all.

Rows of unlike patterns have unlike cores. That ranks which run different rows wait for the slowest
of them is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hetplan.job.spec import Job, LengthShare
from hetplan.model.layers import Attention, Experts, LatentAttention, TransformerLayer
from hetplan.model.work import attended, transformer_work

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


def copied_heads_share(
    layer: TransformerLayer, hidden: int, sequence_length: int, tp: int
) -> float:
    """Part of a layer's operations on one rank that even shares of key-value heads would not have.

    0 for latent attention.
    """
    attention = layer.attention
    if not isinstance(attention, Attention) or tp <= attention.num_kv_heads:
        return 0.0
    # Keys and values: of one head each, where the share would be k / t of one.
    beyond = 2.0 * attention.head_dim * (1.0 - attention.num_kv_heads / tp)
    work = transformer_work(layer, hidden, 1, sequence_length, tp)
    return 2.0 * sequence_length * hidden * beyond / work.flops


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


# ---- sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFactors:
    """Rows of the job's sequences over rows of full ones."""

    tokens: float
    """Useful tokens."""
    core: float
    """Operations of the attention core; everything else takes as long as in full rows."""
    note: str

    def layer_factor(self, core_share: float) -> float:
        """Time of a layer of which the attention core is this part in full rows."""
        return (1.0 - core_share) + self.core * core_share


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pattern:
    """Rows with the same sequences."""

    counts: tuple[int, ...]
    """Sequences of each length."""
    rows: float
    """How many of them there are for one sequence of the job: a fraction."""


def length_factors(job: Job, window: int | None = None) -> LengthFactors:
    """Of the job's sequences, for attention with this window."""
    return _factors(job.sequence_lengths, job.sequence_length, job.packing, window)


@lru_cache(maxsize=256)
def _factors(
    shares: tuple[LengthShare, ...], row: int, packing: bool, window: int | None
) -> LengthFactors:
    if not shares:
        return LengthFactors(tokens=1.0, core=1.0, note="all sequences have sequence_length")
    mean = math.fsum(each.share * each.length for each in shares)
    mean /= math.fsum(each.share for each in shares)
    if not packing:
        return LengthFactors(
            tokens=mean / row,
            core=1.0,
            note=f"padded: {mean / row:.1%} of the tokens are of sequences",
        )
    lengths, patterns = _packed(shares, row)
    rows = math.fsum(each.rows for each in patterns)
    whole = attended(row, window)
    cores = [
        math.fsum(
            count * attended(length, window)
            for count, length in zip(each.counts, lengths, strict=True)
        )
        / whole
        for each in patterns
    ]
    weights = [each.rows / rows for each in patterns]
    core = math.fsum(weight * value for weight, value in zip(weights, cores, strict=True))
    fill = min(1.0, mean / (rows * row))
    return LengthFactors(
        tokens=fill,
        core=core,
        note=f"packed: {fill:.1%} of the tokens are of sequences, {1.0 / rows:.3g} in a row",
    )


def _packed(
    shares: Sequence[LengthShare], row: int
) -> tuple[tuple[int, ...], tuple[_Pattern, ...]]:
    """Lengths, longest first, and the rows into which the job's sequences are packed."""
    ordered = sorted(shares, key=lambda each: -each.length)
    lengths = tuple(each.length for each in ordered)
    total = math.fsum(each.share for each in ordered)
    left = [each.share / total for each in ordered]
    patterns = []
    while any(left):
        room, counts = row, []
        for length, amount in zip(lengths, left, strict=True):
            count = room // length if amount > 0 else 0
            counts.append(count)
            room -= count * length
        # Rows of this pattern until the first of its lengths runs out, which is then exactly 0.
        rows, last = min((left[at] / count, at) for at, count in enumerate(counts) if count)
        left = [max(0.0, amount - rows * count) for amount, count in zip(left, counts, strict=True)]
        left[last] = 0.0
        patterns.append(_Pattern(counts=tuple(counts), rows=rows))
    return lengths, tuple(patterns)
