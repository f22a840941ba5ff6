"""Megatron-LM's distributed checkpoint (--ckpt-format torch_dist): what is in it, both ways.

    FOLDER/latest_checkpointed_iteration.txt   `release`, or the iteration
    FOLDER/release or FOLDER/iter_0000100/     metadata.json, common.pt, .metadata, *.distcp

Tensors are kept whole, in chunks with their place, so tp, pp and dp may change between saving and
loading; only the vocabulary is padded, and Megatron-core accepts another padding there
(`allow_shape_mismatch` of its vocabulary-parallel layers). Tensor names are one and the same for
Megatron-core's own layers and Transformer Engine's: the former rename theirs when they save
(models/gpt/gpt_layer_specs.py, `sharded_state_dict_keys_map`). Layers of one shape are stacked
along a first dimension (transformer/transformer_block.py, `sharded_state_dict`).

`release` is what Megatron-LM calls weights without a run: it asks for no optimizer state and no
random state then, and counts from iteration 0 (training/checkpointing.py, `load_checkpoint`).

Written with Megatron's own names and read back by megatron-core 0.16.1 in the tests. Its
`common.pt` is a pickle by that format; the one written here holds numbers and words only, so that
`torch.load(weights_only=True)` reads it, and one that is found is never opened.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from hetplan.errors import Fault, InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.model.spec import ModelSpec
from hetplan.runtime.weights.distributed import Chunk, Reader, write_chunks
from hetplan.runtime.weights.folders import NOTE, TRACKER
from hetplan.runtime.weights.megatron_names import MegatronTensor, extra_states, tensors_of
from hetplan.runtime.weights.numerics import Numerics
from hetplan.runtime.weights.tensors import Weight, WeightSource, check_names, converted

RELEASE = "release"
SCHEMA = "hetplan.megatron-weights/2"
_ITERATION = re.compile(r"iter_(\d{7,})")
# What is kept beside a model's weights: optimizer, random state, its rerun machine, the schedule.
_NOT_WEIGHTS = re.compile(
    r"(optimizer|chained_\d+\.|rng_state|rerun_state_machine|opt_param_scheduler)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronNote:
    """What hetplan writes beside Megatron's files."""

    model: ModelSpec
    numerics: Numerics
    padded_vocab_size: int
    arguments: tuple[str, ...]
    """Of Megatron-LM, under which it computes what the model computes."""
    huggingface_config: str | None = None
    schema: str = SCHEMA


# ---- reading


@dataclass(slots=True, kw_only=True)
class MegatronSource:
    """A Megatron checkpoint; the tensor that was read last is kept, for the weights fused in it."""

    model: ModelSpec
    numerics: Numerics
    reader: Reader
    places: dict[Weight, MegatronTensor]
    keys: dict[MegatronTensor, _Place]
    _last: tuple[MegatronTensor, Tensor] | None = None

    def dtype(self, weight: Weight) -> torch.dtype:
        """Number format of the weight."""
        key = self.keys[self.places[weight]].keys[0]
        found: torch.dtype = self.reader.tensors[key].properties.dtype
        return found

    def read(self, weight: Weight) -> Tensor:
        """The full weight."""
        tensor = self.places[weight]
        if self._last is None or self._last[0] != tensor:
            self._last = (tensor, self.keys[tensor].read(self.reader))
        return tensor.split(self._last[1])[tensor.weights.index(weight)].contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where one layer's tensor lies: in its own one, in a stack, or in two halves."""

    keys: tuple[str, ...]
    layer: int | None
    """Place in a stack."""
    rows: tuple[int, ...]

    def read(self, reader: Reader) -> Tensor:
        """The layer's tensor."""
        return torch.cat([self._part(reader, key) for key in self.keys])

    def _part(self, reader: Reader, key: str) -> Tensor:
        if self.layer is None:
            return reader.read(key)
        size = reader.tensors[key].size
        offsets = (self.layer, *(0,) * (len(size) - 1))
        return reader.read(key, offsets=offsets, shape=(1, *size[1:]))[0]


def iteration_folder(folder: Path) -> Path:
    """The folder of the newest checkpoint; `folder` itself where it is that of one."""
    if (folder / "metadata.json").is_file():
        return folder
    tracker = folder / TRACKER
    word = tracker.read_text(errors="replace").strip()[:40]
    if word != RELEASE and not (word.isascii() and word.isdigit()):
        message = f"says {word!a}; expected release or a number"
        raise InputError(Fault(file=str(tracker), message=message))
    inner = folder / (RELEASE if word == RELEASE else f"iter_{int(word):07d}")
    if not (inner / "metadata.json").is_file():
        message = f"says {word}, and {inner.name} has no metadata.json: it was not finished, or is "
        raise InputError(Fault(file=str(tracker), message=message + "no distributed checkpoint"))
    return inner


def read_note(folder: Path) -> MegatronNote | None:
    """What hetplan wrote beside the checkpoint; None where Megatron-LM wrote it."""
    inner = iteration_folder(folder)
    for file in (folder / NOTE, inner.parent / NOTE):
        if file.is_file():
            return decode(read_document(file), MegatronNote, schema=SCHEMA)
    return None


def open_megatron(folder: Path, model: ModelSpec, numerics: Numerics) -> MegatronSource:
    """The checkpoint's weights as those of this model; an InputError where they are not.

    Optimizer and random state in it are passed over.
    """
    inner = iteration_folder(folder)
    backend = read_document(inner / "metadata.json").at("sharded_backend")
    if backend != "torch_dist":
        message = f"the format is {str(backend)[:40]!a}; torch_dist can be read (zarr ended with "
        message += "megatron-core 0.13: load and save it there once)"
        raise InputError(Fault(file=str(inner / "metadata.json"), message=message))
    reader = Reader(inner)
    found = reader.tensors
    weights = {key for key in found if not _NOT_WEIGHTS.match(key)}
    padded = _vocabulary_rows(inner, reader, model)
    tensors = tensors_of(model, padded)
    places = {tensor: _place(tensor, weights, model) for tensor in tensors}
    wanted = {key for place in places.values() for key in place.keys}
    check_names(str(inner), found=weights, wanted=wanted)
    faults = [fault for tensor, place in places.items() for fault in _faults(reader, tensor, place)]
    if faults:
        raise InputError(*faults)
    return MegatronSource(
        model=model,
        numerics=numerics,
        reader=reader,
        places={weight: tensor for tensor in tensors for weight in tensor.weights},
        keys=places,
    )


def _vocabulary_rows(inner: Path, reader: Reader, model: ModelSpec) -> int:
    stored = reader.tensors.get("embedding.word_embeddings.weight")
    rows = stored.size[0] if stored is not None and len(stored.size) else model.vocab_size
    if rows < model.vocab_size:
        message = f"has {rows:,} rows; the model's vocabulary is {model.vocab_size:,}"
        raise InputError(reader.fault("embedding.word_embeddings.weight", message))
    return rows


def _place(tensor: MegatronTensor, found: set[str], model: ModelSpec) -> _Place:
    """Names as the checkpoint has them: stacked or one by one, halves together or apart."""
    alone = tensor.unstacked_key
    if tensor.gated and {f"{alone}_w", f"{alone}_v"} <= found:
        half = tensor.shape[0] // 2
        return _Place(keys=(f"{alone}_w", f"{alone}_v"), layer=None, rows=(half, half))
    if tensor.layer is None or alone in found:
        return _Place(keys=(alone,), layer=None, rows=tensor.shape[:1])
    return _Place(keys=(tensor.key,), layer=tensor.layer, rows=tensor.shape[:1])


def _faults(reader: Reader, tensor: MegatronTensor, place: _Place) -> Iterator[Fault]:
    for key, rows in zip(place.keys, place.rows, strict=True):
        wanted = (rows, *tensor.shape[1:])
        if place.layer is not None:
            wanted = (tensor.num_layers, *wanted)
        size = tuple(reader.tensors[key].size)
        if size != wanted and place.layer in (None, 0):
            yield reader.fault(key, f"has shape {size}; the model's is {wanted}")


# ---- writing


def write_megatron(
    folder: Path,
    source: WeightSource,
    *,
    dtype: torch.dtype | None,
    huggingface_config: str | None,
    padded_vocab_size: int,
    arguments: Sequence[str],
    pieces: int = 1,
    iteration: int | None = None,
) -> None:
    """Write the source's weights as a distributed checkpoint into the folder, layer by layer.

    `pieces`: tensor-parallel slices that each tensor is kept in where it can be, so that a rank of
    that tp reads no more than it needs; any other tp loads it as well. `iteration`: None writes a
    release.
    """
    inner = folder / (RELEASE if iteration is None else f"iter_{iteration:07d}")
    inner.mkdir()
    tensors = tensors_of(source.model, padded_vocab_size)
    chunks = [
        chunk for tensor in tensors for chunk in _chunks(_Joined(source, tensor, dtype), pieces)
    ]
    # Layers of Megatron-core's and Transformer Engine's own save an extra state, which they ask
    # for when they load; without FP8 it is empty (ModelOpt, FP8: not converted).
    empty = io.BytesIO()
    torch.save([None], empty)
    write_chunks(
        inner, chunks, objects={key: empty.getvalue() for key in extra_states(source.model)}
    )
    common = {
        # 3.0: queries, keys and values of a group stand together (fix_query_key_value_ordering).
        "checkpoint_version": 3.0,
        "iteration": iteration or 0,
        "content_metadata": {"singleton_local_shards": False},
    }
    torch.save(common, inner / "common.pt")
    note = MegatronNote(
        model=source.model,
        numerics=source.numerics,
        padded_vocab_size=padded_vocab_size,
        arguments=tuple(arguments),
        huggingface_config=huggingface_config,
    )
    write_atomically(folder / NOTE, encode(note, schema=SCHEMA))
    config = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    write_atomically(inner / "metadata.json", json.dumps(config))
    word = RELEASE if iteration is None else str(iteration)
    write_atomically(folder / TRACKER, word)


class _Joined:
    """A tensor that is made when its first chunk is written and let go with its last one."""

    def __init__(
        self, source: WeightSource, tensor: MegatronTensor, dtype: torch.dtype | None
    ) -> None:
        self._source, self.tensor = source, tensor
        kept = reduce(torch.promote_types, (source.dtype(each) for each in tensor.weights))
        self.dtype = dtype or kept
        self._value: Tensor | None = None
        self._left = 0

    def chunk(self, dim: int, start: int, length: int) -> Chunk:
        """Rows (dim 0) or columns (dim 1) of it, as a chunk to write."""
        tensor = self.tensor
        offsets, shape = [0] * len(tensor.shape), list(tensor.shape)
        offsets[dim], shape[dim] = start, length
        stack = () if tensor.layer is None else (tensor.layer,)
        one = () if tensor.layer is None else (1,)
        self._left += 1

        def read() -> Tensor:
            part = self._whole().narrow(dim, start, length).reshape(*one, *shape)
            self._left -= 1
            if not self._left:
                self._value = None
            return part

        return Chunk(
            key=tensor.key,
            full_shape=tensor.full_shape,
            offsets=(*stack, *offsets),
            shape=(*one, *shape),
            dtype=self.dtype,
            file_group=str(tensor.weights[0].position),
            read=read,
        )

    def _whole(self) -> Tensor:
        if self._value is None:
            parts = [
                converted(self._source.read(weight), self.dtype) for weight in self.tensor.weights
            ]
            self._value = self.tensor.join(parts)
        return self._value


def _chunks(joined: _Joined, pieces: int) -> Iterator[Chunk]:
    tensor = joined.tensor
    dim = tensor.cut_dim
    if dim is None:
        yield joined.chunk(0, 0, tensor.shape[0])
        return
    # Gate and up are cut each by itself, and lie one behind the other (transformer/mlp.py).
    parts = pieces * (2 if tensor.gated else 1)
    count = parts if tensor.shape[dim] % parts == 0 else 1
    length = tensor.shape[dim] // count
    for number in range(count):
        yield joined.chunk(dim, number * length, length)
