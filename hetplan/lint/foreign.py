"""Output of measuring tools: which importer reads it, and its records as rows.

The importer is the one that the user names, or the one of the tool that the text names.
"""

from __future__ import annotations

from hetplan.errors import InputError
from hetplan.importers.kinds import KINDS, ImporterKind
from hetplan.importers.looks_like import looks_like
from hetplan.importers.records import ImportContext, Imported
from hetplan.job.spec import Precision
from hetplan.lint.rows import (
    LayerSampleRow,
    LinkSampleRow,
    Material,
    OperatorSampleRow,
    Place,
)
from hetplan.model.spec import ModelSpec

_HEAD = 1 << 16  # every tool says what it is in its first lines


def importer_of(text: str, named: str | None = None) -> ImporterKind | None:
    """The importer to use; None where none is named and no mark stands in the text."""
    if named is not None:
        kind = next((each for each in KINDS if each.kind == named), None)
        if kind is None:
            names = ", ".join(each.kind for each in KINDS)
            raise InputError(f"--kind {named}: there is no such importer; choose one of {names}")
        return kind
    head = text[:_HEAD]
    name = looks_like(head)
    return next((each for each in KINDS if each.kind == name), None)


def read_foreign(
    file: str,
    text: str,
    kind: ImporterKind,
    *,
    device: str | None,
    model: ModelSpec | None,
    precision: Precision | None = None,
    sequence_length: int | None = None,
) -> Material:
    """The records as rows; an InputError where the importer finds the text wrong."""
    context = ImportContext(
        file=file,
        link="checked",
        device=device,
        model=model,
        precision=precision,
        sequence_length=sequence_length,
    )
    return imported_rows(file, kind.parse(text, context))


def imported_rows(file: str, imported: Imported) -> Material:
    """Samples of an import as rows. An importer does not say lines: the whole file is the place."""
    place = Place(file=file, line=0)
    return Material(
        layer_samples=tuple(
            LayerSampleRow(place=place, population=file, sample=sample)
            for sample in imported.layers
        ),
        link_samples=tuple(
            LinkSampleRow(place=place, population=file, sample=sample) for sample in imported.links
        ),
        operator_samples=tuple(
            OperatorSampleRow(place=place, population=file, sample=sample)
            for sample in imported.operators
        ),
    )
