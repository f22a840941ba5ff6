"""From a model file to a ModelSpec: hetplan's own form here, a config.json by `huggingface`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice, repeat
from pathlib import Path as FilePath
from typing import Annotated

from pydantic import Field

from hetplan.errors import Fault, InputError
from hetplan.files.nodes import Path
from hetplan.files.quantities import Count, CountOrZero, FileForm, Name, value_of
from hetplan.files.reading import Document, decode, read_document
from hetplan.model.huggingface import is_huggingface, model_of_config
from hetplan.model.layers import (
    Attention,
    Experts,
    LatentAttention,
    LatentSizes,
    LayerRun,
    Mlp,
    Norm,
    TransformerLayer,
    runs_of,
)
from hetplan.model.numerics import (
    Activation,
    Constant,
    Part,
    RotaryScaling,
    Router,
)
from hetplan.model.spec import MAX_LAYERS, Architecture, ModelSpec

MODEL_SCHEMA = "hetplan.model/3"

LayerCount = Annotated[int, Field(ge=1, le=MAX_LAYERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsForm(FileForm):
    """A mixture of experts in the place of the MLP."""

    num_experts: Count
    """Routed experts."""
    experts_per_token: Count
    """Routed experts that each token goes to."""
    ffn_hidden_size: Count
    """Inner width of each routed expert."""
    shared_ffn_hidden_size: CountOrZero = 0
    """Inner width of all shared experts together; 0: none."""
    shared_gate: bool = False
    """The shared experts' output has a gate. It has hidden_size weights."""
    bias: bool = False
    """Biases on every matrix of the experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersForm(FileForm):
    """Transformer layers in a row that are alike; a key left out is as in the model."""

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
    latent_attention: LatentSizes | None = None
    """Latent attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTokenPredictionForm(FileForm):
    """Layers that predict tokens further ahead while training (arXiv 2412.19437, section 2.2)."""

    num_layers: LayerCount
    """How many; each holds a transformer layer like the model's last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForm(FileForm):
    """Shape of a transformer language model."""

    name: Name
    """In reports."""
    architecture: Architecture
    """gpt: LayerNorm, biases, GELU, learned positions. llama: RMSNorm, no biases, gated SiLU,
    rotary positions. The keys below that are left out follow it."""
    num_layers: LayerCount
    """Transformer layers; the embedding, the head and multi-token prediction are not counted."""
    hidden_size: Count
    """Width of the activations between layers."""
    ffn_hidden_size: Count | None = None
    """Inner width of the dense MLPs. Needed where a layer has no experts."""
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
    """Sliding window: tokens that a token sees, itself included. Left out: all."""
    experts: ExpertsForm | None = None
    """Experts in place of every MLP; of some only: `layers`."""
    latent_attention: LatentSizes | None = None
    """Latent attention."""
    layers: tuple[LayersForm, ...] = ()
    """Runs of unlike layers in order. Counts add up to num_layers."""
    repeat_layers: bool = False
    """The list of layers is repeated up to num_layers. It may end anywhere."""
    multi_token_prediction: MultiTokenPredictionForm | None = None
    """Multi-token prediction layers."""
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
    """4: before and after attention and MLP. 1: one for both, with parallel_residual."""
    parallel_residual: bool = False
    """Attention and MLP read the same input."""
    rotary: bool | None = None
    """Positions by rotation of queries and keys; left out: as the architecture."""
    learned_positions: CountOrZero | None = None
    """Rows of the table of learned positions; left out: max_sequence_length for gpt, else 0."""
    final_norm: bool = True
    """Whether the head has a norm."""
    head_bias: bool = False
    """Whether the head's projection has a bias."""
    embedding_size: Count | None = None
    """Width of the vocabulary's matrices. Left out: hidden_size; else a projection is between."""
    norm_epsilon: Constant | None = None
    """Epsilon of every norm; as all below: left out, the trainer's own stands."""
    activation: Activation | None = None
    """Function of every MLP and expert."""
    rotary_base: Constant | None = None
    """Base of the rotary frequencies (rope_theta)."""
    rotary_fraction: Part | None = None
    """Part of each head that is rotated; left out: all of it."""
    rotary_scaling: RotaryScaling | None = None
    """Stretching of rotary positions; left out: there is none."""
    router: Router | None = None
    """Router of every layer with experts."""


def load_model(path: str | FilePath | Document) -> ModelSpec:
    """The model that the file describes; one InputError with every fault otherwise.

    A file without hetplan's `schema` key that has `model_type` or `architectures` is the
    config.json of a Hugging Face model: it is read as data, nothing in it is executed. Every
    other file is in hetplan's own form (configs/models).
    """
    document = read_document(path)
    if is_huggingface(document):
        return model_of_config(document)
    return model_of_document(document)


def model_of_document(document: Document) -> ModelSpec:
    """The model that the file describes; one InputError with every fault otherwise."""
    form = decode(document, ModelForm, schema=MODEL_SCHEMA, checks=(_check_heads,))
    builder = _Builder(document, form)
    runs = builder.runs()
    _check_uses(builder, runs)
    last = runs[-1].layer
    gpt = form.architecture is Architecture.GPT
    positions = form.learned_positions
    if positions is None:
        positions = form.max_sequence_length if gpt else 0
    mtp = form.multi_token_prediction
    width = form.embedding_size
    try:
        return value_of(
            ModelSpec,
            form,
            layer_runs=runs,
            final_norm=last.norm if form.final_norm else None,
            learned_positions=positions,
            embedding_size=None if width == form.hidden_size else width,
            num_mtp_layers=0 if mtp is None else mtp.num_layers,
            mtp_layer=None if mtp is None else last,
        )
    except InputError as error:
        if any(fault.file for fault in error.faults):
            raise
        raise InputError(document.fault((), str(error))) from error


def _check_uses(builder: _Builder, runs: tuple[LayerRun, ...]) -> None:
    """Rotary keys and a router belong to models that have such a thing."""
    form = builder.form
    rotary = any(
        not isinstance(run.layer.attention, Attention) or run.layer.attention.rotary for run in runs
    )
    for key in ("rotary_base", "rotary_fraction", "rotary_scaling"):
        if getattr(form, key) is not None and not rotary:
            raise builder.error((key,), "the model has no rotary positions; leave it out")
    if form.router is not None and not any(isinstance(run.layer.mlp, Experts) for run in runs):
        raise builder.error(("router",), "the model has no experts; leave it out")


@dataclass(frozen=True, slots=True)
class _Builder:
    """Layers of a form whose single keys are right; what they mean together is checked here."""

    document: Document
    form: ModelForm

    def runs(self) -> tuple[LayerRun, ...]:
        """The transformer layers."""
        form = self.form
        if not form.layers:
            if form.repeat_layers:
                raise self.error(("repeat_layers",), "there is no list of layers to repeat")
            return (LayerRun(count=form.num_layers, layer=self.layer(LayersForm(), ())),)
        shapes = [
            (entry.count, self.layer(entry, ("layers", at))) for at, entry in enumerate(form.layers)
        ]
        total = sum(count for count, _ in shapes)
        if total == form.num_layers or (form.repeat_layers and total < form.num_layers):
            period = chain.from_iterable(repeat(layer, count) for count, layer in shapes)
            return runs_of(islice(cycle(period), form.num_layers))
        raise self.error(
            ("layers",),
            f"the counts add up to {total}, num_layers is {form.num_layers}; make them equal"
            + ("" if form.repeat_layers else ", or say repeat_layers: true"),
        )

    def error(self, path: Path, message: str) -> InputError:
        return InputError(self.document.fault(path, message))

    def layer(self, entry: LayersForm, path: Path) -> TransformerLayer:
        """One shape; keys that the entry leaves out are the model's."""
        form = self.form
        gpt = form.architecture is Architecture.GPT
        attention, mlp = self.attention(entry, path), self.mlp(entry, path)
        try:
            return TransformerLayer(
                attention=attention,
                mlp=mlp,
                norm=form.norm or (Norm.LAYER_NORM if gpt else Norm.RMS_NORM),
                num_norms=form.norms_per_layer,
                parallel_residual=form.parallel_residual,
            )
        except InputError as error:
            raise self.error(("norms_per_layer",), str(error)) from error

    def attention(self, entry: LayersForm, path: Path) -> Attention | LatentAttention:
        """Its attention."""
        try:
            return self._attention(entry, path)
        except InputError as error:
            if any(fault.file for fault in error.faults):
                raise
            raise self.error(path, str(error)) from error

    def _attention(self, entry: LayersForm, path: Path) -> Attention | LatentAttention:
        form = self.form
        gpt = form.architecture is Architecture.GPT
        heads = entry.num_attention_heads or form.num_attention_heads
        latent = entry.latent_attention or form.latent_attention
        window = entry.window or form.window
        if latent is not None:
            given = (entry.num_kv_heads or form.num_kv_heads, entry.head_dim or form.head_dim)
            if any(given) or window or form.qk_norm:
                raise self.error(
                    path if entry.latent_attention else ("latent_attention",),
                    "latent attention has no num_kv_heads, head_dim, window or qk_norm; "
                    "leave those out",
                )
            return value_of(LatentAttention, latent, num_heads=heads)
        return Attention(
            num_heads=heads,
            num_kv_heads=entry.num_kv_heads or form.num_kv_heads or heads,
            head_dim=entry.head_dim or form.head_dim or self.head_dim(heads, path),
            qkv_bias=_default(form.qkv_bias, gpt),
            output_bias=_default(form.output_bias, gpt),
            qk_norm=form.qk_norm,
            rotary=_default(form.rotary, not gpt),
            window=window,
        )

    def head_dim(self, heads: int, path: Path) -> int:
        hidden = self.form.hidden_size
        if hidden % heads:
            raise self.error(
                (*path, "num_attention_heads"),
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; "
                "change one of them or give head_dim",
            )
        return hidden // heads

    def mlp(self, entry: LayersForm, path: Path) -> Mlp | Experts:
        form = self.form
        gpt = form.architecture is Architecture.GPT
        gated = _default(form.gated_mlp, not gpt)
        # A run that names its own MLP width has that MLP, whatever the others have.
        dense = entry.ffn_hidden_size is not None and entry.experts is None
        experts = entry.experts or (None if dense else form.experts)
        if experts is not None:
            try:
                return value_of(
                    Experts, experts, expert_ffn_hidden_size=experts.ffn_hidden_size, gated=gated
                )
            except InputError as error:
                place = path if entry.experts else ()
                raise self.error((*place, "experts"), str(error)) from error
        width = entry.ffn_hidden_size or form.ffn_hidden_size
        if width is None:
            raise self.error(path, "ffn_hidden_size is missing; add it, or experts")
        return Mlp(ffn_hidden_size=width, gated=gated, bias=_default(form.mlp_bias, gpt))


def _default(given: bool | None, otherwise: bool) -> bool:
    return otherwise if given is None else given


def _check_heads(document: Document) -> Iterator[Fault]:
    heads = document.whole(("num_attention_heads",))
    if heads is None:
        return
    kv_heads = document.whole(("num_kv_heads",))
    if kv_heads is not None and heads % kv_heads:
        yield document.fault(
            ("num_kv_heads",),
            f"{kv_heads} does not divide num_attention_heads {heads}; each key-value head serves "
            "the same number of query heads",
        )
    hidden = document.whole(("hidden_size",))
    plain = document.at("head_dim") is None and document.at("latent_attention") is None
    if plain and not document.entries(("layers",)) and hidden is not None and hidden % heads:
        yield document.fault(
            ("hidden_size",),
            f"{hidden} is not a multiple of num_attention_heads {heads}; "
            "change one of them or give head_dim",
        )
