"""Texts of a drafted file: scalars and comments of YAML, and entries for names of hosts."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from hetplan.errors import printable

_WIDTH = 98
# Words that YAML reads as something else than text; numbers are no plain word here.
_NOT_PLAIN = re.compile(r"(?:null|true|false|yes|no|on|off|y|n|nan|inf)", re.IGNORECASE)
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9._-]*", re.ASCII)
_NUMBERED = re.compile(r"(.*?)(\d{1,9})([^\d]*)", re.ASCII | re.DOTALL)
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_MAX_ENTRY = 180  # a cluster file takes entries of up to 200 characters


def scalar(text: str) -> str:
    """The text as a YAML scalar that is read back as this text."""
    if _PLAIN.fullmatch(text) and not _NOT_PLAIN.fullmatch(text):
        return text
    escaped = "".join(
        each if each.isascii() and each.isprintable() and each not in '"\\' else _escape(each)
        for each in text
    )
    return f'"{escaped}"'


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def comment(text: str, indent: int) -> list[str]:
    """Comment lines of this text; characters that do not print are shown by their codes."""
    plain = printable(text)
    margin = " " * indent + "# "
    return textwrap.wrap(
        plain, _WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
    )


def listable(name: str) -> bool:
    """Whether a cluster file can name a node so (an IPv6 address it cannot)."""
    return len(name) <= _MAX_ENTRY and _WORD.fullmatch(name) is not None


def host_ranges(names: Sequence[str]) -> tuple[str, ...]:
    """Entries that stand for exactly these names in this order; every name is `listable`."""
    # Per entry: what stands before and after the number, the first number's digits, the last.
    runs: list[tuple[str, str, str, int]] = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        before, digits, after = match.groups() if match else (name, "", "")
        if runs and digits and runs[-1][:2] == (before, after):
            *_, first, last = runs[-1]
            if digits == f"{last + 1:0{len(first)}d}":
                runs[-1] = (before, after, first, last + 1)
                continue
        runs.append((before, after, digits, int(digits or 0)))
    return tuple(
        f"{before}{first}{after}"
        if not first or int(first) == last
        else f"{before}[{first}-{last:0{len(first)}d}]{after}"
        for before, after, first, last in runs
    )
