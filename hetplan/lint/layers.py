"""Rules about times of layers: what physics and the shape of training forbid, and copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median
from typing import TypeAlias

from hetplan.errors import Fault
from hetplan.lint.evidence import Evidence, Timed, known_device
from hetplan.lint.findings import Check, at, grouped
from hetplan.model.spec import LayerKind

WARM_UP = 1.10  # more work in less time by 10 %: three times the noise of a steady median (3 %)
BACKWARD_MISSING = 0.05  # a backward pass of a twentieth of the forward pass is no backward pass
BACKWARD_FASTER = 0.8  # backward has at least the input gradient: as many operations as forward
INPUT_GRADIENT_ONLY = 1.4  # both gradients are twice the forward pass; halfway to one of them
FLAT = 1.02  # twice the work in less than 2 % more time: within noise, it did not grow
GREW = 1.3  # a series that grew by 30 % before has left the launch of its kernels behind
MAX_LAUNCH = 20e-3  # no host takes so long to launch one layer
LAUNCH_SECONDS = 1e-3  # below it the launch of 50 operators of 20 us each may hide the work
QUIET = 1.15  # p90 over p10 of a measurement that can tell 2 % more from none
FAR_SLOWER = 1 / 3  # efficiencies of one device differ by 2 between widths, not by 3
SAME_RATE = 0.5  # of the true float32 peak: what a device that uses it reaches
MIN_EQUAL = 8  # equal values: eight six-digit times do not agree by chance
SHARE_EQUAL = 0.9  # a copy is edited here and there
DIGITS = 3  # times with fewer digits agree by chance


def _backward_missing(evidence: Evidence) -> Iterator[Fault]:
    for row in evidence.timed:
        if row.backward is None or not row.forward:
            continue
        if row.backward < BACKWARD_MISSING * row.forward:
            times = f"{row.backward * 1e6:.0f} us where forward is {row.forward * 1e6:.0f} us"
            yield at(row.place, f"backward is {times}: {row.name}")


def _input_gradient_series(evidence: Evidence) -> dict[tuple[str | int, ...], float]:
    """Transformer layers whose backward pass is half of what it is: median of backward / forward.

    At tp 1, where neither pass contains communication. The head's forward pass contains the loss.
    """
    found = {}
    for series, rows in evidence.by_series.items():
        if not rows[0].weighted or not rows[0].flops or rows[0].layer == LayerKind.HEAD:
            continue
        ratios = [
            row.backward / row.forward
            for row in rows
            if row.tp == 1 and row.forward and row.backward and row.forward > LAUNCH_SECONDS
        ]
        if len(ratios) >= 2 and BACKWARD_FASTER / 2 < median(ratios) < INPUT_GRADIENT_ONLY:
            found[series] = median(ratios)
    return found


def _input_gradient(evidence: Evidence) -> Iterator[Fault]:
    ratios = _input_gradient_series(evidence)
    for row in evidence.timed:
        if row.series in ratios:
            words = f"backward takes {ratios[row.series]:.2f} of forward at tp 1"
            yield at(row.place, f"{words} in {row.layer}; both gradients would take 2")


def _backward_faster(evidence: Evidence) -> Iterator[Fault]:
    known = _input_gradient_series(evidence)
    for row in evidence.timed:
        if not row.weighted or row.tp != 1 or row.series in known:
            continue
        if not row.forward or not row.backward:
            continue
        ratio = row.backward / row.forward
        if BACKWARD_MISSING <= ratio < BACKWARD_FASTER:
            yield at(row.place, f"backward is {ratio:.2f} of forward, as in {row.name}")


def _warm_up(evidence: Evidence) -> Iterator[Fault]:
    for ordered in _by_microbatch(evidence):
        if len(ordered) < 2 or ordered[0].microbatch_size == ordered[1].microbatch_size:
            continue
        first, second = ordered[:2]
        if not first.forward or not second.forward or first.forward <= LAUNCH_SECONDS:
            continue
        ratio = first.forward / second.forward
        if ratio > WARM_UP * max(first.spread, second.spread):
            words = f"the smallest microbatch takes {ratio:.2f} times as long as the next one"
            yield at(first.place, f"{words}, as in {first.name}")


def _by_microbatch(evidence: Evidence) -> Iterator[list[Timed]]:
    """Rows that differ in the microbatch size only, from the smallest."""
    for rows in evidence.by_series.values():
        for group in grouped(rows, lambda row: row.tp).values():
            yield sorted(group, key=lambda row: row.microbatch_size)


def _not_growing(evidence: Evidence) -> Iterator[Fault]:
    for ordered in _by_microbatch(evidence):
        # The first pair is the warm-up's affair.
        for before, after in pairwise(ordered[1:]):
            twice = after.microbatch_size >= 2 * before.microbatch_size
            if not after.weighted or not twice or max(before.spread, after.spread) > QUIET:
                continue
            for phase in ("forward", "backward"):
                short, long = getattr(before, phase), getattr(after, phase)
                if not (short and long and short > LAUNCH_SECONDS and long < FLAT * short):
                    continue
                least = min(getattr(row, phase) or short for row in ordered)
                if short > GREW * least or short > MAX_LAUNCH:
                    words = f"{phase} of {after.name} takes {1e3 * long:.3g} ms"
                    size = before.microbatch_size
                    yield at(
                        after.place, f"{words}, and {1e3 * short:.3g} ms at microbatch size {size}"
                    )


def _faster_than_peak(evidence: Evidence) -> Iterator[Fault]:
    above: list[tuple[float, Fault]] = []
    for row in evidence.timed:
        device = known_device(row.device)
        if device is None or not row.flops or not device.peak(row.precision):
            continue
        rate, phase = max((work / seconds, phase) for phase, seconds, work in row.phases())
        if rate <= device.peak(row.precision):
            continue
        peak = device.peak(row.precision) / device.margin
        tensor = device.tensor_float32_flops_per_second
        hint = ""
        if row.precision == "float32" and rate <= tensor:
            hint = f"; TF32 has {tensor / 1e12:.0f}: the label hides TF32"
        words = f"{rate / 1e12:.0f} TFLOP/s where {row.precision} has {peak / 1e12:.1f}"
        above.append((rate / peak, at(row.place, f"{words} ({phase} of {row.name}){hint}")))
    yield from (fault for _, fault in sorted(above, key=lambda entry: -entry[0]))


def _rate(row: Timed) -> float:
    """Forward operations per second; 0 where there is no forward time."""
    return row.flops / row.forward if row.forward else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slow:
    """Rows of one model, and what they are compared with."""

    rows: tuple[Timed, ...]
    best: Timed
    """The fastest row of the slow model."""
    fast: Timed
    """The fastest row of the fastest narrower model."""


def _too_slow(evidence: Evidence) -> Iterator[_Slow]:
    """Models that reach far less than narrower ones in the same population."""
    known = [row for row in evidence.timed if row.flops]
    series = grouped(
        known, lambda row: (row.population, row.device, row.precision, row.layer, row.tp)
    )
    for group in series.values():
        models = grouped(group, lambda row: row.model)
        best = {name: max(rows, key=_rate) for name, rows in models.items()}
        for name, rows in models.items():
            narrower = [
                row for other, row in best.items() if other != name and row.width <= rows[0].width
            ]
            fast = max(narrower, key=_rate, default=None)
            if fast is None or _rate(best[name]) >= FAR_SLOWER * _rate(fast):
                continue
            yield _Slow(rows=tuple(rows), best=best[name], fast=fast)


def _true_float32(slow: _Slow) -> bool:
    """Whether the slow rows are true float32 and the fast ones TF32 under the same label."""
    known = known_device(slow.best.device)
    rate, fast = _rate(slow.best), _rate(slow.fast)
    return (
        known is not None
        and slow.best.precision == "float32"
        and known.tensor_float32_flops_per_second > 0
        and SAME_RATE * known.float32_flops_per_second <= rate
        and rate <= known.float32_flops_per_second < fast
    )


def _slower_than_class(evidence: Evidence) -> Iterator[Fault]:
    found = [slow for slow in _too_slow(evidence) if not _true_float32(slow)]
    yield from _class_faults(found, "too slow for what they say")


def _label_of_two(evidence: Evidence) -> Iterator[Fault]:
    found = [slow for slow in _too_slow(evidence) if _true_float32(slow)]
    yield from _class_faults(found, "true float32 beside TF32 under one label")


def _class_faults(found: Sequence[_Slow], words: str) -> Iterator[Fault]:
    for slow in sorted(found, key=lambda each: _rate(each.best) / _rate(each.fast)):
        rates = (
            f"{slow.best.model} reaches {_rate(slow.best) / 1e12:.3g} TFLOP/s on "
            f"{slow.best.device} at tp {slow.best.tp}, the narrower {slow.fast.model} "
            f"{_rate(slow.fast) / 1e12:.3g}"
        )
        for row in slow.rows:
            yield at(row.place, f"{words}: {rates}")


def _digits(seconds: float) -> int:
    """Significant digits of the time in microseconds, to a nanosecond."""
    return len(f"{seconds * 1e6:.3f}".replace(".", "").strip("0"))


Times: TypeAlias = Mapping[tuple[str | int, ...], float]
"""Seconds by shape."""


def _equal(first: Times, second: Times) -> int:
    """How many values two tables share at the same keys; 0 where too few of them do."""
    common = first.keys() & second.keys()
    telling = [key for key in common if _digits(first[key]) >= DIGITS]
    same = [key for key in telling if first[key] == second[key]]
    distinct = {first[key] for key in same}
    enough = len(distinct) >= MIN_EQUAL and len(same) >= SHARE_EQUAL * len(telling)
    return sum(first[key] == second[key] for key in common) if enough else 0


def _alike(tables: Mapping[str, Times]) -> Iterator[tuple[str, str, int]]:
    """Pairs of tables in their order that share values, and how many.

    Only pairs with enough telling values in common are compared: most tables have none.
    """
    owners: dict[tuple[tuple[str | int, ...], float], list[str]] = {}
    for name, table in tables.items():
        for key, value in table.items():
            if _digits(value) >= DIGITS:
                owners.setdefault((key, value), []).append(name)
    shared = Counter(pair for names in owners.values() for pair in combinations(names, 2))
    for (one, two), count in shared.items():
        same = _equal(tables[one], tables[two]) if count >= MIN_EQUAL else 0
        if same:
            yield one, two, same


def _copied(evidence: Evidence) -> Iterator[Fault]:
    samples = grouped(evidence.inputs.layer_samples, lambda row: row.sample.device)
    times = {
        name: {row.sample.shape: row.sample.median_seconds for row in rows}
        for name, rows in samples.items()
    }
    for one, two, same in _alike(times):
        words = f"{same} times of {two} equal those of {one} exactly"
        yield from (at(row.place, words) for row in samples[two])


CHECKS: Mapping[str, Check] = {
    "backward-not-measured": _backward_missing,
    "input-gradient-only": _input_gradient,
    "backward-faster-than-forward": _backward_faster,
    "warm-up-inside": _warm_up,
    "times-do-not-grow": _not_growing,
    "faster-than-peak": _faster_than_peak,
    "slower-than-class": _slower_than_class,
    "one-label-two-precisions": _label_of_two,
    "copied-values": _copied,
}
