"""The safetensors format: tensors in a file without code, read one at a time.

A file is eight bytes with the header's length (little endian), the header (a JSON object: name ->
dtype, shape, begin and end in the bytes behind the header; `__metadata__` -> strings), the bytes.
Source: the format's own description, github.com/huggingface/safetensors, README.md, "Format".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hetplan.errors import Fault, InputError
from hetplan.importers.lines import shown

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where one tensor lies."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte, from the beginning of the file."""

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """The tensor, read from the file now; nothing else of the file is."""
        data = bytearray(self.num_bytes)
        with self.file.open("rb") as stream:
            stream.seek(self.start)
            if stream.readinto(data) != len(data):
                raise InputError(Fault(file=str(self.file), field=self.name, message="cut off"))
        if not data:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(data, dtype=self.dtype).reshape(self.shape)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of the file; an InputError where the header does not describe the file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                message = "no safetensors file: header length"
                raise InputError(Fault(file=str(file), message=message))
            text = stream.read(length)
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        raise InputError(Fault(file=str(file), message=message)) from error
    begin = 8 + length
    found: dict[str, StoredTensor] = {}
    for name, entry in _entries(file, text):
        if name in found:
            raise InputError(Fault(file=str(file), field=shown(name), message="stands there twice"))
        if name != "__metadata__":
            found[name] = _stored(file, name, entry, begin, size)
    _check_places(file, tuple(found.values()), begin, size)
    return found


def _entries(file: Path, text: bytes) -> tuple[tuple[str, object], ...]:
    """The header's names and what stands behind them, each as often as it stands there."""
    outer: list[tuple[str, object]] = []

    def kept(pairs: list[tuple[str, object]]) -> dict[str, object]:
        # The outermost object is the last that is read.
        nonlocal outer
        outer = pairs
        return dict(pairs)

    try:
        header = json.loads(text, object_pairs_hook=kept)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise InputError(Fault(file=str(file), message="no safetensors file: header is no JSON"))
    return tuple(outer)


def _check_places(file: Path, tensors: tuple[StoredTensor, ...], begin: int, size: int) -> None:
    """The format knows no holes and no overlaps (its README, "Format")."""
    at = begin
    for each in sorted(tensors, key=lambda each: (each.start, each.num_bytes)):
        if each.start != at:
            message = "begins before the tensor in front of it ends, or leaves a hole there"
            raise InputError(Fault(file=str(file), field=shown(each.name), message=message))
        at = each.start + each.num_bytes
    if at != size:
        message = f"holds {size - at:,} bytes behind its last tensor"
        raise InputError(Fault(file=str(file), message=message))


def _stored(file: Path, name: str, entry: object, begin: int, size: int) -> StoredTensor:
    fields = entry if isinstance(entry, dict) else {}
    dtype = _DTYPES.get(str(fields.get("dtype")))
    if dtype is None:
        found = str(fields.get("dtype"))[:20]
        message = f"dtype {found!a} is not known; known: {', '.join(_DTYPES)}"
        raise InputError(Fault(file=str(file), field=shown(name), message=message))
    shape, places = _whole_numbers(fields.get("shape")), _whole_numbers(fields.get("data_offsets"))
    if shape is None or places is None or len(places) != 2:
        message = "shape or data_offsets are no whole numbers"
        raise InputError(Fault(file=str(file), field=shown(name), message=message))
    start, stop = places
    stored = StoredTensor(file=file, name=name, dtype=dtype, shape=shape, start=begin + start)
    if stop - start != stored.num_bytes or begin + stop > size:
        message = f"takes {stored.num_bytes:,} bytes, and the file has others for it"
        raise InputError(Fault(file=str(file), field=shown(name), message=message))
    return stored


def _whole_numbers(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
        return None
    return tuple(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorToWrite:
    """One tensor of a file that is written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    """Called once, when its turn comes."""

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(file: Path, tensors: Sequence[TensorToWrite]) -> None:
    """Write the tensors one after the other; only one of them is in memory at a time."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.num_bytes],
        }
        at += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for tensor in tensors:
            value = tensor.read()
            if tuple(value.shape) != tensor.shape or value.dtype != tensor.dtype:
                raise ValueError(f"{tensor.name} is {value.dtype} {tuple(value.shape)}")
            flat = value.detach().contiguous().reshape(-1)
            stream.write(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        stream.flush()
        os.fsync(stream.fileno())
