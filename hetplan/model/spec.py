"""Which model is trained: its shape, its layers and how many parameters each has.

A model is a row of layers: the embedding, `num_layers` transformer layers, the multi-token
prediction layers if there are any, the head (final norm and output projection). Layer i of that
row is `model.layers[i]`; a plan's layer ranges are half-open ranges of these positions, so
position 0 is the embedding and the last one the head.

Transformer layers need not be alike: `layer_runs` says what each is (`hetplan.model.layers`).
`common_layer` is the one shape of all of them, for everything that prices or trains models of
equal layers only; it raises an InputError for other models. So do `architecture`,
`ffn_hidden_size` and the like for models that hetplan's own trainer does not have.

`flat_to_runs` reads models that were written before their layers could differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypedDict, Unpack

from hetplan.errors import InputError
from hetplan.files.quantities import Count, CountOrZero, check_limits
from hetplan.model.layer_units import own_layer_fault, unlike_layers
from hetplan.model.layers import (
    Attention,
    LayerRun,
    Mlp,
    Norm,
    TransformerLayer,
)
from hetplan.model.numerics import Activation, Constant, Part, RotaryScaling, Router

MAX_LAYERS = 100_000
"""Most transformer layers of a model: a hundred times the deepest that was trained (DeepNet,
arXiv 2203.00555). More is a slip, and costs are kept per layer."""


class LayerKind(StrEnum):
    """What a layer of the row is."""

    EMBEDDING = "embedding"
    TRANSFORMER = "transformer"
    HEAD = "head"
    MULTI_TOKEN_PREDICTION = "multi_token_prediction"


TRAINED_KINDS = (LayerKind.EMBEDDING, LayerKind.TRANSFORMER, LayerKind.HEAD)
"""Kinds of layer that hetplan measures, plans and trains."""


class Architecture(StrEnum):
    """Family of hetplan's own transformer layers.

    gpt: LayerNorm with bias, biases on every projection, plain GELU MLP, learned positions.
    llama: RMSNorm, no biases, gated SiLU MLP (three matrices), rotary positions.
    """

    GPT = "gpt"
    LLAMA = "llama"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shape of a transformer language model."""

    name: str
    hidden_size: Count
    vocab_size: Count
    max_sequence_length: Count
    """Longest sequence, in tokens."""
    layer_runs: tuple[LayerRun, ...]
    """The transformer layers in order, equal neighbours together."""
    final_norm: Norm | None
    """Norm of the head; None: it has none."""
    learned_positions: CountOrZero = 0
    """Rows of the table of learned positions; some models keep a few that no token uses."""
    embedding_size: Count | None = None
    """Width of the vocabulary's matrices where it is not hidden_size: a projection without bias
    leads from it to hidden_size, and back before the logits (arXiv 2205.01068, the 350M model)."""
    head_bias: bool = False
    """The output projection has a bias of one element per vocabulary entry."""
    tied_embeddings: bool = False
    """The head's projection is the embedding's matrix."""
    num_mtp_layers: CountOrZero = 0
    """Multi-token prediction layers, which predict tokens further ahead while training."""
    mtp_layer: TransformerLayer | None = None
    """The transformer layer inside each of them."""
    norm_epsilon: Constant | None = None
    """Epsilon of every norm; as all below None where nobody said (`hetplan.model.numerics`)."""
    activation: Activation | None = None
    """Function of every MLP and expert."""
    rotary_base: Constant | None = None
    """Base of the rotary frequencies; None as well where layers have different ones."""
    rotary_fraction: Part | None = None
    """Part of each head that is rotated; None: all of it."""
    rotary_scaling: RotaryScaling | None = None
    """Stretching of rotary positions; None: there is none."""
    router: Router | None = None
    """Router of every layer with experts."""

    def __post_init__(self) -> None:
        check_limits(self)
        layers = self.num_layers
        if not 1 <= layers + self.num_mtp_layers <= MAX_LAYERS or not layers:
            raise InputError(
                f"num_layers is {layers}; it must be at least 1 and at most {MAX_LAYERS:,}"
            )
        if bool(self.num_mtp_layers) != (self.mtp_layer is not None):
            raise InputError("num_mtp_layers and mtp_layer belong together; give both or neither")

    @staticmethod
    def from_older_form(data: dict[str, object]) -> dict[str, object]:
        """Data of a model that was written before its layers could differ, in today's form."""
        return flat_to_runs(data)

    # ---- the row of layers

    @property
    def num_layers(self) -> int:
        """Transformer layers; embedding, head and multi-token prediction are not counted."""
        return sum(run.count for run in self.layer_runs)

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """Every layer in order: embedding, transformer, multi-token prediction, head."""
        return (
            LayerKind.EMBEDDING,
            *(LayerKind.TRANSFORMER,) * self.num_layers,
            *(LayerKind.MULTI_TOKEN_PREDICTION,) * self.num_mtp_layers,
            LayerKind.HEAD,
        )

    def layer_at(self, position: int) -> TransformerLayer:
        """The transformer layer at this position, or the one inside a multi-token prediction."""
        at = position - 1
        if at >= 0:
            for run in self.layer_runs:
                if at < run.count:
                    return run.layer
                at -= run.count
            if at < self.num_mtp_layers and self.mtp_layer is not None:
                return self.mtp_layer
        last = self.num_layers + self.num_mtp_layers
        raise InputError(
            f"position {position} of {self.name} is no transformer layer; those are 1 to {last}"
        )

    def distinct_layers(self, sequence_length: int | None) -> tuple[TransformerLayer, ...]:
        """Every different transformer layer at this length, in order of first use.

        None: by their weights, which windows do not change.
        """
        if len(self.layer_runs) == 1:
            return (self.layer_runs[0].layer.at(sequence_length),)
        return tuple(dict.fromkeys(run.layer.at(sequence_length) for run in self.layer_runs))

    def common_layer(self, sequence_length: int | None = None) -> TransformerLayer:
        """The one shape of all transformer layers; an InputError where they differ."""
        distinct = self.distinct_layers(sequence_length)
        if len(distinct) > 1:
            raise InputError(unlike_layers(self, sequence_length))
        return distinct[0]

    # ---- widths

    @property
    def embedding_width(self) -> int:
        """Width of the vocabulary's matrices."""
        return self.embedding_size or self.hidden_size

    def vocabulary_slice(self, tp: int) -> int:
        """Entries of the vocabulary that one of `tp` ranks holds, rounded up."""
        return -(-self.vocab_size // tp)

    def vocabulary_matrix(self, tp: int = 1) -> int:
        """Elements of the embedding's (or the head's) matrix that one of `tp` ranks holds."""
        return self.vocabulary_slice(tp) * self.embedding_width

    def slicing_faults(self, tp: int) -> tuple[str, ...]:
        """Why a layer cannot be cut into `tp` tensor-parallel slices; empty where it can."""
        layers = self.distinct_layers(None)
        if self.mtp_layer is not None:
            layers = (*layers, self.mtp_layer)
        faults = dict.fromkeys(fault for layer in layers for fault in layer.slicing_faults(tp))
        return tuple(f"{fault} of {self.name}" for fault in faults)

    # ---- parameters

    @property
    def parameter_count(self) -> int:
        """Trainable parameters; a tied matrix counts once, multi-token prediction not at all."""
        layers = sum(run.count * run.layer.parameters(self.hidden_size) for run in self.layer_runs)
        ends = self.parameters(LayerKind.EMBEDDING) + self.parameters(LayerKind.HEAD)
        return ends + layers - (self.vocabulary_matrix() if self.tied_embeddings else 0)

    def parameters(self, kind: LayerKind, tp: int = 1) -> int:
        """Parameters that one of `tp` tensor-parallel ranks holds of one layer of this kind.

        Matrices, column-parallel biases and the vocabulary are split over tp (vocabulary rounded
        up); norms, row-parallel biases, projections beside the embedding and learned positions are
        replicated; key-value heads are replicated where tp exceeds them. A tied head holds its
        copy of the matrix all the same. An InputError where transformer layers differ.
        """
        if kind is LayerKind.TRANSFORMER:
            return self.common_layer().parameters(self.hidden_size, tp)
        h = self.hidden_size
        if kind is LayerKind.MULTI_TOKEN_PREDICTION:
            return self._mtp_parameters(tp)
        projection = h * self.embedding_size if self.embedding_size else 0
        if kind is LayerKind.EMBEDDING:
            return self.vocabulary_matrix(tp) + projection + self.learned_positions * h
        norm = 0 if self.final_norm is None else self.final_norm.parameters(h)
        bias = self.vocabulary_slice(tp) if self.head_bias else 0
        return self.vocabulary_matrix(tp) + projection + norm + bias

    def kind_at(self, position: int) -> LayerKind:
        """What the layer at this position of the row is; an InputError where there is none."""
        behind = position - self.num_layers
        if position >= 1 and behind <= 0:
            return LayerKind.TRANSFORMER
        if position == 0:
            return LayerKind.EMBEDDING
        if 1 <= behind <= self.num_mtp_layers:
            return LayerKind.MULTI_TOKEN_PREDICTION
        if behind == self.num_mtp_layers + 1:
            return LayerKind.HEAD
        raise InputError(f"{self.name} has no layer at position {position}")

    def parameters_at(self, position: int, tp: int = 1) -> int:
        """The same of the layer at this position of the row, whatever its kind."""
        kind = self.kind_at(position)
        if kind is LayerKind.TRANSFORMER:
            return self.layer_at(position).parameters(self.hidden_size, tp)
        return self.parameters(kind, tp)

    def _mtp_parameters(self, tp: int) -> int:
        """Two norms, the merge of state and embedding [h, 2 h], the layer, its final norm.

        Embedding and head are the model's (arXiv 2412.19437, section 2.2). The merge is cut by
        columns; the norms are whole on every rank.
        """
        if self.mtp_layer is None:
            raise InputError(f"{self.name} has no multi-token prediction layers")
        h = self.hidden_size
        merge = 2 * h * -(-h // tp)
        return merge + self.mtp_layer.parameters(h, tp) + 3 * self.mtp_layer.norm.parameters(h)

    # ---- models of hetplan's own layers

    def _own_layer(self) -> tuple[Attention, Mlp]:
        fault = own_layer_fault(self)
        attention, mlp = self.layer_runs[0].layer.attention, self.layer_runs[0].layer.mlp
        if fault or not isinstance(attention, Attention) or not isinstance(mlp, Mlp):
            raise InputError(fault)
        return attention, mlp

    @property
    def architecture(self) -> Architecture:
        """Which of hetplan's own layers the model is made of; an InputError where it is not."""
        fault = own_layer_fault(self, trained=True)
        if fault:
            raise InputError(fault)
        gpt = self.layer_runs[0].layer.norm is Norm.LAYER_NORM
        return Architecture.GPT if gpt else Architecture.LLAMA

    @property
    def ffn_hidden_size(self) -> int:
        """Inner width of the MLP; as all below for models of hetplan's own layers only."""
        return self._own_layer()[1].ffn_hidden_size

    @property
    def num_attention_heads(self) -> int:
        """Query heads."""
        return self._own_layer()[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads."""
        return self._own_layer()[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self._own_layer()[0].head_dim

    @property
    def attention_size(self) -> int:
        """Width of all query heads together: a * d."""
        return self.num_attention_heads * self.head_dim


class OwnLayerSizes(TypedDict):
    """Sizes of one of hetplan's own layers."""

    ffn_hidden_size: int
    """Inner width of the MLP."""
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int


def plain_model(
    *,
    name: str,
    architecture: Architecture,
    num_layers: int,
    hidden_size: int,
    vocab_size: int,
    max_sequence_length: int,
    tied_embeddings: bool = False,
    **sizes: Unpack[OwnLayerSizes],
) -> ModelSpec:
    """A dense model of equal layers of these sizes, as hetplan's own trainer has them."""
    if not 1 <= num_layers <= MAX_LAYERS:
        raise InputError(
            f"num_layers is {num_layers}; it must be at least 1 and at most {MAX_LAYERS:,}"
        )
    gpt = architecture is Architecture.GPT
    layer = TransformerLayer(
        attention=Attention(
            num_heads=sizes["num_attention_heads"],
            num_kv_heads=sizes["num_kv_heads"],
            head_dim=sizes["head_dim"],
            qkv_bias=gpt,
            output_bias=gpt,
            rotary=not gpt,
        ),
        mlp=Mlp(ffn_hidden_size=sizes["ffn_hidden_size"], gated=not gpt, bias=gpt),
        norm=Norm.LAYER_NORM if gpt else Norm.RMS_NORM,
    )
    return ModelSpec(
        name=name,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        layer_runs=(LayerRun(count=num_layers, layer=layer),),
        final_norm=layer.norm,
        learned_positions=max_sequence_length if gpt else 0,
        tied_embeddings=tied_embeddings,
    )


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
