"""The lines of a log as its processes wrote them.

Logs are read once, line by line: a log of a gigabyte takes no more memory than its longest line,
and lines longer than `MAX_LINE_LENGTH` are cut there. gzip is read as it is. torchrun writes
`[rank0]:` or `[default0]:` before a line, srun `0: `, several of them one behind the other, colours
are ANSI escape sequences, a progress bar leaves carriage returns, and a job that is killed leaves
half a line.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from hetplan.errors import Fault, InputError

MAX_LINE_LENGTH = 1 << 16
"""Bytes of a line that are looked at; a metrics line has a few hundred."""

_GZIP = b"\x1f\x8b"  # RFC 1952, section 2.3.1
_WIDE = (b"\xff\xfe", b"\xfe\xff")  # byte order marks of UTF-16; UTF-32's begins alike
_PACKED = (
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bzip2"),
    (b"PK\x03\x04", "zip"),
)
_MAX_RANKS = 4  # before one line: of srun, mpirun and torchrun inside of each other, and to spare
_ANSI = re.compile(r"\x1b\[[0-9;?]{0,20}[ -/]?[@-~]")
_RANK = re.compile(
    r"\s{0,8}(?:"
    r"\[(?:rank|default|[a-z_]{0,20})[ _-]?(\d{1,7})\]:?[ \t]?"  # torchrun
    r"|(\d{1,7}):[ \t]"  # srun --label
    r"|\[\d{1,7},(\d{1,7})\]<std\w{1,6}>:?[ \t]?"  # Open MPI --tag-output
    r"|\[(\d{1,7})\][ \t]"  # MPICH -prepend-rank
    r")",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line as its process wrote it."""

    number: int
    """From 1."""
    text: str
    rank: str
    """What the launcher says of who wrote it; empty where it says nothing."""
    cut: bool = False
    """Whether its end is missing: the job was killed, or still runs."""


def log_lines(path: Path, words: tuple[bytes, ...]) -> Iterator[LogLine]:
    """The lines that hold one of these words, in order; InputError for what is no text."""
    number = 0
    # One pattern for all words is three times as fast as looking for each of 20.
    wanted = re.compile(b"|".join(map(re.escape, words)))
    with ExitStack() as stack:
        stream = _opened(path, stack)
        whole = True
        try:
            while raw := stream.readline(MAX_LINE_LENGTH):
                number += whole
                # What follows the first part of a very long line is no line of its own.
                if whole and wanted.search(raw):
                    yield _cleaned(number, raw)
                whole = raw.endswith(b"\n")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            if number == 0:
                message = f"is no gzip file, or a broken one: {error}; unpack it"
                raise InputError(Fault(file=str(path), message=message)) from error
            # A log that is still being packed, or was cut: what could be read counts.


def _opened(path: Path, stack: ExitStack) -> IO[bytes]:
    """The file's bytes, unpacked; an InputError where it is missing, empty or no text."""
    file = str(path)
    try:
        if path.is_dir():
            raise InputError(Fault(file=file, message="is a folder; name the log files in it"))
        if path.exists() and not path.is_file():
            raise InputError(Fault(file=file, message="is not a regular file; name a file"))
        plain = stack.enter_context(path.open("rb"))
        head = plain.read(MAX_LINE_LENGTH)
        plain.seek(0)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(Fault(file=file, message=f"cannot be read: {reason}")) from error
    if head.startswith(_GZIP):
        packed = gzip.GzipFile(fileobj=plain)
        stack.enter_context(packed)
        return cast("IO[bytes]", packed)
    packed_by = next((name for magic, name in _PACKED if head.startswith(magic)), None)
    if packed_by is not None:
        message = f"is packed by {packed_by}; unpack it (gzip is read as it is)"
        raise InputError(Fault(file=file, message=message))
    if head.startswith(_WIDE) or _looks_wide(head):
        message = "is UTF-16 (a PowerShell redirection writes that); save it as UTF-8 text"
        raise InputError(Fault(file=file, message=message))
    if not head.strip():
        raise InputError(Fault(file=file, message="the file is empty"))
    return plain


def _looks_wide(head: bytes) -> bool:
    """Whether every other byte is zero, as in ASCII text in UTF-16 without a mark.

    Letters beyond ASCII leave fewer of them; a fifth of all bytes is more than any text has. Zeros
    side by side are no letters: a log that was truncated while it was written begins with them.
    """
    few, many = sorted((head[0::2].count(0), head[1::2].count(0)))
    return len(head) >= 8 and many > len(head) / 5 and few < many / 2


def _cleaned(number: int, raw: bytes) -> LogLine:
    text = raw.decode("utf-8", errors="replace").lstrip("\ufeff").rstrip("\r\n")
    # A progress bar writes over itself: what was written last stands at the end.
    text = _ANSI.sub("", text.rpartition("\r")[2])
    ranks: list[str] = []
    while (found := _RANK.match(text)) is not None and len(ranks) < _MAX_RANKS:
        ranks.append(next(group for group in found.groups() if group is not None))
        text = text[found.end() :]
    cut = not raw.endswith(b"\n")
    return LogLine(number=number, text=text, rank="/".join(ranks), cut=cut)
