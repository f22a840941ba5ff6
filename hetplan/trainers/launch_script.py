"""The commands of a simple bash script, its variables filled in. Nothing is run.

Followed are assignments, arrays, `$NAME`, `${NAME}`, `${NAME:-default}`, whole-number arithmetic,
quotes and continued lines. Conditions, loops, functions and command substitutions are not: what
they set counts as unknown, and a trainer that is started inside one is refused with its line.
tree-sitter-bash parses; its node names are used below.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from hetplan.importers.lines import fault_at, shown

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

_BLOCKS = {
    "if_statement": "an if statement",
    "case_statement": "a case statement",
    "for_statement": "a for loop",
    "c_style_for_statement": "a for loop",
    "while_statement": "a while loop",
    "function_definition": "a function",
    "command_substitution": "a command substitution",
    "conditional command": "a command behind a test",
}
"""What is not followed, in words."""
_SEQUENCES = ("program", "compound_statement", "subshell", "pipeline", "variable_assignments")
_DEFAULTS = (":-", "-", ":=", "=")
_REQUIRED = (":?", "?", None)
_UNKNOWN = re.compile("\x00([^\x01]*)\x01")
"""A value that only the host knows, inside a text: its variable between two marks."""
_MAX_LENGTH = 1_000_000
"""Characters of a value, and words of a command: a script that doubles a variable ends here."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command."""

    text: str
    """Unknown variables stand in it as `$NAME`."""
    line: int
    unknown: tuple[str, ...] = ()
    """Variables in it whose value only the host knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of a script."""

    words: tuple[Word, ...]
    exports: tuple[tuple[str, Word], ...]
    """(name, value) of the variables that it gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of the script that is not followed."""

    kind: str
    """In words, as `an if statement`."""
    first_line: int
    last_line: int
    flags: tuple[str, ...]
    """Flags that it names, without dashes."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A text with marks for unknown values, and the line where it begins."""

    text: str
    line: int


@dataclass(slots=True, kw_only=True)
class Script:
    """A script as far as it was read."""

    file: str
    source: bytes
    given: frozenset[str]
    """Variables whose values the user gave; the script's own assignments do not count."""
    variables: dict[str, tuple[_Piece, ...]] = field(default_factory=dict)
    """A list has one piece for each entry."""
    exported: list[str] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    changed: dict[str, Block] = field(default_factory=dict)
    """Variables that a block sets."""


def read_script(file: str, text: str, given: dict[str, str]) -> Script:
    """The commands of a script in order; `given` are values of variables over its own.

    An InputError where it is not bash.
    """
    source = text.encode("utf-8", "surrogateescape")
    script = Script(file=file, source=source, given=frozenset(given))
    script.variables = {name: (_Piece(value, 1),) for name, value in given.items()}
    root = _parser().parse(source).root_node
    try:
        if root.has_error:
            line = next(_errors(root)).start_point[0] + 1
            raise fault_at(file, line, "this line cannot be read as bash")
        _follow(script, root)
    except RecursionError as error:
        raise fault_at(file, 0, "its expressions are nested too deeply") from error
    return script


@cache
def _parser() -> Parser:
    import tree_sitter
    import tree_sitter_bash

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def _errors(node: Node) -> Iterator[Node]:
    if node.type == "ERROR" or node.is_missing:
        yield node
    for child in node.children:
        if child.has_error or child.is_missing:
            yield from _errors(child)


def _line(node: Node) -> int:
    return int(node.start_point[0]) + 1


def _source(script: Script, node: Node) -> str:
    return script.source[node.start_byte : node.end_byte].decode("utf-8", "surrogateescape")


# ---- statements


def _follow(script: Script, node: Node) -> None:
    kind = node.type
    if kind in _SEQUENCES:
        for child in node.named_children:
            _follow(script, child)
    elif kind == "variable_assignment":
        _assign(script, node)
    elif kind == "declaration_command":
        _declare(script, node)
    elif kind == "command":
        _command(script, node)
    elif kind in ("redirected_statement", "negated_command"):
        _follow(script, node.named_children[0])
    elif kind == "list":
        left, operator, right = node.children
        _follow(script, left)
        # A command is taken to succeed: what follows || handles its failure.
        if left.type == "test_command" or (operator.type == "||" and right.type != "command"):
            _leave(script, right, "conditional command")
        elif operator.type == "&&":
            _follow(script, right)
    elif kind in _BLOCKS:
        _leave(script, node, kind)


def _leave(script: Script, node: Node, kind: str) -> None:
    """Leave a block alone; what it may set is unknown from here on."""
    block = Block(
        kind=_BLOCKS[kind],
        first_line=_line(node),
        last_line=int(node.end_point[0]) + 1,
        flags=tuple(re.findall(r"(?<![\w-])--([a-z][\w.-]+)", _source(script, node))),
    )
    script.blocks.append(block)
    for inner in _descendants(node):
        name_node = inner.child_by_field_name("name") or inner.child_by_field_name("variable")
        if inner.type not in ("variable_assignment", "for_statement") or name_node is None:
            continue
        name = _source(script, name_node).partition("[")[0]
        before = script.variables.get(name, ())
        _forget(script, name, block)
        if before and any(child.type == "+=" for child in inner.children):
            # The list keeps its words and may get more.
            more = _Piece(f"\x00{name}\x01[@]", block.first_line)
            script.variables[name] = (*before, more)


def _descendants(node: Node) -> Iterator[Node]:
    pending = [node]
    while pending:
        current = pending.pop()
        yield current
        pending.extend(current.named_children)


def _forget(script: Script, name: str, block: Block | None) -> None:
    if name not in script.given:
        script.variables.pop(name, None)
        if block is not None:
            script.changed[name] = block


def _declare(script: Script, node: Node) -> None:
    exports = node.children[0].type == "export"
    for child in node.named_children:
        if child.type == "variable_assignment":
            _assign(script, child)
        name = child.child_by_field_name("name") or child
        if exports and name.type == "variable_name":
            script.exported.append(_source(script, name))


def _assign(script: Script, node: Node) -> None:
    name_node, value = node.child_by_field_name("name"), node.child_by_field_name("value")
    name = "" if name_node is None else _source(script, name_node)
    if name in script.given:
        return
    if value is None:
        pieces: tuple[_Piece, ...] = (_Piece("", _line(node)),)
    elif value.type == "array":
        pieces = tuple(piece for child in value.named_children for piece in _fields(script, child))
    else:
        pieces = (_text(script, value),)
    if any(child.type == "+=" for child in node.children):
        if name in script.changed and name not in script.variables:
            return  # something was put before it that is not known
        before = script.variables.get(name, ())
        if value is not None and value.type != "array" and before:
            pieces = (_Piece(before[-1].text + pieces[0].text, before[-1].line),)
            before = before[:-1]
        pieces = (*before, *pieces)
    else:
        script.changed.pop(name, None)
    if len(pieces) > _MAX_LENGTH or sum(len(piece.text) for piece in pieces) > _MAX_LENGTH:
        raise fault_at(script.file, _line(node), f"{shown(name)} grows too long")
    script.variables[name] = pieces


def _command(script: Script, node: Node) -> None:
    own: list[tuple[str, Word]] = []
    words: list[Word] = []
    for child in node.named_children:
        if child.type == "variable_assignment":
            name, value = child.child_by_field_name("name"), child.child_by_field_name("value")
            if name is not None and value is not None:
                own.append((_source(script, name), _word(_text(script, value))))
        elif child.type not in ("comment", "file_redirect", "heredoc_redirect"):
            inner = child.named_children[0] if child.type == "command_name" else child
            words += map(_word, _fields(script, inner))
    if len(words) > _MAX_LENGTH:
        raise fault_at(script.file, _line(node), "the command has too many words")
    if not words:
        return
    first = words[0].text
    if first.startswith("--"):
        message = (
            f"bash runs {shown(first)} as a command of its own, because the line before it ends "
            "there: does a blank follow its backslash?"
        )
        raise fault_at(script.file, words[0].line, message)
    if first == "read":
        for word in words[1:]:
            _forget(script, word.text, None)
    exports = [
        (name, _word(script.variables[name][0]))
        for name in dict.fromkeys(script.exported)
        if script.variables.get(name)
    ]
    script.commands.append(Command(words=tuple(words), exports=(*exports, *own)))


def _word(piece: _Piece) -> Word:
    names = tuple(_UNKNOWN.findall(piece.text))
    text = _UNKNOWN.sub(r"$\1", piece.text) if names else piece.text
    return Word(text, piece.line, names)


# ---- words


def _fields(script: Script, node: Node) -> list[_Piece]:
    """The words that a node becomes: a list has many, an unquoted text is split at blanks."""
    if node.type in ("comment", "heredoc_body"):
        return []
    listed = node
    if (
        node.type == "string"
        and len(node.named_children) == 1
        and "[*]" not in _source(script, node)
    ):
        inner = node.named_children[0]
        if node.end_byte - inner.end_byte == 1 and inner.start_byte - node.start_byte == 1:
            listed = inner
    name = _list_name(script, listed)
    if name in script.variables:
        pieces = list(script.variables[name])
        return pieces if node.type == "string" else _split(pieces)
    piece = _text(script, node)
    if node.type not in ("simple_expansion", "expansion"):
        return [piece]
    own = script.variables.get(_source(script, node).strip("${}"), ())
    # The words of a text have the lines on which they are written.
    return _split([own[0] if len(own) == 1 else piece])


def _list_name(script: Script, node: Node) -> str:
    """NAME of `${NAME[@]}`; empty for anything else."""
    found = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", _source(script, node))
    return found.group(1) if node.type == "expansion" and found is not None else ""


def _split(pieces: list[_Piece]) -> list[_Piece]:
    return [
        _Piece(found.group(), piece.line + piece.text.count("\n", 0, found.start()))
        for piece in pieces
        for found in re.finditer(r"[^ \t\n]+", piece.text)
    ]


def _text(script: Script, node: Node) -> _Piece:
    """The node as one text."""
    kind, line = node.type, _line(node)
    if kind in ("string", "concatenation"):
        quoted = kind == "string"
        parts, at = [], node.start_byte + quoted
        for child in node.named_children:
            # Blanks between the parts of a string belong to no node.
            parts += [_quoted(script, at, child.start_byte), _text(script, child).text]
            at = child.end_byte
        text = "".join((*parts, _quoted(script, at, node.end_byte - quoted)))
    elif kind == "raw_string":
        text = _source(script, node)[1:-1]
    elif kind == "string_content":
        text = _quoted(script, node.start_byte, node.end_byte)
    elif kind == "word":
        text = re.sub(r"\\(.)", r"\1", _source(script, node).replace("\\\n", ""))
    elif kind in ("simple_expansion", "expansion"):
        text = _expanded(script, node)
    elif kind == "arithmetic_expansion":
        number = _arithmetic(script, node.named_children[0]) if node.named_children else None
        text = _unknown(script, node) if number is None else str(number)
    elif kind in ("command_substitution", "process_substitution"):
        text = _unknown(script, node)
    else:
        text = _source(script, node)
    if len(text) > _MAX_LENGTH:
        raise fault_at(script.file, line, "a value grows too long")
    return _Piece(text, line)


def _quoted(script: Script, start: int, stop: int) -> str:
    """Part of a text in double quotes, without its backslashes.

    A continued line ends a word as a blank does; the line break keeps the line numbers.
    """
    text = script.source[start:stop].decode("utf-8", "surrogateescape")
    return re.sub(r'\\(["\\$`\n])', r"\1", text)


def _unknown(script: Script, node: Node) -> str:
    """The mark of a value that is not known."""
    name = re.sub("[\x00\x01]", "", _source(script, node).removeprefix("$"))
    return f"\x00{name}\x01"


def _expanded(script: Script, node: Node) -> str:
    """The value of `$NAME` or `${NAME...}`."""
    source = _source(script, node)
    name = (re.search(r"\w+|[@*#?]", source) or [""])[0]
    pieces = script.variables.get(name)
    subscript = any(child.type == "subscript" for child in node.named_children)
    operator = next((c.type for c in node.children[1:-1] if not c.is_named), None)
    if node.type == "simple_expansion" or (subscript and operator is None):
        operator = None
        if subscript and not _list_name(script, node):
            pieces = None
    elif subscript or operator not in (*_DEFAULTS, *_REQUIRED):
        pieces = None
    value = None if pieces is None else " ".join(piece.text for piece in pieces)
    is_empty = value is None or (not value and str(operator).startswith(":"))
    if operator in _DEFAULTS and is_empty and name not in script.changed:
        rest = node.named_children[1:]
        return "".join(_text(script, child).text for child in rest)
    every = "[@]" if _list_name(script, node) else ""
    return f"\x00{name}\x01{every}" if value is None else value


def _arithmetic(script: Script, node: Node) -> int | None:
    """The whole number of an expression; None where a part of it is not known."""
    if node.type == "parenthesized_expression" and node.named_children:
        return _arithmetic(script, node.named_children[0])
    if node.type == "binary_expression":
        left, right = (_arithmetic(script, node.children[at]) for at in (0, 2))
        if left is None or right is None or max(abs(left), abs(right)) > 10**15:
            return None
        operator = node.children[1].type
        if operator in ("/", "%") and right <= 0:
            return None
        results = {"+": left + right, "-": left - right, "*": left * right}
        if operator in ("/", "%"):
            results |= {"/": left // right, "%": left % right}
        return results.get(operator)
    if node.type in ("variable_name", "word"):
        pieces = script.variables.get(_source(script, node), ())
        text = pieces[0].text if pieces else ""
    else:
        text = _text(script, node).text
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,15}", text) else None
