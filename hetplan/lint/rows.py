"""What lint looks at: the rows of every file it knows, in base units, each with its place.

The readers (tables.py, reading.py) fill `Inputs`; a rule reads it and knows nothing of formats.
None is a cell that is empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.profiling.samples import LayerSample, LinkSample, OperatorSample, Provenance
from hetplan.trainers.rules import Launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """File and line of a row."""

    file: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """Time of one layer, or of one operator of a layer, at one microbatch size and tp."""

    place: Place
    source: str
    precision: str
    """As the file writes it."""
    device: str
    model: str
    operation: str
    """`layer` for a whole layer."""
    layer: int | None
    """Position in the model's row of layers; None: an operator."""
    microbatch_size: int
    tp: int
    variant: str
    """What else distinguishes rows, such as the algorithm of a product."""
    forward_seconds: float
    backward_seconds: float | None
    weight_bytes: float | None
    activation_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One collective or transfer among ranks."""

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
class EfficiencyRow:
    """Share of the peak rate that one operator of one shape reaches."""

    place: Place
    source: str
    device: str
    operation: str
    shape: str
    """`key=value` pairs, comma separated, as the file writes them."""
    efficiency: float
    peak_flops_per_second: float | None = None
    """The rate of which it is the share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSampleRow:
    """A row of a profile store, and the population it belongs to (its folder or file)."""

    place: Place
    population: str
    sample: LayerSample


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSampleRow:
    """A row of a profile store, and the population it belongs to."""

    place: Place
    population: str
    sample: LinkSample


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSampleRow:
    """A row of a profile store, and the population it belongs to."""

    place: Place
    population: str
    sample: OperatorSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """One population of a store."""

    place: Place
    name: str
    provenance: Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a plan file was made for."""

    model: ModelSpec
    cluster: Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Everything that was read of one or of many files; `merge` joins them."""

    layers: tuple[LayerRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    efficiencies: tuple[EfficiencyRow, ...] = ()
    layer_samples: tuple[LayerSampleRow, ...] = ()
    link_samples: tuple[LinkSampleRow, ...] = ()
    operator_samples: tuple[OperatorSampleRow, ...] = ()
    populations: tuple[Population, ...] = ()
    launches: tuple[Launch, ...] = ()
    models: tuple[tuple[Path, ModelSpec], ...] = ()
    clusters: tuple[tuple[Path, Cluster], ...] = ()
    jobs: tuple[tuple[Path, Job], ...] = ()
    plans: tuple[tuple[Path, Planned], ...] = ()


def merge(parts: Iterable[Inputs]) -> Inputs:
    """The rows of all of them, in their order."""
    every = list(parts)
    return Inputs(
        **{
            field.name: tuple(row for part in every for row in getattr(part, field.name))
            for field in fields(Inputs)
        }
    )
