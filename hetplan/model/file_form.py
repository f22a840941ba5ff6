"""How a model file is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from hetplan.files.quantities import Count, Name
from hetplan.model.layers import Norm
from hetplan.model.numerics import MAX_CONSTANT, Activation, RotaryScalingKind, ScoreFunction
from hetplan.model.spec import MAX_LAYERS, Architecture

MODEL_SCHEMA = "hetplan.model/3"

LayerCount = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
Constant = Annotated[float, Field(gt=0, le=MAX_CONSTANT)]
Weight = Annotated[float, Field(ge=0, le=MAX_CONSTANT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionForm:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1)."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    query_rank: Count | None = None
    """Width of the queries' latent; left out: queries are projected from hidden_size directly."""
    kv_rank: Count
    """Width of the latent that keys and values are projected from."""
    nope_head_dim: Count
    """Of a query or key head, the width without positions."""
    rope_head_dim: Count
    """Of a query head, the rotated width; all keys share one part of this width."""
    value_head_dim: Count
    """Width of a value head."""
    bias: bool = False
    """Biases on the projections to the latents and on the output projection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsForm:
    """A mixture of experts in the place of the MLP."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    num_experts: Count
    """Routed experts."""
    experts_per_token: Count
    """Routed experts that each token goes to."""
    ffn_hidden_size: Count
    """Inner width of each routed expert."""
    shared_ffn_hidden_size: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Inner width of all shared experts together, which every token goes to; 0: none."""
    shared_gate: bool = False
    """A gate of hidden_size weights weighs the shared experts' output."""
    bias: bool = False
    """Biases on every matrix of the experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersForm:
    """Transformer layers in a row that are alike; a key left out is as in the model."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    count: LayerCount = 1
    """How many."""
    ffn_hidden_size: Count | None = None
    """Inner width of the MLP."""
    num_attention_heads: Count | None = None
    """Query heads."""
    num_kv_heads: Count | None = None
    """Key-value heads."""
    head_dim: Count | None = None
    """Width of one head."""
    window: Count | None = None
    """Sliding window of the attention, in tokens."""
    experts: ExpertsForm | None = None
    """Experts in the place of the MLP."""
    latent_attention: LatentAttentionForm | None = None
    """Latent attention in the place of plain attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryScalingForm:
    """Stretching of rotary positions."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    kind: RotaryScalingKind
    """The word of Hugging Face's rope_type."""
    factor: Constant | None = None
    """How far positions, or their slow frequencies, are stretched."""
    original_length: Count | None = None
    """Sequence length before the stretching."""
    low_frequency_factor: Constant | None = None
    """Of llama3: frequencies of fewer turns than this over the original length are stretched."""
    high_frequency_factor: Constant | None = None
    """Of llama3: those of more turns than this are left as they are."""
    beta_fast: Constant | None = None
    """Of yarn: as high_frequency_factor."""
    beta_slow: Constant | None = None
    """Of yarn: as low_frequency_factor."""
    mscale: Weight | None = None
    """Of yarn: weight of the logarithm of the factor in the rotation's length."""
    mscale_all_dim: Weight | None = None
    """Of yarn: the same in the scale of the attention scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterForm:
    """How tokens are given to experts; a key left out is not said."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    score_function: ScoreFunction | None = None
    """What makes the router's logits weights."""
    normalized: bool | None = None
    """Whether the weights of a token's experts add up to 1, before scaling_factor."""
    scaling_factor: Constant | None = None
    """The weights are multiplied by it."""
    num_groups: Count | None = None
    """Experts lie in this many groups of equal size; needs groups_per_token."""
    groups_per_token: Count | None = None
    """Groups that the experts of one token come from."""
    group_experts: Count | None = None
    """Best experts of a group whose scores, added up, are the group's."""
    correction_bias: bool | None = None
    """The choice adds a bias per expert, which follows its load (arXiv 2408.15664)."""
    loss_coefficient: Weight | None = None
    """Weight of the balancing loss."""
    loss_per_sequence: bool | None = None
    """Whether the balancing loss is that of each sequence; otherwise of a microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTokenPredictionForm:
    """Layers that predict tokens further ahead while training (arXiv 2412.19437, section 2.2)."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    num_layers: LayerCount
    """How many; each holds a transformer layer like the model's last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForm:
    """Shape of a transformer language model."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    name: Name
    """Name of the model in reports."""
    architecture: Architecture
    """gpt: LayerNorm, biases, GELU, learned positions. llama: RMSNorm, no biases, gated SiLU,
    rotary positions. The keys below that are left out follow it."""
    num_layers: LayerCount
    """Transformer layers; the embedding, the head and multi-token prediction are not counted."""
    hidden_size: Count
    """Width of the activations between layers."""
    ffn_hidden_size: Count | None = None
    """Inner width of the MLP; needed where a layer has no experts."""
    num_attention_heads: Count
    """Query heads."""
    num_kv_heads: Count | None = None
    """Key-value heads (grouped-query attention); left out: as many as query heads."""
    head_dim: Count | None = None
    """Width of one head; left out: hidden_size / num_attention_heads."""
    vocab_size: Count
    """Entries of the vocabulary, unpadded."""
    max_sequence_length: Count
    """Longest sequence, in tokens."""
    tied_embeddings: bool = False
    """Whether the head's projection is the embedding's matrix."""
    window: Count | None = None
    """Sliding window: a token sees itself and the window - 1 tokens before it. Left out: all."""
    experts: ExpertsForm | None = None
    """A mixture of experts in the place of every MLP; for some of the layers only, see layers."""
    latent_attention: LatentAttentionForm | None = None
    """Latent attention in the place of plain attention."""
    layers: tuple[LayersForm, ...] = ()
    """Where transformer layers differ: their runs in order, counts adding up to num_layers."""
    repeat_layers: bool = False
    """The list of layers is repeated until num_layers are reached, and may end anywhere."""
    multi_token_prediction: MultiTokenPredictionForm | None = None
    """Multi-token prediction layers after the transformer layers."""
    qkv_bias: bool | None = None
    """Biases on the query, key and value projections; left out: as the architecture."""
    output_bias: bool | None = None
    """A bias on the attention's output projection; left out: as the architecture."""
    mlp_bias: bool | None = None
    """Biases on the matrices of the MLP; left out: as the architecture."""
    qk_norm: bool = False
    """An RMSNorm over each query head and each key head."""
    gated_mlp: bool | None = None
    """Three matrices in the MLP (gate, up, down); left out: as the architecture."""
    norm: Norm | None = None
    """Kind of every norm; left out: as the architecture."""
    norms_per_layer: Annotated[int, Field(ge=1, le=4)] = 2
    """2: one for attention and one for the MLP. 4: before and after each. 1: one for both, with
    parallel_residual."""
    parallel_residual: bool = False
    """Attention and MLP read the same input."""
    rotary: bool | None = None
    """Positions by rotation of queries and keys; left out: as the architecture."""
    learned_positions: Annotated[int, Field(ge=0, le=10**9)] | None = None
    """Rows of the table of learned positions; left out: max_sequence_length for gpt, else 0."""
    final_norm: bool = True
    """Whether the head has a norm."""
    head_bias: bool = False
    """Whether the head's projection has a bias."""
    embedding_size: Count | None = None
    """Width of the vocabulary's matrices where it is not hidden_size, with a projection between."""
    norm_epsilon: Constant | None = None
    """Epsilon of every norm; as all below: left out, the trainer's own stands."""
    activation: Activation | None = None
    """Function of every MLP and expert."""
    rotary_base: Constant | None = None
    """Base of the rotary frequencies (rope_theta)."""
    rotary_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Part of each head that is rotated; left out: all of it."""
    rotary_scaling: RotaryScalingForm | None = None
    """Stretching of rotary positions; left out: there is none."""
    router: RouterForm | None = None
    """Router of every layer with experts."""
