"""How like two device kinds are, and against which rates a measured law ran.

A law that is carried from one kind to another needs three figures of each: the rate of its matrix
products, its memory bandwidth, and whether both are the same chip.

    same chip   same vendor, the same number formats, and rates in all of them higher or lower by
                one ratio: A100 with 40 and 80 GB, H100, H200 and GH200, V100 in a module and in a
                slot, B200 and GB200. What differs is the memory, the board and the clock.
    likeness    exp(-4 |log balance_1 - log balance_2|) with balance = rate / bandwidth (flop per
                byte), a quarter of it across vendors: kinds of one generation have like balances,
                and the more a kind can compute per byte the less of it products reach. Leaving out
                each chip of eight published NVIDIA kinds, products of 16 bit are off by .19 (rms of
                log) with these weights, by .25 with equal ones

float32 is two things. torch multiplies float32 itself unless it is told otherwise
(`torch.backends.cuda.matmul.allow_tf32`, off since torch 1.12), other frameworks and older releases
use TF32, up to eight times faster. What ran is seen from the law: products faster than the kind's
float32 rate were TF32. A job's float32 then means what it meant where it was measured; without
samples of a kind that has TF32 it means float32 itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetplan.cluster.devices import DeviceKind
from hetplan.job.spec import Precision

TF32 = "tf32"
# A law's products may come out a little above the rate: clocks boost, coefficients have errors.
_ABOVE_RATE = 1.15
_ONE_RATIO = math.log(1.12)
"""Most that ratios of two formats differ by: vendors round (GB200 over B200: 1.11 and 1.00)."""
_NEAR_RATES = math.log(1.35)
"""Most that rates differ by: H100 in a slot has 1/1.31 of those in a module; below, parts of the
chip are switched off and its balance is another."""
_ACROSS_VENDORS = 0.25
"""Other vendors' libraries choose other kernels: they count where there is nothing nearer."""

_MAX_NAMED = 3  # as many as a warning of one line can hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a law's terms follow on one kind."""

    kind: DeviceKind
    number_format: str
    """Of its matrix products: a precision, or `tf32`."""
    flops_per_second: float
    bytes_per_second: float

    @property
    def balance(self) -> float:
        """Operations per byte of memory traffic."""
        return self.flops_per_second / self.bytes_per_second


def rates(kind: DeviceKind, number_format: str) -> Rates | None:
    """The kind's figures; None where the datasheet does not have them."""
    rate = dict(kind.peak_flops_per_second).get(number_format, 0.0)
    if rate <= 0 or kind.memory_bandwidth_bytes_per_second <= 0:
        return None
    return Rates(
        kind=kind,
        number_format=number_format,
        flops_per_second=rate,
        bytes_per_second=kind.memory_bandwidth_bytes_per_second,
    )


def same_chip(one: DeviceKind, other: DeviceKind) -> bool:
    """Whether they differ by memory, board and clock alone."""
    return chip_distance(one, other) is not None


def chip_distance(one: DeviceKind, other: DeviceKind) -> float | None:
    """|log| of the ratio of the rates of two kinds of one chip; None: two chips."""
    rates_of, others = dict(one.peak_flops_per_second), dict(other.peak_flops_per_second)
    if one.vendor != other.vendor or not rates_of or rates_of.keys() != others.keys():
        return None
    logs = [math.log(rates_of[name] / others[name]) for name in rates_of]
    if max(logs) - min(logs) > _ONE_RATIO or max(map(abs, logs)) > _NEAR_RATES:
        return None
    return max(map(abs, logs))


def likeness(one: Rates, other: Rates) -> float:
    """Weight of what was measured on one of them for the other, 0 to 1."""
    distance = abs(math.log(one.balance / other.balance))
    near = math.exp(-4.0 * distance)
    return near if one.kind.vendor == other.kind.vendor else _ACROSS_VENDORS * near


def board_distance(one: DeviceKind, other: DeviceKind) -> float:
    """How far boards of one chip are apart: |log| of rates, power limits and bandwidths, summed."""
    return (
        (chip_distance(one, other) or 0.0)
        + _log_ratio(one.max_power_watts, other.max_power_watts)
        + _log_ratio(one.memory_bandwidth_bytes_per_second, other.memory_bandwidth_bytes_per_second)
    )


def _log_ratio(one: float, other: float) -> float:
    return abs(math.log(one / other)) if one > 0 and other > 0 else 0.0


def measured_format(kind: DeviceKind, precision: str, product_rates: Iterable[float]) -> str:
    """The number format in which products labelled `precision` ran at these rates (flop/s)."""
    if precision != Precision.FLOAT32 or not _has_faster_tf32(kind):
        return precision
    known = sorted(rate for rate in product_rates if rate > 0)
    if not known:
        return precision
    middle = known[len(known) // 2]
    return TF32 if middle > _ABOVE_RATE * kind.peak(Precision.FLOAT32) else precision


def _has_faster_tf32(kind: DeviceKind) -> bool:
    """Whether TF32 can be told from float32 by its rate: on GeForce cards both are alike."""
    peaks = dict(kind.peak_flops_per_second)
    return peaks.get(TF32, 0.0) > _ABOVE_RATE * peaks.get(Precision.FLOAT32.value, math.inf)


def asked_format(kind: DeviceKind, precision: str, measured: Iterable[Rates]) -> str:
    """The number format that a job's precision means on a kind, by what it meant on others."""
    if precision != Precision.FLOAT32 or not _has_faster_tf32(kind):
        return precision
    votes = {each.kind.kind: each.number_format for each in measured if _has_faster_tf32(each.kind)}
    ran_tf32 = sum(ran == TF32 for ran in votes.values())
    return TF32 if 2 * ran_tf32 > len(votes) else precision


def named(kinds: Sequence[str]) -> str:
    """These kinds in words: their names, or how many they are where a line has no room."""
    return ", ".join(kinds) if len(kinds) <= _MAX_NAMED else f"{len(kinds)} other kinds"
