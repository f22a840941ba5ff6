"""Rows as the rules need them: layer times of every source in one form, with their work.

The operations of a whole layer follow from its model (the user's, or one that lint knows; causal
attention at half, so never too many). Those of an operator follow from its weights: 2 * tokens *
weights. A table of operators does not say its sequence length: its smallest weight is the h x h
output projection, whose activations are tokens * h, which gives both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hetplan.lint.known import element_bytes, known_model, precision_of
from hetplan.lint.rows import Inputs, LayerRow, LayerSampleRow, Place
from hetplan.model.spec import Architecture, LayerKind, ModelSpec, plain_model
from hetplan.model.work import layer_work
from hetplan.profiling.samples import Phase

_SEQUENCE_LENGTH = 2048  # what Sailor profiled; its files do not say it
SENTINEL_SECONDS = 5.0
"""No layer or message takes so long; marks for failures are powers of ten above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Forward and backward of one layer or operator at one microbatch size and tp."""

    place: Place
    origin: str
    """What rows are compared within: the source of a table, a population of a store."""
    device: str
    model: str
    precision: str
    """`float32`, `float16`, `bfloat16`; empty: not said."""
    operation: str
    layer: int | None
    variant: str
    whole: bool
    """A whole layer, not an operator of one."""
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
    """Hidden size; 0: not known."""
    spread: float = 1.0
    """p90 over p10 of its runs, the larger of both passes; 1 where the source does not say."""

    @property
    def series(self) -> tuple[str, ...]:
        """What is the same for rows that differ in microbatch size and tp only."""
        return (
            self.origin,
            self.device,
            self.model,
            self.precision,
            self.operation,
            str(self.layer),
            self.variant,
        )


@dataclass(kw_only=True)
class Evidence:
    """What the rules judge."""

    inputs: Inputs

    @cached_property
    def timed(self) -> tuple[Timed, ...]:
        """Layer times of tables, profiles and stores; marks for failed measurements left out."""
        sequences = _sequences(self.inputs.layers)
        rows = [_of_row(row, self.inputs, sequences) for row in self.inputs.layers]
        return (*(row for row in rows if row is not None), *_of_samples(self.inputs))

    @cached_property
    def by_series(self) -> dict[tuple[str, ...], list[Timed]]:
        """Rows that differ in microbatch size and tp only."""
        series: dict[tuple[str, ...], list[Timed]] = {}
        for row in self.timed:
            series.setdefault(row.series, []).append(row)
        return series


def is_sentinel(seconds: float) -> bool:
    """Whether the time is a mark, not a time: a power of ten too long for a layer or message."""
    if seconds < SENTINEL_SECONDS:
        return False
    exponent = math.log10(seconds)
    return abs(exponent - round(exponent)) < 1e-9


def _sequences(rows: tuple[LayerRow, ...]) -> dict[tuple[str, ...], tuple[int, int]]:
    """(hidden size, sequence length) by table, device, model and precision, from operators."""
    smallest: dict[tuple[str, ...], LayerRow] = {}
    for row in rows:
        if row.tp != 1 or not row.weight_bytes or not row.activation_bytes:
            continue
        key = _table(row)
        if key not in smallest or row.weight_bytes < (smallest[key].weight_bytes or 0):
            smallest[key] = row
    found = {}
    for key, row in smallest.items():
        bytes_each = element_bytes(precision_of(row.precision), 0)
        if not bytes_each:
            continue
        elements = (row.weight_bytes or 0.0) / bytes_each
        # Three decimals of a MiB are 1 kB: the width is right to far less than one.
        hidden = round(math.sqrt(elements))
        if hidden < 1 or abs(hidden * hidden - elements) > 0.001 * elements:
            continue
        tokens = (row.activation_bytes or 0.0) / bytes_each / hidden
        found[key] = (hidden, round(tokens / row.microbatch_size))
    return found


def _table(row: LayerRow) -> tuple[str, ...]:
    return (row.place.file, row.source, row.device, row.model, row.precision)


def _of_row(
    row: LayerRow, inputs: Inputs, sequences: dict[tuple[str, ...], tuple[int, int]]
) -> Timed | None:
    if row.forward_seconds <= 0 or is_sentinel(row.forward_seconds):
        return None
    backward = row.backward_seconds
    if backward is not None and (backward < 0 or is_sentinel(backward)):
        return None
    whole = row.operation == "layer"
    lookup = "embed" in row.operation
    flops, width = 0.0, 0
    given = [each for _, each in inputs.models]
    model = known_model(row.model, given) if whole else None
    if model is not None:
        flops, width = _layer_flops(model, row), model.hidden_size
    elif not whole and not lookup and row.weight_bytes:
        width, sequence = sequences.get(_table(row), (0, 0))
        elements = row.weight_bytes / element_bytes(precision_of(row.precision), 4)
        flops = 2.0 * row.microbatch_size * sequence * elements
    return Timed(
        place=row.place,
        origin=f"{row.place.file}\0{row.source}",
        device=row.device,
        model=row.model,
        precision=precision_of(row.precision),
        operation=row.operation,
        layer=row.layer,
        variant=row.variant,
        whole=whole,
        weighted=bool(row.weight_bytes) if not whole else row.layer != 0,
        microbatch_size=row.microbatch_size,
        tp=row.tp,
        forward=row.forward_seconds,
        backward=backward,
        flops=flops,
        width=width,
    )


def _layer_flops(model: ModelSpec, row: LayerRow) -> float:
    """Operations of a transformer layer; 0 for the ends of the model, which files count apart."""
    if row.layer is None or not 1 <= row.layer <= model.num_layers:
        return 0.0
    if model.slicing_faults(row.tp):
        return 0.0
    work = layer_work(model, LayerKind.TRANSFORMER, row.microbatch_size, _SEQUENCE_LENGTH, row.tp)
    return work.flops


def _of_samples(inputs: Inputs) -> list[Timed]:
    """One entry per layer of a store with its forward and backward rows together."""
    together: dict[tuple[object, ...], list[LayerSampleRow]] = {}
    for row in inputs.layer_samples:
        sample = row.sample
        if sample.phase not in (Phase.FORWARD, Phase.BACKWARD):
            continue
        shape = tuple(value for value in sample.shape if value != sample.phase)
        together.setdefault((row.population, sample.device, *shape), []).append(row)
    return [_of_pair(rows) for rows in together.values()]


def _of_pair(rows: list[LayerSampleRow]) -> Timed:
    times: dict[str, float] = {}
    for row in rows:
        # The same measurement twice is kept twice: the faster one stands for both.
        seconds = row.sample.median_seconds
        times[row.sample.phase] = min(times.get(row.sample.phase, math.inf), seconds)
    sample = rows[0].sample
    precision = precision_of(sample.precision) or sample.precision
    return Timed(
        place=rows[0].place,
        origin=rows[0].population,
        device=sample.device,
        model=f"{sample.architecture} h{sample.hidden_size} f{sample.ffn_hidden_size} "
        f"a{sample.num_attention_heads}/{sample.num_kv_heads} s{sample.sequence_length} "
        f"v{sample.vocab_size if sample.layer != LayerKind.TRANSFORMER else 0}",
        precision=precision,
        operation=sample.layer,
        layer=None,
        variant=str(sample.copies),
        whole=True,
        weighted=sample.layer != LayerKind.EMBEDDING,
        microbatch_size=sample.microbatch_size,
        tp=sample.tp,
        forward=times.get(Phase.FORWARD),
        backward=times.get(Phase.BACKWARD),
        flops=_sample_flops(rows[0]),
        spread=max(row.sample.p90_seconds / row.sample.p10_seconds for row in rows),
        width=sample.hidden_size,
    )


def _sample_flops(row: LayerSampleRow) -> float:
    sample = row.sample
    known = {each.value: each for each in LayerKind}
    if sample.layer not in known or sample.architecture not in set(Architecture):
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
    kind = known[sample.layer]
    work = layer_work(model, kind, sample.microbatch_size, sample.sequence_length, sample.tp)
    return work.flops * sample.copies


def phases(row: Timed) -> Iterator[tuple[str, float, float]]:
    """(phase, seconds, operations); the backward pass is at least the input gradient."""
    if row.forward is not None:
        yield "forward", row.forward, row.flops
    if row.backward:
        yield "backward", row.backward, 2.0 * row.flops if row.whole else row.flops


def row_name(row: LayerRow | Timed) -> str:
    """Which row it is, in words."""
    layer = "" if row.layer is None else f" {row.layer}"
    model = f"{row.model} " if row.model else ""
    device = f" on {row.device}" if row.device else ""
    return (
        f"{model}{row.operation}{layer}{device}, microbatch size {row.microbatch_size}, tp {row.tp}"
    )
