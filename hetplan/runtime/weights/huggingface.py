"""A Hugging Face checkpoint: which tensor of its files is which weight, both ways.

Only safetensors files and JSON are read, nothing is executed, and the `transformers` package is
not needed. Names and shapes are those of transformers 5.23, models/llama/modeling_llama.py and
models/gpt2/modeling_gpt2.py: Llama and Mistral have one matrix per projection; GPT-2 fuses queries,
keys and values, and keeps matrices as [in, out] (its Conv1D).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from hetplan.errors import Fault, InputError
from hetplan.files.reading import Document, read_document
from hetplan.files.writing import write_atomically
from hetplan.importers.lines import shown
from hetplan.model.huggingface import is_huggingface, model_of_config
from hetplan.model.spec import Architecture, LayerKind, ModelSpec
from hetplan.runtime.weights.folders import CONFIG
from hetplan.runtime.weights.numerics import Numerics, config_of_model, numerics_of_config
from hetplan.runtime.weights.safetensors import (
    StoredTensor,
    TensorToWrite,
    read_header,
    write_tensors,
)
from hetplan.runtime.weights.tensors import (
    VOCABULARY,
    Weight,
    WeightSource,
    by_layer,
    check_names,
    check_shape,
    converted,
    listed,
)

INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
"""Most bytes of one file; what transformers' save_pretrained took for years."""
# Buffers that old versions saved: the causal mask, the value under it, rotary frequencies.
_BUFFERS = re.compile(r"(.*\.)?(attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")
_GPT2_PREFIX = "transformer."


@dataclass(frozen=True, slots=True, kw_only=True)
class HfTensor:
    """One tensor of the files and the weights that lie in it, one above the other."""

    name: str
    weights: tuple[Weight, ...]
    transposed: bool = False
    """Kept as [in, out]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the file."""
        first = self.weights[0].shape
        shape = (sum(weight.shape[0] for weight in self.weights), *first[1:])
        return shape[::-1] if self.transposed else shape

    def join(self, values: Sequence[Tensor]) -> Tensor:
        """The tensor of these weights."""
        joined = values[0] if len(values) == 1 else torch.cat(list(values))
        return joined.T if self.transposed else joined

    def part(self, weight: Weight, value: Tensor) -> Tensor:
        """The weight's part of the tensor."""
        rows = value.T if self.transposed else value
        before = self.weights[: self.weights.index(weight)]
        start = sum(each.shape[0] for each in before)
        return rows.narrow(0, start, weight.shape[0]).contiguous()


_LLAMA = {
    "attention_norm_weight": "input_layernorm.weight",
    "query_weight": "self_attn.q_proj.weight",
    "key_weight": "self_attn.k_proj.weight",
    "value_weight": "self_attn.v_proj.weight",
    "out_weight": "self_attn.o_proj.weight",
    "mlp_norm_weight": "post_attention_layernorm.weight",
    "gate_weight": "mlp.gate_proj.weight",
    "up_weight": "mlp.up_proj.weight",
    "down_weight": "mlp.down_proj.weight",
}
_GPT2 = {
    "attention_norm_weight": "ln_1.weight",
    "attention_norm_bias": "ln_1.bias",
    "query_weight": "attn.c_attn.weight",
    "key_weight": "attn.c_attn.weight",
    "value_weight": "attn.c_attn.weight",
    "query_bias": "attn.c_attn.bias",
    "key_bias": "attn.c_attn.bias",
    "value_bias": "attn.c_attn.bias",
    "out_weight": "attn.c_proj.weight",
    "out_bias": "attn.c_proj.bias",
    "mlp_norm_weight": "ln_2.weight",
    "mlp_norm_bias": "ln_2.bias",
    "up_weight": "mlp.c_fc.weight",
    "up_bias": "mlp.c_fc.bias",
    "down_weight": "mlp.c_proj.weight",
    "down_bias": "mlp.c_proj.bias",
}
_ENDS = {
    Architecture.LLAMA: {
        (LayerKind.EMBEDDING, VOCABULARY): "model.embed_tokens.weight",
        (LayerKind.HEAD, "norm_weight"): "model.norm.weight",
        (LayerKind.HEAD, VOCABULARY): "lm_head.weight",
    },
    Architecture.GPT: {
        (LayerKind.EMBEDDING, VOCABULARY): f"{_GPT2_PREFIX}wte.weight",
        (LayerKind.EMBEDDING, "position_weight"): f"{_GPT2_PREFIX}wpe.weight",
        (LayerKind.HEAD, "norm_weight"): f"{_GPT2_PREFIX}ln_f.weight",
        (LayerKind.HEAD, "norm_bias"): f"{_GPT2_PREFIX}ln_f.bias",
        (LayerKind.HEAD, VOCABULARY): "lm_head.weight",
    },
}
_HEAD = "lm_head.weight"


def tensors_of(model: ModelSpec) -> tuple[HfTensor, ...]:
    """Every tensor of the model's files, layer by layer."""
    return tuple(tensor for layer in by_layer(model) for tensor in _layer_tensors(model, layer))


def _layer_tensors(model: ModelSpec, layer: tuple[Weight, ...]) -> Iterator[HfTensor]:
    names: dict[str, list[Weight]] = {}
    for weight in layer:
        names.setdefault(_name(model, weight), []).append(weight)
    gpt = model.architecture is Architecture.GPT
    for name, weights in names.items():
        matrix = model.layers[weights[0].position] is LayerKind.TRANSFORMER
        conv = gpt and matrix and len(weights[0].shape) == 2
        yield HfTensor(name=name, weights=tuple(weights), transposed=conv)


def _name(model: ModelSpec, weight: Weight) -> str:
    kind = model.layers[weight.position]
    if kind is not LayerKind.TRANSFORMER:
        return _ENDS[model.architecture][kind, weight.name]
    if model.architecture is Architecture.GPT:
        return f"{_GPT2_PREFIX}h.{weight.position - 1}.{_GPT2[weight.name]}"
    return f"model.layers.{weight.position - 1}.{_LLAMA[weight.name]}"


# ---- reading


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceSource:
    """A Hugging Face checkpoint."""

    folder: Path
    model: ModelSpec
    numerics: Numerics
    config: str
    """Text of its config.json."""
    stored: dict[str, StoredTensor]
    """By the names of `tensors_of`."""
    places: dict[Weight, HfTensor]

    def dtype(self, weight: Weight) -> torch.dtype:
        """Number format of the weight."""
        return self.stored[self.places[weight].name].dtype

    def read(self, weight: Weight) -> Tensor:
        """The full weight."""
        place = self.places[weight]
        return place.part(weight, self.stored[place.name].read())


def open_huggingface(folder: Path) -> HuggingFaceSource:
    """The checkpoint in this folder; an InputError lists the tensors that it lacks or has too many.

    So does one whose config.json asks for what no format here can say.
    """
    document = _config(folder)
    numerics = numerics_of_config(document)
    model = model_of_config(document)
    tensors = tensors_of(model)
    found = _stored_tensors(folder)
    if model.architecture is Architecture.GPT and not any(
        name.startswith(_GPT2_PREFIX) for name in found
    ):
        # Saved without the head, as gpt2 itself: the names begin behind the prefix.
        found = {f"{_GPT2_PREFIX}{name}": stored for name, stored in found.items()}
    wanted = {tensor.name: tensor for tensor in tensors}
    passed_over = {name for name in found if _BUFFERS.fullmatch(name)}
    if model.tied_embeddings and _HEAD in found:
        passed_over.add(_HEAD)
        _check_tied(folder, model, found)
    check_names(str(folder), found=found, wanted=wanted, passed_over=passed_over)
    faults = [
        fault
        for name, tensor in wanted.items()
        for fault in check_shape(str(found[name].file), name, found[name].shape, tensor.shape)
    ]
    if faults:
        raise InputError(*faults)
    return HuggingFaceSource(
        folder=folder,
        model=model,
        numerics=numerics,
        config=document.text,
        stored={name: found[name] for name in wanted},
        places={weight: tensor for tensor in tensors for weight in tensor.weights},
    )


def _config(folder: Path) -> Document:
    document = read_document(folder / CONFIG)
    if not is_huggingface(document):
        message = "is no config.json of a model: it has neither model_type nor architectures"
        raise InputError(Fault(file=document.file, message=message))
    return document


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if len(files) > 1:
            message = f"holds {len(files)} safetensors files and no {INDEX} that says what is where"
            raise InputError(Fault(file=str(folder), message=message))
        return {name: tensor for file in files for name, tensor in read_header(file).items()}
    document = read_document(index)
    placed = document.at("weight_map")
    if not isinstance(placed, dict) or not all(type(each) is str for each in placed.values()):
        raise InputError(document.fault(("weight_map",), "expected tensor names and their files"))
    outside = sorted({file for file in placed.values() if Path(file).name != file})
    if outside:
        message = f"{shown(outside[0])} is no file of this folder"
        raise InputError(document.fault(("weight_map",), message))
    headers: dict[str, dict[str, StoredTensor]] = {}
    for file in sorted(set(placed.values())):
        if not os.path.isfile(folder / file):  # False for names that no file can have, too
            message = f"{shown(file)} is not there; the checkpoint is not whole"
            raise InputError(document.fault(("weight_map",), message))
        headers[file] = read_header(folder / file)
    held = {name for header in headers.values() for name in header}
    check_names(str(index), found=held, wanted=placed)
    # A tensor may stand in two files; the one that counts is that of the index.
    elsewhere = sorted(name for name, file in placed.items() if name not in headers[file])
    if elsewhere:
        message = f"{listed(elsewhere)}: another file holds that than the index says"
        raise InputError(document.fault(("weight_map",), message))
    return {name: headers[file][name] for name, file in placed.items()}


def _check_tied(folder: Path, model: ModelSpec, found: dict[str, StoredTensor]) -> None:
    """A head that is written out although it is tied must be the embedding."""
    embedding = found.get(_ENDS[model.architecture][LayerKind.EMBEDDING, VOCABULARY])
    if embedding is not None and not torch.equal(embedding.read(), found[_HEAD].read()):
        message = "differs from the embedding, and config.json says tie_word_embeddings"
        raise InputError(Fault(file=str(folder), field=_HEAD, message=message))


# ---- writing


def write_huggingface(
    folder: Path,
    source: WeightSource,
    *,
    dtype: torch.dtype | None,
    huggingface_config: str | None,
    most_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the source's weights as a Hugging Face checkpoint into the folder.

    The config is the one that the weights once came with, or made from the model.
    """
    tensors = [_to_write(source, tensor, dtype) for tensor in tensors_of(source.model)]
    shards = _shards(tensors, most_shard_bytes)
    names = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / name, shard)
        names.update({tensor.name: name for tensor in shard})
    if len(shards) > 1:
        total = sum(tensor.num_bytes for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": names}
        write_atomically(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
    text = huggingface_config
    if text is None:
        words = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
        word = words.pop() if len(words) == 1 else "float32"
        config = config_of_model(source.model, source.numerics, word)
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    write_atomically(folder / CONFIG, text)


def _to_write(source: WeightSource, tensor: HfTensor, dtype: torch.dtype | None) -> TensorToWrite:
    kept = reduce(torch.promote_types, (source.dtype(weight) for weight in tensor.weights))
    wanted = dtype or kept

    def read() -> Tensor:
        parts = [converted(source.read(weight), wanted) for weight in tensor.weights]
        return tensor.join(parts)

    return TensorToWrite(name=tensor.name, dtype=wanted, shape=tensor.shape, read=read)


def _shards(tensors: Sequence[TensorToWrite], most: int) -> list[list[TensorToWrite]]:
    shards: list[list[TensorToWrite]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > most:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return shards
