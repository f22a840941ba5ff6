"""Where the golden inputs of the importers are, and the context that each is read with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from hetplan.importers.kinds import KINDS, ImporterKind
from hetplan.importers.records import ImportContext, Imported

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "importers"
RECORDS = ".records.json"
CONTEXT = ".context.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenInput:
    """One input file of one kind."""

    kind: ImporterKind
    path: Path

    @property
    def name(self) -> str:
        return f"{self.kind.kind}/{self.path.name}"

    @property
    def text(self) -> str:
        with self.path.open(encoding="utf-8", newline="") as file:
            return file.read()

    @property
    def records(self) -> Path:
        """The file of what the importer must make of it."""
        return self.path.with_name(self.path.stem + RECORDS)

    @property
    def context(self) -> ImportContext:
        """What `<name>.context.json` says, if there is one; `file` is the input's name."""
        path = self.path.with_name(self.path.stem + CONTEXT)
        data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        text = json.dumps({"file": self.path.name} | data)
        return TypeAdapter(ImportContext).validate_json(text, strict=True)

    def read(self) -> Imported:
        return self.kind.parse(self.text, self.context)


def golden_inputs(kind: ImporterKind) -> list[GoldenInput]:
    """Every input of the kind, in the order of the names."""
    return [
        GoldenInput(kind=kind, path=path)
        for path in sorted((FOLDER / kind.kind).glob("*"))
        if path.is_file() and not path.name.endswith((RECORDS, CONTEXT))
    ]


EVERY_INPUT = [each for kind in KINDS for each in golden_inputs(kind)]
