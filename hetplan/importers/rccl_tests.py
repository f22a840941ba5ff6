"""Output of rccl-tests, printed or JSON (`-Z json -x FILE`, `-J FILE`), to link samples."""

from __future__ import annotations

import re

from hetplan.importers.lines import fault_at
from hetplan.importers.nccl_tests import parse_as
from hetplan.importers.records import ImportContext, Imported

_SIGN = re.compile(r'rccl-tests|RCCL (?:version|tests)|librccl|"algBw"')


def detect(text: str) -> bool:
    """Whether the text names the program or its library."""
    return _SIGN.search(text) is not None


def parse(text: str, context: ImportContext) -> Imported:
    """As `nccl_tests.parse`; the programs are the same but for some columns."""
    text = _as_list(text)
    if text.removeprefix("\ufeff").startswith("numCycle,"):
        raise fault_at(context.file, 1, "this is the CSV of `-Z csv`; write it with `-Z json`")
    return parse_as("rccl-tests", text, context)


def _as_list(text: str) -> str:
    """The objects of `-Z json` as a list: its first versions write one per line, without one."""
    lines = text.removeprefix("\ufeff").rstrip().split("\n")
    one_each = all(line.startswith("{") and line.rstrip().endswith("}") for line in lines)
    return "[" + ",\n".join(lines) + "]" if one_each and '"algBw"' in lines[0] else text
