"""The stand-alone measure.py for a cluster and a job, and what comes back from it.

`write_script` joins the modules that run on Python 3.8 and torch 2.1 alone into one file with the
task in it. `merge_files` adds its CSV files to a store: rows that are torn or wrong are refused,
named with their line, and the rest is kept. Rows go to the population of the circumstances that
they were measured under, so other clocks or drivers do not mix; a row that the store has already is
not added again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetplan.cluster.spec import Cluster
from hetplan.errors import Fault, InputError
from hetplan.files.reading import Document, decode, read_bytes
from hetplan.files.writing import write_atomically
from hetplan.job.kernels import job_on
from hetplan.job.trainer import trainer_settings
from hetplan.model.spec import ModelSpec
from hetplan.profiling.grid import ShapeOptions
from hetplan.profiling.measure_layers import model_columns, unit_columns
from hetplan.profiling.measure_operators import operator_units
from hetplan.profiling.needs import cluster_kinds, kind_units, link_needs
from hetplan.profiling.samples import (
    AnySample,
    LayerSample,
    LinkSample,
    OperatorSample,
    Provenance,
    SampleType,
    header,
    parse_row,
)
from hetplan.profiling.store import (
    SCHEMA,
    LayerWriter,
    LinkWriter,
    OperatorWriter,
    control_faults,
)
from hetplan.version import __version__

MODULES = (
    "../files/locks", "timing", "backends", "bodies", "work", "measure_links", "measure",
)  # fmt: skip
"""Files beside this one, joined in this order; they import the standard library, torch, each other
and two errors."""
_ERRORS = '''class InputError(Exception):
    """Something that the user can change."""


class ProfileError(Exception):
    """A measurement failed."""
'''
_HETPLAN_IMPORT = re.compile(r"^from hetplan\.[\w.]+ import (\([^)]*\)|.*)\n", re.MULTILINE)


def write_script(path: Path, cluster: Cluster, shapes: ShapeOptions) -> dict[str, Any]:
    """Write measure.py for the device kinds and links of this cluster; its task."""
    task = measuring_task(cluster, shapes)
    write_atomically(path, script_text(task))
    return task


def script_text(task: dict[str, Any]) -> str:
    """The program with this task."""
    folder = Path(__file__).parent
    sources = {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in MODULES}
    first = sources["measure"]
    docstring, _, _ = first.partition("from __future__")
    parts = [docstring + "from __future__ import annotations\n", _ERRORS]
    for name, source in sources.items():
        code = source.partition("from __future__ import annotations\n")[2]
        if name == "measure":
            line = f"TASK: dict[str, Any] = json.loads({json.dumps(task)!r})\n"
            code = code.replace("TASK: dict[str, Any] = {}\n", line)
        code = _HETPLAN_IMPORT.sub("", code).strip("\n")
        parts.append(f"\n# ---- {Path(name).name}\n{code}\n")
    return "\n".join(parts)


def measuring_task(cluster: Cluster, shapes: ShapeOptions) -> dict[str, Any]:
    """What measure.py is to measure: `TASK` in `measure`."""
    models: dict[ModelSpec, int] = {}
    kinds = {}
    for kind, device, most_tp in cluster_kinds(cluster):
        work = kind_units(shapes, kind, most_tp)
        layers = [
            {"model": models.setdefault(unit.point.model, len(models)), **unit_columns(unit)}
            for unit in work
        ]
        job = shapes.job
        if job is not None and device is not None:
            job = job_on(device, job)
        kernels = None if job is None else trainer_settings(job).kernels
        points = tuple(dict.fromkeys(unit.point for unit in work))
        operators = [
            {
                "operator": unit.operator.operator.value,
                "batch": unit.operator.batch,
                "m": unit.operator.m,
                "n": unit.operator.n,
                "k": unit.operator.k,
                "float32_copy": unit.operator.float32_copy,
                "precision": unit.precision.value,
                "architecture": unit.architecture.value,
            }
            for unit in operator_units(points, kernels)
        ]
        kinds[kind] = {"layers": layers, "operators": operators}
    links = {
        need.place.name: {
            "host_staged": need.place.is_host_staged,
            "cases": [[case.operation, case.group_size, case.message_bytes] for case in need.cases],
        }
        for need in link_needs(shapes, cluster, ())
    }
    return {
        "version": __version__,
        "models": [model_columns(model) for model in models],
        "kinds": kinds,
        "links": links,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """What a merge did."""

    files: int
    added: int
    """Samples that the store did not have."""
    held: int
    """Samples that it had already."""
    refused: tuple[Fault, ...]
    """Rows that were not used."""
    failures: tuple[str, ...]
    """What a device could not measure, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Results:
    """What one file holds."""

    provenance: Provenance
    samples: tuple[AnySample, ...]
    refused: tuple[Fault, ...]
    failures: tuple[str, ...]


def merge_files(paths: Sequence[Path], store: Path) -> MergeReport:
    """Add the samples of these files (or of all CSV files in these folders) to the store.

    An InputError, with nothing added, where a file is not of measure.py.
    """
    files: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise InputError(f"{path}: there is no such file or folder; name what came back")
        files |= dict.fromkeys(sorted(path.rglob("*.csv")) if path.is_dir() else [path])
    if not files:
        raise InputError(f"{paths[0]}: no CSV files there; name the files that came back")
    results = [_read_results(path) for path in files]
    added = sum(_add(each, store) for each in results)
    total = sum(len(each.samples) for each in results)
    return MergeReport(
        files=len(files),
        added=added,
        held=total - added,
        refused=tuple(fault for each in results for fault in each.refused),
        failures=tuple(dict.fromkeys(text for each in results for text in each.failures)),
    )


def _add(results: _Results, store: Path) -> int:
    provenance, samples = results.provenance, results.samples
    layers = [sample for sample in samples if isinstance(sample, LayerSample)]
    operators = [sample for sample in samples if isinstance(sample, OperatorSample)]
    links: dict[str, list[LinkSample]] = {}
    for sample in samples:
        if isinstance(sample, LinkSample):
            links.setdefault(sample.link, []).append(sample)
    added = LayerWriter(store, provenance).add_new(layers) if layers else 0
    added += OperatorWriter(store, provenance).add_new(operators) if operators else 0
    return added + sum(
        LinkWriter(store, name, provenance).add_new(rows) for name, rows in links.items()
    )


def _read_results(path: Path) -> _Results:
    data = read_bytes(path)
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    provenance = _read_provenance(path, lines[0])
    names = lines[1].split(",") if len(lines) > 1 else []
    sample_type = next((each for each in _SAMPLE_TYPES if header(each).split(",") == names), None)
    if sample_type is None:
        message = "is no header of samples; use a newer hetplan, or measure again"
        raise InputError(Fault(file=str(path), line=2, message=message))
    samples: list[AnySample] = []
    refused: list[Fault] = []
    failures: list[str] = []
    if lines[-1]:
        message = "the last line is torn: its measurement was not finished"
        refused.append(Fault(file=str(path), line=len(lines), message=message))
    for number, line in enumerate(lines[2:-1], start=3):
        if line.startswith("# failed "):
            failures.append(f"{provenance.device}: {printable(line[9:300])}")
        elif line and not line.startswith("# "):
            sample: AnySample | None
            sample, faults = parse_row(path, number, names, line, sample_type)  # type: ignore[type-var]
            device = getattr(sample, "device", provenance.device)
            if sample is not None and device != provenance.device:
                message = f"found {device[:60]!a}; the file is of {provenance.device}"
                faults = [Fault(file=str(path), line=number, field="device", message=message)]
            elif sample is not None:
                samples.append(sample)
            refused += faults
    return _Results(
        provenance=provenance,
        samples=tuple(dict.fromkeys(samples)),
        refused=tuple(refused),
        failures=tuple(failures),
    )


_SAMPLE_TYPES: tuple[SampleType, ...] = (LayerSample, OperatorSample, LinkSample)


def _read_provenance(path: Path, line: str) -> Provenance:
    try:
        root = json.loads(line.removeprefix("# "))
    except (ValueError, RecursionError):
        root = None
    if not isinstance(root, dict) or not line.startswith("# "):
        message = "is no provenance; name a file that measure.py wrote"
        raise InputError(Fault(file=str(path), line=1, message=message))
    document = Document(file=str(path), text=line.removeprefix("# "), root=root, sha256="")
    provenance = decode(document, Provenance, schema=SCHEMA)
    if faults := control_faults(path, provenance, line=1):
        raise InputError(*faults)
    return provenance


def printable(text: str) -> str:
    """The text without characters that a terminal obeys."""
    return "".join(each if each.isprintable() else "?" for each in text)
