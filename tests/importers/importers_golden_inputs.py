"""The fixture folder of every importer: inputs, and the records that they must give.

tests/golden/importers/<kind>/<name>.<anything>  an output, written by hand in the tool's format
                             <name>.records.json its `Imported` as JSON
`python tests/importers/importers_golden_inputs.py` writes records that are missing; look at them
before they are committed. To change one, remove it and run the command again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetplan.files.encoding import laid_out, to_plain
from hetplan.importers.records import IMPORT_SCHEMA, ImportContext, Imported
from hetplan.importers.table import IMPORTERS, Importer

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "importers"
CONTEXT = ImportContext(file="golden.txt", link="golden")
_RECORDS = ".records.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenInput:
    """One input file of one importer."""

    importer: Importer
    path: Path

    @property
    def text(self) -> str:
        with self.path.open(encoding="utf-8", newline="") as file:
            return file.read()

    @property
    def records(self) -> Path:
        return self.path.with_name(self.path.stem + _RECORDS)

    def read(self) -> Imported:
        return self.importer.parse(self.text, CONTEXT)


GOLDEN_INPUTS = tuple(
    GoldenInput(importer=importer, path=path)
    for importer in IMPORTERS
    for path in sorted((FOLDER / importer.kind).glob("*"))
    if path.is_file() and not path.name.endswith((_RECORDS, ".context.json"))
)


def records_text(imported: Imported) -> str:
    """What a records file holds: for people, so what fits on a line is on one."""
    plain = to_plain(imported)
    assert isinstance(plain, dict)
    return laid_out({"schema": IMPORT_SCHEMA, **plain}) + "\n"


def write_missing() -> None:
    for golden in GOLDEN_INPUTS:
        if not golden.records.exists():
            golden.records.write_text(records_text(golden.read()), "utf-8")
            print(golden.records)


if __name__ == "__main__":
    write_missing()
