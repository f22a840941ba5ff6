"""Order-free bounds of single families: slices of the whole table's, or a table of one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from hetplan.cost.arrays import Floats
from hetplan.search.bounds.order_free_bound import CHUNKS, UnitCosts, Way
from hetplan.search.bounds.order_free_table import Bases, Columns, family_bounds
from hetplan.search.solver import OrderFreeBound
from hetplan.search.space.family import Block, Family, Kind, table_of
from hetplan.search.space.stage_pricer import StagePricer


@dataclass(frozen=True, slots=True)
class OrderFreeBounds:
    """Order-free bounds of single families of a job; keeps what they share."""

    columns: Columns
    """Of all families."""
    _bases: dict[tuple[object, ...], tuple[Family, Bases]] = field(default_factory=dict, repr=False)
    """With the family whose objects' identity is the key."""
    _chunks: dict[tuple[object, ...], Floats] = field(default_factory=dict, repr=False)

    @property
    def costs(self) -> UnitCosts:
        """Times and memory of one unit of layers."""
        return self.columns.costs

    @property
    def placed(self) -> StagePricer:
        """Prices stages of the job."""
        return self.costs.placed

    def of(self, family: Family) -> OrderFreeBound:
        """Bound and estimate; both infinite where no plan fits in memory."""
        bases, v = self.base(family), 1 if family.splits else family.virtual_stages
        if not len(bases.at):
            return OrderFreeBound(bound_seconds=math.inf, estimate_seconds=math.inf)
        chunks = np.zeros((1, 1, 2))
        if v > 1:
            key = (*_key(family), max(v, CHUNKS))
            chunks = self._chunks.get(key, chunks)
            if key not in self._chunks:
                alone = replace(bases, at=np.zeros(1, dtype=np.int64))
                chunks = self._alone(family).chunks(alone, np.array([v]))
                self._chunks[key] = chunks
        bound, estimate = family_bounds(
            bases,
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

    def base(self, family: Family) -> Bases:
        """What the family has in common with those that differ in their schedules only; none where
        its meshes have no room for all units.
        """
        key = _key(family)
        _, found = self._bases.get(key, (family, None))
        if found is None:
            way = Way.of(family)
            found = self.columns.base(way, family.meshes)
            if found is None:
                found = self._alone(family).bases(way, np.zeros(1, dtype=np.int64))
            self._bases[key] = family, found
        return found

    def _alone(self, family: Family) -> Columns:
        """Of its one block."""
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
        return Columns(self.costs, table_of([(block, (kind,))]), _unchecked)


def _key(family: Family) -> tuple[object, ...]:
    """Equal for families with one base, which share the objects."""
    return id(family.meshes), id(family.recompute), *Way.of(family)[1:]


def _unchecked() -> None:
    """No deadline: of one family."""
