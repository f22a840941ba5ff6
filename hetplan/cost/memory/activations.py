"""Bytes that a layer keeps for its backward pass, and what that pass needs besides.

Everything is for one microbatch on one rank. h is the hidden size, T = b s / cp are the rank's
tokens, e the bytes per element; r is 1 / tp under sequence parallelism, which cuts what tp would
replicate, otherwise 1. A layer keeps, per token (Korthikanti et al., arXiv 2205.05198, section 4,
with fused attention):

    norms       the inputs and outputs of its norms, r h e each, and their statistics
    attention   queries, keys and values as the kernel reads them, and its result; latent
                attention (arXiv 2405.04434) its latents besides
    MLP         what its columns hold: see `TrainerMemory.gated_columns`
    experts     for each of the k copies of a token its permuted input and the columns, on average
                as many copies as are sent away; times the job's expert load factor

The backward pass of a layer runs from its MLP to its first norm, and frees what it is done with:

    down projection    gradients of the layer's output and of the product
    activation         gradients of the output and of the columns, less the product
    up projection      gradients of output, columns and input, less product and columns
    permutation        twice the gradient of all copies
    attention          gradients of queries, keys, values, result and their packed form, the
                       queries' also in float32, less all that the MLP kept

and whole copies of what sequence parallelism cuts, while a product reads or writes them.
Recomputed parts are kept only while their backward pass runs; a recomputed layer keeps its input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from hetplan.cost.memory.values import (
    FLOAT32_BYTES,
    MemoryLayout,
    TrainerMemory,
)
from hetplan.model.layers import Attention, Experts, LatentAttention, Mlp, Norm, TransformerLayer
from hetplan.model.spec import ModelSpec
from hetplan.model.work import largest_matrix
from hetplan.plans.plan import (
    NO_RECOMPUTE,
    Recompute,
    RecomputeGranularity,
    RecomputeModule,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes of one microbatch of one layer on one rank."""

    kept: float
    """From its forward pass until its backward pass."""
    working: float
    """Most that its backward pass needs beside all that it keeps."""
    for_weights: float = 0.0
    """Kept from the gradient of the inputs until that of the weights, where these are apart."""
    loss: float = 0.0
    """Most that the loss needs beside all that the layer keeps, before any gradient is there."""

    def times(self, factor: float) -> LayerBytes:
        """The bytes for `factor` tokens."""
        return LayerBytes(
            kept=self.kept * factor,
            working=self.working * factor,
            for_weights=self.for_weights * factor,
            loss=self.loss * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a layer is cut and what is done again: everything but its number of tokens."""

    tp: int
    cp: int
    etp: int
    sequence_parallel: bool
    sequence_length: int
    """Of the job, for scores that are kept."""
    element_bytes: int
    load_factor: float
    recompute: Recompute

    @property
    def replicated(self) -> float:
        """Part of a replicated tensor on one rank."""
        return 1.0 / self.tp if self.sequence_parallel else 1.0

    @property
    def gathers(self) -> bool:
        """Products read whole copies of what is cut along the sequence."""
        return self.sequence_parallel and self.tp > 1


def cut_of(
    layout: MemoryLayout, sequence_length: int, element_bytes: int, load_factor: float
) -> Cut:
    """The cut of a stage's layers that recompute."""
    return Cut(
        tp=layout.shape.tp,
        cp=layout.shape.cp,
        etp=layout.shape.etp,
        sequence_parallel=layout.shape.sequence_parallel,
        sequence_length=sequence_length,
        element_bytes=element_bytes,
        # With all experts on every rank nobody has more copies than another.
        load_factor=load_factor if layout.shape.ep > 1 else 1.0,
        recompute=layout.recompute,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Attention or MLP, bytes per token."""

    kept: float
    working: float
    inputs: float
    """What the gradients of the weights are made from: inputs of the products, which are kept, and
    gradients of their results."""
    recomputed: float = 0.0
    """Of what it would keep, what is computed again instead."""


@lru_cache(maxsize=4096)
def transformer_bytes(
    layer: TransformerLayer, hidden: int, cut: Cut, habits: TrainerMemory
) -> LayerBytes:
    """One transformer layer, per token of the rank."""
    norms = _norms(layer, hidden, cut, habits)
    attention = _attention(layer.attention, hidden, cut, habits)
    mlp = (
        _mlp(layer.mlp, hidden, cut, habits)
        if isinstance(layer.mlp, Mlp)
        else _experts(layer.mlp, hidden, cut, habits)
    )
    masks = habits.dropout_masks * hidden * cut.replicated
    kept = norms.kept + attention.kept + mlp.kept + masks
    again = attention.recomputed + mlp.recomputed + norms.recomputed
    if habits.frees_as_it_goes:
        working = max(
            mlp.working + mlp.recomputed,
            attention.working + attention.recomputed - mlp.kept,
        )
        working += norms.recomputed
    else:
        working = kept + again
    if cut.recompute.granularity is RecomputeGranularity.FULL:
        boundary = hidden * cut.element_bytes * cut.replicated
        return LayerBytes(kept=boundary, working=working + kept - boundary, for_weights=boundary)
    return LayerBytes(
        kept=kept, working=working, for_weights=norms.inputs + attention.inputs + mlp.inputs
    )


def matrix_bytes(layer: TransformerLayer, hidden: int, cut: Cut, habits: TrainerMemory) -> float:
    """Bytes of the largest matrix's gradient before it is added to the sum of all microbatches.

    It does not grow with tokens; 0 for trainers that add it in place.
    """
    if habits.fused_weight_gradients:
        return 0.0
    return float(cut.element_bytes * largest_matrix(layer, hidden, cut.tp))


def _module(cut: Cut, module: RecomputeModule) -> bool:
    return (
        cut.recompute.granularity is RecomputeGranularity.SELECTIVE
        and module in cut.recompute.modules
    )


def _norms(layer: TransformerLayer, h: int, cut: Cut, habits: TrainerMemory) -> _Part:
    # inputs of the norms before attention and MLP (one where both read the same), those norms'
    # outputs, and the inputs of norms after them.
    width = h * cut.element_bytes * cut.replicated
    inputs = 1 if layer.parallel_residual else 2
    outputs = min(layer.num_norms, 2)
    kept = (inputs + max(layer.num_norms - 2, 0)) * width
    again = 0.0
    if _module(cut, RecomputeModule.NORMS):
        again = outputs * width
    else:
        kept += outputs * width
    if layer.norm is Norm.RMS_NORM:
        kept += habits.normed_copies * layer.num_norms * width
    if habits.norm_statistics:
        each = 1 if layer.norm is Norm.RMS_NORM else 2
        kept += layer.num_norms * each * FLOAT32_BYTES * cut.replicated
    return _Part(kept=kept, working=0.0, inputs=outputs * width, recomputed=again)


def _attention(
    attention: Attention | LatentAttention, h: int, cut: Cut, habits: TrainerMemory
) -> _Part:
    e = cut.element_bytes
    query, keys, value, result, latents = _attention_widths(attention, cut, habits)
    kept = (query + keys + value + result + latents) * e
    heads = attention.num_heads / cut.tp
    core = heads * FLOAT32_BYTES if habits.norm_statistics else 0.0
    ring = 0.0
    if cut.cp > 1 and habits.context_exchange:
        core += result * e
    elif cut.cp > 1:
        # While the last rank's forward pass runs, which meets all blocks.
        ring = cut.cp * (keys + value + result) * e
    if isinstance(attention, Attention):
        if attention.rotary and habits.packed_projection:
            kept += (query + keys) * e
        if attention.num_kv_heads < attention.num_heads:
            core += habits.grouped_copies * result * e
    scores = 0.0
    if not habits.fused_attention:
        scores = heads * (cut.sequence_length / cut.cp) * e
        core += scores
        if habits.attention_dropout:
            core += scores + heads * (cut.sequence_length / cut.cp)  # masks have one byte
    recomputed = core if _module(cut, RecomputeModule.CORE_ATTENTION) else 0.0
    gradients = (2 * (query + keys + value) + result) * e + FLOAT32_BYTES * query
    output = h * e * cut.replicated
    return _Part(
        kept=kept + core - recomputed,
        working=max(ring, output + gradients + 2 * scores + (h * e if cut.gathers else 0.0)),
        inputs=(query + keys + value + result + latents) * e + output,
        recomputed=recomputed,
    )


def _attention_widths(
    attention: Attention | LatentAttention, cut: Cut, habits: TrainerMemory
) -> tuple[float, float, float, float, float]:
    """Elements per token: queries, keys, values, result, and what leads to them."""
    if isinstance(attention, LatentAttention):
        query, value = attention.slice_sizes(cut.tp)
        # the latents before and after their norms.
        latents = ((attention.query_rank or 0) + attention.kv_rank) * cut.replicated
        return query, query, value, value, latents * (2.0 + habits.normed_copies)
    query, kv = attention.slice_sizes(cut.tp)
    return query, kv, kv, query, float(query + kv) if attention.qk_norm else 0.0


def _mlp(mlp: Mlp, h: int, cut: Cut, habits: TrainerMemory) -> _Part:
    e = cut.element_bytes
    width = mlp.ffn_hidden_size // cut.tp * e
    columns, product, kept = _columns(mlp, width, habits)
    recomputed = 0.0
    if _module(cut, RecomputeModule.MLP):
        recomputed = kept
    elif _module(cut, RecomputeModule.ACTIVATION):
        recomputed = product
    output = h * e * cut.replicated
    whole = h * e if cut.gathers else 0.0
    # Down projection; activation, with the product free; up projection, with the columns free too.
    working = max(output + whole + product, output + columns, output + h * e + whole - product)
    return _Part(
        kept=kept - recomputed,
        working=working,
        inputs=product + columns + output,
        recomputed=recomputed,
    )


def _columns(mlp: Mlp, width: float, habits: TrainerMemory) -> tuple[float, float, float]:
    """Bytes of the up projection's result, of the product, and of all that is kept."""
    if mlp.gated:
        return 2 * width, width, habits.gated_columns * width
    return width, width, habits.plain_columns * width


def _experts(experts: Experts, h: int, cut: Cut, habits: TrainerMemory) -> _Part:
    e = cut.element_bytes
    # A rank's own tokens leave as copies, and on average as many come to its experts; where the
    # experts are cut by etp, each of these ranks meets all copies of the group.
    own = experts.experts_per_token * cut.replicated
    copies = own * cut.etp * cut.load_factor
    width = experts.expert_ffn_hidden_size // cut.etp * e
    columns, product, inside = _columns(experts.expert, width, habits)
    # logits and probabilities in float32; each copy's own probability.
    router = 2.0 * FLOAT32_BYTES * experts.num_experts * cut.replicated
    routed = copies * (h * e + inside + FLOAT32_BYTES)
    if not habits.fused_weight_gradients:
        routed += copies * h * e  # the experts' results, which their weights multiply
    kept, product_again = router + routed, copies * product
    shared = experts.shared
    if shared is not None:
        beside = _mlp(shared, h, replace(cut, recompute=NO_RECOMPUTE), habits)
        kept += beside.kept + (h * e * cut.replicated if experts.shared_gate else 0.0)
        product_again += shared.ffn_hidden_size // cut.tp * e
    recomputed = 0.0
    if _module(cut, RecomputeModule.EXPERTS):
        recomputed = kept
    elif _module(cut, RecomputeModule.ACTIVATION):
        recomputed = product_again
    output = h * e * cut.replicated
    working = output + copies * max(2.0 * h * e, h * e + product, columns)
    return _Part(
        kept=kept - recomputed,
        working=working,
        inputs=copies * (2 * h * e + product + columns) + output,
        recomputed=recomputed,
    )


def head_bytes(model: ModelSpec, cut: Cut, habits: TrainerMemory) -> LayerBytes:
    """Final norm, output projection and loss, per token of the rank."""
    e, h = cut.element_bytes, model.hidden_size
    logits = model.vocabulary_slice(cut.tp)
    kept_each, more_each = habits.loss.bytes_per_logit(e)
    norm = h * e * cut.replicated
    if model.final_norm is not None:
        copies = habits.normed_copies if model.final_norm is Norm.RMS_NORM else 0
        norm *= 2 + copies
    kept = norm + (model.embedding_size or 0) * e + kept_each * logits
    # The gradient of the projection's input; under sequence parallelism whole, and then its part.
    after = h * e + (h * e * cut.replicated if cut.gathers else 0.0)
    return LayerBytes(
        kept=kept,
        working=after if habits.frees_as_it_goes else kept,
        for_weights=norm + e * logits,
        loss=more_each * logits,
    )


def embedding_bytes(model: ModelSpec, cut: Cut, habits: TrainerMemory) -> LayerBytes:
    """Token numbers (eight bytes, counted as one element), and a projection's input, per token."""
    kept = cut.element_bytes * (1.0 + (model.embedding_size or 0))
    kept += habits.dropout_masks * model.hidden_size * cut.replicated / 2
    return LayerBytes(kept=kept, working=0.0, for_weights=kept)
