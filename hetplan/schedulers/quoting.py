"""How does a text become a word of a script, a name of a file, or a line of YAML, and nothing else?

Names come from files that other people wrote: a host name may hold `$(...)`, a path a space. Every
text that reaches a script goes through `word` or `folder_word`, every YAML file through
`yaml_text`. Names of hosts and settings of launch domains have been checked before
(`hetplan.cluster.launch_domains`): these functions are the second lock.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from hetplan.errors import InputError
from hetplan.units import number_runs

FOLDER = "{folder}"
"""In the texts of a launch: the emitted folder's place on the host."""
FOLDER_VARIABLE = "folder"
"""Shell variable of the scripts that holds it."""

_NOT_OF_A_FILE_NAME = re.compile(r"[^A-Za-z0-9._-]+", re.ASCII)
# What other readers than PyYAML take for numbers or truths: YAML 1.2's floats without a dot, and
# the one-letter words of YAML 1.1.
_ELSEWHERE_NO_TEXT = re.compile(r"[-+]?(?:[0-9][0-9_.]*(?:[eE][-+]?[0-9]+)?|0o[0-7]+)|[yYnN]")


def word(text: str) -> str:
    """The text as one word of a POSIX shell; an InputError where it holds control characters."""
    check_printable(text)
    return _quoted(text)


def folder_word(text: str) -> str:
    """The same, with `{folder}` as the value of the shell variable `folder`."""
    check_printable(text)
    parts = (_quoted(part) if part else "" for part in text.split(FOLDER))
    return f'"${FOLDER_VARIABLE}"'.join(parts) or "''"


def words(texts: Iterable[str]) -> str:
    """Several words, `{folder}` replaced, a space between them."""
    return " ".join(folder_word(text) for text in texts)


def comment(text: str) -> str:
    """The text for a comment of a script: without control characters, which could end its line."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _quoted(text: str) -> str:
    """As shlex.quote, and in quotes what a reader of scripts could take for something else."""
    if "," in text or text.startswith("="):
        return "'" + text.replace("'", "'\"'\"'") + "'"
    return shlex.quote(text)


def check_printable(text: str) -> None:
    """An InputError where the text holds control characters, or bytes that are no UTF-8."""
    # Python reads such bytes of a command line as surrogates.
    if any(ord(each) < 32 or ord(each) == 127 or "\ud800" <= each <= "\udfff" for each in text):
        raise InputError(
            f"{text[:60]!a} holds a control character, such as a line break, or a byte that is no "
            "UTF-8, which no script can carry safely: remove it"
        )


def file_name(text: str) -> str:
    """A name for a file, made of the text: letters, digits and `._-`, never hidden or a path."""
    found = _NOT_OF_A_FILE_NAME.sub("-", text).strip("-.")
    return found[:100] or "unnamed"


_LAST_NUMBER = re.compile(r"(.*?)(\d{1,9})", re.ASCII)
"""Of a name that ends with a number; others are listed whole."""


def hostlist(names: Sequence[str]) -> str:
    """Names as Slurm writes many: `node[001-003,007],other`, in their order of appearance."""
    groups: dict[tuple[str, int], list[int]] = {}
    for name in names:
        found = _LAST_NUMBER.fullmatch(name)
        if found is None:
            groups[(name, 0)] = []
        else:
            before, digits = found.groups()
            groups.setdefault((before, len(digits)), []).append(int(digits))
    return ",".join(_host_runs(*group, numbers) for group, numbers in groups.items())


def _host_runs(before: str, width: int, numbers: list[int]) -> str:
    if not numbers:
        return before
    runs = number_runs(sorted(numbers), ",", width)
    return f"{before}{runs}" if len(numbers) == 1 else f"{before}[{runs}]"


class _Dumper(yaml.SafeDumper):
    """Indented lists, no anchors, and texts quoted that other readers take for numbers."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        # A list stands below its key's column, as people write it.
        super().increase_indent(flow, False)


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    if not all(each.isprintable() or each == "\n" for each in text):
        style: str | None = '"'  # PyYAML folds some line breaks of Unicode in other styles
    elif _ELSEWHERE_NO_TEXT.fullmatch(text):
        style = "'"
    else:
        style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text_node)


def yaml_text(*documents: object) -> str:
    """Documents of plain values as one YAML text, keys in their order."""
    return yaml.dump_all(
        documents,
        Dumper=_Dumper,
        default_flow_style=False,
        sort_keys=False,
        allow_unicode=True,
        width=10_000,
        explicit_start=len(documents) > 1,
    )
