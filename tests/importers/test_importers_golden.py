"""Every importer reads its golden inputs into the records that stand beside them.

tests/golden/importers/<kind>/<name>.<anything>  input, written by hand in the tool's format
                             <name>.context.json optional: fields of ImportContext but `file`
                             <name>.records.json `Imported` as JSON, from the command below
`python tests/importers/test_importers_golden.py [KIND...]` writes records that are missing; look
at them before they are committed. To change one, remove it and run the command again.
"""

from __future__ import annotations

import sys

import pytest
from importers_golden_inputs import EVERY_INPUT, FOLDER, GoldenInput, golden_inputs

from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.importers.kinds import KINDS, ImporterKind
from hetplan.importers.records import IMPORT_SCHEMA, Imported


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_every_kind_has_a_golden_input(kind: ImporterKind) -> None:
    assert golden_inputs(kind), (
        f"{kind.kind} has no golden input: write one in {FOLDER.name}/{kind.kind}/ with your own "
        "numbers in the tool's documented format, then run "
        f"`python tests/importers/test_importers_golden.py {kind.kind}`"
    )


def test_no_two_inputs_share_a_file_of_records() -> None:
    assert len({golden.records for golden in EVERY_INPUT}) == len(EVERY_INPUT)


@pytest.mark.parametrize("golden", EVERY_INPUT, ids=lambda golden: golden.name)
def test_a_golden_input_gives_its_records(golden: GoldenInput) -> None:
    assert golden.records.is_file(), (
        f"{golden.records.name} is missing: run `python tests/importers/test_importers_golden.py "
        f"{golden.kind.kind}`, look at what it wrote, and commit it"
    )
    imported = golden.read()
    assert imported.kind == golden.kind.kind
    assert encode(imported, schema=IMPORT_SCHEMA) == golden.records.read_text(encoding="utf-8")
    assert decode(read_document(golden.records), Imported, schema=IMPORT_SCHEMA) == imported


@pytest.mark.parametrize("golden", EVERY_INPUT, ids=lambda golden: golden.name)
def test_windows_line_ends_and_a_byte_order_mark_change_nothing(golden: GoldenInput) -> None:
    text = "\ufeff" + golden.text.replace("\r\n", "\n").replace("\n", "\r\n")
    assert golden.kind.parse(text, golden.context) == golden.read()


def write_missing(kinds: list[str]) -> None:
    for golden in EVERY_INPUT:
        if (not kinds or golden.kind.kind in kinds) and not golden.records.exists():
            text = encode(golden.read(), schema=IMPORT_SCHEMA)
            golden.records.write_text(text, encoding="utf-8")
            print(golden.records)


if __name__ == "__main__":
    write_missing(sys.argv[1:])
