"""Measured times of one layer over the microbatch size: repaired, tabulated, or as they are.

More work takes no less time, so a time that exceeds one of more work on the same layer by more than
the two scatter (its 10 % point above the other's 90 % point; a time without a spread by any amount)
is a first pass's: warm-up, or a host that was late. It is taken as the least of these (monotone
repair):

    f(b, t) = min over b' >= b of f(b', t)
    where launches set the pace, f(2 b, t) < 1.5 f(b, t), also over t' in [2, t): a rank with a
    larger share of the work runs the same launches. tp 1 is another program and does not count.

A law is fitted to the repaired times. A table takes their isotonic regression over the sizes
(Barlow et al., Statistical Inference under Order Restrictions, 1972) and is linear between two
sizes. Leaving out every inner size of 234 published layer times (Sailor's profiles: 7 GPU kinds, 3
models, tp 1 to 8), the table is 2.3 % off and a law over all sizes 4.4 %.

A layer at a size that was itself measured has its measured median, unless a law that was checked
is surer: one that meets unseen sizes within less than two measurements of one shape differ by. Such
a law evens out what single medians have of their own. (In the shipped CPU profile the layer of
hidden 64, tp 1, takes at microbatch 4 over 2.2 times as long as at 2, and 69 to 75 % as long as at
8: something else ran.) Half-width of a median's 90 % interval:

    max(scatter, spread, min(repeat, law))

    scatter   of the row's own passes, which also tells how busy the machine was: log(p90 / p10) / 2
    spread    |log| between the median that answers and every median of the shape: rows of several
              measurements (`--again`), and what the repair took off a first pass
    repeat    medians of one shape, measured again later, where rows do not say it themselves
    law       of the law's interval: nobody knows less of a shape for having measured it
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import TypeAlias

from hetplan.cluster.devices import CPU_KIND
from hetplan.errors import InputError
from hetplan.model.spec import LayerKind
from hetplan.predict.regression import interpolate, log_ratio
from hetplan.profiling.samples import LayerSample

# Twice the work in less than this times the time: halfway, on a log scale, between a device that is
# busy (2) and one that waits for launches (1) lies 1.41; the repair across tp stays on its side.
LAUNCH_BOUND = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerIdentity:
    """One layer at one sequence length and tp: everything but the microbatch size."""

    architecture: str
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """0 of a transformer layer, whose time does not depend on it."""
    sequence_length: int
    tp: int

    @property
    def key(self) -> LayerKey:
        """The same as a tuple, in the order of the fields."""
        return tuple(getattr(self, field.name) for field in fields(LayerIdentity))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTable(LayerIdentity):
    """Times of one layer shape, rising with the microbatch size."""

    microbatch_sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.seconds or len(self.seconds) != len(self.microbatch_sizes):
            raise InputError("a table has one time for each microbatch size: fit again")
        if any(a >= b for a, b in pairwise(self.microbatch_sizes)) or any(
            a > b for a, b in pairwise(self.seconds)
        ):
            raise InputError("a table does not rise with the microbatch size: fit again")

    def at(self, microbatch_size: int) -> float | None:
        """Seconds at this size; None outside the measured ones."""
        sizes, seconds = self.microbatch_sizes, self.seconds
        if not sizes[0] <= microbatch_size <= sizes[-1]:
            return None
        return interpolate(sizes, seconds, microbatch_size)


LayerKey: TypeAlias = tuple[str | int, ...]


def table_key(sample: LayerSample) -> LayerKey:
    """The `LayerIdentity.key` of the layer that a sample was taken of."""
    return _identity(sample).key


def _identity(sample: LayerSample) -> LayerIdentity:
    return LayerIdentity(
        architecture=sample.architecture,
        hidden_size=sample.hidden_size,
        ffn_hidden_size=sample.ffn_hidden_size,
        num_attention_heads=sample.num_attention_heads,
        num_kv_heads=sample.num_kv_heads,
        head_dim=sample.head_dim,
        vocab_size=0 if sample.layer == LayerKind.TRANSFORMER else sample.vocab_size,
        sequence_length=sample.sequence_length,
        tp=sample.tp,
    )


def repaired(samples: Sequence[LayerSample]) -> tuple[LayerSample, ...]:
    """Samples of one phase of one kind of layer without times that exceed those of more work.

    Only what the samples' own scatter does not explain counts as exceeding.
    """
    layers: dict[LayerKey, list[LayerSample]] = {}
    for sample in samples:
        layers.setdefault(table_key(sample), []).append(sample)
    result = []
    for sample in samples:
        limits = [
            other.median_seconds
            for other in _of_more_work(sample, layers)
            if other.p90_seconds < sample.p10_seconds
        ]
        seconds = min([sample.median_seconds, *limits])
        share = seconds / sample.median_seconds
        result.append(
            sample
            if share == 1.0
            else replace(
                sample,
                median_seconds=seconds,
                p10_seconds=sample.p10_seconds * share,
                p90_seconds=sample.p90_seconds * share,
            )
        )
    return tuple(result)


def _of_more_work(
    sample: LayerSample, layers: Mapping[LayerKey, Sequence[LayerSample]]
) -> Iterator[LayerSample]:
    """Samples that cannot take less time than this one."""
    key, size = table_key(sample), sample.microbatch_size
    yield from (other for other in layers[key] if other.microbatch_size >= size)
    twice = [o.median_seconds for o in layers[key] if o.microbatch_size == 2 * size]
    own = [o.median_seconds for o in layers[key] if o.microbatch_size == size]
    if sample.tp <= 2 or not twice or min(twice) >= LAUNCH_BOUND * min(own):
        return
    for other_key, others in layers.items():
        if other_key[:-1] == key[:-1]:
            for other in others:
                if 2 <= other.tp < sample.tp and other.microbatch_size >= size:
                    yield other


def layer_tables(samples: Sequence[LayerSample]) -> tuple[LayerTable, ...]:
    """One table per layer and tp, of repaired samples."""
    groups: dict[LayerKey, list[LayerSample]] = {}
    for sample in samples:
        groups.setdefault(table_key(sample), []).append(sample)
    return tuple(_table(groups[key]) for key in sorted(groups, key=str))


def _table(samples: Sequence[LayerSample]) -> LayerTable:
    points = {sample.microbatch_size: sample.median_seconds for sample in samples}
    return LayerTable(
        **asdict(_identity(samples[0])),
        microbatch_sizes=tuple(sorted(points)),
        seconds=_rising([points[size] for size in sorted(points)]),
    )


def _rising(seconds: Sequence[float]) -> tuple[float, ...]:
    """The nearest times that do not fall."""
    from scipy.optimize import isotonic_regression

    return tuple(float(value) for value in isotonic_regression(seconds).x)


def left_out_sizes(tables: Sequence[LayerTable]) -> dict[tuple[tuple[str | int, ...], int], float]:
    """log(measured / interpolated) of every inner size by the table without it."""
    errors = {}
    for table in tables:
        sizes, seconds = table.microbatch_sizes, table.seconds
        for at in range(1, len(sizes) - 1):
            rest = interpolate(
                (*sizes[:at], *sizes[at + 1 :]), (*seconds[:at], *seconds[at + 1 :]), sizes[at]
            )
            errors[table.key, sizes[at]] = log_ratio(seconds[at], rest)
    return errors


# `hetplan profile layers --device cpu` of gpt-tiny's layers, six stores, 12 s each, two cores of a
# virtual machine beside a run of tests, 2026-11-21: of 3418 pairs of medians of one shape half
# differ by more than .06 (log), 10 % by more than .39. With five busy processes beside it, half
# differ by more than .25: the rows' own scatter shows that, and counts where it is wider.
CPU_REPEAT_LOG_HALFWIDTH = 0.39

# Published steps of one plan, measured again on GH200 nodes (Sailor's artifact), differ by 5.0 % in
# the mean; times 2.06, the ratio of the 90 % quantile to the mean of a half-normal. Steps hold
# communication too; nobody publishes the same layer twice.
ACCELERATOR_REPEAT_LOG_HALFWIDTH = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayer(LayerIdentity):
    """Medians of one layer at one tp, by microbatch size."""

    microbatch_sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    log_halfwidths: tuple[float, ...]

    def __post_init__(self) -> None:
        count = len(self.microbatch_sizes)
        if not count or {len(self.seconds), len(self.log_halfwidths)} != {count}:
            raise InputError(
                "a measured layer has one time and one half-width for each microbatch size: "
                "fit again"
            )
        if any(a >= b for a, b in pairwise(self.microbatch_sizes)) or min(self.seconds) <= 0:
            raise InputError(
                "a measured layer has rising microbatch sizes and times above 0: fit again"
            )

    def at(self, microbatch_size: int) -> tuple[float, float] | None:
        """Seconds and half-width at this very size; None where it was not measured."""
        if microbatch_size not in self.microbatch_sizes:
            return None
        index = self.microbatch_sizes.index(microbatch_size)
        return self.seconds[index], self.log_halfwidths[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredUpdate:
    """Median of the update of this many parameters."""

    parameters: int
    seconds: float
    log_halfwidth: float


def repeat_log_halfwidth(device: str) -> float:
    """Within which 90 % of second measurements of a shape lie on devices of this sort."""
    if device == CPU_KIND:
        return CPU_REPEAT_LOG_HALFWIDTH
    return ACCELERATOR_REPEAT_LOG_HALFWIDTH


def scatter_log_halfwidth(sample: LayerSample) -> float:
    """How far 80 % of the row's own passes lie around their middle; 0 where it is not said."""
    if not 0.0 < sample.p10_seconds <= sample.p90_seconds:
        return 0.0
    return math.log(sample.p90_seconds / sample.p10_seconds) / 2.0


def answers_itself(own_log_halfwidth: float, law_log_halfwidth: float, *, checked: bool) -> bool:
    """Whether a measured shape answers for itself, beside a law with this interval.

    `checked`: whether left-out rows set the law's interval, not an assumption.
    """
    return not checked or own_log_halfwidth < law_log_halfwidth


def exact_log_halfwidth(device: str, scatter: float, law_log_halfwidth: float) -> float:
    """Half-width of a measured shape, by its row's scatter and the half-width of its law."""
    return max(scatter, min(repeat_log_halfwidth(device), law_log_halfwidth))


def measured_layers(
    samples: Sequence[LayerSample],
    repaired: Sequence[LayerSample],
    law_log_halfwidth: float,
    *,
    checked: bool,
) -> tuple[MeasuredLayer, ...]:
    """Layers of the samples, at the sizes that answer for themselves.

    `repaired` are the same samples, none slower than one of more work.
    """
    groups: dict[LayerKey, dict[int, list[tuple[LayerSample, LayerSample]]]] = {}
    for pair in zip(samples, repaired, strict=True):
        sizes = groups.setdefault(table_key(pair[0]), {})
        sizes.setdefault(pair[0].microbatch_size, []).append(pair)
    layers = []
    for key in sorted(groups, key=str):
        rows = groups[key]
        times = _answering(rows, law_log_halfwidth, checked=checked)
        if times:
            at, seconds, halfwidths = zip(*times, strict=True)
            layers.append(
                MeasuredLayer(
                    **asdict(_identity(next(iter(rows.values()))[0][0])),
                    microbatch_sizes=at,
                    seconds=seconds,
                    log_halfwidths=halfwidths,
                )
            )
    return tuple(layers)


def measured_updates(
    samples: Sequence[LayerSample],
    parameters: Sequence[int],
    law_log_halfwidth: float,
    *,
    checked: bool,
) -> tuple[MeasuredUpdate, ...]:
    """Updates that answer for themselves, by their `parameters`, one for each sample."""
    groups: dict[int, list[tuple[LayerSample, LayerSample]]] = {}
    for sample, count in zip(samples, parameters, strict=True):
        groups.setdefault(count, []).append((sample, sample))
    return tuple(
        MeasuredUpdate(parameters=count, seconds=seconds, log_halfwidth=halfwidth)
        for count, seconds, halfwidth in _answering(groups, law_log_halfwidth, checked=checked)
    )


def _answering(
    groups: Mapping[int, Sequence[tuple[LayerSample, LayerSample]]],
    law_log_halfwidth: float,
    *,
    checked: bool,
) -> list[tuple[int, float, float]]:
    """(size, seconds, half-width) of the sizes that answer for themselves, rising.

    The rows of each size are given as measured and as repaired.
    """
    times = []
    for size, rows in sorted(groups.items()):
        seconds = statistics.median(repaired.median_seconds for _, repaired in rows)
        scatter = max(scatter_log_halfwidth(sample) for sample, _ in rows)
        spread = max(abs(math.log(sample.median_seconds / seconds)) for sample, _ in rows)
        device = rows[0][0].device
        halfwidth = exact_log_halfwidth(device, max(scatter, spread), law_log_halfwidth)
        if answers_itself(halfwidth, law_log_halfwidth, checked=checked):
            times.append((size, seconds, halfwidth))
    return times
