"""JSON of a tool: values by path, and a fault with the line where one is not what it must be."""

from __future__ import annotations

import hashlib
import math

from hetplan.errors import InputError
from hetplan.files.nodes import Path, field_text, read_json
from hetplan.files.reading import Document
from hetplan.importers.lines import fault_at, shown


def json_document(file: str, text: str, repeatable: frozenset[Path] = frozenset()) -> Document:
    """The data of a JSON text; an InputError where it is not acceptable JSON.

    `repeatable` are paths of keys that the tool itself writes more than once.
    """
    text = text.removeprefix("\ufeff")
    if not text.strip():
        raise fault_at(file, 0, "the file is empty")
    try:
        root = read_json(file, text, repeatable)
    except InputError as error:
        if "Extra data" in str(error):
            message = "something follows the JSON document; give one document per file"
            raise fault_at(file, error.faults[0].line, message) from error
        raise
    sha256 = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return Document(file=file, text=text, root=root, sha256=sha256)


def looks_like_json(text: str) -> bool:
    """Whether the first character that is not a space begins a JSON object or list."""
    begin = text.removeprefix("\ufeff").lstrip()[:80]
    # `[1,0]<stdout>:` is the label that mpirun puts before a line.
    return begin.startswith("{") or (begin.startswith("[") and begin[1:].lstrip()[:1] in ("{", "]"))


def has(document: Document, *path: str | int) -> bool:
    """Whether something other than null stands at this path."""
    return document.at(*path) is not None


def number(document: Document, *path: str | int) -> float:
    """The finite number at this path."""
    value = document.at(*path)
    if isinstance(value, int | float) and not isinstance(value, bool):
        # An int may be larger than any float.
        result = float(value) if abs(value) < 1e300 else math.inf
        if math.isfinite(result):
            return result
    raise wrong(document, path, "a finite number")


def whole(document: Document, *path: str | int) -> int:
    """The whole number of 0 or more at this path, below 10**18."""
    value = document.at(*path)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**18:
        return value
    raise wrong(document, path, "a whole number from 0")


def word(document: Document, *path: str | int) -> str:
    """The text at this path, of characters that can be written to a file."""
    value = document.at(*path)
    if isinstance(value, str) and not any("\ud800" <= each <= "\udfff" for each in value):
        return value
    raise wrong(document, path, "a text")


def optional_whole(document: Document, *path: str | int) -> int | None:
    """As `whole`; None where nothing stands there."""
    return whole(document, *path) if has(document, *path) else None


def optional_word(document: Document, *path: str | int) -> str:
    """As `word`; empty where nothing stands there."""
    return word(document, *path) if has(document, *path) else ""


def wrong(document: Document, path: Path, wanted: str) -> InputError:
    """The error that something else than `wanted` stands at this path."""
    value = document.at(*path)
    if value is None:
        message = f"is missing; {wanted} is expected here"
    else:
        found = "an object" if isinstance(value, dict) else "a list"
        if not isinstance(value, dict | list):
            found = _short(value)
        message = f"found {found}; {wanted} is expected here"
    return fault_at(document.file, document.line(path), message, field_text(path))


def _short(value: object) -> str:
    # An int of thousands of digits cannot be turned into text.
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    return shown(value) if isinstance(value, str) else ascii(value)
