"""What are the statements of a shell script, once it is read?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from hetplan.importers.launches.shell_words import Word


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """NAME=value or NAME=( values )."""

    name: str
    line: int
    value: Word
    items: tuple[Word, ...] | None
    """Of an array; None: it is none."""
    adds: bool
    """With += ."""
    item: bool = False
    """NAME[index]=value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What stands between << END and END."""

    text: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Simple:
    """Assignments and a command with its words."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    line: int
    documents: tuple[Document, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Both:
    """Two statements with && or || between them; with ! the denied one stands left."""

    left: Statement
    operator: str
    right: Statement
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """if: (condition, body) of every branch; an empty condition for else."""

    branches: tuple[tuple[tuple[Statement, ...], tuple[Statement, ...]], ...]
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """case: (patterns, body) of every branch."""

    subject: Word
    branches: tuple[tuple[tuple[Word, ...], tuple[Statement, ...]], ...]
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """for, while, until, select: how often the body runs is not worked out."""

    variable: str
    """Of for; empty otherwise."""
    body: tuple[Statement, ...]
    """With what while and until ask first."""
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function; its body runs where it is called."""

    name: str
    body: tuple[Statement, ...]
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """{ ...; } or ( ... )."""

    body: tuple[Statement, ...]
    line: int


Statement: TypeAlias = Simple | Both | Choice | Case | Loop | Function | Group
