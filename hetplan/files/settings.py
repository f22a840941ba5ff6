"""Values given on the command line over those of a file: `--set pin.tp=8`, `--gap 0.02`.

A setting is laid over the document before it is checked, so the same reader finds the same faults;
they name the option instead of a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields

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
