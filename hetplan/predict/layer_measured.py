"""What is known of a layer that was itself measured, at the size that is asked for?

Its measured median, unless a law that was checked knows better: one that meets sizes that it has
not seen within less than two measurements of one shape differ by. It evens out what single medians
have of their own. (In the shipped CPU profile the layer of hidden 64, tp 1, takes at microbatch 4
over 2.2 times as long as at 2, and 69 to 75 % as long as at 8: something else ran.) What a median
is off by is what a second measurement would say, not what a law is off by on unseen sizes.
Half-width of its 90 % interval:

    max(scatter, spread, min(repeat, law))

    scatter   of the row's own passes, which also tells how busy the machine was: log(p90 / p10) / 2
    spread    |log| between the median that answers and every median of the shape: rows of several
              measurements (`--again`), and what `predict.layer_table` took off a first pass
    repeat    medians of one shape, measured again later, where rows do not say it themselves
    law       of the law's interval: nobody knows less of a shape for having measured it

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

# `hetplan profile --device cpu` of gpt-tiny's layers into six stores, 12 s each, on two cores of a
# virtual machine beside a run of tests, 2026-11-21: of 3418 pairs of medians of one shape half
# differ by more than .06 (log), 10 % by more than .39. With five busy processes beside it, half
# differ by more than .25: the rows' own scatter shows that, and counts where it is wider.
CPU_REPEAT_LOG_HALFWIDTH = 0.39

# Published steps of one plan, measured again on GH200 nodes (Sailor's artifact), differ by 5.0 % in
# the mean; times 2.06, the ratio of the 90 % quantile to the mean of a half-normal. Steps hold
# communication too; nobody publishes the same layer twice.
ACCELERATOR_REPEAT_LOG_HALFWIDTH = 0.10


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
    groups: dict[tuple[str | int, ...], dict[int, list[tuple[LayerSample, LayerSample]]]] = {}
    for pair in zip(samples, repaired, strict=True):
        sizes = groups.setdefault(table_key(pair[0]), {})
        sizes.setdefault(pair[0].microbatch_size, []).append(pair)
    found = []
    for key in sorted(groups, key=str):
        rows = groups[key]
        times = {size: _together(rows[size], law_log_halfwidth) for size in sorted(rows)}
        times = {
            size: each
            for size, each in times.items()
            if answers_itself(each[1], law_log_halfwidth, checked=checked)
        }
        if not times:
            continue
        first = next(iter(rows.values()))[0][0]
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
                microbatch_sizes=tuple(times),
                seconds=tuple(seconds for seconds, _ in times.values()),
                log_halfwidths=tuple(halfwidth for _, halfwidth in times.values()),
            )
        )
    return tuple(found)


def measured_updates(
    samples: Sequence[LayerSample],
    parameters: Sequence[int],
    law_log_halfwidth: float,
    *,
    checked: bool,
) -> tuple[MeasuredUpdate, ...]:
    """The same of updates, by their `parameters`, one for each sample."""
    groups: dict[int, list[tuple[LayerSample, LayerSample]]] = {}
    for sample, count in zip(samples, parameters, strict=True):
        groups.setdefault(count, []).append((sample, sample))
    found = []
    for count in sorted(groups):
        seconds, halfwidth = _together(groups[count], law_log_halfwidth)
        if answers_itself(halfwidth, law_log_halfwidth, checked=checked):
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
