"""How a model file is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from hetplan.files.quantities import Count, Name
from hetplan.model.spec import MOST_LAYERS, Architecture

MODEL_SCHEMA = "hetplan.model/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForm:
    """Shape of a dense transformer language model."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    name: Name
    """Name of the model in reports."""
    architecture: Architecture
    """gpt: LayerNorm, biases, GELU, learned positions. llama: RMSNorm, no biases, gated SiLU,
    rotary positions."""
    num_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    """Transformer layers; the embedding and the head are not counted."""
    hidden_size: Count
    """Width of the activations between layers."""
    ffn_hidden_size: Count
    """Inner width of the MLP."""
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
