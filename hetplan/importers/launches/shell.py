"""Which commands does a shell script run, and what of them is known without running it?

Statements are walked in order. A choice is followed where its test is about known values; where it
is not, its body is left alone, what it assigns counts as unknown, and the reader says so.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from hetplan.errors import InputError
from hetplan.importers.launches.shell_nodes import (
    Assignment,
    Both,
    Case,
    Choice,
    Function,
    Group,
    Loop,
    Simple,
    Statement,
)
from hetplan.importers.launches.shell_scripts import Marks, perhaps_scripts, scripts_in
from hetplan.importers.launches.shell_sets import LET, counted, names_set, sourced_text
from hetplan.importers.launches.shell_tests import all_hold, commands_of, holds, is_let, is_test
from hetplan.importers.launches.shell_tree import DECLARES, read_script
from hetplan.importers.launches.shell_values import (
    MAX_PIECES,
    Field,
    Piece,
    Value,
    fields_of,
    known_text,
    line_of_field,
    text_of_field,
    value_of,
)
from hetplan.importers.lines import fault_at

_READS = frozenset((".", "source"))
_POSITIONAL = (*"123456789", "@", "*", "#")
_MAX_NESTED = 8
_MAX_STEPS = 20_000
_MAX_WORDS = 400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command with its words."""

    words: tuple[Field, ...]
    line: int
    sure: bool
    """False inside a choice or loop that was not followed."""
    exported: tuple[tuple[str, Field, int], ...]
    """(name, value, line) of the variables that the script exports, or sets for this command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """What of a script was left alone."""

    line: int
    text: str
    names: tuple[str, ...] = ()
    """Variables that are unknown for it."""


@dataclass(slots=True)
class Walk:
    """What is known at a place of the script."""

    file: str
    given: dict[str, str]
    variables: dict[str, Value] = field(default_factory=dict)
    exported: dict[str, int] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)
    sure: bool = True
    nested: int = 0
    """Choices and loops inside each other."""
    inside: list[str] = field(default_factory=list)
    """Functions that are being followed; an empty name for a script in a script."""
    steps: int = 0
    words: int = 0
    """Of all commands so far."""

    def exports(self) -> tuple[tuple[str, Field, int], ...]:
        """(name, value, line) of the variables that are exported here and have a value."""
        return tuple(
            (name, self.variables[name].items[0], line)
            for name, line in self.exported.items()
            if name in self.variables and self.variables[name].items
        )


def walk_script(file: str, text: str, given: dict[str, str]) -> Walk:
    """Every command of the script; `given` are values of variables, over the script's own."""
    walk = Walk(file=file, given=given)
    for name, value in given.items():
        # A given value has no line of the script; 1 is where somebody would write it.
        walk.variables[name] = Value(items=((Piece(text=value, line=1),),))
    try:
        _run(walk, read_script(file, text))
    except InputError as error:
        faults = (fault if fault.file else replace(fault, file=file) for fault in error.faults)
        raise InputError(*faults) from error
    return walk


def _run(walk: Walk, statements: tuple[Statement, ...]) -> None:
    for statement in statements:
        walk.steps += 1
        if walk.steps > _MAX_STEPS:
            raise fault_at(walk.file, statement.line, f"the script takes over {_MAX_STEPS} steps")
        _step(walk, statement)


def _step(walk: Walk, statement: Statement) -> None:
    if isinstance(statement, Simple):
        _simple(walk, statement)
    elif isinstance(statement, Group):
        _run(walk, statement.body)
    elif isinstance(statement, Function):
        walk.functions[statement.name] = statement
    elif isinstance(statement, Choice):
        _choice(walk, statement)
    elif isinstance(statement, Case):
        _case(walk, statement)
    elif isinstance(statement, Loop):
        names = (statement.variable,) if statement.variable else ()
        _leave(walk, (statement.body,), statement.line, "loop", names)
    else:
        _both(walk, statement)


def _both(walk: Walk, both: Both) -> None:
    answer = holds(both.left, walk.variables)
    if both.operator == "!":
        _step(walk, both.left)
        return
    tested = is_test(both.left)
    if not tested or is_let(both.left):
        _step(walk, both.left)
    if tested and answer is None:
        _leave(walk, ((both.right,),), both.line, f"command after {both.operator}", ())
    # A command that is no test is taken to succeed: what follows || handles its failure.
    elif (answer is not False) == (both.operator == "&&"):
        _step(walk, both.right)


def _choice(walk: Walk, choice: Choice) -> None:
    for at, (condition, body) in enumerate(choice.branches):
        _run(walk, commands_of(condition))
        answer = all_hold(condition, walk.variables)
        if answer:
            _run(walk, body)
            return
        if answer is None:
            later = choice.branches[at + 1 :]
            left = (body, *((*commands_of(asked), *each) for asked, each in later))
            _leave(walk, left, choice.line, "if", ())
            return


def _case(walk: Walk, case: Case) -> None:
    subject = known_text(value_of(case.subject, walk.variables))
    for patterns, body in case.branches:
        texts = [known_text(value_of(each, walk.variables)) for each in patterns]
        if subject is None or None in texts:
            _leave(walk, tuple(each for _, each in case.branches), case.line, "case", ())
            return
        if any(text is not None and fnmatchcase(subject, text) for text in texts):
            _run(walk, body)
            return


def _leave(
    walk: Walk,
    bodies: tuple[tuple[Statement, ...], ...],
    line: int,
    what: str,
    names: tuple[str, ...],
) -> None:
    """Bodies that may or may not run: their commands are unsure, what they assign is unknown."""
    walk.nested += 1
    if walk.nested > _MAX_NESTED * 4:
        raise fault_at(walk.file, line, "too many choices inside each other")
    before, sure = dict(walk.variables), walk.sure
    changed: dict[str, Value] = {}
    for name in names:
        before[name] = _doubtful(walk, name, line, None)
    for body in bodies:
        walk.variables = dict(before)
        walk.sure = False
        _run(walk, body)
        for name, value in walk.variables.items():
            earlier = before.get(name)
            if earlier is not value and earlier != value and name not in walk.given:
                old = changed.get(name, before.get(name))
                changed[name] = _doubtful(walk, name, line, _begin(old, value))
    walk.variables, walk.sure = {**before, **changed}, sure
    text = f"the {what} is left alone, as only the host knows whether it runs"
    if names or changed:
        walk.remarks.append(Remark(line=line, text=text, names=(*names, *changed)))
    walk.nested -= 1


def _begin(old: Value | None, new: Value) -> Value | None:
    """What of a list is sure where a body only adds to it."""
    if old is not None and old.array and new.array and new.items[: len(old.items)] == old.items:
        return old
    return None


def _doubtful(walk: Walk, name: str, line: int, begin: Value | None) -> Value:
    if begin is not None:
        if begin.items and begin.items[-1] and begin.items[-1][0].unknown == name:
            return begin
        more = (Piece(text=f"${{{name}[@]}}", line=line, unknown=name),)
        return Value(items=(*begin.items, more), array=True)
    return Value(items=((Piece(text=f"${name}", line=line, unknown=name),),))


# ---- commands


def _simple(walk: Walk, simple: Simple) -> None:
    words: list[Field] = []
    for word in simple.words:
        words += fields_of(word, walk.variables)
        if len(words) > MAX_PIECES:
            raise fault_at(walk.file, simple.line, f"a command of over {MAX_PIECES} words")
    walk.words += len(words)
    if walk.words > _MAX_WORDS:
        raise fault_at(walk.file, simple.line, f"commands of over {_MAX_WORDS} words in all")
    first = text_of_field(words[0]) if words else ""
    before: list[tuple[str, Field, int]] = []
    for assignment in simple.assignments:
        if first and first not in DECLARES:
            value = value_of(assignment.value, walk.variables)
            before.append((assignment.name, value, assignment.line))
            continue
        _assign(walk, assignment)
        if first == "export":
            walk.exported[assignment.name] = assignment.line
    if not words:
        return
    if first in DECLARES:
        for each in words[1:]:
            if first == "export" and re.fullmatch(r"\w+", text_of_field(each)):
                walk.exported[text_of_field(each)] = line_of_field(each)
    elif first == "unset":
        for each in words[1:]:
            walk.variables.pop(text_of_field(each), None)
    elif first in _READS:
        _source(walk, words, simple.line)
    elif first in walk.functions:
        _call(walk, walk.functions[first], tuple(words[1:]), simple.line)
    elif first == "set" and "--" in map(text_of_field, words):
        at = [text_of_field(word) for word in words].index("--")
        _set_positional(walk, tuple(words[at + 1 :]))
    elif first == "shift":
        _shift(walk, words)
    else:
        _command(walk, simple, tuple(words), before)
        for name in names_set(words):
            _set_by_host(walk, name, words, simple.line)


def _set_by_host(walk: Walk, name: str, words: list[Field], line: int) -> None:
    """What a command such as read gives a variable; of let the value, where it can be counted."""
    if name in walk.given:
        return
    one = counted(words[1], line) if len(words) == 2 else None
    if text_of_field(words[0]) == LET and one is not None:
        walk.variables[name] = Value(items=(value_of(one[1], walk.variables),))
    else:
        walk.variables[name] = _doubtful(walk, name, line, None)


def _source(walk: Walk, words: list[Field], line: int) -> None:
    """Run a file that stands beside the script; what it sets has the line of this command."""
    found = sourced_text(walk.file, words[1]) if len(words) > 1 else None
    shown = " ".join(map(text_of_field, words))[:80]
    if found is None:
        walk.remarks.append(Remark(line=line, text=f"{shown} is not read"))
        return
    path, text = found
    if len(walk.inside) >= _MAX_NESTED:
        raise fault_at(walk.file, line, f"files read each other over {_MAX_NESTED} deep")
    walk.inside.append("")
    read_script(str(path), text)  # for the place of a fault in that file
    begins = (0, *(found.end() for found in re.finditer("\n", text)))
    _run(walk, read_script(walk.file, text, tuple((begin, line) for begin in begins)))
    walk.inside.pop()


def _set_positional(walk: Walk, arguments: tuple[Field, ...]) -> None:
    """$1 to $9, $@, $* and $#."""
    every = Value(items=arguments, array=True)
    line = line_of_field(arguments[0]) if arguments else 1
    count = Value(items=((Piece(text=str(len(arguments)), line=line),),))
    walk.variables.update({"@": every, "*": every, "#": count})
    for at in range(9):
        value = arguments[at] if at < len(arguments) else ()
        walk.variables[str(at + 1)] = Value(items=(value,))


def _shift(walk: Walk, words: list[Field]) -> None:
    every = walk.variables.get("@")
    count = text_of_field(words[1]) if len(words) > 1 else "1"
    if every is not None and count.isdecimal() and len(count) < 4:
        _set_positional(walk, every.items[int(count) :])
        return
    for name in _POSITIONAL:
        walk.variables.pop(name, None)


def _call(walk: Walk, function: Function, arguments: tuple[Field, ...], line: int) -> None:
    """Follow a function, but not again from inside itself: how often is for its host to know."""
    if function.name in walk.inside or len(walk.inside) >= _MAX_NESTED:
        why = (
            "calls itself" if function.name in walk.inside else f"is called over {_MAX_NESTED} deep"
        )
        text = f"the function {function.name[:40]} {why}; that call is left alone"
        walk.remarks.append(Remark(line=line, text=text))
        return
    walk.inside.append(function.name)
    before = {name: walk.variables[name] for name in _POSITIONAL if name in walk.variables}
    _set_positional(walk, arguments)
    _run(walk, function.body)
    for name in _POSITIONAL:
        walk.variables.pop(name, None)
    walk.variables.update(before)
    walk.inside.pop()


def _command(
    walk: Walk, simple: Simple, words: tuple[Field, ...], before: list[tuple[str, Field, int]]
) -> None:
    exported = walk.exports()
    walk.commands.append(
        Command(words=words, line=simple.line, sure=walk.sure, exported=(*exported, *before))
    )
    for text, marks in scripts_in(words, simple):
        if len(walk.inside) >= _MAX_NESTED:
            raise fault_at(walk.file, marks[0][1], f"scripts in scripts over {_MAX_NESTED} deep")
        walk.inside.append("")
        _run(walk, read_script(walk.file, text, marks))
        walk.inside.pop()
    for text, marks in perhaps_scripts(words, simple):
        _try(walk, text, marks)


def _try(walk: Walk, text: str, marks: Marks) -> None:
    """Commands of a text that may be a script; what they set stays inside, faults are none."""
    if len(walk.inside) >= _MAX_NESTED:
        return
    before, sure, nested, inside = dict(walk.variables), walk.sure, walk.nested, [*walk.inside]
    walk.sure = False
    walk.inside.append("")
    with contextlib.suppress(InputError):
        _run(walk, read_script(walk.file, text, marks))
    walk.variables, walk.sure, walk.nested, walk.inside = before, sure, nested, inside


def _assign(walk: Walk, assignment: Assignment) -> None:
    name = assignment.name
    if name in walk.given:
        return
    old = walk.variables.get(name)
    if assignment.item:
        walk.variables[name] = _doubtful(walk, name, assignment.line, None)
        return
    if assignment.items is None:
        value = value_of(assignment.value, walk.variables)
        if assignment.adds and old is not None and old.items:
            joined = (*old.items[0], *value)
            walk.variables[name] = Value(items=(joined, *old.items[1:]), array=old.array)
        elif assignment.adds:
            unknown = Piece(text=f"${name}", line=assignment.line, unknown=name)
            walk.variables[name] = Value(items=((unknown, *value),))
        else:
            walk.variables[name] = Value(items=(value,))
        return
    items: list[Field] = [*old.items] if assignment.adds and old is not None else []
    for word in assignment.items:
        items += fields_of(word, walk.variables)
        if len(items) > MAX_PIECES:
            raise fault_at(walk.file, assignment.line, f"a list of over {MAX_PIECES} words")
    walk.variables[name] = Value(items=tuple(items), array=True)
