"""What makes work uneven: loads of experts, lengths of sequences, clocks, and slow ranks.

Experts: ranks of an expert-parallel group wait for the one with most tokens. With tokens f times
the mean on it, its experts' products, its side of the all_to_all and what it keeps are f times the
mean; one of e ranks cannot have more than all tokens, so f <= e.

What sequences of unlike lengths cost, against rows that are full: padded, or packed.

A row has s tokens. Everything but the attention core costs the same per token; the core costs the
query-key pairs, l^2 / 2 of a sequence of l tokens (`hetplan.model.work.attended`; windows cut
them). With shares p_l of the sequences:

    padded   one sequence per row, computed like a full one: time 1, useful tokens E[l] / s
    packed   rows are filled with whole sequences, each of which attends only to itself:
             useful tokens = fill, core = pairs of a row's sequences / pairs of s tokens

Rows are filled as first-fit decreasing does it with many sequences (Johnson et al., SIAM Journal on
Computing 3, 1974): row after row takes, of the sequences that are left, the longest that still
fit. Rows of one pattern are filled until one of its lengths runs out, so there are no more patterns
than lengths. Trainers that pack from a small buffer fill less, those that cut sequences fill all.

Rows of unlike patterns have unlike cores. That ranks which run different rows wait for the slowest
of them is not counted.

The slowest of many ranks. Devices of one kind differ: a rank takes m e^(s Z) for the same work, Z
standard normal, s its island's `speed_spread` (Sinha et al., SC 2022, arXiv 2208.11035: 8 % between
the GPUs of a cluster on average, outliers 1.5 times as slow). Whoever waits for n of them waits for
the largest,

    F(t) = Phi(log(t / m) / s)^n,    mean = lower + integral of (1 - F)

which is exact here (Gauss-Legendre over log t). The spread is a device's own: the same device is
slow in every pass, so the maximum is taken once over all that wait for each other, not once per
pass. Tensor-parallel ranks wait in every layer, data-parallel ones at the end of the step, stages
for the slowest stage; a step waits for all of its devices. Ranks are taken to err independently;
those of a node, which share air and power, err partly together, which lowers the maximum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from hetplan.cluster.devices import capped_clock_ratio
from hetplan.cluster.spec import Island
from hetplan.job.spec import Job, LengthShare
from hetplan.model.layers import Experts, TransformerLayer
from hetplan.model.work import attended


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """How much more than the mean the busiest expert-parallel rank has."""

    factor: float
    """Its tokens over the mean: scales its experts' time, its all_to_all and what it keeps."""
    note: str = ""


def expert_load(layer: TransformerLayer, job: Job, ep: int) -> ExpertLoad:
    """The job's load factor as it holds for this many expert-parallel ranks."""
    if not isinstance(layer.mlp, Experts):
        return ExpertLoad(factor=1.0, note="the layers have no experts")
    if ep == 1:
        return ExpertLoad(factor=1.0, note="every rank holds all experts")
    if job.expert_load_factor == 1:
        return ExpertLoad(factor=1.0, note="equal loads, as the job says")
    factor = min(job.expert_load_factor, float(ep))
    # Top-k experts differ, so a rank gets at most min(k, its experts) copies of each token.
    held = layer.mlp.num_experts / ep
    copies = min(float(layer.mlp.experts_per_token), held)
    factor = max(1.0, min(factor, ep * copies / layer.mlp.experts_per_token))
    return ExpertLoad(
        factor=factor, note=f"the busiest of {ep} ranks has {factor:g} times the mean"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFactors:
    """Rows of the job's sequences over rows of full ones."""

    tokens: float
    """Useful tokens."""
    core: float
    """Operations of the attention core; everything else takes as long as in full rows."""
    note: str

    def layer_factor(self, core_share: float) -> float:
        """Time of a layer of which the attention core is this part in full rows."""
        return (1.0 - core_share) + self.core * core_share


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pattern:
    """Rows with the same sequences."""

    counts: tuple[int, ...]
    """Sequences of each length."""
    rows: float
    """How many of them there are for one sequence of the job: a fraction."""


def length_factors(job: Job, window: int | None = None) -> LengthFactors:
    """Of the job's sequences, for attention with this window."""
    return _factors(job.sequence_lengths, job.sequence_length, job.packing, window)


@lru_cache(maxsize=256)
def _factors(
    shares: tuple[LengthShare, ...], row: int, packing: bool, window: int | None
) -> LengthFactors:
    if not shares:
        return LengthFactors(tokens=1.0, core=1.0, note="all sequences have sequence_length")
    mean = math.fsum(each.share * each.length for each in shares)
    mean /= math.fsum(each.share for each in shares)
    if not packing:
        return LengthFactors(
            tokens=mean / row,
            core=1.0,
            note=f"padded: {mean / row:.1%} of the tokens are of sequences",
        )
    lengths, patterns = _packed(shares, row)
    rows = math.fsum(each.rows for each in patterns)
    whole = attended(row, window)
    cores = [
        math.fsum(
            count * attended(length, window)
            for count, length in zip(each.counts, lengths, strict=True)
        )
        / whole
        for each in patterns
    ]
    weights = [each.rows / rows for each in patterns]
    core = math.fsum(weight * value for weight, value in zip(weights, cores, strict=True))
    fill = min(1.0, mean / (rows * row))
    return LengthFactors(
        tokens=fill,
        core=core,
        note=f"packed: {fill:.1%} of the tokens are of sequences, {1.0 / rows:.3g} in a row",
    )


def _packed(
    shares: Sequence[LengthShare], row: int
) -> tuple[tuple[int, ...], tuple[_Pattern, ...]]:
    """Lengths, longest first, and the rows into which the job's sequences are packed."""
    ordered = sorted(shares, key=lambda each: -each.length)
    lengths = tuple(each.length for each in ordered)
    total = math.fsum(each.share for each in ordered)
    left = [each.share / total for each in ordered]
    patterns = []
    while any(left):
        room, counts = row, []
        for length, amount in zip(lengths, left, strict=True):
            count = room // length if amount > 0 else 0
            counts.append(count)
            room -= count * length
        # Rows of this pattern until the first of its lengths runs out, which is then exactly 0.
        rows, last = min((left[at] / count, at) for at, count in enumerate(counts) if count)
        left = [max(0.0, amount - rows * count) for amount, count in zip(left, counts, strict=True)]
        left[last] = 0.0
        patterns.append(_Pattern(counts=tuple(counts), rows=rows))
    return lengths, tuple(patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """At which clock an island's devices compute, over the one of their rates or samples."""

    ratio: float
    notes: tuple[str, ...] = ()


def clock(island: Island) -> Clock:
    """The island's sustained clock, and what its power cap makes of it.

    An InputError where the cap is no more than what the device draws standing still
    (`hetplan.cluster.devices.capped_clock_ratio` has the law).
    """
    notes = []
    if island.clock_ratio != 1:
        notes.append(f"{island.name}: clock at {island.clock_ratio:g} of its reference")
    cap, board = island.power_cap_watts, island.device.max_power_watts
    if cap is None or not board or cap >= board:
        if cap is not None and not board:
            notes.append(f"{island.name}: the power cap is not priced, its board's is not known")
        return Clock(ratio=island.clock_ratio, notes=tuple(notes))
    capped = capped_clock_ratio(cap / board)
    notes.append(
        f"{island.name}: capped at {cap:g} of {board:g} W, assumed to hold {capped:.2f} of its "
        "clock, as if it drew all of its limit without a cap"
    )
    return Clock(ratio=island.clock_ratio * capped, notes=tuple(notes))


_NODES, _WEIGHTS = (tuple(map(float, part)) for part in np.polynomial.legendre.leggauss(48))
_PIECES = 4  # of 48 nodes each: with many ranks the distribution is steep in one of them
_TAIL = 1e-13  # probability left out at either end of the integral
_NORMAL = NormalDist()


@lru_cache(maxsize=4096)
def straggler_factor(spread: float | None, count: int) -> float:
    """Mean time of the slowest of `count` ranks over that of a typical one; 1 without a spread."""
    if not spread:
        return 1.0

    def below(log_time: float) -> float:
        return math.exp(count * _log_phi(log_time / spread))

    # Logarithms between which the largest time lies but for a probability of 1e-13 each.
    lowest = spread * _NORMAL.inv_cdf(math.exp(math.log(_TAIL) / count))
    # Upper tail by symmetry: 1 - (1 - tail)^(1 / n) is far below what 1 - x can hold.
    highest = -spread * _NORMAL.inv_cdf(-math.expm1(math.log1p(-_TAIL) / count))
    mean, width = math.exp(lowest), (highest - lowest) / _PIECES
    for piece in range(_PIECES):
        center = lowest + (piece + 0.5) * width
        for node, weight in zip(_NODES, _WEIGHTS, strict=True):
            x = center + 0.5 * width * node
            mean += 0.5 * width * weight * math.exp(x) * (1.0 - below(x))
    return mean


def _log_phi(z: float) -> float:
    """Logarithm of the standard normal distribution function."""
    if z < -37.0:
        return -math.inf  # below 1e-299
    upper = 0.5 * math.erfc(z / math.sqrt(2.0))
    return math.log1p(-upper) if z > 0 else math.log(0.5 * math.erfc(-z / math.sqrt(2.0)))
