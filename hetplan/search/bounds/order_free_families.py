"""Order-free bounds of single families, each a table of one (`order_free_table`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.search.bounds.order_free_bound import CHUNKS, UnitCosts, Way
from hetplan.search.bounds.order_free_table import Bases, Columns, family_bounds
from hetplan.search.solver import OrderFreeBound
from hetplan.search.space.family import Block, Family, Kind, table_of
from hetplan.search.space.stage_pricer import StagePricer


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """What families have in common that differ in their schedules only."""

    columns: Columns
    """Of one block, whose meshes it keeps: their identity is the key."""
    bases: Bases
    """Of that block; empty where its meshes have no room for all units."""

    @property
    def arrays(self) -> tuple[Floats, Floats, Floats, Ints, Ints] | None:
        """cost, rows, room, first and most, as `least_chunked` takes them."""
        if not len(self.bases.at):
            return None
        bases, columns = self.bases, self.columns
        return bases.cost, bases.rows, bases.room, columns.first, columns.most

    @property
    def positions(self) -> int:
        """Most stages of a plan."""
        return int(self.bases.positions[0])


@dataclass(frozen=True, slots=True)
class OrderFreeBounds:
    """Order-free bounds of single families of a job; keeps what they share."""

    costs: UnitCosts
    _bases: dict[tuple[object, ...], Base] = field(default_factory=dict, repr=False)
    _chunks: dict[tuple[object, ...], Floats] = field(default_factory=dict, repr=False)

    @property
    def placed(self) -> StagePricer:
        """Prices stages of the job."""
        return self.costs.placed

    def of(self, family: Family) -> OrderFreeBound:
        """Bound and estimate; both infinite where no plan fits in memory."""
        base, v = self.base(family), 1 if family.splits else family.virtual_stages
        if not len(base.bases.at):
            return OrderFreeBound(bound_seconds=math.inf, estimate_seconds=math.inf)
        chunks = np.zeros((1, 1, 2))
        if v > 1:
            key = (*_key(family), max(v, CHUNKS))
            chunks = self._chunks.get(key, chunks)
            if key not in self._chunks:
                chunks = base.columns.chunks(base.bases, np.array([v]))
                self._chunks[key] = chunks
        bound, estimate = family_bounds(
            base.bases,
            chunks,
            np.zeros(1, dtype=np.int64),
            np.array([float(family.num_microbatches)]),
            np.array([family.most_extra_depth]),
            np.array([family.early_sends]),
            np.array([v]),
            np.array([family.splits]),
        )
        loading = self.placed.job.data_loading_seconds
        return OrderFreeBound(
            bound_seconds=float(bound[0]) + loading, estimate_seconds=float(estimate[0]) + loading
        )

    def base(self, family: Family) -> Base:
        """What the family has in common with those that differ in their schedules only."""
        key = _key(family)
        found = self._bases.get(key)
        if found is None:
            block = Block(
                samples=family.samples,
                num_microbatches=family.num_microbatches,
                meshes=family.meshes,
            )
            kind = Kind(
                schedule="1f1b",
                virtual_stages=1,
                early_sends=False,
                most_extra_depth=0,
                sharding=family.sharding,
                recompute=family.recompute,
                offload=family.offload,
                sharing_ranks=family.sharing_ranks,
            )
            columns = Columns(self.costs, table_of([(block, (kind,))]), _unchecked)
            way = Way.of(family)
            bases = columns.bases(way, np.zeros(1, dtype=np.int64))
            found = self._bases[key] = Base(columns, bases)
        return found


def _key(family: Family) -> tuple[object, ...]:
    """Equal for families with one base, which share the objects; the base keeps them."""
    return id(family.meshes), id(family.recompute), *Way.of(family)[1:]


def _unchecked() -> None:
    """No deadline: of one family."""
