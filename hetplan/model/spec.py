"""Which model is trained: its shape, its layers and how many parameters each has.

A model is a row of layers: the embedding, `num_layers` transformer layers, the head (final norm
and output projection). Layer i of that row is `model.layers[i]`; a plan's layer ranges are
half-open ranges of these positions, so position 0 is the embedding and position
`num_layers + 1` the head.

Symbols: h hidden, f ffn hidden, V vocabulary, s sequence, a attention heads, k key-value heads,
d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hetplan.errors import InputError

MOST_LAYERS = 100_000
"""Most transformer layers of a model: a hundred times the deepest that was trained (DeepNet,
arXiv 2203.00555). More is a slip, and costs are kept per layer."""
MOST_OF_A_SIZE = 10**9
"""Largest width, vocabulary or length."""


class LayerKind(StrEnum):
    """What a layer of the row is."""

    EMBEDDING = "embedding"
    TRANSFORMER = "transformer"
    HEAD = "head"


class Architecture(StrEnum):
    """Family of the transformer layer.

    gpt: LayerNorm with bias, biases on every projection, plain GELU MLP, learned positions.
    llama: RMSNorm, no biases, gated SiLU MLP (three matrices), rotary positions.
    """

    GPT = "gpt"
    LLAMA = "llama"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shape of a dense transformer language model."""

    name: str
    architecture: Architecture
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_sequence_length: int
    """Longest sequence; the number of learned positions where the architecture has them."""
    tied_embeddings: bool = False
    """The head's projection is the embedding's matrix."""

    def __post_init__(self) -> None:
        for field in (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "max_sequence_length",
        ):
            value = getattr(self, field)
            most = MOST_LAYERS if field == "num_layers" else MOST_OF_A_SIZE
            if not 1 <= value <= most:
                raise InputError(f"{field} is {value}; it must be at least 1 and at most {most:,}")
        if self.num_attention_heads % self.num_kv_heads:
            raise InputError(
                f"num_kv_heads is {self.num_kv_heads}, which does not divide "
                f"num_attention_heads {self.num_attention_heads}"
            )

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """Every layer in order: embedding, transformer layers, head."""
        return (
            LayerKind.EMBEDDING,
            *(LayerKind.TRANSFORMER,) * self.num_layers,
            LayerKind.HEAD,
        )

    @property
    def attention_size(self) -> int:
        """Width of all query heads together: a * d."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together: k * d."""
        return self.num_kv_heads * self.head_dim

    @property
    def mlp_matrices(self) -> int:
        """Matrices of the MLP: gate, up and down for llama; up and down for gpt."""
        return 3 if self.architecture is Architecture.LLAMA else 2

    @property
    def parameter_count(self) -> int:
        """Trainable parameters of the whole model; a tied matrix is counted once."""
        return (
            self.parameters(LayerKind.EMBEDDING)
            + self.num_layers * self.parameters(LayerKind.TRANSFORMER)
            + self.parameters(LayerKind.HEAD)
            - (self.vocab_size * self.hidden_size if self.tied_embeddings else 0)
        )

    def slicing_faults(self, tp: int) -> tuple[str, ...]:
        """Why a layer cannot be cut into `tp` tensor-parallel slices; empty where it can."""
        faults = [
            f"tp {tp} does not divide {name} {size} of {self.name}"
            for name, size in (
                ("num_attention_heads", self.num_attention_heads),
                ("ffn_hidden_size", self.ffn_hidden_size),
            )
            if size % tp
        ]
        # Where tp exceeds the key-value heads each is replicated, equally often.
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            faults.append(
                f"tp {tp} neither divides nor is a multiple of num_kv_heads {self.num_kv_heads} of "
                f"{self.name}"
            )
        return tuple(faults)

    def slice_sizes(self, tp: int) -> tuple[int, int, int]:
        """(queries, keys, MLP): widths that one of `tp` ranks holds; values are as wide as keys."""
        kv_heads = max(1, self.num_kv_heads // tp)
        return self.attention_size // tp, kv_heads * self.head_dim, self.ffn_hidden_size // tp

    def vocabulary_slice(self, tp: int) -> int:
        """Entries of the vocabulary that one of `tp` ranks holds, rounded up."""
        return -(-self.vocab_size // tp)

    def parameters(self, kind: LayerKind, tp: int = 1) -> int:
        """Parameters that one of `tp` tensor-parallel ranks holds of one layer of this kind.

        Matrices, column-parallel biases and the vocabulary are split over tp (vocabulary rounded
        up); norms, row-parallel biases and learned positions are replicated; key-value heads are
        replicated where tp exceeds them. A tied head holds its copy of the matrix all the same.
        """
        h, gpt = self.hidden_size, self.architecture is Architecture.GPT
        vocab = self.vocabulary_slice(tp)
        norm = 2 * h if gpt else h
        if kind is LayerKind.EMBEDDING:
            return vocab * h + (self.max_sequence_length * h if gpt else 0)
        if kind is LayerKind.HEAD:
            return vocab * h + norm
        query, kv, ffn = self.slice_sizes(tp)
        matrices = h * (query + 2 * kv) + query * h + self.mlp_matrices * h * ffn
        biases = (query + 2 * kv + h + ffn + h) if gpt else 0
        return matrices + biases + 2 * norm


def plain_model(
    *,
    name: str,
    architecture: Architecture,
    num_layers: int,
    hidden_size: int,
    ffn_hidden_size: int,
    num_attention_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    max_sequence_length: int,
    tied_embeddings: bool = False,
) -> ModelSpec:
    """A dense model of equal layers, as hetplan's own trainer has them."""
    return ModelSpec(
        name=name,
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        num_attention_heads=num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        tied_embeddings=tied_embeddings,
    )
