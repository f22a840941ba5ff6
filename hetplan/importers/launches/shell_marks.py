"""Signs between the words of a script: spaces, separators, redirections, assignments."""

from __future__ import annotations

import re

from hetplan.importers.launches.shell_nodes import Assignment, Document
from hetplan.importers.launches.shell_words import Cursor, Word, read_word

_ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]=]{0,60}\])?(\+?)=", re.ASCII)
_SEPARATORS = (";;&", ";;", ";&", "&&", "||", "|&", ";", "&", "|", "\n")
_SEPARATING = frozenset(";&|\n")
_SPACE = re.compile(r"(?:[ \t\r]+|\\\n|#[^\n]*)*")
_SPACE_LINES = re.compile(r"(?:[ \t\r\n]+|\\\n|#[^\n]*)*")
_KEYWORD = re.compile(r"[A-Za-z]+|[{})!]|\[\[|\(\(?")
_DIGITS = re.compile(r"[0-9]{0,3}")
_REDIRECTING = frozenset("<>&0123456789")
_REDIRECTIONS = ("<<<", "<<-", "<<", "&>>", "&>", ">>", ">&", "<&", ">|", "<>", ">", "<")


def step_over_space(cursor: Cursor, *, lines: bool = False) -> None:
    """Step over spaces, comments and continued lines; with `lines` over ends of lines as well."""
    found = (_SPACE_LINES if lines else _SPACE).match(cursor.text, cursor.at)
    if found is not None and found.end() > cursor.at:
        cursor.take(found.end() - cursor.at)


def separator_here(cursor: Cursor) -> str:
    """What ends a command here; empty where nothing does."""
    if cursor.text[cursor.at : cursor.at + 1] not in _SEPARATING:
        return ""
    found = next((each for each in _SEPARATORS if cursor.text.startswith(each, cursor.at)), "")
    return "" if found == "&" and cursor.peek(2) == "&>" else found


def keyword_here(cursor: Cursor) -> str:
    """The plain word that begins here; the cursor stays."""
    found = _KEYWORD.match(cursor.text, cursor.at)
    if found is None:
        return ""
    after = cursor.text[found.end() : found.end() + 1]
    whole = found.group() in (")", "(", "((") or after in ("", " ", "\t", "\r", "\n", ";", "&", ")")
    return found.group() if whole else ""


def skip_to(cursor: Cursor, text: str) -> None:
    """Step behind the next such text."""
    end = cursor.text.find(text, cursor.at)
    if end < 0:
        raise cursor.fault(f"the script ends before {text}")
    cursor.take(end + len(text) - cursor.at)


def step_over_redirection(cursor: Cursor, waiting: list[tuple[str, bool, bool]]) -> bool:
    """Step over a redirection; what ends a here-document is put on the list."""
    if cursor.text[cursor.at : cursor.at + 1] not in _REDIRECTING:
        return False
    digits = _DIGITS.match(cursor.text, cursor.at)
    skip = len(digits.group()) if digits else 0
    at = cursor.at + skip
    sign = next((each for each in _REDIRECTIONS if cursor.text.startswith(each, at)), "")
    if not sign or cursor.text.startswith(("<(", ">("), at):
        if cursor.text.startswith(("<(", ">("), at) and not skip:
            cursor.take(2)
            skip_to(cursor, ")")
            return True
        return False
    cursor.take(skip + len(sign))
    step_over_space(cursor)
    target = read_word(cursor)
    if sign in ("<<", "<<-"):
        end = "".join(part.text for part in target)
        waiting.append((end, sign == "<<-", any(part.quoted for part in target)))
    return True


def documents_after(cursor: Cursor, waiting: list[tuple[str, bool, bool]]) -> tuple[Document, ...]:
    """The texts that begin on the next line, which the cursor then stands behind.

    What follows the command on its own line stays to be read: it is put before the rest.
    """
    end = cursor.text.find("\n", cursor.at)
    if end < 0:
        raise cursor.fault(f"the script ends before {waiting[0][0]}")
    found: list[Document] = []
    at, line = end + 1, cursor.line + 1
    for word, tabs, _ in waiting:
        start, first = at, line
        while True:
            stop = cursor.text.find("\n", at)
            text = cursor.text[at : len(cursor.text) if stop < 0 else stop]
            last = at
            at = len(cursor.text) if stop < 0 else stop + 1
            line += 1
            if (text.lstrip("\t") if tabs else text) == word:
                found.append(Document(text=cursor.text[start:last], line=first))
                break
            if stop < 0:
                raise cursor.fault(f"the text after << never ends with a line {word[:40]!a}")
    rest = cursor.text[cursor.at : end]
    # The lines of the texts are left as empty ones, so that the numbers of later lines stay right.
    gap = "\n" * (line - cursor.line)
    cursor.text = cursor.text[: cursor.at] + rest + gap + cursor.text[at:]
    return tuple(found)


def assignment_here(cursor: Cursor) -> Assignment | None:
    """The assignment that begins here; None where none does."""
    found = _ASSIGNED.match(cursor.text, cursor.at)
    if found is None:
        return None
    line = cursor.line
    cursor.take(len(found.group()))
    items: list[Word] | None = None
    value: Word = ()
    if cursor.peek() == "(":
        cursor.take()
        items = []
        while True:
            step_over_space(cursor, lines=True)
            if cursor.done:
                raise cursor.fault(f"the list {found.group(1)[:60]}=( is never closed", line)
            if cursor.peek() == ")":
                cursor.take()
                break
            word = read_word(cursor)
            if not word and cursor.peek() in ";&|<>()":
                raise cursor.fault(f"found {cursor.peek()!a} in a list of words", cursor.line)
            if word:
                items.append(word)
    else:
        value = read_word(cursor)
    return Assignment(
        name=found.group(1),
        line=line,
        value=value,
        items=None if items is None else tuple(items),
        adds=bool(found.group(3)),
        item=found.group(2) is not None,
    )
