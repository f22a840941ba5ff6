"""What one transformer layer is: its attention, its MLP or experts, its norms, and their weights.

A tensor-parallel rank of `tp` holds: a column or row block of every matrix, the biases of its
columns, and whole copies of norms, routers, biases of row-cut matrices and the down projections
of latent attention (Shoeybi et al., arXiv 1909.08053, section 3; Megatron-LM duplicates the
latents' projections too). Key-value heads are copied where `tp` exceeds them.

Sources of the forms: grouped key-value heads, arXiv 2305.13245; sliding window, arXiv 2310.06825,
section 2; mixture of experts, arXiv 2401.04088, section 2.1; shared experts, arXiv 2401.06066,
equations 9 to 11; latent attention, arXiv 2405.04434, equations 9 to 19; multi-token prediction,
arXiv 2412.19437, equations 21 to 23.

Symbols: h hidden, f ffn hidden, a attention heads, k key-value heads, d head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from hetplan.errors import InputError
from hetplan.files.quantities import Count, CountOrZero, FileForm, check_limits


class Norm(StrEnum):
    """Kind of a normalisation and the weights it has."""

    LAYER_NORM = "layer_norm"
    """Scale and bias: 2 h."""
    RMS_NORM = "rms_norm"
    """Scale: h."""
    UNSCALED = "unscaled"
    """LayerNorm without weights."""

    def parameters(self, width: int) -> int:
        """Weights of one norm of this width."""
        return {Norm.LAYER_NORM: 2, Norm.RMS_NORM: 1, Norm.UNSCALED: 0}[self] * width


def _undivided(tp: int, **sizes: int) -> Iterator[str]:
    for name, size in sizes.items():
        if size % tp:
            yield f"tp {tp} does not divide {name} {size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention with grouped key-value heads; causal."""

    num_heads: Count
    """Query heads."""
    num_kv_heads: Count
    head_dim: Count
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """An RMSNorm over each query head and each key head, with one scale of head_dim for each."""
    rotary: bool = True
    """Positions by rotation of queries and keys."""
    window: Count | None = None
    """A token sees itself and the window - 1 tokens before it; None: all before it."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"num_kv_heads is {self.num_kv_heads}, which does not divide "
                f"num_attention_heads {self.num_heads}"
            )

    @property
    def rotated_head_dim(self) -> int:
        """Width of a head's part that is rotated, where positions are."""
        return self.head_dim

    def slice_sizes(self, tp: int) -> tuple[int, int]:
        """Widths of the queries and of the keys that one of `tp` ranks holds."""
        kv_heads = max(1, self.num_kv_heads // tp)
        return self.num_heads * self.head_dim // tp, kv_heads * self.head_dim

    def matrix_parameters(self, hidden: int, tp: int = 1) -> int:
        """Weights of the matrices: h (a d + 2 k d) + a d h."""
        query, kv = self.slice_sizes(tp)
        return hidden * (query + 2 * kv) + query * hidden

    def parameters(self, hidden: int, tp: int = 1) -> int:
        """All weights."""
        query, kv = self.slice_sizes(tp)
        biases = (query + 2 * kv if self.qkv_bias else 0) + (hidden if self.output_bias else 0)
        norms = 2 * self.head_dim if self.qk_norm else 0
        return self.matrix_parameters(hidden, tp) + biases + norms

    def slicing_faults(self, tp: int) -> Iterator[str]:
        """Why it cannot be cut into `tp` slices."""
        yield from _undivided(tp, num_attention_heads=self.num_heads)
        # Where tp exceeds the key-value heads each is replicated, equally often.
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            yield f"tp {tp} neither divides nor is a multiple of num_kv_heads {self.num_kv_heads}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes(FileForm):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1)."""

    query_rank: Count | None = None
    """Width of the queries' latent; left out: queries are projected from hidden_size directly."""
    kv_rank: Count
    """Width of the keys' and values' latent."""
    nope_head_dim: Count
    """Unrotated width of a head."""
    rope_head_dim: Count
    """Rotated width of a query head; all keys share one part of this width."""
    value_head_dim: Count
    """Width of a value head."""
    bias: bool = False
    """Biases of latent and output projections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention(LatentSizes):
    """Latent attention as it is trained: not absorbed. The latents' own RMSNorms belong to it."""

    num_heads: Count

    def __post_init__(self) -> None:
        check_limits(self)

    @property
    def rotated_head_dim(self) -> int:
        """Width of a head's part that is rotated."""
        return self.rope_head_dim

    @property
    def latent_size(self) -> int:
        """Width of the keys' and values' latent and of the keys' shared rotated part."""
        return self.kv_rank + self.rope_head_dim

    @property
    def key_head_dim(self) -> int:
        """Width of one query or key head."""
        return self.nope_head_dim + self.rope_head_dim

    def slice_sizes(self, tp: int) -> tuple[int, int]:
        """Widths of the queries (as wide as the keys) and of the values of one of `tp` ranks."""
        heads = self.num_heads // tp
        return heads * self.key_head_dim, heads * self.value_head_dim

    def matrix_parameters(self, hidden: int, tp: int = 1) -> int:
        """Weights of the matrices; those from h to the latents are whole on every rank."""
        query, value = self.slice_sizes(tp)
        keys = self.num_heads // tp * self.nope_head_dim
        from_hidden = hidden * self.latent_size
        if self.query_rank is None:
            queries = hidden * query
        else:
            queries = hidden * self.query_rank + self.query_rank * query
        return queries + from_hidden + self.kv_rank * (keys + value) + value * hidden

    def parameters(self, hidden: int, tp: int = 1) -> int:
        """All weights."""
        query_rank = self.query_rank or 0
        norms = query_rank + self.kv_rank
        biases = query_rank + self.kv_rank + self.rope_head_dim + hidden if self.bias else 0
        return self.matrix_parameters(hidden, tp) + norms + biases

    def slicing_faults(self, tp: int) -> Iterator[str]:
        """Why it cannot be cut into `tp` slices."""
        yield from _undivided(tp, num_attention_heads=self.num_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """A dense MLP."""

    ffn_hidden_size: Count
    gated: bool
    """Three matrices (gate, up, down; arXiv 2002.05202) instead of two."""
    bias: bool = False
    """On every matrix."""

    def __post_init__(self) -> None:
        check_limits(self)

    def matrix_parameters(self, hidden: int, tp: int = 1) -> int:
        """Weights of the matrices."""
        return (3 if self.gated else 2) * hidden * (self.ffn_hidden_size // tp)

    def parameters(self, hidden: int, tp: int = 1) -> int:
        """All weights; the bias of the down projection is whole on every rank."""
        columns = (2 if self.gated else 1) * (self.ffn_hidden_size // tp)
        return self.matrix_parameters(hidden, tp) + (columns + hidden if self.bias else 0)

    def slicing_faults(self, tp: int) -> Iterator[str]:
        """Why it cannot be cut into `tp` slices."""
        yield from _undivided(tp, ffn_hidden_size=self.ffn_hidden_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A router and its experts, of which each token goes to a few; and shared ones for all."""

    num_experts: Count
    experts_per_token: Count
    expert_ffn_hidden_size: Count
    """Of each routed expert."""
    shared_ffn_hidden_size: CountOrZero = 0
    """Of all shared experts together; 0: none."""
    shared_gate: bool = False
    """The shared experts' output is weighed by a gate of h weights."""
    gated: bool = True
    """Three matrices per expert instead of two."""
    bias: bool = False
    """On every matrix of routed and shared experts."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.experts_per_token > self.num_experts:
            raise InputError(
                f"experts_per_token is {self.experts_per_token}, more than num_experts "
                f"{self.num_experts}"
            )
        if self.shared_gate and not self.shared_ffn_hidden_size:
            raise InputError("shared_gate is true, and there are no shared experts to weigh")

    @property
    def expert(self) -> Mlp:
        """One routed expert."""
        return Mlp(ffn_hidden_size=self.expert_ffn_hidden_size, gated=self.gated, bias=self.bias)

    @property
    def shared(self) -> Mlp | None:
        """The shared experts as one MLP: side by side they are one as wide as all of them."""
        if not self.shared_ffn_hidden_size:
            return None
        return Mlp(ffn_hidden_size=self.shared_ffn_hidden_size, gated=self.gated, bias=self.bias)

    def router_parameters(self, hidden: int) -> int:
        """Weights of the router and of the shared experts' gate, whole on every rank."""
        return hidden * (self.num_experts + self.shared_gate)

    def parameters(self, hidden: int, tp: int = 1) -> int:
        """All weights, every expert's."""
        shared = self.shared
        return (
            self.router_parameters(hidden)
            + self.num_experts * self.expert.parameters(hidden, tp)
            + (shared.parameters(hidden, tp) if shared else 0)
        )

    def slicing_faults(self, tp: int) -> Iterator[str]:
        """Why it cannot be cut into `tp` slices."""
        yield from _undivided(
            tp,
            expert_ffn_hidden_size=self.expert_ffn_hidden_size,
            shared_ffn_hidden_size=self.shared_ffn_hidden_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerLayer:
    """Shape of one transformer layer."""

    attention: Attention | LatentAttention
    mlp: Mlp | Experts
    norm: Norm
    num_norms: int = 2
    """Norms of width h: 2 before (or after) attention and MLP, 4 both before and after, 1 where
    both read one normed input."""
    parallel_residual: bool = False
    """Attention and MLP read the same input, and both are added to it (arXiv 2204.06745)."""

    def __post_init__(self) -> None:
        if self.num_norms not in (1, 2, 4):
            raise InputError(f"num_norms is {self.num_norms}; it must be 1, 2 or 4")
        if self.num_norms == 1 and not self.parallel_residual:
            raise InputError("num_norms is 1; only with parallel_residual do both parts share one")

    @property
    def window(self) -> int | None:
        """The attention's window; None where it sees everything before a token."""
        return self.attention.window if isinstance(self.attention, Attention) else None

    def at(self, sequence_length: int | None) -> TransformerLayer:
        """The same layer for this length: a window that covers all of it is none.

        None: for no length at all, as for weights, where windows do not matter.
        """
        attention = self.attention
        if not isinstance(attention, Attention) or attention.window is None:
            return self
        if sequence_length is not None and attention.window < sequence_length:
            return self
        return replace(self, attention=replace(attention, window=None))

    def parameters(self, hidden: int, tp: int = 1) -> int:
        """Weights that one of `tp` ranks holds."""
        return (
            self.attention.parameters(hidden, tp)
            + self.mlp.parameters(hidden, tp)
            + self.num_norms * self.norm.parameters(hidden)
        )

    def slicing_faults(self, tp: int) -> tuple[str, ...]:
        """Why it cannot be cut into `tp` tensor-parallel slices; empty where it can."""
        return (*self.attention.slicing_faults(tp), *self.mlp.slicing_faults(tp))

    def features(self, *, trained: bool = False) -> tuple[str, ...]:
        """What hetplan's own gpt and llama layers do not have, in words.

        trained: what its trainer does not have either: with RMSNorm it has norms of heads, latent
        attention and experts, too.
        """
        attention, mlp = self.attention, self.mlp
        own_biases = self.norm is Norm.LAYER_NORM
        found = {
            "parallel residual": self.parallel_residual,
            f"{self.num_norms} norms": self.num_norms != 2,
            f"{self.norm} norms": self.norm is Norm.UNSCALED,
        }
        if isinstance(attention, LatentAttention):
            found["latent attention"] = not trained or own_biases or attention.bias
        else:
            found[f"attention window {attention.window}"] = attention.window is not None
            found["query and key norms"] = attention.qk_norm and (own_biases or not trained)
            found["rotary positions with LayerNorm"] = own_biases and attention.rotary
            found["RMSNorm without rotary positions"] = not own_biases and not attention.rotary
            biases = (attention.qkv_bias, attention.output_bias)
            found["attention biases that differ"] = biases != (own_biases, own_biases)
        if isinstance(mlp, Experts):
            plain = mlp.gated and not mlp.bias and not mlp.shared_gate and not own_biases
            found[f"{mlp.num_experts} experts"] = not trained
            found["experts other than gated ones without biases"] = trained and not plain
        else:
            found["MLP biases that differ"] = mlp.bias != own_biases
            found["gated MLP with LayerNorm"] = mlp.gated and own_biases
            found["plain MLP with RMSNorm"] = not mlp.gated and not own_biases
        return tuple(word for word, present in found.items() if present)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """Equal transformer layers that follow each other."""

    count: Count
    layer: TransformerLayer

    def __post_init__(self) -> None:
        check_limits(self)


def runs_of(layers: Iterator[TransformerLayer]) -> tuple[LayerRun, ...]:
    """These layers in order, equal neighbours together."""
    runs: list[tuple[int, TransformerLayer]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer:
            runs[-1] = (runs[-1][0] + 1, layer)
        else:
            runs.append((1, layer))
    return tuple(LayerRun(count=count, layer=layer) for count, layer in runs)
