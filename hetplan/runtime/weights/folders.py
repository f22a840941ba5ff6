"""How a folder of weights comes to be: whole or not at all, and never over another one by mistake.

It is written beside its place under a name that starts with a dot and says `partial`, and renamed
when it is done. So an interruption leaves at most a folder of that name, which nothing reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from hetplan.errors import Fault, InputError
from hetplan.files.writing import sync_folder
from hetplan.runtime.weights.native import MANIFEST
from hetplan.runtime.weights.tensors import listed

NOTE = "hetplan-weights.json"
"""What a Megatron checkpoint's weights are of; Megatron-LM's own files say it in a pickle only."""
TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron-LM's file that names its newest checkpoint (training/checkpointing.py)."""
CONFIG = "config.json"
_WRITTEN = re.compile(
    rf"{re.escape(CONFIG)}|model(-\d{{5}}-of-\d{{5}})?\.safetensors|model\.safetensors\.index\.json"
    rf"|{re.escape(MANIFEST)}|\.metadata|\w+\.distcp|{re.escape(TRACKER)}|{re.escape(NOTE)}",
    re.ASCII,
)
_INNER = re.compile(r"release|iter_\d{7,}", re.ASCII)
_WRITTEN_INSIDE = re.compile(r"\.metadata|\w+\.distcp|common\.pt|metadata\.json", re.ASCII)


class Format(StrEnum):
    """Kinds of folders that weights are kept in."""

    HUGGINGFACE = "huggingface"
    """config.json and safetensors files."""
    NATIVE = "native"
    """The reference trainer's checkpoint."""
    MEGATRON = "megatron"
    """Megatron-LM's distributed checkpoint, --ckpt-format torch_dist."""


def format_of(folder: Path) -> Format:
    """What the folder holds; an InputError where it is none of these, with the reason."""
    found = _format(folder)
    if found is not None:
        return found
    if not folder.is_dir():
        raise InputError(Fault(file=str(folder), message="there is no such folder"))
    per_rank = [*folder.glob("mp_rank_*"), *folder.glob("*/mp_rank_*")]
    if per_rank:
        message = (
            f"{per_rank[0].name} is Megatron-LM's format `torch`: one pickle per rank, cut as that "
            "run was cut; let Megatron-LM rewrite it with --ckpt-convert-format torch_dist "
            "--ckpt-convert-save, then convert that"
        )
        raise InputError(Fault(file=str(folder), message=message))
    pickles = sorted(each.name for each in folder.glob("*.bin")) + sorted(
        each.name for each in folder.glob("*.pt")
    )
    if pickles:
        message = (
            f"{pickles[0]} is a pickle, which can run code when it is read; save the model as "
            "safetensors (transformers: save_pretrained)"
        )
        raise InputError(Fault(file=str(folder), message=message))
    message = (
        f"holds no weights that are known: neither {CONFIG} with *.safetensors (Hugging Face), nor "
        f"{MANIFEST} (reference trainer), nor {TRACKER} or metadata.json (Megatron-LM)"
    )
    raise InputError(Fault(file=str(folder), message=message))


def _format(folder: Path) -> Format | None:
    if (folder / MANIFEST).is_file():
        return Format.NATIVE
    if (folder / TRACKER).is_file() or (folder / "metadata.json").is_file():
        per_rank = [*folder.glob("mp_rank_*"), *folder.glob("*/mp_rank_*")]
        return None if per_rank else Format.MEGATRON
    if any(folder.glob("*.safetensors")):
        return Format.HUGGINGFACE
    return None


def check_free(folder: Path, *, force: bool) -> None:
    """An InputError where something is there that must stay."""
    if not folder.parent.is_dir():
        message = "cannot be made: its parent folder does not exist; create that first"
        raise InputError(Fault(file=str(folder), message=message))
    if not folder.exists() and not folder.is_symlink():
        return
    if not force:
        message = "exists; nothing was changed: name a new folder, or replace it with --force"
        raise InputError(Fault(file=str(folder), message=message))
    if folder.is_symlink() or not folder.is_dir() or _format(folder) is None:
        message = "exists and holds no weights; --force replaces only a folder of weights"
        raise InputError(Fault(file=str(folder), message=message))
    foreign = _foreign(folder)
    if foreign:
        message = (
            f"holds more than a conversion writes: {listed(foreign)}; --force would lose it: move "
            "it away or name a new folder"
        )
        raise InputError(Fault(file=str(folder), message=message))


def _foreign(folder: Path) -> list[str]:
    """What of a folder is no file of one checkpoint as it is written here; sorted."""
    names = [
        (each.relative_to(folder).as_posix(), each.is_dir() and not each.is_symlink())
        for each in sorted(folder.rglob("*"))
    ]
    kept = [name for name, is_folder in names if is_folder]
    if len(kept) == 1 and _INNER.fullmatch(kept[0]) and (folder / NOTE).is_file():
        kept, inner = [], f"{kept[0]}/"
    else:
        inner = ""
    found = [f"{name}/" for name in kept]
    for name, is_folder in names:
        written = _WRITTEN_INSIDE if inner and name.startswith(inner) else _WRITTEN
        if not is_folder and not written.fullmatch(name.removeprefix(inner)):
            found.append(name)
    return sorted(found)


@contextlib.contextmanager
def whole_folder(folder: Path, *, force: bool) -> Iterator[Path]:
    """A new folder to write into, which takes `folder`'s place when the block ends without error.

    On an error, or Ctrl-C, it is removed and what was there before stays.
    """
    check_free(folder, force=force)
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    except OSError as error:
        message = f"cannot be made: {error.strerror}"
        raise InputError(Fault(file=str(folder), message=message)) from error
    try:
        yield partial
        # mkdtemp's folder is for its owner alone; this one is like any new folder.
        umask = os.umask(0)
        os.umask(umask)
        partial.chmod(0o777 & ~umask)
        with _alone(folder.parent):
            # Another conversion may have come first, or somebody put a file there.
            check_free(folder, force=force)
            put_in_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other conversion puts a folder in place in this one meanwhile."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems have no locks; the rename is one step there as well.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def put_in_place(partial: Path, folder: Path) -> None:
    """Rename `partial` to `folder`; a folder that is there goes when the new one is in place."""
    old: Path | None = None
    if folder.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old-", dir=folder.parent))
        folder.rename(old / folder.name)
    try:
        partial.rename(folder)
    except OSError:
        if old is not None:
            (old / folder.name).rename(folder)
            old.rmdir()
        raise
    sync_folder(folder.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
