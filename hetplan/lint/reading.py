"""From files and folders to rows, faults, and what was skipped, with why.

Every file is recognised by its content. A file that is recognised and cannot be read has faults;
one that lint does not know is skipped. Tables of collectives by size are CSV, recognised by their
header: other columns are ignored, and a cell that must be a number and is not is a fault.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetplan.cluster.catalogue import DEVICES_SCHEMA, DevicesForm
from hetplan.cluster.file_form import CLUSTER_SCHEMA
from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.errors import Fault, InputError
from hetplan.files.nodes import json_nodes, read_json
from hetplan.files.reading import Document, decode, read_bytes, read_document
from hetplan.files.shipped import default_stores
from hetplan.importers.table import import_text, importer_of
from hetplan.job.load import load_job
from hetplan.lint.evidence import (
    CollectiveRow,
    Inputs,
    Place,
    Planned,
    Population,
    Sample,
    SampleRow,
    merge,
)
from hetplan.lint.launches import known_places, launch_part, understood, unknown_sizes
from hetplan.model.load import load_model
from hetplan.model.spec import ModelSpec
from hetplan.plans.check_job import check_job_against
from hetplan.predict.fit import fit_stores, load_predictor, with_shipped
from hetplan.profiling.samples import (
    SAMPLE_TYPES,
    LayerSample,
    LinkSample,
    OperatorSample,
    Provenance,
    SampleType,
    header,
    read_samples,
)
from hetplan.profiling.store import FILES, PROVENANCE_FILE
from hetplan.profiling.store import SCHEMA as PROVENANCE_SCHEMA
from hetplan.search.files import load_legal_plan
from hetplan.search.result import Question
from hetplan.trainers.before_search import lacks_figures, question_faults, unknown_kinds
from hetplan.trainers.folder import CHECK_FILE

TEXT_SUFFIXES = (".md", ".rst", ".html", ".py", ".sh", ".c", ".h", ".cpp", ".cu", ".toml")
"""Files in which people write, not measure; they are skipped without a look."""
PLAN_FILE = "plan.json"
"""Of an emitted folder."""
_SAMPLES: Mapping[str, SampleType] = {name: kind for kind, name in FILES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchContext:
    """What the user says about launches, and which importer reads other tools' files."""

    importer: str | None = None
    model: ModelSpec | None = None
    """What launches train."""
    cluster: Cluster | None = None
    """Where launches run."""
    given: tuple[tuple[str, str], ...] = ()
    """Variables and settings of launches that only their hosts know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was read."""

    inputs: Inputs
    files: tuple[str, ...]
    skipped: tuple[str, ...]
    faults: tuple[Fault, ...]
    kinds: tuple[str, ...] = ()
    """What each file without faults was read as, in the order of the files: `cluster`, `iperf3`."""
    is_together: bool = False
    """Whether the job was held against the model and the cluster."""
    notes: tuple[str, ...] = ()
    """What could not be judged, a line each."""
    understood: tuple[str, ...] = ()
    """What each launch asks for, a line each."""


_NOTHING = Inputs()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one file gave."""

    inputs: Inputs = _NOTHING
    kind: str = ""
    skipped: str = ""


def read_all(paths: Sequence[Path], context: LaunchContext) -> Reading:
    """Every file of these paths; folders are walked, hidden names are passed over."""
    parts: list[_Part] = []
    files: list[str] = []
    skipped: list[str] = []
    faults: list[Fault] = []
    for path in _walk(paths):
        try:
            part = _read(path, context)
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
    inputs = merge(part.inputs for part in parts)
    is_together = len(inputs.models) == len(inputs.clusters) == len(inputs.jobs) == 1
    if is_together:
        # Several of a kind, as in configs/, are examples and not one question.
        faults += _against_each_other(inputs)
    launches = known_places(
        inputs.launches, inputs, inputs.plans, model=context.model, cluster=context.cluster
    )
    return Reading(
        inputs=replace(inputs, launches=launches),
        files=tuple(files),
        skipped=tuple(skipped),
        faults=tuple(faults),
        kinds=tuple(part.kind for part in parts if part.kind),
        is_together=is_together,
        notes=tuple(filter(None, map(unknown_sizes, inputs.launches))),
        understood=tuple(map(understood, launches)),
    )


def _against_each_other(inputs: Inputs) -> Iterable[Fault]:
    """Faults of every job against every model and cluster that were read with it, as `hetplan plan`
    finds them before it searches.
    """
    for job_path, job in inputs.jobs:
        for model_path, model in inputs.models:
            for cluster_path, cluster in inputs.clusters:
                document = read_document(job_path)
                question = Question(model=model, cluster=cluster, job=job)
                faults = (
                    *check_job_against(job, model, cluster, document),
                    *question_faults(question, document),
                )
                for fault in faults:
                    of_model = fault.field == "model"
                    yield replace(fault, file=str(model_path), field="") if of_model else fault
                if not faults and lacks_figures(question):
                    predictor = with_shipped(fit_stores(*default_stores())[0])
                    yield from unknown_kinds(question, predictor, cluster_path)


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
    """Files of a folder; of a folder that hetplan emitted only its plan."""
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    emitted = {
        path.parent
        for path in files
        if path.name == CHECK_FILE and path.with_name(PLAN_FILE) in files
    }
    return [
        path
        for path in files
        if path.name == PLAN_FILE or not any(folder in path.parents for folder in emitted)
    ]


def _read(path: Path, context: LaunchContext) -> _Part:
    if context.importer is None:
        row = launch_part(path, context.given)
        if isinstance(row, str):
            return _Part(skipped=row)
        if row is not None:
            return _Part(inputs=Inputs(launches=(row,)), kind=f"{row.text.trainer} launch")
    if path.suffix.lower() in TEXT_SUFFIXES:
        return _Part(skipped="is text or code, no measurements")
    sample_type = _SAMPLES.get(path.name)
    in_store = (path.parent / PROVENANCE_FILE).is_file()
    if sample_type is not None and in_store and context.importer is None:
        return _Part(inputs=sample_rows(path, sample_type), kind="samples")
    try:
        text = read_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        return _Part(skipped="is not UTF-8 text")
    if not text.strip():
        raise InputError(Fault(file=str(path), message="the file is empty"))
    if context.importer is not None:
        return _imported(path, text, context.importer)
    return _recognised(path, text)


def _recognised(path: Path, text: str) -> _Part:
    """A file by what it contains."""
    if text.startswith("#!"):
        return _Part(skipped="is text or code, no measurements")
    text = text.lstrip("\ufeff")
    first = text.split("\n", 1)[0].strip("\r")
    for sample_type in SAMPLE_TYPES:
        if first.startswith(",".join(header(sample_type).split(",")[:6])):
            return _Part(inputs=sample_rows(path, sample_type), kind="samples")
    if columns_of(first) >= COLUMNS:
        return _Part(inputs=Inputs(collectives=read_collectives(str(path), text)), kind="table")
    if first.startswith("# {") and '"schema": "hetplan.provenance/' in first:
        return _Part(skipped="holds results of measure.py; `hetplan profile merge` checks them")
    importer = importer_of(text)
    if text.lstrip(" \t\r\n").startswith(("{", "[")):
        own = _own_json(path, text, foreign=importer is not None)
        if own is not None:
            return own
    elif path.suffix.lower() in (".yaml", ".yml"):
        return _own(path, read_document(path)) or _Part(
            skipped="is YAML without a `schema` of hetplan; begin a cluster file with "
            f"`schema: {CLUSTER_SCHEMA}`, a model or job file alike"
        )
    if importer is not None:
        return _imported(path, text, importer.kind)
    if "," in first and not first.startswith(("{", "[")):
        return _Part(
            skipped=f"is a table whose columns hetplan check does not know: {first[:60]!a}"
        )
    return _Part(skipped="is of no kind that hetplan check knows; --kind names an importer for it")


def _own_json(path: Path, text: str, *, foreign: bool) -> _Part | None:
    """One of hetplan's own JSON files; an InputError where it is no JSON and no other tool's."""
    try:
        root = read_json(str(path), text)
    except InputError:
        if foreign:
            return None
        raise
    tree = json_nodes(text)
    return _own(path, Document(file=str(path), text=text, root=root, sha256="", tree=tree))


def _load_provenance(path: Path) -> Provenance:
    return decode(read_document(path), Provenance, schema=PROVENANCE_SCHEMA)


def _load_plan(path: Path) -> Planned:
    inputs = load_legal_plan(path).inputs
    return Planned(model=inputs.model, cluster=inputs.cluster)


_LOADERS: Mapping[str, Callable[[Path], Inputs | None]] = {
    "hetplan.model": lambda path: Inputs(models=((path, load_model(path)),)),
    "hetplan.cluster": lambda path: Inputs(clusters=((path, load_cluster(path)),)),
    "hetplan.job": lambda path: Inputs(jobs=((path, load_job(path)),)),
    "hetplan.plan": lambda path: Inputs(plans=((path, _load_plan(path)),)),
    "hetplan.devices": lambda path: _only_checked(
        decode(read_document(path), DevicesForm, schema=DEVICES_SCHEMA)
    ),
    "hetplan.predictor": lambda path: _only_checked(load_predictor(path)),
    "hetplan.provenance": lambda path: _only_checked(_load_provenance(path)),
}
"""How one of hetplan's own files is read, by the kind that its `schema` names."""


def _only_checked(_: object) -> None:
    """Nothing to judge further: reading the file was the check."""


def _own(path: Path, document: Document) -> _Part | None:
    """What one of hetplan's own files says; None where it is none."""
    schema, root = document.word(("schema",)) or "", document.root
    kind = schema.partition("/")[0] if schema.startswith("hetplan.") else ""
    if isinstance(root, dict) and {"model_type", "vocab_size"} <= root.keys() and not kind:
        kind = "hetplan.model"  # config.json of a Hugging Face model
    if not kind:
        return None
    if kind not in _LOADERS:
        return _Part(skipped=f"is {kind}, which has no rules")
    return _Part(inputs=_LOADERS[kind](path) or _NOTHING, kind=kind.removeprefix("hetplan."))


def _imported(path: Path, text: str, kind: str) -> _Part:
    """Another tool's output; an importer does not say lines: the whole file is the place."""
    imported = import_text(text, str(path), kind=kind, link="checked")
    place = Place(file=str(path), line=0)
    rows = tuple(
        SampleRow(place=place, population=str(path), sample=sample) for sample in imported.links
    )
    return _Part(inputs=Inputs(link_samples=rows), kind=kind)


def sample_rows(path: Path, sample_type: SampleType) -> Inputs:
    """The rows of a store's CSV, and where they were measured."""
    name = str(path.parent)
    population = Population(
        place=Place(file=str(path), line=0),
        name=name,
        provenance=_load_provenance(path.parent / PROVENANCE_FILE),
    )

    def rows(kind: type[Sample]) -> tuple[SampleRow[Sample], ...]:
        # A row of the store is one line, the first is line 2 (samples.row).
        return tuple(
            SampleRow(place=Place(file=str(path), line=line), population=name, sample=sample)
            for line, sample in enumerate(read_samples(path, kind), start=2)
        )

    populations = (population,)
    if sample_type is LayerSample:
        return Inputs(layer_samples=rows(LayerSample), populations=populations)
    if sample_type is OperatorSample:
        return Inputs(operator_samples=rows(OperatorSample), populations=populations)
    return Inputs(link_samples=rows(LinkSample), populations=populations)


# ---- tables of collectives


MAX_FAULTS = 20
"""Faults of one file that are reported; a file with more is of another kind, or broken."""
MAX_NUMBER = 1e30
"""A cell above it is no measurement: bytes, seconds and rates all stay far below."""
MICROSECOND = 1e-6
MAX_CELL = 1 << 20  # csv's own limit is 128 KiB; notes are long, a megabyte is a wrong file
COLUMNS = frozenset({"gpu", "op", "ranks", "size_bytes", "time_us", "busbw_GBps"})
"""Columns of a table of collectives: `time_us` microseconds, `busbw_GBps` 1e9 bytes per second."""


def columns_of(header: str) -> frozenset[str]:
    """The column names in the first line of a CSV file."""
    try:
        return frozenset(next(csv.reader([header]), []))
    except csv.Error:
        return frozenset()


def read_collectives(file: str, text: str) -> tuple[CollectiveRow, ...]:
    """The rows of a table with `COLUMNS`; an InputError lists the cells that are wrong."""
    faults: list[Fault] = []
    rows = [_collective(file, line, cells, faults) for line, cells in _lines(file, text, faults)]
    if faults:
        raise InputError(*faults[:MAX_FAULTS])
    return tuple(rows)


def _collective(
    file: str, line: int, cells: Mapping[str, str], faults: list[Fault]
) -> CollectiveRow:
    def number(column: str, unit: float) -> float | None:
        """A finite number times its unit; None where the cell is empty, or wrong (a fault)."""
        text = cells.get(column, "").strip()
        if not text or text.lower() in ("nan", "none"):
            return None
        try:
            value, wanted = float(text), "a finite number"
        except ValueError:
            value, wanted = math.nan, "a number"
        if math.isfinite(value) and abs(value) <= MAX_NUMBER:
            return value * unit
        message = f"found {text[:60]!a}; write {wanted}"
        faults.append(Fault(file=file, line=line, field=column, message=message))
        return None

    return CollectiveRow(
        place=Place(file=file, line=line),
        source=cells.get("source", "").strip(),
        device=cells.get("gpu", "").strip(),
        operation=cells.get("op", "").strip(),
        ranks=cells.get("ranks", "").strip(),
        scope=cells.get("scope", "").strip(),
        size_bytes=number("size_bytes", 1.0),
        seconds=number("time_us", MICROSECOND),
        bus_bytes_per_second=number("busbw_GBps", 1e9),
    )


def _lines(file: str, text: str, faults: list[Fault]) -> Iterator[tuple[int, Mapping[str, str]]]:
    """(line, cells by column) of every row as wide as the header; a fault for every other."""
    lines = csv.reader(io.StringIO(text, newline=""))
    previous = csv.field_size_limit(MAX_CELL)
    try:
        names = next(lines, [])
        for values in lines:
            if not values:
                continue
            if len(values) != len(names):
                message = f"found {len(values)} columns where the header has {len(names)}"
                faults.append(Fault(file=file, line=lines.line_num, message=message))
                continue
            yield lines.line_num, dict(zip(names, values, strict=True))
    except csv.Error as error:
        faults.append(Fault(file=file, line=lines.line_num, message=f"not CSV: {error}"))
    finally:
        csv.field_size_limit(previous)
