"""What is known of a layer that was itself measured, at the size that is asked for?

Its measured median. What that is off by is what a second measurement of the shape would say, not
what a law is off by on sizes that it has not seen. Half-width of its 90 % interval:

    max(scatter, spread, min(repeat, law))

    scatter   of the row's single passes: log(p90 / p10) / 2, from an 80 % to a 90 % interval
    spread    |log| between the median that answers and every median of the shape: rows of several
              measurements (`--again`), and what `predict.layer_table` took off a first pass
    repeat    medians of one shape, measured again later, where rows do not say it themselves
    law       of the law's own interval: where it meets sizes that it has not seen within less, the
              medians that it was fitted to cannot differ by more

Only the very shape counts: device, precision, kind of layer, architecture, sizes, sequence length,
tp and microbatch size; of updates the number of parameters. Errors on sizes left out are of fits
that saw no row of the size, so none of this is in them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetplan.cluster.devices import CPU_KIND
from hetplan.errors import InputError
from hetplan.predict.layer_table import TRANSFORMER, table_key
from hetplan.profiling.samples import LayerSample

CPU_REPEAT_LOG_HALFWIDTH = 0.45
ACCELERATOR_REPEAT_LOG_HALFWIDTH = 0.10

# From the 10 % to 90 % range of a normal law to its 90 % interval: 1.645 / 1.282.
_TO_90 = 1.2835


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayer:
    """Medians of one layer at one tp, by microbatch size."""

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

    @property
    def key(self) -> tuple[str | int, ...]:
        """The layer that was measured; as `predict.layer_table.table_key`."""
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
    """Of the 90 % interval of the row's single passes; 0 where the row does not say it."""
    if not 0.0 < sample.p10_seconds <= sample.p90_seconds:
        return 0.0
    return _TO_90 * math.log(sample.p90_seconds / sample.p10_seconds) / 2.0


def exact_log_halfwidth(device: str, scatter: float, law_log_halfwidth: float) -> float:
    """Half-width of a measured shape, by its row's scatter and the half-width of its law."""
    return max(scatter, min(repeat_log_halfwidth(device), law_log_halfwidth))


def measured_layers(
    samples: Sequence[LayerSample], repaired: Sequence[LayerSample], law_log_halfwidth: float
) -> tuple[MeasuredLayer, ...]:
    """Every layer of the samples; `repaired` are the same ones, none slower than more work."""
    groups: dict[tuple[str | int, ...], dict[int, list[tuple[LayerSample, LayerSample]]]] = {}
    for pair in zip(samples, repaired, strict=True):
        sizes = groups.setdefault(table_key(pair[0]), {})
        sizes.setdefault(pair[0].microbatch_size, []).append(pair)
    found = []
    for key in sorted(groups, key=str):
        sizes = groups[key]
        times = [_together(sizes[size], law_log_halfwidth) for size in sorted(sizes)]
        first = next(iter(sizes.values()))[0][0]
        found.append(
            MeasuredLayer(
                architecture=first.architecture,
                hidden_size=first.hidden_size,
                ffn_hidden_size=first.ffn_hidden_size,
                num_attention_heads=first.num_attention_heads,
                num_kv_heads=first.num_kv_heads,
                head_dim=first.head_dim,
                vocab_size=0 if first.layer == TRANSFORMER else first.vocab_size,
                sequence_length=first.sequence_length,
                tp=first.tp,
                microbatch_sizes=tuple(sorted(sizes)),
                seconds=tuple(seconds for seconds, _ in times),
                log_halfwidths=tuple(halfwidth for _, halfwidth in times),
            )
        )
    return tuple(found)


def measured_updates(
    samples: Sequence[LayerSample], parameters: Sequence[int], law_log_halfwidth: float
) -> tuple[MeasuredUpdate, ...]:
    """Every number of parameters whose update was measured; `parameters` of each sample."""
    groups: dict[int, list[tuple[LayerSample, LayerSample]]] = {}
    for sample, count in zip(samples, parameters, strict=True):
        groups.setdefault(count, []).append((sample, sample))
    found = []
    for count in sorted(groups):
        seconds, halfwidth = _together(groups[count], law_log_halfwidth)
        found.append(MeasuredUpdate(parameters=count, seconds=seconds, log_halfwidth=halfwidth))
    return tuple(found)


def _together(
    rows: Sequence[tuple[LayerSample, LayerSample]], law_log_halfwidth: float
) -> tuple[float, float]:
    """Seconds and half-width of the rows of one shape, each as measured and as repaired."""
    seconds = statistics.median(repaired.median_seconds for _, repaired in rows)
    scatter = max(scatter_log_halfwidth(sample) for sample, _ in rows)
    spread = max(abs(math.log(sample.median_seconds / seconds)) for sample, _ in rows)
    device = rows[0][0].device
    return seconds, exact_log_halfwidth(device, max(scatter, spread), law_log_halfwidth)
