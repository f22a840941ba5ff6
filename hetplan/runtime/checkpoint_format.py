"""torch's distributed checkpoint format: full tensors kept as chunks, in files that any rank wrote.

Writing and reading go through torch.distributed.checkpoint's own planner, writer and reader
interfaces. Two things are added. Writing asks for one layer's tensors at a time and puts each
layer into a file of its own, so no more than a layer is in memory. Reading never runs code that a
checkpoint brings: the format's `.metadata` file is a pickle, so it is read by an unpickler that
knows the classes of the format and no others; tensors are loaded with `weights_only`.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import EnumMeta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hetplan.errors import Fault, InputError, LaunchError

METADATA = ".metadata"
"""The list of a checkpoint's tensors; written last."""
_MAX_SHOWN_NAMES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A rectangular part of a full tensor, to be written."""

    key: str
    """Name of the full tensor."""
    full_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    file_group: str
    """Chunks of one group are in memory together and share a file."""
    read: Callable[[], Tensor]
    """Called once, when its turn comes."""


# ---- writing


class _Planner(DefaultSavePlanner):
    """A plan of given chunks, whose tensors are made when they are written."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks = {(chunk.key, chunk.offsets): chunk for chunk in chunks}

    def create_local_plan(self) -> SavePlan:
        """One write per chunk."""
        self.plan = SavePlan([_write_item(chunk) for chunk in self._chunks.values()])
        return self.plan

    def _chunk(self, item: WriteItem) -> Chunk:
        return self._chunks[item.index.fqn, tuple(item.index.offset or ())]

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The tensor of this item."""
        chunk = self._chunk(write_item)
        value = chunk.read().detach()
        if tuple(value.shape) != chunk.shape or value.dtype != chunk.dtype:
            raise ValueError(f"{chunk.key} is {value.dtype} {tuple(value.shape)}")
        value = value.contiguous()
        # torch.save writes all of a storage, of which this may be a part.
        return value.clone() if value.untyped_storage().nbytes() != value.nbytes else value

    def group_of(self, item: WriteItem) -> str:
        """The file group of this item."""
        return self._chunk(item).file_group


def _write_item(chunk: Chunk) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(chunk.key, torch.Size(chunk.offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(
                offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.shape)
            ),
            properties=TensorProperties(dtype=chunk.dtype),
            size=torch.Size(chunk.full_shape),
        ),
    )


class _Writer(FileSystemWriter):
    """torch's writer, with one file per group: it keeps all tensors of a file until it is done."""

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """Write group after group."""
        results: list[WriteResult] = []
        groups = itertools.groupby(plan.items, key=planner.group_of)
        for number, (_, items) in enumerate(groups):
            prefix = f"{plan.storage_data.prefix}{number}_"
            storage = replace(plan.storage_data, prefix=prefix)
            part = replace(plan, items=list(items), storage_data=storage)
            results += super().write_data(part, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def write_chunks(
    folder: Path,
    chunks: Sequence[Chunk],
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write this process's chunks into the folder, which must exist.

    With a group every rank of it calls this, with different chunks, and the folder is one that all
    of them see; its first rank writes the metadata.
    """
    planner = _Planner(chunks)
    writer = _Writer(folder, single_file_per_rank=True, sync_files=True)
    with warnings.catch_warnings():
        # torch warns that without a process group it saves what one process has.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save(
                {},
                storage_writer=writer,
                planner=planner,
                process_group=group,
                no_dist=group is None,
            )
        except CheckpointException as error:
            raise _own_failure(error, 0 if group is None else dist.get_rank(group)) from error


def _own_failure(error: CheckpointException, rank: int) -> BaseException:
    """What failed on this rank, an interrupt too; torch wraps all of it in an exception that no
    `except Exception` sees. On the other ranks, that some rank failed.
    """
    if rank in error.failures:
        return error.failures[rank][0]
    ranks = ", ".join(str(failed) for failed in sorted(error.failures))
    reason = _first_line(next(iter(error.failures.values()))[0])
    return LaunchError(f"rank {ranks} of the group could not save: {reason}")


# ---- reading


_FORMAT = "torch.distributed.checkpoint"
_ALLOWED = {
    (f"{_FORMAT}.metadata", "BytesStorageMetadata"),
    (f"{_FORMAT}.metadata", "ChunkStorageMetadata"),
    (f"{_FORMAT}.metadata", "Metadata"),
    (f"{_FORMAT}.metadata", "MetadataIndex"),
    (f"{_FORMAT}.metadata", "StorageMeta"),
    (f"{_FORMAT}.metadata", "TensorProperties"),
    (f"{_FORMAT}.metadata", "TensorStorageMetadata"),
    (f"{_FORMAT}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_FORMAT}.filesystem", "_StorageInfo"),
    (f"{_FORMAT}.filesystem", "_StoragePrefix"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


def _member(kind: object, name: object) -> Any:
    """A member of an enumeration, which pickles of Python 3.11.0 to 3.11.3 name by getattr."""
    if isinstance(kind, EnumMeta) and isinstance(name, str) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"it asks for {name!a} of {kind!a}, which is no enumeration's")


class _Unpickler(pickle.Unpickler):
    """Knows the classes of the format; everything else is refused before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is none of the format")


class Reader(FileSystemReader):
    """torch's reader, which reads `.metadata` once and runs no code of it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self._metadata = _read_metadata(folder)
        self.set_up_storage_reader(self._metadata, True)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's list of tensors."""
        return self._metadata

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Every tensor by name."""
        return {
            key: value
            for key, value in self._metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }

    @property
    def objects(self) -> tuple[str, ...]:
        """Names of what is no tensor."""
        kept = self._metadata.state_dict_metadata
        return tuple(key for key in kept if not isinstance(kept[key], TensorStorageMetadata))

    def read(
        self,
        key: str,
        *,
        offsets: Sequence[int] | None = None,
        shape: Sequence[int] | None = None,
        into: Tensor | None = None,
    ) -> Tensor:
        """The tensor, or its part of this shape from `offsets` on; copied into `into` if given.

        Only chunks that the part touches are read. An InputError where the file lacks some of it.
        """
        stored = self.tensors[key]
        start = torch.Size(offsets if offsets is not None else [0] * len(stored.size))
        size = torch.Size(shape if shape is not None else stored.size)
        target = into
        if target is None:
            target = torch.empty(tuple(size), dtype=stored.properties.dtype)
        wanted = ChunkStorageMetadata(offsets=start, sizes=size)
        items = create_read_items_for_chunk_list(key, stored, [wanted])
        if sum(math.prod(item.lengths) for item in items) != math.prod(size):
            raise InputError(self.fault(key, "is not whole: chunks of it are missing"))
        try:
            self.read_data(LoadPlan(items), _Into(target)).wait()
        except (OSError, RuntimeError, ValueError, EOFError, KeyError, AssertionError) as error:
            raise InputError(self.fault(key, f"cannot be read: {_first_line(error)}")) from error
        except pickle.UnpicklingError as error:
            raise InputError(self.fault(key, f"is no tensor: {_first_line(error)}")) from error
        return target

    def fault(self, key: str, message: str) -> Fault:
        """A fault of one tensor of this checkpoint."""
        return Fault(file=str(self.folder), field=key, message=message)


class _Into(DefaultLoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target.detach()

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor, whatever is read."""
        return self._target

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Objects are never read: they would be pickles."""
        raise ValueError("is an object")


def _read_metadata(folder: Path) -> Metadata:
    file = folder / METADATA
    try:
        with file.open("rb") as stream:
            metadata = _Unpickler(stream).load()
    except OSError as error:
        message = f"cannot be read ({error.strerror}); a checkpoint that was not finished has none"
        raise InputError(Fault(file=str(file), message=message)) from error
    except Exception as error:  # a damaged pickle raises nearly anything
        message = f"is not torch's distributed checkpoint format: {_first_line(error)}"
        raise InputError(Fault(file=str(file), message=message)) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        message = "is not torch's distributed checkpoint format"
        raise InputError(Fault(file=str(file), message=message))
    _check_files(folder, metadata.storage_data.values())
    return metadata


def _check_files(folder: Path, stored: Iterable[Any]) -> None:
    """An InputError unless every file is in the folder, at least as long as the metadata states."""
    lengths: dict[str, int] = {}
    for info in stored:
        name = str(info.relative_path)
        lengths[name] = max(lengths.get(name, 0), int(info.offset) + int(info.length))
    faulty: dict[str, list[str]] = {}
    for name, length in sorted(lengths.items()):
        if Path(name).name != name:
            faulty.setdefault("names files outside of its folder", []).append(name)
        elif not (folder / name).is_file():
            faulty.setdefault("files of the checkpoint are missing", []).append(name)
        elif (folder / name).stat().st_size < length:
            faulty.setdefault("files of the checkpoint are cut off", []).append(name)
    if faulty:
        messages = (f"{what}: {shown_names(names)}" for what, names in faulty.items())
        raise InputError(*(Fault(file=str(folder), message=message) for message in messages))


def _first_line(error: BaseException) -> str:
    """What went wrong, short enough for a message."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def shown_names(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _MAX_SHOWN_NAMES:,} more" if len(names) > _MAX_SHOWN_NAMES else ""
    # Names come from files: nothing in them may move a terminal's cursor.
    short = (name if name.isprintable() else ascii(name) for name in names[:_MAX_SHOWN_NAMES])
    return ", ".join(short) + more
