"""From a family of plans to its numbers: order-free bound, crossing bound, exact stage table."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.times import Exchange
from hetplan.cost.step_model.plan import exchange_of
from hetplan.job.spec import Job
from hetplan.model.layer_units import LayerUnits
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Recompute
from hetplan.predict.predictor import Predictor
from hetplan.search.bounds.crossing_bound import CrossingBounds
from hetplan.search.bounds.order_free_bound import BottleneckLinks, UnitCosts, caps
from hetplan.search.bounds.order_free_families import OrderFreeBounds
from hetplan.search.bounds.order_free_table import Columns, OrderFreeTable
from hetplan.search.one_f_one_b.heuristic import IN_FLIGHT, MANY, likely_meshes
from hetplan.search.result import Question
from hetplan.search.solver import OrderFreeBound
from hetplan.search.space.allowed import searched_cluster
from hetplan.search.space.chunk_memory import ChunkMemory
from hetplan.search.space.families import Families
from hetplan.search.space.family import Family, FamilyTable, island_masks
from hetplan.search.space.plan_evaluator import PlanEvaluator, is_exact
from hetplan.search.space.stage_pricer import StagePricer
from hetplan.search.space.stage_table import (
    StageTable,
)
from hetplan.search.space.stage_tables import StageTables
from hetplan.search.space.transfers import Transfers

_KEPT_BYTES = 300_000_000
"""Of the large tables that solvers keep, and as much again of the rows of interleaved families: 600
MB in all. With what one of them takes while it is made, and all that is small, a search stays below
2 GB."""


@dataclass(slots=True)
class Kept:
    """Values that can be made again, as many as there is room for: the oldest are given up."""

    most_bytes: int
    _held_bytes: int = 0
    _values: dict[Hashable, tuple[object, int]] = field(default_factory=dict)

    def value(self, key: Hashable, size: int, make: Callable[[], object]) -> object:
        """What `make` gives; None where that alone, of so many bytes, has no room."""
        if key in self._values:
            return self._values[key][0]
        if size > self.most_bytes:
            return None
        while self._held_bytes + size > self.most_bytes:
            self._held_bytes -= self._values.pop(next(iter(self._values)))[1]
        made = make()
        self._values[key] = made, size
        self._held_bytes += size
        return made


@dataclass(frozen=True, kw_only=True)
class TableMaker:
    """Turns families of one job into bounds and stage tables; keeps what families share."""

    model: ModelSpec
    cluster: Cluster
    """With the forbidden nodes out."""
    job: Job
    predictor: Predictor = field(repr=False)
    check: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)
    """Called every few milliseconds while tables are made; may raise."""
    _unchunked: dict[tuple[Family, bool], StageTable] = field(
        default_factory=dict, repr=False, compare=False
    )

    kept: Kept = field(default_factory=lambda: Kept(_KEPT_BYTES), repr=False, compare=False)
    """Large tables of solvers, the newest."""
    kept_rows: Kept = field(default_factory=lambda: Kept(_KEPT_BYTES), repr=False, compare=False)
    """Rows of interleaved families: so many that they would push out the tables."""
    walked: dict[int, tuple[float, float]] = field(default_factory=dict, repr=False, compare=False)
    """Last (target, bound) of walks over loosest families, by their id: the table of families keeps
    them. Of another target the bound is found again, so that a resumed search has the same.
    """
    _shared: dict[int, tuple[float, float]] = field(default_factory=dict, repr=False, compare=False)
    """The same of their bounds that know boundaries."""

    @classmethod
    def of(
        cls,
        question: Question,
        predictor: Predictor,
        check: Callable[[], None] = lambda: None,
    ) -> TableMaker:
        """Of a question, whose forbidden islands and nodes are left out."""
        job = question.job
        cluster = searched_cluster(question.cluster, job)
        return cls(model=question.model, cluster=cluster, job=job, predictor=predictor, check=check)

    @cached_property
    def families(self) -> FamilyTable:
        """The families of plans with one pipeline."""
        return self._families.families()

    @cached_property
    def _families(self) -> Families:
        return Families(model=self.model, cluster=self.cluster, job=self.job)

    @property
    def recompute(self) -> tuple[Recompute, ...]:
        """What a stage of some family may recompute."""
        return self._families.recompute

    @cached_property
    def stage_pricer(self) -> StagePricer:
        """Prices stages of the job."""
        return StagePricer(
            model=self.model,
            cluster=self.cluster,
            job=self.job,
            predictor=self.predictor,
            chain=tuple(dict.fromkeys(each.modules for each in self._families.recompute)),
        )

    @property
    def transfers(self) -> Transfers:
        """Transfers between the meshes of the job."""
        return self.stage_tables.transfers

    @cached_property
    def evaluator(self) -> PlanEvaluator:
        """Places, checks and prices whole plans of the job."""
        return PlanEvaluator(self.model, self.cluster, self.job, self.predictor)

    @cached_property
    def _order_free(self) -> OrderFreeBounds:
        costs = UnitCosts(self.stage_pricer, BottleneckLinks(self.stage_pricer))
        return OrderFreeBounds(Columns(costs, self.families, self.check))

    @cached_property
    def _crossing_bound(self) -> CrossingBounds:
        return CrossingBounds(self._order_free, self.stage_tables.transfers, self.stage_tables.ends)

    def units(self) -> LayerUnits:
        """Where the model can be cut; an InputError where it has no such units."""
        return self.stage_pricer.units

    @cached_property
    def stage_tables(self) -> StageTables:
        """Makes the stage tables of the job."""
        return StageTables(self.stage_pricer, self.check)

    def space(self, family: Family) -> StageTable:
        """The family's stage table; an InputError for models without units, and where the predictor
        lacks something.
        """
        return self.stage_tables.of(family)

    def passes_space(self, family: Family) -> StageTable:
        """The same where nothing follows the last pass: no plan costs more by it."""
        return self.stage_tables.of(family, ends=False)

    def unchunked_space(self, family: Family, *, ends: bool = True) -> StageTable:
        """The space of an interleaved family's meshes as if its stages had one chunk each.

        Families that differ in their chunks only have one. What its ends hide is what stages of
        several chunks hide at most. Memory (`chunk_memory`), schedule and
        the limit of stages are the interleaved family's own.
        """
        plain = replace(family, schedule="1f1b", virtual_stages=1, most_extra_depth=0)
        found = self._unchunked.get((plain, ends))
        if found is None:
            found = self.stage_tables.of(plain, chunked=True, ends=ends)
            self._unchunked[plain, ends] = found
        return found

    def chunk_memory(self, family: Family) -> ChunkMemory:
        """What fits on the family's stages of several chunks."""
        return ChunkMemory(self.stage_pricer, family)

    @cached_property
    def exchange(self) -> Exchange:
        """How the job's trainer exchanges messages of interleaved stages."""
        return exchange_of(self.job)

    @cached_property
    def island_names(self) -> tuple[str, ...]:
        """As the cluster has them."""
        return tuple(island.name for island in self.cluster.islands)

    def order_free(self, family: Family) -> OrderFreeBound:
        """A valid bound and a guess (`order_free_bound`); raises as `space` does."""
        return self._order_free.of(family)

    def order_free_bounds(self, below: float = math.inf) -> OrderFreeTable:
        """The same of all families at once; of those without a step below `below` a bound that they
        share with others may do.
        """
        return self._order_free.columns.order_free(below)

    def likeliest(self) -> dict[int, float]:
        """Of every size of tick a family of the block whose loosest family has the lowest guess:
        the one with one chunk per stage that has the lowest itself, and that guess.
        """
        families, columns = self.families, self._order_free.columns
        samples = np.array([each.samples for each in families.blocks])
        plain = np.array(families.plain(), dtype=np.int64)
        guesses = columns.loosest.estimates[plain]
        blocks = families.block[plain[np.argsort(guesses, kind="stable")]]
        first = blocks[np.unique(samples[blocks], return_index=True)[1]]
        plain = plain[np.isin(families.block[plain], first)]
        found: dict[int, tuple[float, int]] = {}
        own = columns.estimates(plain).tolist()
        of_block = families.block[plain].tolist()
        for at, guess, block in zip(plain.tolist(), own, of_block, strict=True):
            found[block] = min(found.get(block, (math.inf, at)), (guess, at))
        return {at: guess for guess, at in found.values()}

    def with_room(self) -> Ints:
        """Numbers of the families whose meshes have room for the whole model."""
        return self._order_free.columns.with_room()

    def held_units(self) -> Floats:
        """[N] units that the meshes of each family hold, without embedding and head."""
        return Columns(self._order_free.costs, self.families, lambda: None).held_units()

    def likely(self, family: Family) -> Family:
        """The family with those of its meshes that are worth a local search
        (`hetplan.search.one_f_one_b.heuristic`): itself where they are few.
        """
        base = self._order_free.base(family)
        if len(family.meshes) <= MANY or not len(base.at):
            return family
        units, positions = self.units().count, min(IN_FLIGHT, int(base.positions[0]))
        held = caps(base.rows, base.room, units, family.num_microbatches, positions)
        masks = island_masks(family.meshes)
        kept = likely_meshes(masks, base.cost, held[:, :, -1], base.most, units)
        return replace(family, meshes=tuple([family.meshes[at] for at in kept.tolist()]))

    def below(self, family: Family, seconds: float) -> Family:
        """The family with those of its meshes that a step below `seconds` can have: a stage has m
        passes of each kind of at least one unit. Itself where all can.
        """
        base = self._order_free.base(family)
        if not len(base.at) or not math.isfinite(seconds):
            return family
        busy = family.num_microbatches * base.cost.min(axis=0)
        kept = np.flatnonzero(busy <= seconds * (1.0 + 1e-9))
        if len(kept) in (0, len(family.meshes)):
            return family
        return replace(family, meshes=tuple([family.meshes[at] for at in kept.tolist()]))

    def crossing_bound(self, family: Family, enough: float = math.inf) -> float:
        """A valid bound that knows the boundaries between islands, no less than the order-free one.

        Less work where it is `enough` soon: for most families the bound that they share with those
        which differ in recomputation, sharding and chunks is (`FamilyTable.loosest`).
        """
        loosest = self.families.loosest(family)
        if loosest is family or enough == math.inf:
            return self._crossing_bound.seconds(family, enough)
        known = self._shared.get(id(loosest))
        if known is None or known[0] != enough:
            known = self._shared[id(loosest)] = (
                enough,
                self._crossing_bound.of_all(loosest, enough),
            )
        if known[1] >= enough:
            return known[1]
        return self._crossing_bound.seconds(family, enough)

    def exact(self, family: Family) -> bool:
        """Whether plans of the family cost what its space says, and not a little less."""
        return is_exact(self.stage_pricer, family)
