"""Writes the reference pages of docs: commands, library and file forms.

`make docs` calls it. The pages follow from the commands, the docstrings and the JSON Schemas; a
test fails where a page differs.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, get_overloads

import hetplan
from hetplan.cli.main import ENTRIES, load_command
from hetplan.job.schemas import input_schemas

DOCS = Path(__file__).resolve().parents[2] / "docs"
REFRESH = "run `make docs`"


def first_sentence(text: str) -> str:
    """The text up to the end of its first sentence, in one line."""
    line = " ".join(text.split())
    return re.split(r"(?<=[a-z0-9)`'%}\]])[.;] (?=[A-Za-z0-9`'\[])", line)[0].rstrip(".:;")


# Commands

Option = tuple[str, str]
"""How it is written, and its text."""


def commands() -> Iterator[tuple[str, Any]]:
    """(name, command) of every command and sub-command."""
    for entry in ENTRIES:
        command = load_command(entry.name)
        if hasattr(command, "commands"):
            for name, part in command.commands.items():
                yield f"{entry.name} {name}", part
        else:
            yield entry.name, command


def options(command: Any) -> Iterator[Option]:
    """The arguments and options of a command, those too that its help leaves to a page."""
    context = command.context_class(command)
    for param in command.params:
        if "--help" in param.opts:
            continue
        shown = copy.copy(param)
        shown.hidden = False
        written, text = shown.get_help_record(context)
        sentence, _, notes = f" {text}".partition(" [")
        default = re.search(r"default: ([^;\]]+)", notes)
        needed = "**" if "required" in notes else ""
        yield (
            f"{needed}{re.sub(r' <[^>]*>$', '', written)}",
            (first_sentence(sentence) + (f" (default {default[1]})" if default else "")).strip(),
        )


def shared(known: Sequence[Sequence[Option]]) -> dict[str, Option]:
    """Options that several of these commands have, by name: as most of them explain it."""
    uses = Counter(option for found in known for option in found)
    several: dict[str, Option] = {}
    for option, times in uses.most_common():
        if times > 1:
            several.setdefault(option_name(option), option)
    return dict(sorted(several.items()))


def option_name(option: Option) -> str:
    return option[0].removeprefix("**").split()[0].rstrip(",")


def commands_page() -> str:
    """docs/commands.md."""
    groups: dict[str, dict[str, list[Option]]] = {}
    texts = {name: command.help or "" for name, command in commands()}
    for name, command in commands():
        groups.setdefault(name.split()[0], {})[name] = [*options(command)]
    # What commands of several groups share is explained once for all.
    everywhere = shared([[*dict.fromkeys(chain(*group.values()))] for group in groups.values()])
    lines = [
        "# Commands and their options",
        "",
        "`make docs` writes this page from the commands. `hetplan COMMAND --help` says more, and",
        "which options of several commands it takes. **Bold** options are required.",
        "",
        "## Options of several commands",
        "",
        *(_item(*option) for option in everywhere.values()),
    ]
    for group, known in groups.items():
        common = {*shared([*known.values()]).values()} - {*everywhere.values()}
        lines += ["", f"## {group}", ""] if len(known) > 1 else []
        lines += [_item(*option) for option in sorted(common)]
        for name, found in known.items():
            lines += ["", f"##{'#' * (len(known) > 1)} {name}", ""]
            own = [each for each in found if each not in common | {*everywhere.values()}]
            lines += [first_sentence(texts[name]) + "."]
            lines += ["", *(_item(*option) for option in own)] if own else []
    return _page(lines)


# Library


def api_page() -> str:
    """docs/api.md."""
    lines = [
        "# The library",
        "",
        "`make docs` writes this page; `help(hetplan.plan)` says units, shapes and errors.",
        "",
        "## Functions",
        "",
    ]
    names = sorted(set(hetplan.__all__) - {"__version__"})
    public = {name: getattr(hetplan, name) for name in names}
    kinds = [name for name in names if isinstance(public[name], type)]
    lines += [_api_item(name, public[name]) for name in names if name not in kinds]
    for title, members in (
        ("Result", vars(hetplan.Result)),
        ("Cluster", vars(hetplan.Cluster)),
    ):
        lines += ["", f"## {title}", "", f"{first_sentence(_doc(public[title]))}.", ""]
        shown = {name: each for name, each in members.items() if name[0] != "_" and name != "of"}
        lines += [_api_item(name, each) for name, each in sorted(shown.items())]
    others = [f"`{name}`" for name in kinds if name not in ("Result", "Cluster")]
    return _page([*lines, "", f"Also: {', '.join(others)}."])


def _api_item(name: str, value: Any) -> str:
    """A function with its arguments, or a property, in a sentence."""
    if isinstance(value, property):
        return _item(name, first_sentence(_doc(value)))
    function = getattr(value, "__func__", value)
    overloads = get_overloads(function)
    written = ", ".join(_arguments(overloads[-1] if overloads else function))
    return _item(f"{name}({written})", first_sentence(_doc(value)))


def _arguments(function: Any) -> Iterator[str]:
    """As they are written in a call: defaults, no types."""
    keyword = False
    for each in inspect.signature(function).parameters.values():
        if each.name in ("self", "cls"):
            continue
        if each.kind is each.KEYWORD_ONLY and not keyword:
            keyword = True
            yield "*"
        keyword = keyword or each.kind is each.VAR_POSITIONAL
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        default = "" if each.default is each.empty else f"={each.default!r}"
        yield f"{stars}{each.name}{default}"


def _doc(value: Any) -> str:
    return inspect.getdoc(value) or ""


# Input files

FORMS = {
    "model": "Model file",
    "job": "Job file",
    "devices": "Device kinds",
    "cluster": "Cluster file",
    "sweep": "Sweep file",
}


def forms_page() -> str:
    """docs/file-forms.md."""
    schemas = {name.partition(".")[0]: json.loads(text) for name, text in input_schemas()}
    lines = [
        "# Keys of the input files",
        "",
        "`make docs` writes this page from the forms that read the files. **Bold** keys are",
        "required, an example stands for a quantity with its unit, `=` precedes a default. Older",
        "numbers of `schema` are read too. [Inputs](inputs.md) explains the files; the examples",
        "there and the schemas say more of each key.",
    ]
    reader = _FormWriter()
    for name, title in FORMS.items():
        newest = schemas[name]["properties"]["schema"]["enum"][-1]
        lines += ["", f"## {title}", "", f"- **`schema`**: {newest}"]
        lines += reader.lines_of(schemas[name], schemas[name], name)
    return _page(lines)


class _FormWriter:
    """Writes every form once, and every key once of those that forms of a file share."""

    def __init__(self) -> None:
        self.written: dict[str, str] = {}
        """Heading of a form, by its title."""
        self.keys: dict[str, str] = {}
        """Heading under which a key with this text is explained."""
        self.own: dict[str, list[str]] = {}
        """The keys that are explained under a heading."""

    def lines_of(self, form: dict[str, Any], schema: dict[str, Any], place: str) -> list[str]:
        """The keys of a form, then those of the forms inside it."""
        lines: list[str] = []
        inside: list[tuple[str, dict[str, Any]]] = []
        again: dict[str, list[str]] = {}
        for key, about in form["properties"].items():
            if key == "schema":
                continue
            kind, part = _kind(about, schema)
            if part is not None and part["title"] not in self.written:
                self.written[part["title"]] = f"{place}.{key}"
                inside.append((f"{place}.{key}", part))
            if part is not None and self.written[part["title"]] != f"{place}.{key}":
                kind += f" of `{self.written[part['title']]}`"
            text = first_sentence(about.get("description", ""))
            first = self.keys.setdefault(f"{key}: {text}", place)
            if first != place:
                again.setdefault(first, []).append(f"`{key}`")
                continue
            default = about.get("default")
            if isinstance(default, bool | int | float | str):
                kind += f"={json.dumps(default)}"
            mark = "**" if key in form.get("required", []) else ""
            lines.append(f"- {mark}`{key}`{mark} ({kind}){': ' if text else ''}{text}")
            self.own.setdefault(place, []).append(f"`{key}`")
        lines += [f"- {self._again(where, keys)}" for where, keys in again.items()]
        for heading, part in inside:
            lines += ["", f"### `{heading}`", "", *self.lines_of(part, schema, heading)]
        return lines

    def _again(self, where: str, keys: list[str]) -> str:
        """Keys that are explained there: those that it has besides are fewer to read, or these."""
        others = [key for key in self.own[where] if key not in keys]
        if len(others) >= len(keys):
            return f"as in `{where}`: {', '.join(keys)}"
        return f"as in `{where}`{', but not ' * bool(others)}{', '.join(others)}"


def _kind(about: dict[str, Any], schema: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """What a value of the schema is called, and the form inside it."""
    for way in about.get("anyOf", []):
        if way.get("type") != "null":
            return _kind(way, schema)
    if "$ref" in about:
        part = schema["$defs"][about["$ref"].rpartition("/")[2]]
        return ("keys", part) if "properties" in part else _kind(part, schema)
    if about.get("type") == "array":
        kind, part = _kind(about.get("items", {}), schema)
        return f"list[{kind}]", part
    if "enum" in about:
        return "|".join(about["enum"]), None
    if "examples" in about:
        return f"`{about['examples'][0]}`", None
    names = {"integer": "int", "number": "float", "boolean": "bool", "object": "map"}
    return names.get(about.get("type", ""), "text"), None


def _item(name: str, text: str) -> str:
    bold = "**" if name.startswith("**") else ""
    written = f"- {bold}`{name.removeprefix('**')}`{bold}"
    return f"{written}: {text}" if text else written


def _page(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


PAGES = {"api.md": api_page, "commands.md": commands_page, "file-forms.md": forms_page}

if __name__ == "__main__":
    for name, text in PAGES.items():
        (DOCS / name).write_text(text(), encoding="utf-8")
