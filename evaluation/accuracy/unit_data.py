"""The unit data of a folder of reference data as populations that a fit takes.

    unit/layer_times.csv       operators: Aceso's profiler on six devices (unit_operators)
    unit/gemm_efficiency.csv   operators: SimuMax's products and attention (unit_operators)
    unit/collectives.csv       links: collectives by size, ranks and nodes (unit_links)
    sailor/layer_profiles      whole layers, float32 (unit_layers)

Nothing is invented: a row that its source or the folder's README marks as wrong is not used and is
counted in the notes under its reason. A file that is not there is a note, a file that is damaged an
error: so any other folder in the same forms can be read.

A folder that is judged and not fitted has files of other names, rows of unknown makes and broken
cells. There every table of `unit/*.csv` is known by its header; a row that its reader refuses is
left out and noted. Whole layers of a table (operator `layer`) are taken where they have no
communication in them (tp = 1), because such a folder need not have the profiles that they come
from.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.accuracy.rows import csv_files
from evaluation.accuracy.unit_layers import FOLDER as PROFILES
from evaluation.accuracy.unit_layers import UNUSABLE, layer_sample, read_layers
from evaluation.accuracy.unit_links import (
    read_collectives,
)
from evaluation.accuracy.unit_operators import Notes, population, read_operators, read_products
from hetplan.errors import InputError
from hetplan.lint.known import known_model, precision_of
from hetplan.lint.rows import LayerRow
from hetplan.lint.tables import read_table, table_kind
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.profiling.samples import LayerSample, Phase, ProfileSet


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitData:
    """Everything that a folder's unit data say of single operators, layers and links."""

    populations: tuple[ProfileSet, ...]
    """Each with one provenance; of two of one device and precision the first is the better one."""
    notes: tuple[str, ...]
    """Rows that are not used, counted by reason, and what a reader of the others must know."""


def read_unit(folder: Path) -> UnitData:
    """The populations of a reference folder; an InputError with file and line for wrong rows.

    `folder` holds `unit/` and `sailor/`; what of them is missing is noted.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder; name a folder of reference data")
    notes = Notes()
    collectives = read_collectives(folder, notes)
    links = [sample for population in collectives for sample in population.links]
    populations = (
        *read_operators(folder, notes),
        *read_products(folder, notes),
        *collectives,
        *read_layers(folder, notes, links),
    )
    return UnitData(populations=populations, notes=notes.lines())


UNIT_FOLDER = "unit"
_NAMES = {
    "layer or operator times": "layer_times.csv",
    "collectives by size": "collectives.csv",
    "efficiency by shape": "gemm_efficiency.csv",
}
"""What the readers call a table of this title."""
_MAX_DROPPED = 200
"""Rows of one file that may be wrong; more, and the file is of another kind."""
_NOT_THERE = "is not there"
_LAYERS_TOOL = "rows of whole layers"


def read_judged_unit(folder: Path) -> UnitData:
    """All populations that can be read, and a note for everything that cannot."""
    populations: list[ProfileSet] = []
    notes: dict[str, None] = {}
    for path in (*csv_files(folder / UNIT_FOLDER), *csv_files(folder)):
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as fault:
            notes[f"{path.name} cannot be read: {fault}"] = None
            continue
        kind = table_kind(text.partition("\n")[0].rstrip("\r"))
        name = _NAMES.get(kind.title if kind else "")
        if name is None and path.parent == folder and "step_time_s" in text.partition("\n")[0]:
            continue  # a table of runs
        if name is None:
            notes[f"{path.name} is no table of layers, products or collectives"] = None
            continue
        found, sound = _read(name, path.name, text, notes)
        populations += found
        if name == "layer_times.csv" and not (folder / PROFILES).is_dir():
            populations += _whole_layers(path.name, sound, notes)
    if (folder / PROFILES).is_dir():
        populations += _read_profiles(folder, notes)
    return UnitData(populations=tuple(populations), notes=tuple(notes))


def _read(
    name: str, real: str, text: str, notes: dict[str, None]
) -> tuple[tuple[ProfileSet, ...], str]:
    """The populations by the reader of tables called `name`, and the text without wrong rows."""
    lines = text.splitlines()
    dropped: set[int] = set()
    with tempfile.TemporaryDirectory() as root:
        copy = Path(root) / UNIT_FOLDER / name
        copy.parent.mkdir()
        while True:
            # Lines that are left out stay as empty ones, so that the others keep their numbers.
            kept = ("" if at in dropped else line for at, line in enumerate(lines, start=1))
            sound = "\n".join(kept) + "\n"
            copy.write_text(sound, encoding="utf-8")
            try:
                found = read_unit(Path(root))
            except InputError as error:
                wrong = {fault.line for fault in error.faults} - dropped - {0, 1}
                dropped |= wrong
                if not wrong or len(dropped) > _MAX_DROPPED:
                    notes[f"{real} is not read: {error.faults[0].message}"] = None
                    return (), ""
                for fault in error.faults:
                    field = f"{fault.field}: " if fault.field else ""
                    notes[f"{real}:{fault.line} is left out: {field}{fault.message}"] = None
                continue
            break
    notes |= {f"{real}: {note}": None for note in found.notes if _NOT_THERE not in note}
    return found.populations, sound


def _read_profiles(folder: Path, notes: dict[str, None]) -> tuple[ProfileSet, ...]:
    """Layer profiles, with the collectives that the reader takes out of them."""
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "sailor").symlink_to((folder / "sailor").resolve())
        try:
            found = read_unit(Path(root))
        except InputError as error:
            notes[f"{PROFILES} is not read: {error.faults[0]}"] = None
            return ()
    notes |= {note: None for note in found.notes if _NOT_THERE not in note}
    return found.populations


def _whole_layers(real: str, text: str, notes: dict[str, None]) -> Iterator[ProfileSet]:
    kind = table_kind(text.partition("\n")[0].rstrip("\r"))
    rows = () if kind is None else read_table(real, text, kind).layers
    by_device: dict[str, list[LayerSample]] = {}
    own = Notes()
    for row in rows:
        if row.operation != "layer":
            continue
        found = _layer_samples(row, own.kind(row.device))
        if isinstance(found, str):
            notes[f"{real}: layers of {row.model} on {row.device} are left out: {found}"] = None
        else:
            by_device.setdefault(row.device, []).extend(found)
    for label, samples in by_device.items():
        words = "whole layers at tp 1, times as they stand in the table"
        yield population(
            own.kind(label), label, tool=_LAYERS_TOOL, file=real, words=words, layers=samples
        )


def _layer_samples(row: LayerRow, device: str) -> Sequence[LayerSample] | str:
    """Forward and backward of one row, or why it cannot be used."""
    model, precision = known_model(row.model), precision_of(row.precision)
    if model is None:
        return "the shape of the model is not known"
    if not precision:
        return f"dtype is {row.precision[:40]!a}, which is not known"
    if row.tp > 1:
        return "tp above 1, with communication in the times"
    kind = _kind(row, model)
    if kind is None:
        return f"layer {row.layer} is none of the model's {len(model.layers)}"
    if "sailor" in row.source.lower():
        defect = _known_defect(row, kind)
        if defect:
            return defect
    times = ((Phase.FORWARD, row.forward_seconds), (Phase.BACKWARD, row.backward_seconds))
    try:
        return [
            layer_sample(
                model,
                device,
                kind,
                phase.value,
                row.microbatch_size,
                1,
                [seconds],
                precision=precision,
                sequence_length=model.max_sequence_length,
            )
            for phase, seconds in times
            # An embedding's backward pass of microseconds was not waited for.
            if seconds and not (kind is LayerKind.EMBEDDING and phase is Phase.BACKWARD)
        ]
    except InputError as fault:  # a model of other layers than samples can say
        return str(fault)


def _known_defect(row: LayerRow, kind: LayerKind) -> str:
    """What is known to be wrong with a row of Sailor's profiles (README of the reference data)."""
    if row.model in UNUSABLE:
        return UNUSABLE[row.model]
    if (row.model, row.device) == ("OPT-30", "A100-40"):
        return "float32 itself, under the same label as TF32"
    if row.model.startswith("GPT-Neo"):
        if row.device == "GH-96":
            return "copies of OPT-350's"
        if kind is LayerKind.HEAD:
            return "the last layer holds no projection"
    return ""


def _kind(row: LayerRow, model: ModelSpec) -> LayerKind | None:
    if row.layer is None or not 0 <= row.layer < len(model.layers):
        return None
    return model.layers[row.layer]
