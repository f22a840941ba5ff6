"""What lint looks at: the rows of every file it knows, in base units, each with its place.

A reader (tables.py, documents.py, own_files.py, foreign.py) fills `Material`; a rule reads it
and knows nothing of formats. None stands for a cell that is empty.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.cluster.spec import Cluster
from hetplan.model.spec import ModelSpec
from hetplan.profiling.samples import LayerSample, LinkSample, OperatorSample, Provenance
from hetplan.trainers.rules import Launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a row stands."""

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
class RunRow:
    """One training run from end to end."""

    place: Place
    source: str
    model: str
    parameters: float | None
    layers: int | None
    hidden: int | None
    ffn_hidden: int | None
    heads: int | None
    kv_heads: int | None
    vocab: int | None
    sequence_length: int | None
    experts: int | None
    device: str
    devices: int | None
    devices_per_node: int | None
    tp: int
    pp: int
    cp: int
    dp: int
    microbatch_size: int | None
    global_batch_size: int | None
    precision: str
    recompute: str
    other: str
    flops_per_second: float | None
    """Per device, as published."""
    mfu: float | None
    step_seconds: float | None
    memory_bytes: float | None
    """Most that a device had allocated."""
    step_kind: str
    """`published...` or `derived...`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CityPair:
    """What a wide-area link between two places does."""

    place: Place
    ends: tuple[str, str]
    delay_seconds: float
    bandwidth_bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Polynomial:
    """Fitted bandwidth a*L^2 + b*L + c GB/s with L = log2(bytes / 1e6), and its ceiling."""

    place: Place
    path: tuple[str, ...]
    """Keys from the root of the file."""
    ends: tuple[str, str]
    """The devices of both ends; equal inside a node."""
    coefficients: tuple[float, float, float]
    most_bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """A few plain numbers that a file gives per device, such as overlap factors."""

    place: Place
    device: str
    figures: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """A pipeline that was run, as its measurers wrote it down."""

    place: Place
    model: str
    layers: tuple[tuple[int, ...], ...]
    """Layers of each stage."""
    tp: tuple[tuple[int, ...], ...]
    """Per stage the tp of each replica."""
    dp: tuple[int, ...]
    microbatch_size: int
    global_batch_size: int
    step_seconds: float | None
    reduction_seconds: float | None
    memory_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCase:
    """A plan that names how many layers each stage has, not which."""

    place: Place
    planner: str
    model_layers: int
    pp: int
    layers: tuple[int, ...]
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSize:
    """Parameters of one layer on one tensor-parallel rank."""

    place: Place
    model: str
    tp: int
    layer: int
    parameters: float


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
class Material:
    """Everything that was read of one or of many files."""

    layers: tuple[LayerRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    efficiencies: tuple[EfficiencyRow, ...] = ()
    runs: tuple[RunRow, ...] = ()
    cities: tuple[CityPair, ...] = ()
    polynomials: tuple[Polynomial, ...] = ()
    figures: tuple[DeviceFigures, ...] = ()
    plans: tuple[StagePlan, ...] = ()
    cases: tuple[PlanCase, ...] = ()
    sizes: tuple[LayerSize, ...] = ()
    layer_samples: tuple[LayerSampleRow, ...] = ()
    link_samples: tuple[LinkSampleRow, ...] = ()
    operator_samples: tuple[OperatorSampleRow, ...] = ()
    populations: tuple[Population, ...] = ()
    clusters: tuple[tuple[str, Cluster], ...] = ()
    """Clusters, each with its file."""
    launches: tuple[Launch, ...] = ()
    models: tuple[ModelSpec, ...] = ()
    """Models that the user named; they come before those that lint knows."""


def joined(parts: tuple[Material, ...]) -> Material:
    """The rows of all of them, in their order."""
    return Material(
        layers=tuple(row for part in parts for row in part.layers),
        collectives=tuple(row for part in parts for row in part.collectives),
        efficiencies=tuple(row for part in parts for row in part.efficiencies),
        runs=tuple(row for part in parts for row in part.runs),
        cities=tuple(row for part in parts for row in part.cities),
        polynomials=tuple(row for part in parts for row in part.polynomials),
        figures=tuple(row for part in parts for row in part.figures),
        plans=tuple(row for part in parts for row in part.plans),
        cases=tuple(row for part in parts for row in part.cases),
        sizes=tuple(row for part in parts for row in part.sizes),
        layer_samples=tuple(row for part in parts for row in part.layer_samples),
        link_samples=tuple(row for part in parts for row in part.link_samples),
        operator_samples=tuple(row for part in parts for row in part.operator_samples),
        populations=tuple(row for part in parts for row in part.populations),
        launches=tuple(row for part in parts for row in part.launches),
        models=tuple(row for part in parts for row in part.models),
    )
