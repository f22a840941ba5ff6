"""Sailor's network files as figures of paths.

A leaf, at any depth, is a fit `[[a, b, c], largest]`: bandwidth = a L^2 + b L + c GB/s with
L = log2(bytes / 1e6), and the largest bandwidth in bytes per second. The keys above it say what was
measured: zones, GPUs, counts. A parabola means nothing where it is negative or falls with size, so
figures are given at stated sizes only where it is neither.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from hetplan.errors import Fault, InputError
from hetplan.importers.lines import refuse_all
from hetplan.importers.peer_json import Value, read_tree, tidy
from hetplan.importers.records import ImportContext, Imported, PathFigures

KIND = "sailor-network"

STATED_BYTES = tuple(62_500 * 4**k for k in range(8))  # 1/16 MB to 1024 MB: what training sends
_MEGABYTE = 1e6
_GIGABYTE = 1e9
_NOTED_COPIES = 20  # a reader of more has got the point; the rest is counted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """One leaf."""

    at: Value
    a: float
    b: float
    c: float
    most: float
    """Bytes per second."""

    @property
    def name(self) -> str:
        """The keys above it."""
        return " ".join(tidy(str(step)) for step in self.at.path)

    @property
    def places(self) -> tuple[str, ...]:
        """The keys without counts, in no order: the same in both directions of a path."""
        steps = (str(step) for step in self.at.path)
        return tuple(sorted(step for step in steps if not re.fullmatch(r"[0-9]+", step)))

    def bandwidth(self, size: int) -> float:
        """Bytes per second for messages of this size, by the parabola."""
        exponent = math.log2(size / _MEGABYTE)
        return (self.a * exponent**2 + self.b * exponent + self.c) * _GIGABYTE

    def falls(self, size: int) -> bool:
        """Whether larger messages would be slower."""
        return 2 * self.a * math.log2(size / _MEGABYTE) + self.b < 0

    @property
    def zero_bytes(self) -> float | None:
        """Size at which the rising branch passes zero; None where it does not."""
        square = self.b**2 - 4 * self.a * self.c
        if self.a == 0:
            exponent = -self.c / self.b if self.b > 0 else math.inf
        elif square < 0:
            return None
        else:
            exponent = (-self.b + math.sqrt(square)) / (2 * self.a)
        return _MEGABYTE * 2.0**exponent if -60 < exponent < 60 else None


def parse(text: str, context: ImportContext) -> Imported:
    """The figures of every path of the file; an InputError for what is no such file."""
    fits = list(_fits(read_tree(text, context.file)))
    paths: list[PathFigures] = []
    skipped: list[str] = []
    for fit in fits:
        _read(fit, paths, skipped)
    return Imported(
        kind=KIND,
        paths=tuple(paths),
        notes=(
            "bandwidths are Sailor's fitted parabolas, not measurements: figures without a size "
            "are the largest measured ones, and no parabola goes above them",
            *_copies(fits),
        ),
        skipped=tuple(skipped),
    )


def _fits(root: Value) -> Iterator[_Fit]:
    """Every leaf, in the order of the file; an InputError where a branch ends in something else."""
    faults: list[Fault] = []
    fits = []
    left = [root]
    while left:
        value = left.pop()
        if value.is_mapping:
            left += reversed([child for _, child in value.items()])
            continue
        try:
            fits.append(_fit(value))
        except InputError as error:
            faults += error.faults
    refuse_all(faults)
    if not fits:
        raise root.refuse("the file holds no fit [[a, b, c], bytes per second]")
    yield from fits


def _fit(value: Value) -> _Fit:
    if value.node.entries is None or len(value.node.entries) != 2:
        raise value.refuse(
            f"found {value.words()}; a fit [[a, b, c], bytes per second] is expected here"
        )
    coefficients, most = value.entries()
    numbers = [entry.number() for entry in coefficients.entries()]
    if len(numbers) != 3:
        raise coefficients.refuse(f"found {len(numbers)} coefficients; a parabola has three")
    return _Fit(at=value, a=numbers[0], b=numbers[1], c=numbers[2], most=most.number())


def _read(fit: _Fit, paths: list[PathFigures], skipped: list[str]) -> None:
    """The figures of one fit, and what of it means nothing."""
    where = f"line {fit.at.line}: {fit.name}"
    if fit.most <= 0:
        skipped.append(f"{where}: largest bandwidth {fit.most:g} B/s, not measured")
        return
    measured = f"send/recv {fit.name}"
    negative = [size for size in STATED_BYTES if fit.bandwidth(size) <= 0]
    falling = [size for size in STATED_BYTES if size not in negative and fit.falls(size)]
    good = [size for size in STATED_BYTES if size not in negative and size not in falling]
    for size in good:
        paths.append(
            PathFigures(
                measured=measured,
                message_bytes=size,
                bandwidth_bytes_per_second=min(fit.bandwidth(size), fit.most),
            )
        )
    paths.append(PathFigures(measured=measured, bandwidth_bytes_per_second=fit.most))
    if not good:
        skipped.append(f"{where}: the parabola is negative or falls at every size")
        return
    if negative:
        zero = fit.zero_bytes
        below = f"below {zero:.0f} bytes" if zero is not None else f"at {negative[0]} bytes"
        skipped.append(f"{where}: the parabola is negative {below}")
    if falling:
        side = "below" if falling[0] < good[0] else "above"
        edge = good[0] if side == "below" else good[-1]
        skipped.append(f"{where}: the parabola falls with size {side} {edge} bytes")


def _copies(fits: list[_Fit]) -> list[str]:
    """Fits that are equal to the last digit under different names: one was not measured."""
    same: dict[tuple[float, ...], list[_Fit]] = {}
    for fit in fits:
        same.setdefault((fit.a, fit.b, fit.c, fit.most), []).append(fit)
    groups: dict[frozenset[tuple[str, ...]], list[_Fit]] = {}
    for equal in same.values():
        names = frozenset(fit.places for fit in equal)
        if len(names) > 1:
            groups.setdefault(names, []).extend(equal)
    notes = []
    for equal in groups.values():
        first = equal[0]
        other = next(fit for fit in equal if fit.places != first.places)
        more = f" ({len(equal)} fits in all)" if len(equal) > 2 else ""
        notes.append(
            f"line {first.at.line} {first.name} and line {other.at.line} {other.name} are equal "
            f"to the last digit{more}: one is a copy"
        )
    if len(notes) > _NOTED_COPIES:
        rest = len(notes) - _NOTED_COPIES
        notes = [*notes[:_NOTED_COPIES], f"{rest} more groups of names have equal fits"]
    return notes
