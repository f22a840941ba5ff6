"""From a family of plans to its numbers: order-free bound, crossing bound, exact stage table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.memory.lines import most_units
from hetplan.cost.replay.times import Exchange
from hetplan.cost.step_model.end_of_step import clips_gradients
from hetplan.cost.step_model.plan import exchange_of
from hetplan.job.spec import Job
from hetplan.model.layer_units import LayerUnits
from hetplan.model.spec import ModelSpec
from hetplan.plans.targets import target
from hetplan.predict.predictor import Predictor
from hetplan.search.bounds.crossing_bound import CrossingBounds
from hetplan.search.bounds.order_free_bound import (
    BottleneckLinks,
    UnitCosts,
    caps,
    most_stages_of,
)
from hetplan.search.bounds.order_free_table import Columns, OrderFreeBounds, OrderFreeTable
from hetplan.search.interleaved.memory import ChunkMemory
from hetplan.search.one_f_one_b.likely_meshes import IN_FLIGHT, MANY, likely_meshes
from hetplan.search.result import Question
from hetplan.search.solver import OrderFreeBound
from hetplan.search.space.allowed import allowed_cluster, ends_allowed, is_one_stage, mesh_matches
from hetplan.search.space.families import Families
from hetplan.search.space.family import Family, FamilyTable, Mesh
from hetplan.search.space.optimizer_phase import Ends
from hetplan.search.space.plan_evaluator import PlanEvaluator, is_exact
from hetplan.search.space.stage_passes import Bools, stage_passes
from hetplan.search.space.stage_pricer import StagePricer
from hetplan.search.space.stage_table import (
    FIRST,
    LAST,
    MAX_FREE_ISLANDS,
    ROLES,
    StageTable,
    num_islands,
)
from hetplan.search.space.transfers import Transfers


@dataclass(frozen=True, kw_only=True)
class TableMaker:
    """Turns families of one job into spaces; keeps what families share."""

    model: ModelSpec
    cluster: Cluster
    """With the forbidden nodes out."""
    job: Job
    predictor: Predictor = field(repr=False)
    _unchunked: dict[Family, StageTable] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, question: Question, predictor: Predictor) -> TableMaker:
        """Of a question, whose forbidden islands and nodes are left out."""
        job = question.job
        cluster = allowed_cluster(question.cluster, job)
        return cls(model=question.model, cluster=cluster, job=job, predictor=predictor)

    @cached_property
    def families(self) -> FamilyTable:
        """The families of plans with one pipeline."""
        return Families(model=self.model, cluster=self.cluster, job=self.job).families()

    @cached_property
    def stage_pricer(self) -> StagePricer:
        """Prices stages of the job."""
        return StagePricer(
            model=self.model, cluster=self.cluster, job=self.job, predictor=self.predictor
        )

    @cached_property
    def transfers(self) -> Transfers:
        """Transfers between the meshes of the job."""
        return Transfers(self.stage_pricer)

    @cached_property
    def _ends(self) -> Ends:
        return Ends(self.stage_pricer)

    @cached_property
    def evaluator(self) -> PlanEvaluator:
        """Places, checks and prices whole plans of the job."""
        return PlanEvaluator(self.model, self.cluster, self.job, self.predictor)

    @cached_property
    def _order_free(self) -> OrderFreeBounds:
        return OrderFreeBounds(UnitCosts(self.stage_pricer, BottleneckLinks(self.stage_pricer)))

    @cached_property
    def _crossing_bound(self) -> CrossingBounds:
        return CrossingBounds(self._order_free, self.transfers, self._ends)

    def units(self) -> LayerUnits:
        """Where the model can be cut; an InputError where it has no such units."""
        return self.stage_pricer.units

    def space(self, family: Family) -> StageTable:
        """Exact costs of every stage, boundary and end of step of the family's plans.

        They add up to the step of the plan without shared links (`hetplan.cost.step_model`). Where
        parts of a stage take turns at being the slowest, plans with several tp pad the vocabulary
        further than a stage's own tp asks, or early sends take compute units of the passes beside
        them, the numbers are a little less than the plan's.
        An InputError for models without units, and where the predictor lacks something.
        """
        meshes, units = family.meshes, self.units()
        passes, waited_for = stage_passes(self.stage_pricer, family)
        most_stages = np.array([min(each.max_stages, units.count) for each in meshes])
        limit = most_stages_of(
            self.job,
            units,
            family.num_microbatches,
            family.virtual_stages,
            one=is_one_stage(self.job, self.model),
        )
        flights = most_flights(most_stages, limit, family, units)
        links, node_links, norm_links, norm_nodes = self.transfers.between(meshes)
        clips = clips_gradients(self.job)
        norm_inside = np.zeros(len(meshes))
        if clips:
            norm_inside = np.array([self.transfers.norm_inside(mesh) for mesh in meshes])
        most_layers = self._memory(family, flights)
        after, leaving = self._after(family, waited_for, most_layers[..., 1].max(axis=0))
        after += float(norm_inside.min())
        masks = np.array([mesh.mask for mesh in meshes], dtype=np.int64)
        pin, trainer = self.job.pin, target(self.job.target)
        return StageTable(
            num_layers=units.count,
            layers_per_unit=units.layers_per_unit,
            front_layers=units.front_layers,
            back_layers=units.back_layers,
            num_microbatches=family.num_microbatches,
            most_extra_depth=family.most_extra_depth,
            stages=pin.pp or 0,
            stage_limit=limit,
            regions_apart=num_islands(masks) > MAX_FREE_ISLANDS,
            rendezvous=trainer.rendezvous_sends and not family.early_sends,
            clips_gradients=clips,
            region=np.array([self._region(mesh) for mesh in meshes], dtype=np.int64),
            island_mask=masks,
            max_stages=most_stages,
            may_be_first=np.array([self._may(mesh, pin.embedding_on) for mesh in meshes]),
            may_be_last=np.array([self._may(mesh, pin.head_on) for mesh in meshes]),
            forward=passes.forward,
            backward=passes.backward,
            extra_forward=passes.extra_forward,
            extra_backward=passes.extra_backward,
            links=links,
            node_links=node_links,
            stages_per_node=np.array(
                [self.transfers.side(mesh).stages_per_node for mesh in meshes], dtype=np.int64
            ),
            tied=self._tied(meshes, waited_for),
            most_layers=most_layers,
            after=after,
            leaving=leaving if clips else np.zeros_like(leaving),
            norm_inside=norm_inside - norm_inside.min(),
            norm_links=norm_links if clips else np.zeros_like(norm_links),
            norm_node_links=norm_nodes if clips else np.zeros_like(norm_nodes),
        ).contiguous()

    def unchunked_space(self, family: Family) -> StageTable:
        """The space of an interleaved family's meshes as if its stages had one chunk each.

        Families that differ in their chunks only have one. Memory (`chunk_memory`), schedule and
        the limit of stages are the interleaved family's own.
        """
        plain = replace(family, schedule="1f1b", virtual_stages=1, most_extra_depth=0)
        found = self._unchunked.get(plain)
        if found is None:
            found = self._unchunked[plain] = self.space(plain)
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

    def order_free_bounds(self, families: FamilyTable, check: Callable[[], None]) -> OrderFreeTable:
        """The same of all families at once; `check` is called every few milliseconds."""
        return Columns(self._order_free.costs, families, check).order_free()

    def likely(self, family: Family) -> Family:
        """The family with those of its meshes that are worth a local search
        (`hetplan.search.one_f_one_b.likely_meshes`): itself where they are few.
        """
        base = self._order_free.base(family)
        if len(family.meshes) <= MANY or base.arrays is None:
            return family
        cost, rows, room, _, most = base.arrays
        units = self.units().count
        held = caps(rows, room, units, family.num_microbatches, min(IN_FLIGHT, base.positions))
        masks = np.array([mesh.mask for mesh in family.meshes], dtype=np.int64)
        kept = likely_meshes(masks, cost, held[:, :, -1], most, units)
        return replace(family, meshes=tuple([family.meshes[at] for at in kept.tolist()]))

    def below(self, family: Family, seconds: float) -> Family:
        """The family with those of its meshes that a step below `seconds` can have: a stage has m
        passes of each kind of at least one unit. Itself where all can.
        """
        base = self._order_free.base(family)
        if base.arrays is None or not math.isfinite(seconds):
            return family
        busy = family.num_microbatches * base.arrays[0].min(axis=0)
        kept = np.flatnonzero(busy <= seconds * (1.0 + 1e-9))
        if len(kept) in (0, len(family.meshes)):
            return family
        return replace(family, meshes=tuple([family.meshes[at] for at in kept.tolist()]))

    def crossing_bound(self, family: Family, enough: float = math.inf) -> float:
        """A valid bound that knows the boundaries between islands, no less than the rough one.

        Less work where it is `enough` soon.
        """
        return self._crossing_bound.seconds(family, enough)

    def exact(self, family: Family) -> bool:
        """Whether plans of the family cost what its space says, and not a little less."""
        return is_exact(self.stage_pricer, family)

    def _region(self, mesh: Mesh) -> int:
        regions = {self.cluster.islands[at].region for at in mesh.islands}
        return self.cluster.regions.index(min(regions)) if len(regions) == 1 else -1

    def _tied(self, meshes: Sequence[Mesh], waited_for: Sequence[Bools]) -> Floats:
        """[M, M], infinite for ends that the target cannot have together."""
        found, trainer = self.transfers.tied(meshes, waited_for), target(self.job.target)
        if trainer.equal_ends:
            for i, first in enumerate(meshes):
                for j, last in enumerate(meshes):
                    if not ends_allowed(trainer, self.model, first, last):
                        found[i, j] = math.inf
        return found

    def _may(self, mesh: Mesh, place: str | None) -> bool:
        return mesh_matches(mesh, self.cluster, place)

    def _after(
        self, family: Family, waited_for: Sequence[Bools], most: Ints
    ) -> tuple[Floats, Floats]:
        """[4, M, L + 1] after the last backward pass, and of that what waits for all stages.

        `most`: [4, M] units that fit at all.
        """
        each = [
            self._ends.least(mesh, family.sharding, fits, waited)
            for mesh, waited, fits in zip(family.meshes, waited_for, most.T.tolist(), strict=True)
        ]
        leaving = np.stack([left for _, left in each], axis=1)
        after = np.stack([reduction for reduction, _ in each], axis=1) + leaving
        after += self.job.data_loading_seconds
        return after, leaving

    def _memory(self, family: Family, flights: int) -> Ints:
        """[V, 4, M, W + 1] units that fit; none with nothing in flight."""
        chunks = family.num_microbatches * family.virtual_stages
        in_flight = np.minimum(np.arange(1, flights + 1), chunks)
        shape = (len(family.recompute), ROLES, len(family.meshes))
        found = np.zeros((*shape, flights + 1), dtype=np.int64)
        found[..., 1:] = self.units().count
        widest = max(len(mesh.islands) for mesh in family.meshes)
        for part in range(widest):
            have = [m for m, mesh in enumerate(family.meshes) if part < len(mesh.islands)]
            rows, room = self._rows(family, have, part)
            fits = most_units(rows, room, self.units().count, in_flight)
            found[:, :, have, 1:] = np.minimum(found[:, :, have, 1:], fits)
        return found

    def _rows(self, family: Family, have: Sequence[int], part: int) -> tuple[Floats, Floats]:
        """Lines of memory [V, 4, meshes, 8] and the room for them [V, 4, meshes]."""
        placed = self.stage_pricer
        rows = np.empty((len(family.recompute), ROLES, len(have), 8))
        room = np.empty(rows.shape[:3])
        for m, at in enumerate(have):
            mesh = family.meshes[at]
            shape = mesh.shapes[part]
            shards, expert_shards = family.shards(mesh, part)
            room[:, :, m] = self._room(mesh, part)
            for v, recompute in enumerate(family.recompute):
                for role in range(ROLES):
                    held = placed.stage_bytes(shape, recompute, role, family.virtual_stages)
                    lines = held.lines(
                        family.sharding,
                        shards,
                        expert_shards,
                        family.num_microbatches,
                        early_sends=family.early_sends,
                    )
                    if family.virtual_stages > 1:
                        lines = lines.interleaved(
                            held, family.virtual_stages, ends=bool(role & LAST)
                        )
                    rows[v, role, m] = lines.row()
        return rows, room

    def _room(self, mesh: Mesh, part: int) -> float:
        island = self.cluster.islands[mesh.islands[part]]
        return island.memory_bytes * (1 - self.job.memory_reserve_fraction)


def most_flights(most_stages: Ints, limit: int, family: Family, units: LayerUnits) -> int:
    """W: most microbatches that a stage of the family has in flight; of several chunks, passes."""
    stages = min(int(most_stages.sum()), limit, units.count)
    if family.virtual_stages > 1:
        return (family.virtual_stages + 1) * stages
    return stages + family.most_extra_depth


def transformer_layers(space: StageTable, role: int, units: int) -> int:
    """Transformer layers of a stage of this role with so many units."""
    layers = units * space.layers_per_unit
    return (
        layers
        + (space.front_layers if role & FIRST else 0)
        + (space.back_layers if role & LAST else 0)
    )
