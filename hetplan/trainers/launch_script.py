"""The commands of a simple bash script, its variables filled in. Nothing is run.

Followed are assignments, arrays, `$NAME`, `${NAME}`, `${NAME:-default}`, whole-number arithmetic,
quotes and continued lines. Conditions, loops, functions and command substitutions are not: what
they set counts as unknown, and a trainer that is started inside one is refused with its line.
tree-sitter-bash parses; its node names are used below.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
}
"""What is not followed, in words."""
_SEQUENCES = (
    *("program", "compound_statement", "subshell", "pipeline", "variable_assignments"),
    *("redirected_statement", "negated_command", "declaration_command"),
)
_EXPANSION = re.compile(r"\$\{?(\w+|[@*#?])(\[[@*]\])?(?:(:?[-=]).*|:?\?.*)?\}?", re.DOTALL)
"""Name, subscript of a whole list, operator of a default."""
_UNQUOTED = re.compile(r"(?:\$\([^()]*\)|[^ \t\n])+")
"""A word without quotes; a command substitution is a part of one."""
_MAX_LENGTH = 1_000_000
"""Characters of a value and words of a list: a script that doubles a variable ends here."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command, or one value of a variable."""

    text: str
    """Variables that only the host knows stand in it as `$NAME`."""
    line: int
    known: bool = True
    """Whether nothing in it depends on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of the script that is not followed."""

    kind: str
    """In words, as `an if statement`."""
    first_line: int
    last_line: int
    flags: tuple[str, ...]
    """Flags that it names, without dashes."""


class Script:
    """A script as far as it can be followed; `given` are values of variables over its own.

    An InputError where it is not bash.
    """

    def __init__(self, file: str, text: str, given: dict[str, str]) -> None:
        self.file = file
        self.text = text
        self.commands: list[tuple[Word, ...]] = []
        self.blocks: list[Block] = []
        self.changed: dict[str, Block] = {}
        """Variables that a block sets."""
        self._given = frozenset(given)
        self._variables: dict[str, tuple[Word, ...]] = {
            name: (Word(value, 1),) for name, value in given.items()
        }
        self._before_commands: dict[tuple[Word, ...], dict[str, Word]] = {}
        """Variables of single commands, as in `NAME=1 torchrun ...`."""
        self._source = text.encode("utf-8", "surrogateescape")
        root = _parser().parse(self._source).root_node
        try:
            if root.has_error:
                line = next(_errors(root)).start_point[0] + 1
                raise fault_at(file, line, "this line cannot be read as bash")
            self._follow(root)
        except RecursionError as error:
            raise fault_at(file, 0, "its expressions are nested too deeply") from error

    def variable(self, name: str, command: tuple[Word, ...]) -> Word | None:
        """What a variable is for a command of the script; None: the script gives it no value.

        Of assignments that stand alone the last one counts.
        """
        found = self._before_commands.get(command, {}).get(name)
        words = self._variables.get(name, ())
        return found or (_joined(words, words[0].line, " ") if words else None)

    def _slice(self, start: int, stop: int) -> str:
        return self._source[start:stop].decode("utf-8", "surrogateescape")

    def _text(self, node: Node) -> str:
        return self._slice(node.start_byte, node.end_byte)

    # ---- statements

    def _follow(self, node: Node) -> None:
        kind = node.type
        if kind in _SEQUENCES:
            for child in node.named_children:
                self._follow(child)
        elif kind == "variable_assignment":
            self._assign(node)
        elif kind == "command":
            self._command(node)
        elif kind == "list":
            left, operator, right = node.children
            self._follow(left)
            if operator.type == "&&" and left.type != "test_command":
                self._follow(right)
            else:
                self._leave(right, "a command behind a test")
        elif kind in _BLOCKS:
            self._leave(node, _BLOCKS[kind])

    def _leave(self, node: Node, kind: str) -> None:
        """Leave a block alone; what it may set is unknown from here on."""
        block = Block(
            kind=kind,
            first_line=_line(node),
            last_line=int(node.end_point[0]) + 1,
            flags=tuple(re.findall(r"(?<![\w-])--([a-z][\w.-]+)", self._text(node))),
        )
        self.blocks.append(block)
        for inner in _descendants(node):
            name_node = inner.child_by_field_name("name") or inner.child_by_field_name("variable")
            if inner.type not in ("variable_assignment", "for_statement") or name_node is None:
                continue
            name = self._text(name_node).partition("[")[0]
            if name in self._given:
                continue
            self.changed[name] = block
            before = self._variables.pop(name, ())
            if before and any(child.type == "+=" for child in inner.children):
                # The list keeps its words and may get more.
                more = Word(f"${name}[@]", block.first_line, known=False)
                self._variables[name] = (*before, more)

    def _assign(self, node: Node) -> None:
        name_node, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        name = "" if name_node is None else self._text(name_node)
        if name in self._given:
            return
        words: Sequence[Word] = [Word("", _line(node)) if value is None else self._value(value)]
        if value is not None and value.type == "array":
            words = [word for child in value.named_children for word in self._words(child)]
        if any(child.type == "+=" for child in node.children):
            if name in self.changed and name not in self._variables:
                return  # something was put before it that is not known
            before = self._variables.get(name, ())
            if value is not None and value.type != "array" and before:
                words = [_joined((before[-1], *words), before[-1].line)]
                before = before[:-1]
            words = (*before, *words)
        else:
            self.changed.pop(name, None)
        if len(words) > _MAX_LENGTH or sum(len(word.text) for word in words) > _MAX_LENGTH:
            raise fault_at(self.file, _line(node), f"{shown(name)} grows too long")
        self._variables[name] = tuple(words)

    def _command(self, node: Node) -> None:
        words: list[Word] = []
        own: dict[str, Word] = {}
        for child in node.named_children:
            if child.type == "variable_assignment":
                name = child.child_by_field_name("name")
                value = child.child_by_field_name("value")
                if name is not None and value is not None:
                    own[self._text(name)] = self._value(value)
            elif child.type not in ("file_redirect", "heredoc_redirect"):
                inner = child.named_children[0] if child.type == "command_name" else child
                words += self._words(inner)
        if words and words[0].text.startswith("--"):
            message = (
                f"bash runs {shown(words[0].text)} as a command of its own, because the line "
                "before it ends there: does a blank follow its backslash?"
            )
            raise fault_at(self.file, words[0].line, message)
        if words:
            self._before_commands[tuple(words)] = own
            self.commands.append(tuple(words))

    # ---- words

    def _words(self, node: Node) -> list[Word]:
        """The words that a node becomes: a list has many, an unquoted text is split at blanks."""
        if node.type in ("comment", "heredoc_body"):
            return []
        source = self._text(node)
        listed = re.fullmatch(r'("?)\$\{(\w+)\[([@*])\]\}\1', source)
        if listed is not None and listed.group(2) in self._variables:
            entries = self._variables[listed.group(2)]
            if not listed.group(1):
                return _split(entries)
            if listed.group(3) == "@":
                return list(entries)
        if node.type not in ("simple_expansion", "expansion"):
            return [self._value(node)]
        own = self._variables.get(source.strip("${}"), ())
        # The words of a text have the lines on which they are written.
        return _split(own if len(own) == 1 else [self._value(node)])

    def _value(self, node: Node) -> Word:
        """The node as one word."""
        kind, line = node.type, _line(node)
        if kind in ("string", "concatenation"):
            quote = int(kind == "string")
            parts, at = [], node.start_byte + quote
            for child in node.named_children:
                # Blanks between the parts of a string belong to no node.
                parts += [Word(_unescaped(self._slice(at, child.start_byte)), line)]
                parts += [self._value(child)]
                at = child.end_byte
            parts += [Word(_unescaped(self._slice(at, node.end_byte - quote)), line)]
            word = _joined(parts, line)
        elif kind == "raw_string":
            word = Word(self._text(node)[1:-1], line)
        elif kind == "string_content":
            word = Word(_unescaped(self._text(node)), line)
        elif kind == "word":
            word = Word(re.sub(r"\\(.)", r"\1", self._text(node).replace("\\\n", "")), line)
        elif kind in ("simple_expansion", "expansion"):
            word = self._expanded(node)
        elif kind == "arithmetic_expansion":
            number = self._number(node.named_children[0]) if node.named_children else None
            word = self._unknown(node) if number is None else Word(str(number), line)
        elif kind in ("command_substitution", "process_substitution"):
            word = self._unknown(node)
        else:
            word = Word(self._text(node), line)
        if len(word.text) > _MAX_LENGTH:
            raise fault_at(self.file, line, "a value grows too long")
        return word

    def _unknown(self, node: Node) -> Word:
        return Word(self._text(node), _line(node), known=False)

    def _expanded(self, node: Node) -> Word:
        """The value of `$NAME` or `${NAME...}`."""
        found = _EXPANSION.fullmatch(self._text(node))
        if found is None:
            return self._unknown(node)
        name, subscript, default = found.groups()
        words = self._variables.get(name)
        line = _line(node)
        is_empty = words is None or (
            str(default).startswith(":") and not any(word.text for word in words)
        )
        if default and is_empty and name not in self.changed:
            return _joined([self._value(child) for child in node.named_children[1:]], line)
        if words is None:
            return Word(f"${name}" + ("[@]" if subscript else ""), line, known=False)
        return replace(_joined(words, line, " "), line=line)

    def _number(self, node: Node) -> int | None:
        """The whole number of an expression; None where a part of it is not known."""
        if node.type == "parenthesized_expression" and node.named_children:
            return self._number(node.named_children[0])
        if node.type == "binary_expression":
            left, right = (self._number(node.children[at]) for at in (0, 2))
            if left is None or right is None or max(abs(left), abs(right)) > 10**15:
                return None
            operator = node.children[1].type
            if operator in ("/", "%") and right > 0:
                return left // right if operator == "/" else left % right
            return {"+": left + right, "-": left - right, "*": left * right}.get(operator)
        words: Sequence[Word] = [self._value(node)]
        if node.type in ("variable_name", "word"):
            words = self._variables.get(self._text(node), ())
        text = words[0].text if words else ""
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,15}", text) else None


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


def _descendants(node: Node) -> Iterator[Node]:
    pending = [node]
    while pending:
        current = pending.pop()
        yield current
        pending.extend(current.named_children)


def _line(node: Node) -> int:
    return int(node.start_point[0]) + 1


def _joined(words: Sequence[Word], line: int, between: str = "") -> Word:
    text = between.join(word.text for word in words)
    return Word(text, line, all(word.known for word in words))


def _split(words: Sequence[Word]) -> list[Word]:
    return [
        replace(word, text=found.group(), line=word.line + word.text.count("\n", 0, found.start()))
        for word in words
        for found in _UNQUOTED.finditer(word.text)
    ]


def _unescaped(text: str) -> str:
    """Text in double quotes without its backslashes.

    A continued line ends a word as a blank does; the line break keeps the line numbers.
    """
    return re.sub(r'\\(["\\$`\n])', r"\1", text)
