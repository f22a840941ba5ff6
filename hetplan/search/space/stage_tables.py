"""Makes the stage table of a family: every number that search, bounds and verification add up.

One family is one table (`hetplan.search.space.stage_table`). Its numbers are those of
`hetplan.cost`, so that they add up to the step of the plan without shared links.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.memory.lines import most_units
from hetplan.cost.step_model.end_of_step import clips_gradients
from hetplan.job.spec import Job
from hetplan.model.layer_units import LayerUnits
from hetplan.plans.targets import target
from hetplan.search.space.allowed import (
    ends_allowed,
    is_one_stage,
    mesh_matches,
    most_stages_of,
)
from hetplan.search.space.family import Family, Mesh, island_masks
from hetplan.search.space.optimizer_phase import Ends
from hetplan.search.space.stage_passes import Bools, stage_passes
from hetplan.search.space.stage_pricer import StagePricer
from hetplan.search.space.stage_table import (
    LAST,
    MAX_FREE_ISLANDS,
    ROLES,
    StageTable,
    num_islands,
)
from hetplan.search.space.transfers import Transfers


@dataclass(frozen=True)
class StageTables:
    """Stage tables of the families of one job; keeps what they share."""

    stage_pricer: StagePricer
    check: Callable[[], None] = lambda: None
    """Called now and then; may raise."""

    @cached_property
    def job(self) -> Job:
        """The training job."""
        return self.stage_pricer.job

    @cached_property
    def units(self) -> LayerUnits:
        """Where the model can be cut; an InputError where it has no such units."""
        return self.stage_pricer.units

    @cached_property
    def transfers(self) -> Transfers:
        """Transfers between the meshes of the job."""
        return Transfers(self.stage_pricer, self.check)

    @cached_property
    def ends(self) -> Ends:
        """Ends of the step of the job's meshes."""
        return Ends(self.stage_pricer)

    def of(self, family: Family, *, chunked: bool = False, ends: bool = True) -> StageTable:
        """Costs of every stage, boundary and end of step of the family's plans.

        They add up to the step of the plan without shared links (`hetplan.cost.step_model`), or to
        a little less: where parts of a stage take turns at being the slowest, plans with several tp
        pad the vocabulary further than a stage's own tp asks, early sends take compute units of the
        passes beside them, or ends of the step run beside compute (`is_exact`). `chunked`: ends
        are those of stages with several chunks, too. Without `ends` nothing follows the last pass:
        all costs are lower, and the table is made in a fraction of the time.
        An InputError for models without units, and where the predictor lacks something.
        """
        meshes, units = family.meshes, self.units
        passes, waited_for = stage_passes(self.stage_pricer, family)
        most_stages = np.array([min(each.max_stages, units.count) for each in meshes])
        limit = self._stage_limit(family)
        flights = most_flights(most_stages, limit, family, units)
        links, node_links, norm_links, norm_nodes = self.transfers.between(meshes)
        clips = clips_gradients(self.job)
        norm_inside = np.zeros(len(meshes))
        if clips:
            norm_inside = np.array([self.transfers.norm_inside(mesh) for mesh in meshes])
        most_layers = self._memory(family, flights)
        chunked = chunked or family.virtual_stages > 1
        fits = most_layers[..., 1].max(axis=0)
        after = np.full((ROLES, len(meshes), units.count + 1), self.job.data_loading_seconds)
        leaving = np.zeros_like(after)
        if ends:
            after, leaving = self._after(family, waited_for, fits, chunked=chunked)
        after += float(norm_inside.min())
        masks = island_masks(meshes)
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

    def _stage_limit(self, family: Family) -> int:
        one = family.one_stage or is_one_stage(self.job, self.stage_pricer.model)
        chunks = family.virtual_stages
        return most_stages_of(self.job, self.units, family.num_microbatches, chunks, one=one)

    def _region(self, mesh: Mesh) -> int:
        regions = {self.stage_pricer.cluster.islands[at].region for at in mesh.islands}
        return self.stage_pricer.cluster.regions.index(min(regions)) if len(regions) == 1 else -1

    def _tied(self, meshes: Sequence[Mesh], waited_for: Sequence[Bools]) -> Floats:
        """[M, M], infinite for ends that the target cannot have together."""
        found, trainer = self.transfers.tied(meshes, waited_for), target(self.job.target)
        if trainer.equal_ends:
            for i, first in enumerate(meshes):
                for j, last in enumerate(meshes):
                    if not ends_allowed(trainer, self.stage_pricer.model, first, last):
                        found[i, j] = math.inf
        return found

    def _may(self, mesh: Mesh, place: str | None) -> bool:
        return mesh_matches(mesh, self.stage_pricer.cluster, place)

    def _after(
        self, family: Family, waited_for: Sequence[Bools], most: Ints, *, chunked: bool
    ) -> tuple[Floats, Floats]:
        """[4, M, L + 1] after the last backward pass, and of that what waits for all stages.

        `most`: [4, M] units that fit at all.
        """
        each = [
            self.ends.least(mesh, family, fits, waited, chunked=chunked)
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
        found[..., 1:] = self.units.count
        widest = max(len(mesh.islands) for mesh in family.meshes)
        for part in range(widest):
            have = [m for m, mesh in enumerate(family.meshes) if part < len(mesh.islands)]
            rows, room, most = self._rows(family, have, part)
            fits = most_units(rows, room, self.units.count, in_flight)
            np.minimum(fits, most[..., None], out=fits)
            found[:, :, have, 1:] = np.minimum(found[:, :, have, 1:], fits)
        return found

    def _rows(self, family: Family, have: Sequence[int], part: int) -> tuple[Floats, Floats, Ints]:
        """Lines of memory [V, 4, meshes, 8], the room for them [V, 4, meshes], and the units whose
        optimizer the host has room for, likewise.
        """
        placed = self.stage_pricer
        rows = np.empty((len(family.recompute), ROLES, len(have), 8))
        room = np.empty(rows.shape[:3])
        most = np.empty(rows.shape[:3], dtype=np.int64)
        for m, at in enumerate(have):
            mesh = family.meshes[at]
            shape = mesh.shapes[part]
            room[:, :, m] = placed.room_bytes(mesh.islands[part])
            host = placed.host_bytes(mesh.islands[part])
            for v, recompute in enumerate(family.recompute):
                for role in range(ROLES):
                    held = placed.stage_bytes(
                        mesh.islands[part], shape, recompute, role, family.virtual_stages
                    )
                    lines = family.lines(held, mesh, part)
                    if family.virtual_stages > 1:
                        lines = lines.interleaved(
                            held, family.virtual_stages, ends=bool(role & LAST)
                        )
                    rows[v, role, m] = lines.row()
                    most[v, role, m] = lines.host_units(host, self.units.count)
        return rows, room, most


def most_flights(most_stages: Ints, limit: int, family: Family, units: LayerUnits) -> int:
    """W: most microbatches that a stage of the family has in flight; of several chunks, passes."""
    stages = min(int(most_stages.sum()), limit, units.count)
    if family.virtual_stages > 1:
        return (family.virtual_stages + 1) * stages
    return stages + family.most_extra_depth
