"""Rules about times of layers: what physics and the shape of training forbid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from hetplan.errors import Fault
from hetplan.lint.evidence import Evidence, Timed, known_device
from hetplan.lint.findings import Check, at, grouped

WARM_UP = 1.10  # more work in less time by 10 %: three times the noise of a steady median (3 %)
BACKWARD_FASTER = 0.8  # backward has at least the input gradient: as many operations as forward
FLAT = 1.02  # twice the work in less than 2 % more time: within noise, it did not grow
GREW = 1.3  # a series that grew by 30 % before has left the launch of its kernels behind
MAX_LAUNCH = 20e-3  # no host takes so long to launch one layer
LAUNCH_SECONDS = 1e-3  # below it the launch of 50 operators of 20 us each may hide the work
QUIET = 1.15  # p90 over p10 of a measurement that can tell 2 % more from none


def _backward_faster(evidence: Evidence) -> Iterator[Fault]:
    for row in evidence.timed:
        if not row.weighted or row.tp != 1:
            continue
        if not row.forward or not row.backward:
            continue
        ratio = row.backward / row.forward
        if ratio < BACKWARD_FASTER:
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


CHECKS: Mapping[str, Check] = {
    "backward-faster-than-forward": _backward_faster,
    "warm-up-inside": _warm_up,
    "times-do-not-grow": _not_growing,
    "faster-than-peak": _faster_than_peak,
}
