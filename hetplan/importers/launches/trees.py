"""Keys of a YAML or TOML file as settings: dotted names, a value for each entry of a list."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator

from hetplan.files.nodes import Path
from hetplan.files.reading import Document
from hetplan.importers.launches.values import Setting
from hetplan.importers.lines import fault_at


def tree_settings(document: Document, prefix: str = "") -> tuple[Setting, ...]:
    """Every key of a document that holds no keys itself."""
    found: list[Setting] = []
    for path, value in _leaves(document.root, ()):
        name = ".".join([*([prefix] if prefix else []), *map(str, path)])
        line = document.line(path)
        found.append(Setting(name=name, values=values_of(value), file=document.file, line=line))
    return tuple(found)


def _leaves(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(each, (*path, key if isinstance(key, int) else str(key)))
    elif path:
        yield path, value


def values_of(value: object) -> tuple[str, ...]:
    """A list has a value for each entry; lists in it are JSON; true stands alone as a flag."""
    if value is True:
        return ("true",)
    if isinstance(value, list):
        return tuple(_text(each) for each in value)
    return (_text(value),)


def _text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | dict):
        return json.dumps(value, default=str, separators=(",", ":"))
    return str(value)


def toml_settings(file: str, text: str) -> tuple[Setting, ...]:
    """Every key of a TOML text; an InputError where it is none."""
    try:
        root = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # of numbers with too many digits, plain ones
        # The message ends with the place: (at line 3, column 5).
        place = str(error).rpartition("at line ")[2].partition(",")[0]
        line = int(place) if place.isdecimal() and len(place) < 9 else 0
        raise fault_at(file, line, f"is not TOML: {str(error)[:200]}") from error
    lines = _toml_lines(text)
    found: list[Setting] = []
    for path, value in _leaves(root, ()):
        found.append(
            Setting(
                name=".".join(map(str, path)),
                values=values_of(value),
                file=file,
                line=lines.get(".".join(map(str, path)), 0),
            )
        )
    return tuple(found)


def _toml_lines(text: str) -> dict[str, int]:
    """Line of each dotted name, the first that begins with it; tomllib keeps no lines."""
    found: dict[str, int] = {}
    current = ""
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if stripped.startswith("["):
            current = stripped.strip("[] ").replace('"', "").partition("#")[0].strip("[] ")
        elif "=" in stripped:
            begin = stripped.partition("=")[0].strip().strip('"')
            found.setdefault(f"{current}.{begin}".lstrip("."), number)
    return found
