"""Does a test of a script hold, as far as its text alone tells it?"""

from __future__ import annotations

from hetplan.importers.launches.shell_nodes import Both, Simple, Statement
from hetplan.importers.launches.shell_sets import LET
from hetplan.importers.launches.shell_values import (
    Field,
    Variables,
    fields_of,
    text_of_field,
    unknown_of,
)
from hetplan.importers.lines import whole_number

_TESTS = frozenset(("[", "[[", "test", LET))
_MAX_PER_TEST = 60
_COMPARED = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}


def is_test(statement: Statement) -> bool:
    """Whether a statement is [ ... ], [[ ... ]] or test, perhaps denied."""
    if isinstance(statement, Both):
        return is_test(statement.left)
    if not isinstance(statement, Simple) or not statement.words:
        return False
    return "".join(part.text for part in statement.words[0]) in _TESTS


def is_let(statement: Statement) -> bool:
    """Whether a statement is let or ((...)), which may set variables as it tests."""
    words = statement.words if isinstance(statement, Simple) else ()
    return bool(words) and "".join(part.text for part in words[0]) == LET


def commands_of(condition: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """What of a condition does more than to test: it may set variables, or start something."""
    return tuple(each for each in condition if not is_test(each) or is_let(each))


def all_hold(condition: tuple[Statement, ...], variables: Variables) -> bool | None:
    """Whether the last of these holds; True for none of them, which is else."""
    return holds(condition[-1], variables) if condition else True


def holds(statement: Statement, variables: Variables) -> bool | None:
    """Whether a statement succeeds; None where the text does not tell."""
    if isinstance(statement, Both):
        left = holds(statement.left, variables)
        if statement.operator == "!":
            return None if left is None else not left
        right = holds(statement.right, variables)
        return _joined(left, statement.operator, right)
    if not isinstance(statement, Simple) or not statement.words:
        return None
    words = [each for word in statement.words for each in fields_of(word, variables)]
    texts = [text_of_field(word) for word in words]
    if not texts or texts[0] not in _TESTS:
        return {":": True, "true": True, "false": False}.get(texts[0]) if texts else None
    if texts[0] == LET:
        return None
    if texts[0] == "[" and texts[-1] == "]":
        words = words[:-1]
    return _test(words[1:])


def _joined(left: bool | None, operator: str, right: bool | None) -> bool | None:
    if operator == "&&":
        return False if left is False or right is False else None if None in (left, right) else True
    return True if left or right else None if None in (left, right) else False


def _test(words: list[Field]) -> bool | None:
    """Words of a test, without its brackets."""
    if len(words) > _MAX_PER_TEST:
        return None
    texts = [text_of_field(word) for word in words]
    for operator in ("||", "&&"):
        if operator in texts:
            at = texts.index(operator)
            return _joined(_test(words[:at]), operator, _test(words[at + 1 :]))
    if texts[:1] == ["!"]:
        denied = _test(words[1:])
        return None if denied is None else not denied
    if any(unknown_of(word) for word in words):
        return None
    if len(texts) == 1:
        return bool(texts[0])
    if len(texts) == 2 and texts[0] in ("-z", "-n"):
        return bool(texts[1]) == (texts[0] == "-n")
    if len(texts) != 3:
        return None
    left, operator, right = texts
    if operator in ("=", "==", "!="):
        if any(sign in right for sign in "*?["):
            return None
        return (left == right) == (operator != "!=")
    numbers = (whole_number(left), whole_number(right))
    if operator in _COMPARED and None not in numbers:
        return bool(_COMPARED[operator](*numbers))
    return None
