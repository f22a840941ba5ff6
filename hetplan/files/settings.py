"""Values given on the command line over those of a file: `--set pin.tp=8`, `--gap 0.02`.

A setting is laid over the document before it is checked, so the same reader finds the same faults;
they name the option instead of a line. What a program gives in the place of a file
(`hetplan.make_job(sequence_length=4096)`) is a document too, and its faults name the argument.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from hetplan.errors import Fault, InputError
from hetplan.files import nodes
from hetplan.files.nodes import field_text
from hetplan.files.reading import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value over a file's."""

    option: str
    """As the user wrote it, as in `--set pin.tp` or `--gap`; faults begin with it."""
    path: nodes.Path
    """Where the value goes in the file."""
    value: object
    """Plain data, as a YAML file would have it."""


def parse_setting(text: str) -> Setting:
    """`KEY=VALUE`: dots lead into a mapping, the value is YAML, as in `forbid.islands=[a, b]`."""
    key, mark, value = text.partition("=")
    path = tuple(key.strip().split("."))
    if not mark or not all(path):
        raise InputError(f"--set {text!a}: write KEY=VALUE, as in pin.tp=8")
    option = f"--set {key.strip()}"
    plain = nodes.plain(nodes.read_yaml(option, value)) if value.strip() else None
    return Setting(option=option, path=path, value=plain)


@dataclass(frozen=True, kw_only=True)
class DocumentWithSettings(Document):
    """A document under settings."""

    settings: tuple[Setting, ...] = field(default=())

    def fault(self, path: nodes.Path, message: str) -> Fault:
        """A fault of the setting that gave this value, or of the file."""
        for setting in reversed(self.settings):
            depth = len(setting.path)
            if path[:depth] == setting.path:
                below = f".{field_text(path[depth:])}" if path[depth:] else ""
                return Fault(field=f"{setting.option}{below}", message=message)
            if path and path == setting.path[: len(path)] and self._is_new(path):
                return Fault(field=setting.option, message=message)
        return Document.fault(self, path, message)

    def _is_new(self, path: nodes.Path) -> bool:
        """Whether the file itself has nothing there."""
        items = self.node.items
        return items is not None and path[0] not in items


def with_settings(document: Document, settings: Sequence[Setting]) -> Document:
    """The document with these values; of two for one place the last one counts."""
    if not settings or not isinstance(document.root, dict):
        return document
    root = deepcopy(document.root)
    for setting in settings:
        target = root
        for step in setting.path[:-1]:
            if not isinstance(target.get(step), dict):
                target[step] = {}
            target = target[step]
        target[setting.path[-1]] = setting.value
    known = {each.name: getattr(document, each.name) for each in fields(document)}
    return DocumentWithSettings(**(known | {"root": root, "settings": tuple(settings)}))


@dataclass(frozen=True, kw_only=True)
class Keywords(Document):
    """Arguments of a function in the place of a file."""

    def fault(self, path: nodes.Path, message: str) -> Fault:
        """A fault of the argument."""
        return Fault(field=field_text(path), message=message)


def given_path(given: object, argument: str, other: str = "") -> Path:
    """The path in an argument of a function; `other` is what else it takes, in words."""
    if isinstance(given, str | PathLike):
        return Path(given)
    message = f"found a value of {type(given).__name__}; give a file's path{other}"
    raise InputError(Fault(field=argument, message=message))


def keywords(values: Mapping[str, object], schema: str) -> Keywords:
    """The arguments as the document of a file of this schema; those that are None are left out.

    An InputError for what a file cannot hold.
    """
    root = {"schema": schema, **_plain(values, ())}
    return Keywords(file="", text=json.dumps(root), root=root, sha256="")


def _plain(value: Any, path: nodes.Path) -> Any:
    """As a YAML file would have it: dicts, lists and scalars; of numpy and pandas too."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Mapping):
        items = ((str(key), item) for key, item in value.items() if item is not None)
        return {key: _plain(item, (*path, key)) for key, item in items}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple | set | frozenset | range):
        ordered = sorted(value) if isinstance(value, set | frozenset) else value
        return [_plain(item, (*path, at)) for at, item in enumerate(ordered)]
    if isinstance(value, PathLike):
        return fspath(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    message = f"found a value of {type(value).__name__}; give a number, a text, a list or a dict"
    raise InputError(Fault(field=field_text(path), message=message))
