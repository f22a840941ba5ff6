"""What the rules judge: the inputs, and the layers of stores with both passes and their work.

The operations of a layer follow from its shape (causal attention at half, so never too many).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hetplan.lint.rows import Inputs, Place, SampleRow
from hetplan.model.spec import Architecture, LayerKind, plain_model
from hetplan.model.work import layer_work
from hetplan.profiling.samples import LayerSample, Phase

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
