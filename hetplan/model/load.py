"""From a model file to a ModelSpec."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hetplan.errors import Fault
from hetplan.files.reading import Document, decode, read_document
from hetplan.model.file_form import MODEL_SCHEMA, ModelForm
from hetplan.model.spec import ModelSpec


def load_model(path: str | Path) -> ModelSpec:
    """The model that the file describes; one InputError with every fault otherwise."""
    document = read_document(Path(path))
    form = decode(document, ModelForm, schema=MODEL_SCHEMA, checks=(_check_heads,))
    return ModelSpec(
        name=form.name,
        architecture=form.architecture,
        num_layers=form.num_layers,
        hidden_size=form.hidden_size,
        ffn_hidden_size=form.ffn_hidden_size,
        num_attention_heads=form.num_attention_heads,
        num_kv_heads=form.num_kv_heads or form.num_attention_heads,
        head_dim=form.head_dim or form.hidden_size // form.num_attention_heads,
        vocab_size=form.vocab_size,
        max_sequence_length=form.max_sequence_length,
        tied_embeddings=form.tied_embeddings,
    )


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
    if document.at("head_dim") is None and hidden is not None and hidden % heads:
        yield document.fault(
            ("hidden_size",),
            f"{hidden} is not a multiple of num_attention_heads {heads}; "
            "change one of them or give head_dim",
        )
