"""From a frozen value to its canonical JSON text, which `decode` reads back to an equal value.

Canonical: keys sorted, two spaces, floats by repr (which is exact), a `schema` key, a newline at
the end. Equal values give equal bytes.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

UNWRITTEN = {"written": False}
"""Metadata of a dataclass's field that is in no file."""


def encode(value: object, *, schema: str) -> str:
    """The JSON text of a frozen dataclass; ValueError or TypeError for what JSON cannot hold."""
    data = to_plain(value)
    if not isinstance(data, dict):
        raise TypeError(f"encode takes a dataclass, not {type(value).__name__}")
    if data.setdefault("schema", schema) != schema:
        raise ValueError(f"the value says schema {data['schema']!r}, the caller {schema!r}")
    return canonical(data)


def canonical(data: dict[str, object]) -> str:
    """The text of plain data; ValueError for what JSON cannot hold."""
    return json.dumps(data, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def laid_out(value: Any, margin: str = "") -> str:
    """JSON with sorted keys, in which what fits on a line of 100 columns is on one."""
    line = json.dumps(value, sort_keys=True, ensure_ascii=False)
    if not value or not isinstance(value, dict | list) or len(margin) + len(line) <= 100:
        return line
    inner = f"{margin}  "
    if isinstance(value, dict):
        rows = [
            f"{inner}{json.dumps(key)}: {laid_out(part, inner)}"
            for key, part in sorted(value.items())
        ]
        return "{\n" + ",\n".join(rows) + f"\n{margin}}}"
    return "[\n" + ",\n".join(inner + laid_out(each, inner) for each in value) + f"\n{margin}]"


def to_plain(value: object) -> object:
    """Dataclasses as dicts, tuples as lists, enumeration members as their values."""
    return _plain(value, type(value))


@lru_cache(maxsize=256)
def hints_of(type_: type[Any]) -> dict[str, Any]:
    """Types of a dataclass's fields that files have."""
    kept = {each.name for each in fields(type_) if each.metadata.get("written", True)}
    return {name: hint for name, hint in get_type_hints(type_).items() if name in kept}


def _plain(value: object, hint: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        hints = hints_of(type(value))
        return {
            field.name: _plain(getattr(value, field.name), hints[field.name])
            for field in fields(value)
            if field.name in hints
        }
    if get_origin(hint) in (Union, UnionType):
        real = [part for part in get_args(hint) if part is not NoneType]
        return _plain(value, real[0] if len(real) == 1 else type(value))
    if isinstance(value, tuple | list):
        parts = get_args(hint)
        each = not parts or Ellipsis in parts or isinstance(value, list)
        inner = parts[0] if parts else None
        return [
            _plain(entry, inner if each else parts[position])
            for position, entry in enumerate(value)
        ]
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | bool | float):
        return value
    if isinstance(value, int):
        # A float field that happens to hold an int must give the same bytes as its float.
        return float(value) if hint is float else value
    raise TypeError(
        f"a {type(value).__name__} cannot be written as JSON; use tuples and dataclasses"
    )
