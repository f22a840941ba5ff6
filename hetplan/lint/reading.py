"""Files and folders that somebody wants checked to rows, faults and what was skipped, with why.

Every file is recognised by what stands in it. A file that is recognised and cannot be read has
faults; one that lint does not know is skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetplan.cluster.file_form import CLUSTER_SCHEMA
from hetplan.cluster.spec import Cluster
from hetplan.errors import Fault, InputError
from hetplan.files.nodes import json_nodes, read_json
from hetplan.files.reading import Document, read_bytes, read_document
from hetplan.importers.open import NEEDED
from hetplan.job.spec import Job, Precision
from hetplan.lint.documents import read_tree
from hetplan.lint.foreign import importer_of, read_foreign
from hetplan.lint.launches import EMITTED, known_places, launch_part, understood, unknown_sizes
from hetplan.lint.own_files import (
    LOADERS,
    Inputs,
    Loader,
    Planned,
    against_each_other,
    kind_of,
    sample_rows,
)
from hetplan.lint.rows import Material, joined
from hetplan.lint.tables import read_table, table_kind
from hetplan.model.spec import ModelSpec
from hetplan.profiling.samples import (
    SAMPLE_TYPES,
    LayerSample,
    LinkSample,
    OperatorSample,
    SampleType,
    header,
)
from hetplan.profiling.store import (
    LAYERS_FILE,
    LINKS_FILE,
    OPERATORS_FILE,
    PROVENANCE_FILE,
)

TEXT_SUFFIXES = (".md", ".rst", ".html", ".py", ".sh", ".c", ".h", ".cpp", ".cu", ".toml")
"""Files in which people write, not measure; they are skipped without a look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user says of the files."""

    importer: str | None = None
    device: str | None = None
    model: ModelSpec | None = None
    precision: Precision | None = None
    sequence_length: int | None = None
    cluster: Cluster | None = None
    """Where launches run."""
    given: tuple[tuple[str, str], ...] = ()
    """Variables and settings of launches that only their hosts know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was read."""

    material: Material
    files: tuple[str, ...]
    skipped: tuple[str, ...]
    faults: tuple[Fault, ...]
    kinds: tuple[str, ...] = ()
    """What each file without faults was read as, in the order of the files: `cluster`, `iperf3`."""
    is_together: bool = False
    """Whether the job was held against the model and the cluster."""
    notes: tuple[str, ...] = ()
    """What of the files could not be judged, a line each."""
    understood: tuple[str, ...] = ()
    """What each launch asks for, a line each."""


_SAMPLES: Mapping[str, SampleType] = {
    LAYERS_FILE: LayerSample,
    LINKS_FILE: LinkSample,
    OPERATORS_FILE: OperatorSample,
}
_MEASURED_RESULTS = '"schema": "hetplan.provenance/'
PLAN_FILE = "plan.json"
"""Of an emitted folder."""
NOTHING = Material()
NO_INPUTS = Inputs()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What came of one file."""

    material: Material = NOTHING
    inputs: Inputs = NO_INPUTS
    skipped: str = ""
    kind: str = ""
    planned: tuple[tuple[Path, Planned], ...] = ()


def read_all(
    paths: Sequence[Path], asked: Asked, more_loaders: Mapping[str, Loader] | None = None
) -> Reading:
    """Every file of these paths; folders are walked, hidden names are passed over."""
    loaders = {**LOADERS, **(more_loaders or {})}
    parts: list[_Part] = []
    files: list[str] = []
    skipped: list[str] = []
    faults: list[Fault] = []
    for path in _walk(paths):
        try:
            part = _read(path, asked, loaders)
        except InputError as error:
            files.append(str(path))
            faults += [
                fault if fault.file else replace(fault, file=str(path)) for fault in error.faults
            ]
            continue
        if part.skipped:
            skipped.append(f"{path}: {part.skipped}")
        else:
            files.append(str(path))
            parts.append(part)
    inputs = Inputs(
        models=tuple(entry for part in parts for entry in part.inputs.models),
        clusters=tuple(entry for part in parts for entry in part.inputs.clusters),
        jobs=tuple(entry for part in parts for entry in part.inputs.jobs),
    )
    is_together = len(inputs.models) == len(inputs.clusters) == len(inputs.jobs) == 1
    if is_together:
        # Several of a kind, as in configs/, are examples and not one question.
        faults += against_each_other(inputs)
    material = joined(tuple(part.material for part in parts))
    named = (asked.model,) if asked.model is not None else ()
    planned = tuple(entry for part in parts for entry in part.planned)
    launches = known_places(
        material.launches, inputs, planned, model=asked.model, cluster=asked.cluster
    )
    return Reading(
        material=replace(
            material,
            clusters=tuple((str(path), cluster) for path, cluster in inputs.clusters),
            launches=launches,
            models=(*named, *(model for _, model in inputs.models), *material.models),
        ),
        files=tuple(files),
        skipped=tuple(skipped),
        faults=tuple(faults),
        kinds=tuple(part.kind for part in parts if part.kind),
        is_together=is_together,
        notes=tuple(filter(None, map(unknown_sizes, material.launches))),
        understood=tuple(map(understood, launches)),
    )


def _walk(paths: Sequence[Path]) -> Iterator[Path]:
    """The files, each once; an InputError where a path does not exist."""
    seen: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise InputError(Fault(file=str(path), message="there is no such file or folder"))
        for file in _inside(path) if path.is_dir() else [path]:
            if file.resolve() not in seen:
                seen.add(file.resolve())
                yield file


def _inside(folder: Path) -> list[Path]:
    """Files of a folder; a folder that hetplan emitted is one launch, beside its plan."""
    files = sorted(
        each
        for each in folder.rglob("*")
        if each.is_file()
        and not any(part.startswith(".") for part in each.relative_to(folder).parts)
    )
    launches = sorted({each.parent for each in files if each.name == EMITTED})
    found = [
        each
        for each in files
        if each.name == PLAN_FILE or not any(emitted in each.parents for emitted in launches)
    ]
    return sorted([*found, *launches])


def _read(path: Path, asked: Asked, loaders: Mapping[str, Loader]) -> _Part:
    if asked.importer is None:
        row = launch_part(path, asked.given)
        if isinstance(row, str):
            return _Part(skipped=row)
        if row is not None:
            return _Part(material=Material(launches=(row,)), kind=f"{row.text.trainer} launch")
    if path.suffix.lower() in TEXT_SUFFIXES:
        return _Part(skipped="is text or code, no measurements")
    sample_type = _of_population(path)
    if sample_type is not None and asked.importer is None:
        return _Part(material=sample_rows(path, sample_type), kind="samples")
    text = _text(path)
    if text is None:
        return _Part(skipped="is not UTF-8 text")
    if not text.strip():
        raise InputError(Fault(file=str(path), message="the file is empty"))
    if asked.importer is not None:
        return _foreign(path, text, asked)
    if text.startswith("#!"):
        return _Part(skipped="is text or code, no measurements")
    first = text.lstrip("\ufeff").split("\n", 1)[0].strip("\r")
    for sample_type in SAMPLE_TYPES:
        if first.startswith(",".join(header(sample_type).split(",")[:6])):
            return _Part(material=sample_rows(path, sample_type), kind="samples")
    kind = table_kind(first)
    if kind is not None:
        return _Part(material=read_table(str(path), text.lstrip("\ufeff"), kind), kind="table")
    if first.startswith("# {") and _MEASURED_RESULTS in first:
        return _Part(skipped="holds results of measure.py; `hetplan profile merge` checks them")
    if text.lstrip("\ufeff \t\r\n").startswith(("{", "[")):
        return _read_json(path, text, asked, loaders)
    if path.suffix.lower() in (".yaml", ".yml"):
        return _own(path, read_document(path), loaders) or _Part(
            skipped="is YAML without a `schema` of hetplan; begin a cluster file with "
            f"`schema: {CLUSTER_SCHEMA}`, a model or job file alike"
        )
    if importer_of(text) is not None:
        return _recognised(path, text, asked)
    return _Part(skipped=_unknown(first))


def _of_population(path: Path) -> SampleType | None:
    """What a file in a population's folder must hold, by its name; None for others."""
    if not (path.parent / PROVENANCE_FILE).is_file():
        return None
    return _SAMPLES.get(path.name)


def _unknown(first: str) -> str:
    if "," in first:
        return f"is a table whose columns hetplan check does not know: {first[:60]!a}"
    return "is of no kind that hetplan check knows; --kind names an importer for it"


def _text(path: Path) -> str | None:
    """The file's text; None where it is not UTF-8."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        return None


def _read_json(path: Path, text: str, asked: Asked, loaders: Mapping[str, Loader]) -> _Part:
    text = text.lstrip("\ufeff")
    try:
        root = read_json(str(path), text)
    except InputError:
        if importer_of(text) is not None and not _is_json(text):
            return _foreign(path, text, asked)
        raise
    tree = json_nodes(text)
    document = Document(file=str(path), text=text, root=root, sha256="", tree=tree)
    part = _own(path, document, loaders)
    if part is not None:
        return part
    found = read_tree(str(path), tree)
    if found is not None:
        return _Part(material=found[1], kind=found[0])
    if importer_of(text) is not None:
        return _recognised(path, text, asked)
    return _Part(
        skipped="is JSON of no shape that hetplan check knows; --kind names an importer for it"
    )


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _own(path: Path, document: Document, loaders: Mapping[str, Loader]) -> _Part | None:
    """What one of hetplan's own files says; None where it is none."""
    kind = kind_of(document)
    if not kind:
        return None
    loader = loaders.get(kind)
    if loader is None:
        return _Part(skipped=f"is {kind}, which has no rules")
    value = loader(path)
    if isinstance(value, Planned):
        return _Part(planned=((path, value),), kind=kind.removeprefix("hetplan."))
    if isinstance(value, ModelSpec):
        return _Part(inputs=Inputs(models=((path, value),)), kind="model")
    if isinstance(value, Cluster):
        return _Part(inputs=Inputs(clusters=((path, value),)), kind="cluster")
    if isinstance(value, Job):
        return _Part(inputs=Inputs(jobs=((path, value),)), kind="job")
    return _Part(kind=kind.removeprefix("hetplan."))


def _recognised(path: Path, text: str, asked: Asked) -> _Part:
    """What an importer that nobody named reads; skipped where the user must say more."""
    try:
        return _foreign(path, text, asked)
    except InputError as error:
        if all(fault.field in NEEDED and not fault.line for fault in error.faults):
            options = dict.fromkeys(NEEDED[fault.field][0] for fault in error.faults)
            return _Part(skipped=f"needs {', '.join(options)}: {error.faults[0].message}")
        raise


def _foreign(path: Path, text: str, asked: Asked) -> _Part:
    kind = importer_of(text, asked.importer)
    if kind is None:
        return _Part()
    material = read_foreign(
        str(path),
        text,
        kind,
        device=asked.device,
        model=asked.model,
        precision=asked.precision,
        sequence_length=asked.sequence_length,
    )
    return _Part(material=material, kind=kind.kind)
