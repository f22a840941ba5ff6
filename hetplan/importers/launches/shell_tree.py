"""Text of a shell script to its statements: commands, choices, loops, functions; nothing is run."""

from __future__ import annotations

import re

from hetplan.importers.launches.shell_marks import (
    assignment_here,
    documents_after,
    keyword_here,
    separator_here,
    skip_to,
    step_over_redirection,
    step_over_space,
)
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
from hetplan.importers.launches.shell_sets import LET
from hetplan.importers.launches.shell_words import (
    Cursor,
    Word,
    plain_text,
    read_word,
    text_part,
)

DECLARES = frozenset(("export", "declare", "local", "readonly", "typeset"))
"""Commands whose arguments are assignments."""
_MAX_JOINED = 100
_CLOSERS = frozenset(("then", "elif", "else", "fi", "do", "done", "esac", "}", ")"))


def read_script(
    file: str, text: str, marks: tuple[tuple[int, int], ...] = ((0, 1),)
) -> tuple[Statement, ...]:
    """The statements of a script; an InputError with the line where quotes or blocks do not close.

    `marks` are (place in the text, its line), the first at 0.
    """
    cursor = Cursor(file, text, marks)
    found = _statements(cursor, ())
    if not cursor.done:
        raise cursor.fault(f"found {cursor.peek()!a}, which nothing opened")
    return found


def _statements(cursor: Cursor, ends: tuple[str, ...]) -> tuple[Statement, ...]:
    """Statements up to one of these words, which is left there; to the end of the text for none."""
    cursor.deeper()
    found: list[Statement] = []
    while True:
        step_over_space(cursor, lines=True)
        if cursor.done:
            if ends:
                raise cursor.fault(f"the script ends before {' or '.join(ends)}")
            break
        separator = separator_here(cursor)
        if separator and separator in ends:
            break
        if separator:
            cursor.take(len(separator))
            continue
        word = keyword_here(cursor)
        if word in ends:
            break
        if word in _CLOSERS:
            raise cursor.fault(f"found {word}, which nothing opened")
        found.append(_chain(cursor))
    cursor.depth -= 1
    return tuple(found)


def _chain(cursor: Cursor) -> Statement:
    """A statement with those that && and || join to it; of a pipe every member runs."""
    found = _statement(cursor)
    for _ in range(_MAX_JOINED):
        step_over_space(cursor)
        separator = separator_here(cursor)
        if separator not in ("&&", "||"):
            return found
        line = cursor.line
        cursor.take(2)
        step_over_space(cursor, lines=True)
        if cursor.done:
            raise cursor.fault(f"nothing follows {separator}", line)
        right = _statement(cursor)
        found = Both(left=found, operator=separator, right=right, line=line)
    raise cursor.fault(f"more than {_MAX_JOINED} commands joined by && and ||")


def _statement(cursor: Cursor) -> Statement:
    line, word = cursor.line, keyword_here(cursor)
    if word == "!":
        cursor.take()
        cursor.deeper()
        step_over_space(cursor)
        nothing = Simple(assignments=(), words=(), line=line)
        denied = nothing if cursor.done else _statement(cursor)
        cursor.depth -= 1
        return Both(left=denied, operator="!", right=nothing, line=line)
    if word == "if":
        return _if(cursor)
    if word == "case":
        return _case(cursor)
    if word in ("for", "select", "while", "until"):
        return _loop(cursor, word)
    if word == "function":
        cursor.take(len(word))
        step_over_space(cursor)
        name = plain_text(read_word(cursor)) or ""
        step_over_space(cursor)
        if cursor.peek() == "(":
            cursor.take()
            step_over_space(cursor)
            _expect(cursor, ")")
        return _function(cursor, name, line)
    if word in ("{", "("):
        cursor.take()
        body = _statements(cursor, ("}" if word == "{" else ")",))
        cursor.take()
        return Group(body=body, line=line)
    if word == "((":
        cursor.take(2)
        start = cursor.at
        skip_to(cursor, "))")
        text = cursor.text[start : cursor.at - 2]
        words = (text_part(LET, line, quoted=False),), (text_part(text, line, quoted=True),)
        return Simple(assignments=(), words=words, line=line)
    if word == "[[":
        return _test(cursor)
    return _simple(cursor)


def _expect(cursor: Cursor, text: str) -> None:
    if cursor.peek(len(text)) != text:
        raise cursor.fault(f"found {cursor.peek(20)!a} where {text} must stand")
    cursor.take(len(text))


def _if(cursor: Cursor) -> Choice:
    line = cursor.line
    branches: list[tuple[tuple[Statement, ...], tuple[Statement, ...]]] = []
    word = "if"
    while word in ("if", "elif"):
        cursor.take(len(word))
        condition = _statements(cursor, ("then",))
        cursor.take(4)
        body = _statements(cursor, ("elif", "else", "fi"))
        branches.append((condition, body))
        word = keyword_here(cursor)
    if word == "else":
        cursor.take(4)
        branches.append(((), _statements(cursor, ("fi",))))
    cursor.take(2)
    return Choice(branches=tuple(branches), line=line)


def _case(cursor: Cursor) -> Case:
    line = cursor.line
    cursor.take(4)
    step_over_space(cursor)
    subject = read_word(cursor)
    step_over_space(cursor, lines=True)
    _expect(cursor, "in")
    branches: list[tuple[tuple[Word, ...], tuple[Statement, ...]]] = []
    while True:
        step_over_space(cursor, lines=True)
        if keyword_here(cursor) == "esac":
            break
        if cursor.peek() == "(":
            cursor.take()
        patterns: list[Word] = []
        while cursor.peek() != ")":
            step_over_space(cursor)
            pattern = read_word(cursor)
            if not pattern:
                raise cursor.fault(
                    "the script ends before esac, or a pattern without ) stands here"
                )
            patterns.append(pattern)
            step_over_space(cursor)
            if cursor.peek() == "|":
                cursor.take()
        cursor.take()
        body = _statements(cursor, (";;", ";&", ";;&", "esac"))
        branches.append((tuple(patterns), body))
        separator = separator_here(cursor)
        if separator.startswith(";"):
            cursor.take(len(separator))
    cursor.take(4)
    return Case(subject=subject, branches=tuple(branches), line=line)


def _loop(cursor: Cursor, word: str) -> Loop:
    line = cursor.line
    cursor.take(len(word))
    variable = ""
    if word in ("for", "select"):
        step_over_space(cursor)
        if cursor.peek(2) == "((":
            skip_to(cursor, "))")
        else:
            variable = plain_text(read_word(cursor)) or ""
            while not cursor.done and separator_here(cursor) not in (";", "\n"):
                step_over_space(cursor)
                if not read_word(cursor) and separator_here(cursor) not in (";", "\n"):
                    raise cursor.fault("a list of words must stand here")
        step_over_space(cursor, lines=True)
        if cursor.peek() == ";":
            cursor.take()
        step_over_space(cursor, lines=True)
    condition = () if word in ("for", "select") else _statements(cursor, ("do",))
    _expect(cursor, "do")
    body = (*condition, *_statements(cursor, ("done",)))
    cursor.take(4)
    return Loop(variable=variable, body=body, line=line)


def _function(cursor: Cursor, name: str, line: int) -> Function:
    step_over_space(cursor, lines=True)
    word = keyword_here(cursor)
    if word not in ("{", "("):
        raise cursor.fault(f"the body of the function {name[:40]!a} must begin here with {{")
    cursor.take()
    body = _statements(cursor, ("}" if word == "{" else ")",))
    cursor.take()
    return Function(name=name, body=body, line=line)


def _test(cursor: Cursor) -> Simple:
    """[[ ... ]]: its words; && and || and brackets are words of it."""
    line = cursor.line
    cursor.take(2)
    words: list[Word] = [(text_part("[[", line, quoted=False),)]
    while True:
        step_over_space(cursor, lines=True)
        if cursor.done:
            raise cursor.fault("a [[ opens here and is never closed", line)
        if cursor.peek(2) == "]]":
            cursor.take(2)
            return Simple(assignments=(), words=tuple(words), line=line)
        sign = next((each for each in ("&&", "||") if cursor.peek(2) == each), "")
        sign = sign or (cursor.peek() if cursor.peek() in "()<>;&|" else "")
        if sign:
            words.append((text_part(cursor.take(len(sign)), cursor.line, quoted=False),))
            continue
        words.append(read_word(cursor))


def _simple(cursor: Cursor) -> Simple | Function:
    line = cursor.line
    assignments: list[Assignment] = []
    words: list[Word] = []
    waiting: list[tuple[str, bool, bool]] = []
    declares = False
    while True:
        step_over_space(cursor)
        if cursor.done or separator_here(cursor):
            break
        if step_over_redirection(cursor, waiting):
            continue
        if cursor.peek() == ")":
            break
        if cursor.peek() == "(":
            name = plain_text(words[0]) if len(words) == 1 else None
            if name is None or re.fullmatch(r"\(\s*\)", cursor.peek(2)) is None:
                raise cursor.fault("found (, which no command or list has here")
            cursor.take(2)
            return _function(cursor, name, line)
        if not words or declares:
            found = assignment_here(cursor)
            if found is not None:
                assignments.append(found)
                continue
        words.append(read_word(cursor))
        declares = declares or (len(words) == 1 and plain_text(words[0]) in DECLARES)
    documents = documents_after(cursor, waiting) if waiting else ()
    return Simple(
        assignments=tuple(assignments), words=tuple(words), line=line, documents=documents
    )
