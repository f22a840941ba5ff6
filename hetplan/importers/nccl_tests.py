"""Output of nccl-tests, printed or JSON (`-J FILE`), to link samples."""

from __future__ import annotations

from hetplan.importers.collectives import imported_of
from hetplan.importers.collectives_json import read_json_output
from hetplan.importers.collectives_text import read_output
from hetplan.importers.json_text import looks_like_json
from hetplan.importers.lines import text_lines
from hetplan.importers.records import ImportContext, Imported

KIND = "nccl-tests"
BACKEND = "nccl"


def parse(text: str, context: ImportContext) -> Imported:
    """One sample per row; `context.link` names the link.

    Raises InputError for what is no output of nccl-tests, for a row that was cut off or
    contradicts itself, and where the program or the number of ranks cannot be known.
    """
    return parse_as(KIND, BACKEND, text, context)


def parse_as(kind: str, backend: str, text: str, context: ImportContext) -> Imported:
    """The same for a program of the family."""
    if looks_like_json(text):
        output = read_json_output(text, context.file)
    else:
        output = read_output(text_lines(text), context.file)
    return imported_of(kind, backend, output.runs, context, output.version, output.device)
