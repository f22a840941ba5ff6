"""What the rules judge: rows and files in base units, with their places, and what they imply.

The reader (reading.py) fills `Inputs`; rules know nothing of file forms. `Evidence` adds the layers
of stores with both passes and their work: the operations of a layer follow from its shape (causal
attention at half, so never too many). `known_device` has the ceilings of devices that a file of
measurements only names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Generic, TypeVar

from hetplan.cluster.catalogue import kind_called, load_catalogue
from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job
from hetplan.model.spec import Architecture, LayerKind, ModelSpec, plain_model
from hetplan.model.work import layer_work
from hetplan.profiling.samples import LayerSample, LinkSample, OperatorSample, Phase, Provenance
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


# ---- ceilings of devices


DATA_CENTRE_MARGIN = 1.03  # peaks are quoted at the highest clock; 3 % for rounded times
DESK_MARGIN = 1.25  # peaks are quoted at the boost clock, which such cards exceed (RTX 3090: 1.24x)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDevice:
    """Ceilings of a device; 0 where a figure is not known."""

    name: str
    float32_flops_per_second: float
    tensor_float32_flops_per_second: float
    half_flops_per_second: float
    """float16 or bfloat16 with float32 accumulation; dense, as all rates here."""
    link_bytes_per_second: float
    """All direct links to other devices together, one direction."""
    margin: float
    """How much above its quoted peak a rate may be."""

    def peak(self, precision: str) -> float:
        """Operations per second that nothing of this precision exceeds; 0: not known."""
        if precision == "float32":
            return self.float32_flops_per_second * self.margin
        known = precision in ("float16", "bfloat16")
        return self.half_flops_per_second * self.margin if known else 0.0


@lru_cache(maxsize=256)
def known_device(label: str) -> KnownDevice | None:
    """The device of the catalogue that a file's label means; None where it means none.

    The label is a kind, a driver's name, or some of a kind's words, as in `A100-40`, `a100_pcie` or
    `RTX-3090`; of several kinds with these words, the SXM one and the smallest memory is meant. A
    label of several devices (`RTX-3090+Titan-RTX`) is none.
    """
    kinds = _catalogue()
    called = label.lower() if label.lower() in kinds else kind_called(label, kinds.values())
    words = re.findall(r"[a-z0-9]+", label.lower().partition("(")[0])
    if not called and words and "+" not in label:
        fitting = [kind for kind in kinds if _has_words(kind, words)]
        called = min(fitting, key=lambda kind: ("sxm" not in kind, len(kind), kind), default="")
    return _of_kind(kinds[called]) if called else None


def _has_words(kind: str, words: Sequence[str]) -> bool:
    """Whether every word is one of the kind's; `40` also means `40gb`, `gh` also `gh200`."""
    parts = kind.split("-")
    parts += [one + two for one, two in pairwise(parts)]  # `2080ti`
    return all(
        any(
            part == word or (part.startswith(word) and (word.isdecimal() or word.isalpha()))
            for part in parts
        )
        for word in words
    )


@lru_cache(maxsize=1)
def _catalogue() -> dict[str, DeviceKind]:
    return {kind.kind: kind for kind in load_catalogue()}


def _of_kind(kind: DeviceKind) -> KnownDevice:
    rates = dict(kind.peak_flops_per_second)
    link = kind.scale_up.bandwidth_bytes_per_second if kind.scale_up is not None else 0.0
    return KnownDevice(
        name=kind.kind,
        float32_flops_per_second=rates.get("float32", 0.0),
        tensor_float32_flops_per_second=rates.get("tf32", 0.0),
        half_flops_per_second=max(rates.get("float16", 0.0), rates.get("bfloat16", 0.0)),
        link_bytes_per_second=link,
        margin=DESK_MARGIN if "-rtx-" in kind.kind else DATA_CENTRE_MARGIN,
    )


def fastest_link() -> float:
    """Bytes per second, one direction, of the fastest links of any catalogue device."""
    fabrics = [kind.scale_up for kind in _catalogue().values()]
    return max(fabric.bandwidth_bytes_per_second for fabric in fabrics if fabric is not None)


# ---- layers with both passes


SENTINEL_SECONDS = 5.0
"""No layer or message takes so long; marks for failures are powers of ten above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Forward and backward of one layer at one microbatch size and tp."""

    place: Place
    population: str
    device: str
    model: str
    """Architecture and sizes, in words."""
    precision: str
    layer: str
    """A `LayerKind`."""
    copies: int
    weighted: bool
    """Its time is that of products with weights."""
    microbatch_size: int
    tp: int
    forward: float | None
    """Seconds, as backward; None: not measured."""
    backward: float | None
    flops: float
    """Operations of the forward pass on one rank; 0: not known."""
    width: int
    """Hidden size."""
    spread: float
    """p90 over p10 of its runs, the larger of both passes."""

    @property
    def series(self) -> tuple[str | int, ...]:
        """Equal for rows that differ in microbatch size and tp only."""
        return (
            self.population, self.device, self.model, self.precision, self.layer, self.copies,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """The row in words."""
        return (
            f"{self.model} {self.layer} on {self.device}, microbatch size {self.microbatch_size}, "
            f"tp {self.tp}"
        )

    def phases(self) -> Iterator[tuple[str, float, float]]:
        """(phase, seconds, operations) of the measured passes."""
        if self.forward is not None:
            yield "forward", self.forward, self.flops
        if self.backward:
            yield "backward", self.backward, 2.0 * self.flops


@dataclass(kw_only=True)
class Evidence:
    """The inputs, and what several rules derive from them."""

    inputs: Inputs

    @cached_property
    def timed(self) -> tuple[Timed, ...]:
        """One entry per layer of a store, its forward and backward rows together."""
        layers: dict[tuple[object, ...], list[SampleRow[LayerSample]]] = {}
        for row in self.inputs.layer_samples:
            sample = row.sample
            if sample.phase in (Phase.FORWARD, Phase.BACKWARD):
                shape = tuple(value for value in sample.shape if value != sample.phase)
                layers.setdefault((row.population, sample.device, *shape), []).append(row)
        return tuple(map(_timed, layers.values()))

    @cached_property
    def by_series(self) -> dict[tuple[str | int, ...], list[Timed]]:
        """Rows that differ in microbatch size and tp only."""
        series: dict[tuple[str | int, ...], list[Timed]] = {}
        for row in self.timed:
            series.setdefault(row.series, []).append(row)
        return series


def is_sentinel(seconds: float) -> bool:
    """Whether the time is a mark, not a time: a power of ten too long for a layer or message."""
    if seconds < SENTINEL_SECONDS:
        return False
    exponent = math.log10(seconds)
    return abs(exponent - round(exponent)) < 1e-9


def _timed(rows: list[SampleRow[LayerSample]]) -> Timed:
    times: dict[str, float] = {}
    for row in rows:
        # The same measurement twice is kept twice: the faster one stands for both.
        seconds = row.sample.median_seconds
        times[row.sample.phase] = min(times.get(row.sample.phase, math.inf), seconds)
    sample = rows[0].sample
    return Timed(
        place=rows[0].place,
        population=rows[0].population,
        device=sample.device,
        model=f"{sample.architecture} h{sample.hidden_size} f{sample.ffn_hidden_size} "
        f"a{sample.num_attention_heads}/{sample.num_kv_heads} s{sample.sequence_length} "
        f"v{sample.vocab_size if sample.layer != LayerKind.TRANSFORMER else 0}",
        precision=sample.precision,
        layer=sample.layer,
        copies=sample.copies,
        weighted=sample.layer != LayerKind.EMBEDDING,
        microbatch_size=sample.microbatch_size,
        tp=sample.tp,
        forward=times.get(Phase.FORWARD),
        backward=times.get(Phase.BACKWARD),
        flops=_flops(sample),
        width=sample.hidden_size,
        spread=max(row.sample.p90_seconds / row.sample.p10_seconds for row in rows),
    )


def _flops(sample: LayerSample) -> float:
    if sample.layer not in set(LayerKind) or sample.architecture not in set(Architecture):
        return 0.0
    model = plain_model(
        name="sample",
        architecture=Architecture(sample.architecture),
        num_layers=1,
        hidden_size=sample.hidden_size,
        ffn_hidden_size=max(1, sample.ffn_hidden_size),
        num_attention_heads=max(1, sample.num_attention_heads),
        num_kv_heads=max(1, sample.num_kv_heads),
        head_dim=max(1, sample.head_dim),
        vocab_size=max(1, sample.vocab_size),
        max_sequence_length=sample.sequence_length,
    )
    if model.slicing_faults(sample.tp):
        return 0.0
    kind = LayerKind(sample.layer)
    work = layer_work(model, kind, sample.microbatch_size, sample.sequence_length, sample.tp)
    return work.flops * sample.copies
