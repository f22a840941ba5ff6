"""Rows that may stand in one plan, by when they are done, and combinations of their variants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Floats, Ints
from hetplan.job.spec import Job
from hetplan.search.several.listing_prices import least_prices, least_step
from hetplan.search.several.listing_rows import Row
from hetplan.search.several.listing_values import Ended, Variants


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows that may stand in one plan, those that are done first before the others."""

    rows: tuple[Row, ...]
    seconds: dict[Row, float]
    """No plan with the row has a shorter step."""
    needs: Ints
    """[R, I] devices."""
    samples: Ints
    devices: Ints
    """[I] usable ones."""
    least: float
    """No plan of these rows has a shorter step."""

    @staticmethod
    def of(some: Sequence[tuple[float, Row]], cluster: Cluster, job: Job) -> Group:
        """Of (seconds, row)."""
        order = sorted(range(len(some)), key=lambda at: (some[at][0], at))
        rows = tuple(some[at][1] for at in order)
        seconds = [some[at][0] for at in order]
        islands = cluster.islands
        needs = np.array([row.devices(len(islands)) for row in rows], dtype=np.int64)
        samples = np.array([row.samples for row in rows], dtype=np.int64)
        devices = np.array([island.num_usable_devices for island in islands], dtype=np.int64)
        return Group(
            rows=rows,
            seconds=dict(zip(rows, seconds, strict=True)),
            needs=needs,
            samples=samples,
            devices=devices,
            least=least_step(seconds, needs, samples, devices, job.global_batch_size),
        )

    def below(self, limit: float) -> tuple[tuple[Row, ...], Floats]:
        """Rows below the limit, and prices of devices at which none is worth more than it needs."""
        count = sum(seconds < limit for seconds in self.seconds.values())
        prices = least_prices(self.needs[:count], self.samples[:count], self.devices)
        return self.rows[:count], prices


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Variants of one pipeline, as plain numbers, by when they end and have reduced at least."""

    last: list[float]
    positions: list[list[int]]
    units: list[list[int]]
    choices: list[list[int]]
    slow: list[list[int]]
    ends: list[list[float]]

    @staticmethod
    def of(ended: Ended, each: Variants, reductions: Floats, limit: float) -> Columns:
        """Of one placement of a row; reductions: [P, parts, layers + 1, layers + 1] at least."""
        which = ended.which
        cut, slow = each.positions[which], each.slow[which]
        stages = np.arange(slow.shape[1])
        done = ended.ends + reductions[stages, slow, cut[:, :-1], cut[:, 1:]]
        last = done.max(axis=1)
        order = np.argsort(last, kind="stable")[: int(np.count_nonzero(last < limit))]
        return Columns(
            last=last[order].tolist(),
            positions=cut[order].tolist(),
            units=each.units[which][order].tolist(),
            choices=each.choices[which][order].tolist(),
            slow=slow[order].tolist(),
            ends=ended.ends[order].tolist(),
        )


def combinations(
    columns: Sequence[Columns], limit: Callable[[], float], taken: tuple[int, ...] = ()
) -> Iterator[tuple[int, ...]]:
    """One variant of each pipeline, all with ends below the limit, which may fall meanwhile."""
    if len(taken) == len(columns):
        yield taken
        return
    for w, last in enumerate(columns[len(taken)].last):
        if last >= limit():
            return
        yield from combinations(columns, limit, (*taken, w))
