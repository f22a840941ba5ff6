"""The rows and files that rules judge, in base units, with file and line.

The readers (tables.py, reading.py) fill `Inputs`; rules know nothing of file forms.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Generic, TypeVar

from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.profiling.samples import LayerSample, LinkSample, OperatorSample, Provenance
from hetplan.trainers.rules import Launch

Sample = TypeVar("Sample", LayerSample, LinkSample, OperatorSample)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """File and line of a row."""

    file: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """Time of one collective or transfer among ranks; None is an empty cell."""

    place: Place
    source: str
    device: str
    operation: str
    ranks: str
    scope: str
    size_bytes: float | None
    seconds: float | None
    bus_bytes_per_second: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow(Generic[Sample]):
    """A row of a profile store, and the population (its folder) or file that it belongs to."""

    place: Place
    population: str
    sample: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """One population of a store."""

    place: Place
    name: str
    provenance: Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Model and cluster of a plan file."""

    model: ModelSpec
    cluster: Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """All rows and files that were read; `merge` joins those of several files."""

    collectives: tuple[CollectiveRow, ...] = ()
    layer_samples: tuple[SampleRow[LayerSample], ...] = ()
    link_samples: tuple[SampleRow[LinkSample], ...] = ()
    operator_samples: tuple[SampleRow[OperatorSample], ...] = ()
    populations: tuple[Population, ...] = ()
    launches: tuple[Launch, ...] = ()
    models: tuple[tuple[Path, ModelSpec], ...] = ()
    clusters: tuple[tuple[Path, Cluster], ...] = ()
    jobs: tuple[tuple[Path, Job], ...] = ()
    plans: tuple[tuple[Path, Planned], ...] = ()


def merge(parts: Iterable[Inputs]) -> Inputs:
    """The inputs of several files as one."""
    every = list(parts)
    return Inputs(
        **{
            field.name: tuple(row for part in every for row in getattr(part, field.name))
            for field in fields(Inputs)
        }
    )
