"""hetplan's own files: which loader reads a file, by its `schema` key, and what comes of it.

What the loaders find wrong is an InputError with every fault. Where a model, a cluster and a job
were all read, `against_each_other` checks them together, as a plan would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from hetplan.cluster.device_form import DEVICES_SCHEMA, DevicesForm
from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.errors import Fault
from hetplan.files.reading import Document, decode, read_document
from hetplan.job.check import check_job_against
from hetplan.job.load import load_job
from hetplan.job.spec import Job
from hetplan.lint.rows import (
    LayerSampleRow,
    LinkSampleRow,
    Material,
    OperatorSampleRow,
    Place,
    Population,
)
from hetplan.model.load import load_model
from hetplan.model.spec import ModelSpec
from hetplan.predict.fit import load_predictor
from hetplan.profiling.samples import (
    LayerSample,
    LinkSample,
    OperatorSample,
    Provenance,
    SampleType,
    read_samples,
)
from hetplan.profiling.store import PROVENANCE_FILE
from hetplan.profiling.store import SCHEMA as PROVENANCE_SCHEMA

Loader: TypeAlias = Callable[[Path], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Models, clusters and jobs among the files, with the file of each."""

    models: tuple[tuple[Path, ModelSpec], ...] = ()
    clusters: tuple[tuple[Path, Cluster], ...] = ()
    jobs: tuple[tuple[Path, Job], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a plan file was made for."""

    model: ModelSpec
    cluster: Cluster


def _load_devices(path: Path) -> DevicesForm:
    return decode(read_document(path), DevicesForm, schema=DEVICES_SCHEMA)


def _load_provenance(path: Path) -> Provenance:
    return decode(read_document(path), Provenance, schema=PROVENANCE_SCHEMA)


LOADERS: Mapping[str, Loader] = {
    "hetplan.model": load_model,
    "hetplan.cluster": load_cluster,
    "hetplan.job": load_job,
    "hetplan.devices": _load_devices,
    "hetplan.predictor": load_predictor,
    "hetplan.provenance": _load_provenance,
}
"""Loader by kind of schema; the command line adds those of the rooms above this one."""


def kind_of(document: Document) -> str:
    """The kind of hetplan's file, as in `hetplan.job`; empty: none of hetplan's."""
    schema = document.word(("schema",))
    if schema is not None and schema.startswith("hetplan."):
        return schema.partition("/")[0]
    root = document.root
    if isinstance(root, dict) and "model_type" in root and "vocab_size" in root:
        return "hetplan.model"  # config.json of a Hugging Face model
    return ""


def sample_rows(path: Path, sample_type: SampleType) -> Material:
    """The rows of a store's CSV, and where they were measured."""
    folder = path.parent
    population = Population(
        place=Place(file=str(path), line=0),
        name=str(folder),
        provenance=_load_provenance(folder / PROVENANCE_FILE),
    )
    # A row of the store is one line, the first stands on line 2 (samples_csv.row).
    if sample_type is LayerSample:
        layers = read_samples(path, LayerSample)
        rows = tuple(
            LayerSampleRow(
                place=Place(file=str(path), line=number), population=str(folder), sample=sample
            )
            for number, sample in enumerate(layers, start=2)
        )
        return Material(layer_samples=rows, populations=(population,))
    if sample_type is OperatorSample:
        operators = read_samples(path, OperatorSample)
        operator_rows = tuple(
            OperatorSampleRow(
                place=Place(file=str(path), line=number), population=str(folder), sample=sample
            )
            for number, sample in enumerate(operators, start=2)
        )
        return Material(operator_samples=operator_rows, populations=(population,))
    links = read_samples(path, LinkSample)
    link_rows = tuple(
        LinkSampleRow(
            place=Place(file=str(path), line=number), population=str(folder), sample=sample
        )
        for number, sample in enumerate(links, start=2)
    )
    return Material(link_samples=link_rows, populations=(population,))


def against_each_other(inputs: Inputs) -> Iterable[Fault]:
    """Faults of every job against every model and cluster that were read with it."""
    for job_path, job in inputs.jobs:
        for _, model in inputs.models:
            for _, cluster in inputs.clusters:
                yield from check_job_against(job, model, cluster, read_document(job_path))
