"""From a file that another tool wrote to hetplan's records: the verb `hetplan.import_file`."""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from hetplan.errors import Fault, InputError
from hetplan.files.reading import read_text
from hetplan.importers.kinds import KINDS, ImporterKind
from hetplan.importers.looks_like import looks_like
from hetplan.importers.records import ImportContext, Imported
from hetplan.job.spec import Precision
from hetplan.model.load import load_model
from hetplan.model.spec import ModelSpec

_MAX_NAME_LENGTH = 100  # of a name in a cluster file

NEEDED = {
    "link": ("--link", "the name that cluster files will use for these samples"),
    "device": ("--device", "the device kind, as in nvidia-a100-80gb-sxm"),
    "model": ("--model", "the file of the model whose layers were measured"),
    "precision": ("--precision", "float32, bfloat16 or float16"),
    "sequence_length": ("--seq", "the sequence length that was measured"),
}
"""Option of the command, and what it is, per field of ImportContext that a kind may need."""


def import_file(
    kind: str,
    path: str | Path,
    *,
    link: str | None = None,
    device: str | None = None,
    model: ModelSpec | str | Path | None = None,
    precision: Precision | str | None = None,
    sequence_length: int | None = None,
) -> Imported:
    """What the file says, in hetplan's records and base units; nothing is stored.

    `kind` is one of `hetplan import --help`. The others say what the tool's output does not: the
    name for link samples (left out: the file's, which a note says), the device kind, and the model
    (or its file) whose layers were measured.
    Raises InputError with every fault: unknown kind, missing context, what is wrong in which line.
    """
    importer = importer_kind(kind)
    spec = load_model(model) if isinstance(model, str | Path) else model
    context = ImportContext(
        file=str(path),
        link=link,
        device=device,
        model=spec,
        precision=None if precision is None else known_precision(str(precision)),
        sequence_length=sequence_length,
    )
    if link is not None:
        check_context(importer, context)
        return read_with(importer, read_text(Path(path)), context)
    named = replace(context, link=_link_name(Path(path)))
    check_context(importer, named)
    imported = read_with(importer, read_text(Path(path)), named)
    if not imported.links:
        return imported
    note = f"the samples' link is named {named.link} after the file; link= gives another name"
    return replace(imported, notes=(*imported.notes, note))


def _link_name(path: Path) -> str:
    """The file's name as a link's: a word that can stand in a cluster file."""
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem, flags=re.ASCII).lstrip("._-")
    return word[:_MAX_NAME_LENGTH] or "link"


def importer_kind(name: str, more: tuple[str, ...] = ()) -> ImporterKind:
    """The importer of this name; an InputError lists the nearest, or all.

    `more` are names that the caller reads otherwise, to be listed as well.
    """
    names = [*(each.kind for each in KINDS), *more]
    for each in KINDS:
        if each.kind == name:
            return each
    near = get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(names)}"
    raise InputError(f"unknown kind {name[:60]!a}; {hint}")


_SHORT_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}


def known_precision(name: str) -> Precision:
    """The precision of this name; an InputError lists them."""
    try:
        return Precision(name)
    except ValueError:
        known = ", ".join(each.value for each in Precision)
        meant = _SHORT_PRECISIONS.get(name.lower())
        hint = f"; did you mean {meant}?" if meant else ""
        raise InputError(f"unknown precision {name[:60]!a}; write one of {known}{hint}") from None


def check_context(importer: ImporterKind, context: ImportContext) -> None:
    """An InputError that names the option for everything the kind needs and nobody said."""
    faults = []
    for name in importer.needs:
        if getattr(context, name) is None:
            option, what = NEEDED[name]
            faults.append(Fault(message=f"{importer.kind} needs {option}: {what}"))
    for option, given in (("--link", context.link), ("--device", context.device)):
        if given is not None and not given.isprintable():
            faults.append(Fault(message=f"{option} {given[:60]!a} cannot be printed; give a name"))
    if faults:
        raise InputError(*faults)


def read_with(importer: ImporterKind, text: str, context: ImportContext) -> Imported:
    """What the importer reads; where it cannot, its faults and what the text looks like."""
    try:
        return _printable(importer.parse(text, context))
    except InputError as error:
        likely = looks_like(text)
        if likely is None or likely == importer.kind:
            raise
        message = f"this looks like {likely}; try `hetplan import {likely}`"
        raise InputError(Fault(file=context.file, message=message), *error.faults) from error


def _printable(imported: Imported) -> Imported:
    """The same, so that what a file says can be shown: a terminal obeys control characters."""
    return replace(
        imported,
        tool_version=_shown(imported.tool_version),
        device_name=_shown(imported.device_name),
        notes=tuple(map(_shown, imported.notes)),
        skipped=tuple(map(_shown, imported.skipped)),
    )


def _shown(text: str) -> str:
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def guessed(text: str, context: ImportContext, among: tuple[str, ...]) -> Imported:
    """What the text says, read as the first of these kinds that can read it.

    The kind that it looks like is tried first. An InputError says what it looks like, and what is
    wrong with it as that kind, or as the first.
    """
    likely = looks_like(text)
    order = [likely, *among] if likely in among and likely is not None else [*among]
    errors: list[InputError] = []
    for kind in dict.fromkeys(order):
        try:
            return importer_kind(kind).parse(text, context)
        except InputError as error:
            errors.append(error)
    found = f"this looks like {likely}, " if likely is not None and likely not in among else ""
    message = f"{found}not like {' or '.join(among)}"
    first = () if likely in among else (Fault(file=context.file, message=message),)
    raise InputError(*first, *errors[0].faults)
