"""How a search result is kept: one JSON file that holds the plan and everything behind it."""

from __future__ import annotations

from pathlib import Path

from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.search.result import SearchResult

SCHEMA = "hetplan.plan/1"


def result_text(result: SearchResult) -> str:
    """Canonical JSON text of a result; equal results give equal bytes."""
    return encode(result, schema=SCHEMA)


def save_result(result: SearchResult, path: Path) -> None:
    """Write the result; the file is whole or, after a fault, as it was before."""
    write_atomically(path, result_text(result))


def load_plan(path: Path) -> SearchResult:
    """The result of a file written by `save_result`; an InputError lists what is wrong in it."""
    return decode(read_document(path), SearchResult, schema=SCHEMA)
