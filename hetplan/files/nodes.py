"""Text of a YAML or JSON file to plain data in which every value knows its line.

YAML is read event by event into this tree, so nothing in a file can create objects, run code or
overflow the stack. Scalars follow the YAML 1.2 core schema: `no` is a word, `010` is ten, dates
are text. Tags, merge keys and several documents are refused. Aliases are allowed until what they
stand for grows beyond `MAX_ALIASED` values: a few lines of nested aliases can stand for billions.
What is written out may have `MAX_NODES` values, because each of them costs its writer bytes.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import yaml

from hetplan.errors import Fault, InputError

MAX_DEPTH = 64  # the deepest file form has 6 levels, the deepest value (a search result) 14
MAX_NODES = 1_000_000  # a cluster of 100,000 named nodes has 100,000; 0.4 GB of memory
MAX_ALIASED = 100_000  # a cluster of 1,000 islands that share links by aliases has about 10,000

Path: TypeAlias = tuple[str | int, ...]
"""Keys and list positions from the root to a value."""


@dataclass(slots=True)
class Node:
    """One value of a file: a scalar, a mapping (`items`) or a list (`entries`)."""

    line: int
    scalar: object = None
    items: dict[str, tuple[int, Node]] | None = None
    """Per key: the key's own line and its value."""
    entries: list[Node] | None = None
    size: int = 1
    """Nodes below and including this one, aliases expanded."""
    repeats: list[tuple[int, str]] | None = None
    """(line, key) of keys that occur again in this mapping; None where none does."""

    def add_repeat(self, line: int, key: str) -> None:
        """Note a key that occurs again."""
        self.repeats = self.repeats or []
        self.repeats.append((line, key))


def plain(node: Node) -> object:
    """The value as dicts, lists and scalars."""
    if node.items is not None:
        return {key: plain(value) for key, (_, value) in node.items.items()}
    if node.entries is not None:
        return [plain(entry) for entry in node.entries]
    return node.scalar


def line_of(node: Node, path: Path) -> int:
    """Line of the value at this path, or of the deepest part of the path that exists."""
    line = node.line
    for step in path:
        if node.items is not None and step in node.items:
            line, node = node.items[str(step)]
        elif node.entries is not None and isinstance(step, int) and step < len(node.entries):
            node = node.entries[step]
            line = node.line
        else:
            break
    return line


def repeated_keys(node: Node, path: Path = ()) -> Iterator[tuple[int, Path, int]]:
    """(line of the second, path of the key, line of the first) for every key that occurs twice."""
    if node.items is not None:
        for line, key in node.repeats or ():
            yield line, (*path, key), node.items[key][0]
        for key, (_, value) in node.items.items():
            yield from repeated_keys(value, (*path, key))
    for position, entry in enumerate(node.entries or ()):
        yield from repeated_keys(entry, (*path, position))


def read_yaml(file: str, text: str) -> Node:
    """The tree of a YAML text; an InputError with the line where it is not acceptable YAML."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C parser where PyYAML has it
    try:
        return _YamlBuilder(file).build(yaml.parse(text, Loader=loader))
    except yaml.MarkedYAMLError as error:
        problem = " ".join(part for part in (error.context, error.problem) if part)
        hint = "; indent with spaces, not tabs" if "'\\t'" in problem or "a tab" in problem else ""
        mark = error.problem_mark
        if mark is None:
            mark = error.context_mark
        line = 0 if mark is None else mark.line + 1
        raise InputError(
            Fault(file=file, line=line, message=f"not YAML: {problem}{hint}")
        ) from error
    except yaml.reader.ReaderError as error:
        position = error.position if isinstance(error.position, int) else 0
        line = text.count("\n", 0, position) + 1
        message = "not YAML: a character that may not stand in a text file; remove it"
        raise InputError(Fault(file=file, line=line, message=message)) from error
    except yaml.YAMLError as error:
        raise InputError(Fault(file=file, message=f"not YAML: {error}")) from error


_INTEGER = re.compile(r"[-+]?[0-9]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", re.ASCII)
_WORDS: dict[str, object] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


def _resolve(text: str) -> object:
    """Value of an unquoted YAML 1.2 scalar; numbers that are out of range stay text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        # Python refuses longer ones by default, and no count of anything has 300 digits.
        return int(text) if len(text) <= 300 else text
    if _FLOAT.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


class _YamlBuilder:
    """Builds the tree from parser events with a stack of its own."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.anchors: dict[str, Node] = {}
        self.open: list[tuple[Node, str | None, list[Node]]] = []
        self.written = 0
        self.aliased = 0
        self.root: Node | None = None

    def build(self, events: Iterator[yaml.Event]) -> Node:
        documents = 0
        for event in events:
            line = 0 if event.start_mark is None else event.start_mark.line + 1
            if isinstance(event, yaml.ScalarEvent):  # first: nine of ten events
                self.node(event, line)
            elif isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self.fault(line, "a second document (---); one file holds one document")
            elif isinstance(event, yaml.AliasEvent):
                if event.anchor not in self.anchors:
                    raise self.fault(line, f"alias *{event.anchor} has no finished anchor above it")
                node = self.anchors[event.anchor]
                self.aliased += node.size
                if self.aliased > MAX_ALIASED:
                    raise self.fault(
                        line,
                        f"by aliases the file stands for more than {MAX_ALIASED} values; split it",
                    )
                self.add(node, line)
            elif isinstance(event, yaml.NodeEvent):
                self.node(event, line)
            elif isinstance(event, yaml.CollectionEndEvent):
                self.close()
        if self.root is None:
            raise InputError(Fault(file=self.file, message="the file is empty"))
        return self.root

    def node(self, event: yaml.NodeEvent, line: int) -> None:
        self.written += 1
        if self.written > MAX_NODES:
            raise self.fault(line, f"the file holds more than {MAX_NODES} values; split it")
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise self.fault(line, f"tag {tag!r}; tags are not accepted, write the plain value")
        if isinstance(event, yaml.ScalarEvent):
            # implicit[0]: the scalar was written without quotes, so its text decides its type.
            is_text = not event.implicit[0] or self.expects_key()
            node = Node(line=line, scalar=event.value if is_text else _resolve(event.value))
            if event.anchor:
                self.anchors[event.anchor] = node
            self.add(node, line)
            return
        if len(self.open) >= MAX_DEPTH:
            raise self.fault(line, f"nested more than {MAX_DEPTH} levels deep")
        if self.expects_key():
            raise self.fault(line, "a list or mapping as a key; a key is a word")
        node = Node(line=line)
        if isinstance(event, yaml.MappingStartEvent):
            node.items = {}
        else:
            node.entries = []
        self.open.append((node, event.anchor, []))

    def expects_key(self) -> bool:
        """Whether the next node is a key of the open mapping."""
        return bool(self.open) and self.open[-1][0].items is not None and not self.open[-1][2]

    def close(self) -> None:
        node, anchor, _ = self.open.pop()
        if anchor:
            self.anchors[anchor] = node
        self.add(node, node.line)

    def add(self, node: Node, line: int) -> None:
        """Put a finished node where it belongs: a key, a value, a list entry or the root."""
        if not self.open:
            self.root = node
            return
        parent, _, pending = self.open[-1]
        parent.size += node.size
        if parent.entries is not None:
            parent.entries.append(node)
        elif not pending:
            if not isinstance(node.scalar, str):
                raise self.fault(line, "a list, mapping or number as a key; a key is a word")
            if node.scalar == "<<":
                raise self.fault(line, "merge keys (<<) are not accepted; write the keys out")
            pending.append(Node(line=line, scalar=node.scalar))
        elif parent.items is not None:
            key = pending.pop()
            if str(key.scalar) in parent.items:
                parent.add_repeat(key.line, str(key.scalar))
            else:
                parent.items[str(key.scalar)] = (key.line, node)

    def fault(self, line: int, message: str) -> InputError:
        return InputError(Fault(file=self.file, line=line, message=message))


def read_json(file: str, text: str, repeatable: frozenset[Path] = frozenset()) -> object:
    """The data of a JSON text; an InputError where it is not acceptable JSON.

    A key may occur twice only where its path is `repeatable`; the last one counts.

    Lines are found only when a fault needs them (`json_nodes`), because files that hetplan wrote
    are large and rarely wrong.
    """

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(items)
        if len(result) < len(items):
            duplicates.append(True)
        return result

    def constant(name: str) -> object:
        raise InputError(Fault(file=file, message=f"{name} is not a number in JSON"))

    duplicates: list[bool] = []
    try:
        data: object = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise InputError(
            Fault(file=file, line=error.lineno, message=f"not JSON: {error.msg}")
        ) from error
    except RecursionError as error:
        message = f"nested more than {MAX_DEPTH} levels deep"
        raise InputError(Fault(file=file, message=message)) from error
    except ValueError as error:  # an integer with more digits than Python converts
        raise InputError(Fault(file=file, message=f"not JSON: {error}")) from error
    if _depth(data) > MAX_DEPTH:
        raise InputError(Fault(file=file, message=f"nested more than {MAX_DEPTH} levels deep"))
    if duplicates:
        tree = json_nodes(text)
        if any(path not in repeatable for _, path, _ in repeated_keys(tree)):
            raise duplicate_error(file, tree)
    return data


_MAX_DUPLICATES = 20  # a reader mends the first few and looks again


def duplicate_error(file: str, root: Node) -> InputError:
    """The error that names every key that occurs twice, the first twenty of them."""
    found = sorted(repeated_keys(root), key=lambda entry: entry[0])
    faults = [
        Fault(
            file=file,
            line=line,
            field=field_text(path),
            message=f"this key is already on line {first}; keep one of the two",
        )
        for line, path, first in found[:_MAX_DUPLICATES]
    ]
    if len(found) > _MAX_DUPLICATES:
        message = f"{len(found) - _MAX_DUPLICATES} more keys are repeated"
        faults.append(Fault(file=file, line=found[_MAX_DUPLICATES][0], message=message))
    return InputError(*faults)


def field_text(path: Path) -> str:
    """`regions[0].islands[1].device`; a key that is not a plain word is quoted."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            word = step if re.fullmatch(r"[\w.<>*/+-]{1,60}", step) else ascii(step[:60])
            text += f".{word}" if text else word
    return text


def _depth(data: object) -> int:
    depth, level = 0, [data]
    while level:
        depth += 1
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
    return depth


_SPACE = re.compile(r"[ \t\n\r]*")


def json_nodes(text: str) -> Node:
    """The tree, with lines, of a text that `read_json` has accepted."""
    breaks = [at for at, character in enumerate(text) if character == "\n"]
    decoder = json.JSONDecoder()

    def skip(at: int) -> int:
        found = _SPACE.match(text, at)
        return found.end() if found else at

    def value(at: int) -> tuple[Node, int]:
        node = Node(line=bisect_right(breaks, at - 1) + 1 if at else 1)
        if text[at] == "{":
            node.items = {}
            at = skip(at + 1)
            while text[at] != "}":
                line = bisect_right(breaks, at) + 1
                key, at = decoder.raw_decode(text, at)
                child, at = value(skip(skip(at) + 1))
                if key in node.items:
                    node.add_repeat(line, key)
                else:
                    node.items[key] = (line, child)
                at = skip(at)
                at = skip(at + 1) if text[at] == "," else at
            return node, at + 1
        if text[at] == "[":
            node.entries = []
            at = skip(at + 1)
            while text[at] != "]":
                child, at = value(at)
                node.entries.append(child)
                at = skip(at)
                at = skip(at + 1) if text[at] == "," else at
            return node, at + 1
        node.scalar, at = decoder.raw_decode(text, at)
        return node, at

    return value(skip(0))[0]
