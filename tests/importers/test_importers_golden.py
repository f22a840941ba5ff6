"""Every importer reads its fixture folder into the records beside the inputs, and no other's."""

from __future__ import annotations

import pytest
from importers_golden_inputs import CONTEXT, FOLDER, GOLDEN_INPUTS, GoldenInput, records_text

from hetplan.files.reading import decode, read_document
from hetplan.importers.records import IMPORT_SCHEMA, Imported
from hetplan.importers.table import IMPORTERS, importer_of

REFRESH = "run `python tests/importers/importers_golden_inputs.py`, look at it, and commit it"


def test_every_importer_has_a_fixture_folder() -> None:
    for importer in IMPORTERS:
        inputs = [golden for golden in GOLDEN_INPUTS if golden.importer == importer]
        assert inputs, f"write an output into {FOLDER.name}/{importer.kind}/, then {REFRESH}"
    assert len({golden.records for golden in GOLDEN_INPUTS}) == len(GOLDEN_INPUTS)


@pytest.mark.parametrize(
    "golden", GOLDEN_INPUTS, ids=lambda golden: f"{golden.importer.kind}/{golden.path.name}"
)
def test_an_input_gives_its_records_whatever_its_line_ends(golden: GoldenInput) -> None:
    assert golden.records.is_file(), f"{golden.records.name} is missing: {REFRESH}"
    imported = golden.read()
    assert records_text(imported) == golden.records.read_text(encoding="utf-8"), REFRESH
    assert decode(read_document(golden.records), Imported, schema=IMPORT_SCHEMA) == imported
    windows = "\ufeff" + golden.text.replace("\r\n", "\n").replace("\n", "\r\n")
    assert golden.importer.parse(windows, CONTEXT) == imported


def test_every_input_is_detected_as_its_own_kind() -> None:
    for golden in GOLDEN_INPUTS:
        detected = importer_of(golden.text)
        plain = golden.path.name in (
            "hostnames.txt",
            "mpich.txt",
            "scontrol.txt",
        )  # names alone, or with counts
        assert detected == golden.importer or (plain and detected is None), golden.path
