"""The distributed format: nothing in it is run, damage is said, one layer is in memory."""

from __future__ import annotations

import io
import os
import pickle
import weakref
from pathlib import Path

import numpy
import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MEMORY_FORMAT
from torch.distributed.checkpoint.metadata import Metadata

from hetplan.errors import InputError
from hetplan.runtime.checkpoint_format import (
    METADATA,
    Chunk,
    Reader,
    _Unpickler,
    write_chunks,
)


def chunk(key: str, start: int, rows: int, group: str = "0", **more: object) -> Chunk:
    values = torch.arange(40, dtype=torch.float32).reshape(10, 4)[start : start + rows]
    fields = {
        "key": key,
        "full_shape": (10, 4),
        "offsets": (start, 0),
        "shape": (rows, 4),
        "dtype": torch.float32,
        "file_group": group,
        "read": lambda: values,
    }
    return Chunk(**(fields | more))  # type: ignore[arg-type]


def written(folder: Path, *chunks: Chunk) -> Path:
    folder.mkdir()
    write_chunks(folder, chunks)
    return folder


def test_parts_are_read_across_chunks(tmp_path: Path) -> None:
    reader = Reader(written(tmp_path / "a", chunk("x", 0, 3), chunk("x", 3, 7)))
    whole = torch.arange(40, dtype=torch.float32).reshape(10, 4)
    assert torch.equal(reader.read("x"), whole)
    assert torch.equal(reader.read("x", offsets=(2, 1), shape=(4, 2)), whole[2:6, 1:3])
    target = torch.zeros(4, 10, dtype=torch.bfloat16)
    reader.read("x", into=target.T)
    assert torch.equal(target.T, whole.bfloat16())


def test_a_group_is_let_go_before_the_next_one(tmp_path: Path) -> None:
    """Tensors of 1 MB in 12 groups: never more than a group's two are alive."""
    alive = most = 0

    def let_go() -> None:
        nonlocal alive
        alive -= 1

    def make() -> torch.Tensor:
        nonlocal alive, most
        values = numpy.zeros((512, 512), dtype=numpy.float32)
        weakref.finalize(values, let_go)  # the tensor keeps the array alive
        alive += 1
        most = max(most, alive)
        return torch.from_numpy(values)

    whole = {"full_shape": (512, 512), "shape": (512, 512), "read": make}
    chunks = [
        chunk(f"{group}.{name}", 0, 512, str(group), **whole)
        for group in range(12)
        for name in ("a", "b")
    ]
    folder = written(tmp_path / "a", *chunks)
    assert 2 <= most <= 4  # a group, and what the loop over the one before still names
    assert alive == 0
    assert len(list(folder.glob("*.distcp"))) == 12


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.mark),))


def test_a_pickle_from_elsewhere_is_refused_and_not_run(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", chunk("x", 0, 10))
    mark = tmp_path / "ran"
    (folder / METADATA).write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(InputError, match=r"names posix\.mkdir, which is none of the format"):
        Reader(folder)
    assert not mark.exists()
    pickle.loads((folder / METADATA).read_bytes())
    assert mark.exists()  # so it would have run


class _Named:
    """Pickled as Python 3.11.0 to 3.11.3 pickle members of enumerations: getattr(kind, name)."""

    def __init__(self, kind: object, name: str) -> None:
        self.asked = (kind, name)

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, self.asked


def test_getattr_in_a_pickle_names_members_of_enumerations_and_nothing_else() -> None:
    member = pickle.dumps(_Named(MEMORY_FORMAT, "TORCH_CONTIGUOUS_FORMAT"))
    assert _Unpickler(io.BytesIO(member)).load() is MEMORY_FORMAT.TORCH_CONTIGUOUS_FORMAT
    for kind, name in ((Metadata, "__init__"), (MEMORY_FORMAT, "__class__"), (MEMORY_FORMAT, "X")):
        with pytest.raises(pickle.UnpicklingError, match="no enumeration's"):
            _Unpickler(io.BytesIO(pickle.dumps(_Named(kind, name)))).load()


def test_a_tensor_that_is_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", chunk("x", 0, 10))
    mark = tmp_path / "ran"
    file = next(folder.glob("*.distcp"))
    size = file.stat().st_size
    torch.save(Evil(mark), file)
    file.write_bytes(file.read_bytes().ljust(size, b"\0")[:size])
    with pytest.raises(InputError, match="x: "):
        Reader(folder).read("x")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda folder: (folder / METADATA).unlink(), "was not finished"),
        (lambda folder: (folder / METADATA).write_bytes(b"\x80\x04junk"), "is not torch's"),
        (lambda folder: next(folder.glob("*.distcp")).unlink(), "files of the checkpoint are"),
        (lambda folder: os.truncate(next(folder.glob("*.distcp")), 99), "are cut off"),
    ],
)
def test_damage_is_said(spoil: object, word: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "a", chunk("x", 0, 10))
    spoil(folder)  # type: ignore[operator]
    with pytest.raises(InputError, match=word):
        Reader(folder).read("x")


def test_files_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", chunk("x", 0, 10))
    reader = Reader(folder)
    metadata = reader.read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = "../b.distcp"
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(InputError, match="names files outside"):
        Reader(folder)
