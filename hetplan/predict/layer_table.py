"""Measured times of one layer over the microbatch size, and what they must look like.

Between two measured sizes time is linear in the size. More work takes no less time, so a time that
exceeds one of more work on the same layer by more than the two scatter (its 10 % point above the
other's 90 % point; a time without a spread by any amount) is a first pass's: warm-up, or a host
that was late. It is taken as the least of these (monotone repair):

    f(b, t) = min over b' >= b of f(b', t)
    where launches set the pace, f(2 b, t) < 1.5 f(b, t), also over t' in [2, t): a rank with a
    larger share of the work runs the same launches. tp 1 is another program and does not count.

What scatter explains stays as measured in the rows that a law is fitted to; a table takes the mean
of such times, the isotonic regression of its sizes (Barlow et al., Statistical Inference under
Order Restrictions, 1972).

Leaving out every inner size of 234 published layer times (Sailor's profiles: 7 GPU kinds, 3 models,
tp 1 to 8), the repaired table is 2.3 % off and a law over all sizes 4.4 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hetplan.errors import InputError
from hetplan.predict.regression import log_ratio
from hetplan.profiling.samples import LayerSample

# Twice the work in less than this times the time: halfway, on a log scale, between a device that is
# busy (2) and one that waits for launches (1) lies 1.41; the repair across tp stays on its side.
LAUNCH_BOUND = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTable:
    """Times of one layer shape, rising with the microbatch size."""

    architecture: str
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """0 of a transformer layer."""
    sequence_length: int
    tp: int
    microbatch_sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.seconds or len(self.seconds) != len(self.microbatch_sizes):
            raise InputError("a table has one time for each microbatch size: fit again")
        if any(a >= b for a, b in pairwise(self.microbatch_sizes)) or any(
            a > b for a, b in pairwise(self.seconds)
        ):
            raise InputError("a table does not rise with the microbatch size: fit again")

    @property
    def key(self) -> tuple[str | int, ...]:
        """The layer that was measured."""
        return (
            self.architecture,
            self.hidden_size,
            self.ffn_hidden_size,
            self.num_attention_heads,
            self.num_kv_heads,
            self.head_dim,
            self.vocab_size,
            self.sequence_length,
            self.tp,
        )

    def at(self, microbatch_size: int) -> float | None:
        """Seconds at this size; None outside the measured ones."""
        sizes, seconds = self.microbatch_sizes, self.seconds
        if not sizes[0] <= microbatch_size <= sizes[-1]:
            return None
        return _between(sizes, seconds, microbatch_size)


def _between(sizes: Sequence[int], seconds: Sequence[float], size: int) -> float:
    for at, right in enumerate(sizes):
        if size == right:
            return seconds[at]
        if size < right:
            left = sizes[at - 1]
            share = (size - left) / (right - left)
            return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])
    return seconds[-1]


TRANSFORMER = "transformer"  # `LayerKind.TRANSFORMER`; its times do not depend on a vocabulary


def table_key(sample: LayerSample) -> tuple[str | int, ...]:
    """The layer that a sample was taken of; everything but the microbatch size."""
    return (
        sample.architecture,
        sample.hidden_size,
        sample.ffn_hidden_size,
        sample.num_attention_heads,
        sample.num_kv_heads,
        sample.head_dim,
        0 if sample.layer == TRANSFORMER else sample.vocab_size,
        sample.sequence_length,
        sample.tp,
    )


def repaired(samples: Sequence[LayerSample]) -> tuple[LayerSample, ...]:
    """Samples of one phase of one kind of layer without times that exceed those of more work.

    Only what the samples' own scatter does not explain counts as exceeding.
    """
    layers: dict[tuple[str | int, ...], list[LayerSample]] = {}
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
    sample: LayerSample, layers: Mapping[tuple[str | int, ...], Sequence[LayerSample]]
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
    groups: dict[tuple[str | int, ...], list[LayerSample]] = {}
    for sample in samples:
        groups.setdefault(table_key(sample), []).append(sample)
    return tuple(_table(groups[key]) for key in sorted(groups, key=str))


def _table(samples: Sequence[LayerSample]) -> LayerTable:
    points = {sample.microbatch_size: sample.median_seconds for sample in samples}
    first = samples[0]
    return LayerTable(
        architecture=first.architecture,
        hidden_size=first.hidden_size,
        ffn_hidden_size=first.ffn_hidden_size,
        num_attention_heads=first.num_attention_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        vocab_size=0 if first.layer == TRANSFORMER else first.vocab_size,
        sequence_length=first.sequence_length,
        tp=first.tp,
        microbatch_sizes=tuple(sorted(points)),
        seconds=_rising([points[size] for size in sorted(points)]),
    )


def _rising(seconds: Sequence[float]) -> tuple[float, ...]:
    """The nearest times that do not fall: neighbours that do are both their mean."""
    blocks: list[tuple[float, int]] = []
    for value in seconds:
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            before, held = blocks.pop()
            mean, count = (before * held + mean * count) / (held + count), held + count
        blocks.append((mean, count))
    return tuple(mean for mean, count in blocks for _ in range(count))


def left_out_sizes(tables: Sequence[LayerTable]) -> dict[tuple[tuple[str | int, ...], int], float]:
    """log(measured / interpolated) of every inner size by the table without it."""
    errors = {}
    for table in tables:
        sizes, seconds = table.microbatch_sizes, table.seconds
        for at in range(1, len(sizes) - 1):
            rest = _between(
                (*sizes[:at], *sizes[at + 1 :]), (*seconds[:at], *seconds[at + 1 :]), sizes[at]
            )
            errors[table.key, sizes[at]] = log_ratio(seconds[at], rest)
    return errors
