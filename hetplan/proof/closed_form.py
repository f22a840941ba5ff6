"""Does the closed form exclude a family: has no plan of it a step below a limit?

Symbols: T the limit, m microbatches, K the longest both passes of a stage, S the sum of both passes
over all stages, W microbatches in flight on a stage, r the largest part of both passes that the
shorter one takes. For every stage under 1F1B (`hetplan.cost.bounds`, (b))

    m K <= T                    S + (m - 1) K - (W - 1) r K <= T

and with several chunks per stage, or split backward passes, the first one, in which K counts a
stage's update on the host as well, spread over the microbatches. Both limit K. Where stages of at
most that K cannot hold all units of layers, no plan is below T. How many they can hold, whatever
their order:

    by islands    an island stands in the pipeline once, with one mesh: the most of its meshes
    by places     of the stage at each distance from the end, whose microbatches in flight are
                  known, the most that any mesh can hold there

S is no less than if all units went to the cheapest islands that have room for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.memory.lines import StageBytes, most_units
from hetplan.cost.step_model.end_of_step import host_update_seconds
from hetplan.model.layers import Experts
from hetplan.plans.check_job import MIN_INTERLEAVED_STAGES
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import FULL_RECOMPUTE, NO_RECOMPUTE
from hetplan.plans.targets import target
from hetplan.search.space.allowed import divisors, is_one_stage, most_stages_of
from hetplan.search.space.family import Family, Mesh
from hetplan.search.space.stage_pricer import StagePricer

ROUNDING = 1e-9
"""Sums in another order differ by less than this part of themselves."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClosedForm:
    """What families with these meshes, recomputations and sharding have in common."""

    pricer: StagePricer
    family: Family
    """One of them."""
    cost: Floats
    """[V, M] seconds of both passes of one unit, by recomputation and mesh."""
    shorter: float
    """r"""
    first: Ints
    """[M] first island of each mesh."""
    update: Floats
    """[M] seconds in which the host updates the optimizer of one unit."""
    stages: Ints
    """[M] most stages."""
    places: int
    """Most stages of a pipeline."""
    holds: Ints
    """[V, M, W] units that fit at each distance from the end, with one chunk per stage."""

    @classmethod
    def of(cls, pricer: StagePricer, family: Family) -> ClosedForm:
        """Priced from the inputs."""
        plain = replace(family, schedule="1f1b", virtual_stages=1)
        meshes, m, units = family.meshes, family.num_microbatches, pricer.units
        stages = np.array([min(mesh.max_stages, units.count) for mesh in meshes])
        first = np.array([mesh.islands[0] for mesh in meshes])
        one = family.one_stage or is_one_stage(pricer.job, pricer.model)
        limit = pricer.job.pin.pp or most_stages_of(pricer.job, units, m, 1, one=one)
        places = min(int(_most_by(first, stages).sum()), limit)
        both, shorter = zip(*(_unit_seconds(pricer, family, mesh) for mesh in meshes), strict=True)
        return cls(
            pricer=pricer,
            family=plain,
            cost=np.array(both).T,
            shorter=max(shorter),
            update=np.array([_host_seconds(pricer, family, mesh) for mesh in meshes]),
            first=first,
            stages=stages,
            places=places,
            holds=_held_units(pricer, plain, np.minimum(np.arange(1, places + 1), m)),
        )

    @property
    def has_room(self) -> bool:
        """Whether the model fits at all, however long stages take."""
        return self._most_units(self.holds) >= self.pricer.units.count

    def excludes(self, family: Family, limit_seconds: float) -> bool:
        """Whether no plan of a family of these meshes has a step below the limit."""
        units, m = self.pricer.units.count, family.num_microbatches
        limit = (limit_seconds - self.pricer.job.data_loading_seconds) * (1.0 - ROUNDING)
        if not self.has_room:
            return True
        # A stage of n units has m passes of each kind, and then the host updates its optimizer.
        within = self._units_within(limit / m, self.cost + self.update / m)
        if family.splits:
            # In flight as under 1F1B, in another order of stages (search/bounds/order_free_bound).
            return self._most_units(np.minimum(self.holds, within[..., None])) < units
        if family.virtual_stages > 1:
            counts = self.stage_counts(family)
            return all(self._chunked_units(family, at, within) < units for at in counts)
        in_flight = min(self.places + family.most_extra_depth, m)
        turns = m - 1 - (in_flight - 1) * self.shorter
        left = limit - self._least_whole(units)
        if turns > 0:
            within = np.minimum(within, self._units_within(left / turns, self.cost))
        held = np.minimum(self.holds, within[..., None])
        return left < 0 or self._most_units(held) < units

    def stage_counts(self, family: Family) -> Iterator[int]:
        """Numbers of stages that an interleaved pipeline can have."""
        most = min(self.places, self.pricer.units.count // family.virtual_stages)
        for count in range(MIN_INTERLEAVED_STAGES, most + 1):
            pinned = self.pricer.job.pin.pp in (None, count)
            if pinned and family.num_microbatches % count == 0:
                yield count

    def _units_within(self, longest: float, cost: Floats) -> Ints:
        """[V, M] units that take no longer at this cost of one."""
        quotients = np.minimum(longest / cost * (1.0 + ROUNDING), self.pricer.units.count)
        units: Ints = np.floor(quotients).astype(np.int64)
        return units

    def _most_units(self, held: Ints) -> int:
        """Of all stages together; `held`: [V, M, W] of each."""
        by_islands = _most_by(self.first, self.stages * held[:, :, 0].max(axis=0)).sum()
        return int(min(by_islands, held.max(axis=(0, 1)).sum()))

    def _least_whole(self, units: int) -> float:
        """S: all units on the cheapest islands, each with the most room that it can have."""
        cost = np.where(self.holds[:, :, 0] > 0, self.cost, np.inf).min(axis=0)
        room = _most_by(self.first, self.stages * self.holds[:, :, 0].max(axis=0))
        cheapest = np.full(len(room), np.inf)
        np.minimum.at(cheapest, self.first, cost)
        whole, left = 0.0, units
        for at in np.argsort(cheapest, kind="stable").tolist():
            taken = min(left, int(room[at]))
            whole += taken * float(cheapest[at]) if taken > 0 else 0.0
            left -= taken
        return whole

    def _chunked_units(self, family: Family, count: int, within: Ints) -> int:
        """Of so many stages; 0 where one of them cannot hold a unit for each of its chunks."""
        held = _held_units(self.pricer, family, passes_in_flight(family, count))
        held = np.minimum(held, within[..., None]).max(axis=0)
        held[held < family.virtual_stages] = 0
        by_place = held.max(axis=0)
        # Places nearer to the end hold more: an island's stages are best there.
        own = np.array([row[:most].sum() for row, most in zip(held, self.stages, strict=True)])
        return int(min(by_place.sum(), _most_by(self.first, own).sum())) if by_place.all() else 0


def passes_in_flight(family: Family, count: int) -> Ints:
    """[W] passes in flight at each distance from the end of a pipeline of so many stages."""
    v = family.virtual_stages
    passes = 2 * np.arange(count) + (v - 1) * count + 1 if v > 1 else np.arange(1, count + 1)
    capped: Ints = np.minimum(passes, family.num_microbatches * v)
    return capped


def _most_by(first: Ints, values: Ints) -> Ints:
    """[islands] the most of each island's meshes."""
    most = np.zeros(int(first.max()) + 1, dtype=np.int64)
    np.maximum.at(most, first, values)
    return most


def _unit_seconds(pricer: StagePricer, family: Family, mesh: Mesh) -> tuple[Floats, float]:
    """([V] both passes of one unit on the slowest part, r of all parts), with the fewest ranks that
    can hold all experts: more are no faster.
    """
    parts = []
    for island, shape in zip(mesh.islands, mesh.shapes, strict=True):
        parts.append(pricer.unit_passes(island, shape.with_fewest_copies(), family.recompute))
    passes = np.array(parts)
    both = passes.sum(axis=1)
    return both.max(axis=0), float((passes.min(axis=1) / both).max())


def _host_seconds(pricer: StagePricer, family: Family, mesh: Mesh) -> float:
    """Of one unit's optimizer, as far as it is offloaded; of several parts the fastest."""
    if not family.offload:
        return 0.0
    found = []
    for part, (island, shape) in enumerate(zip(mesh.islands, mesh.shapes, strict=True)):
        held = pricer.stage_bytes(island, shape, family.recompute[0], 0)
        shards, experts = family.shards(mesh, part)
        own = family.offload * (held.dense.each / shards + held.routed.each / experts)
        place = pricer.cluster.islands[island]
        found.append(sum(host_update_seconds(place, pricer.job, own)))
    return min(found)


def _held_units(pricer: StagePricer, family: Family, in_flight: Ints) -> Ints:
    """[V, M, W] units that fit with so many passes in flight; of several parts the fullest."""
    held = np.empty((len(family.recompute), len(family.meshes), len(in_flight)), dtype=np.int64)
    for i, mesh in enumerate(family.meshes):
        for v, recompute in enumerate(family.recompute):
            fits = []
            for part, (island, shape) in enumerate(zip(mesh.islands, mesh.shapes, strict=True)):
                needed = _least_bytes(
                    pricer.stage_bytes(island, shape, recompute, 0, family.virtual_stages)
                )
                lines = family.lines(needed, mesh, part)
                if family.virtual_stages > 1:
                    lines = lines.interleaved(needed, family.virtual_stages, ends=False)
                row, room = np.array(lines.row()), np.array(pricer.room_bytes(island))
                fits.append(most_units(row, room, pricer.units.count, in_flight))
            held[v, i] = np.min(fits, axis=0)
    return held


def _least_bytes(needed: StageBytes) -> StageBytes:
    """What every stage has at least, wherever it stands: its units, and the work on them. Messages,
    and what stands before and behind the units, differ by place.
    """
    return replace(
        needed,
        dense=replace(needed.dense, fixed=0.0),
        routed=replace(needed.routed, fixed=0.0),
        kept=replace(needed.kept, fixed=0.0),
        front_kept=0.0,
        back_kept=0.0,
        sent=0.0,
        received=0.0,
        working=needed.working_alone,
        before=-math.inf,
        released=0.0,
    )


def several_pipelines_bound(pricer: StagePricer) -> float:
    """No plan of several pipelines has a step of fewer seconds: all devices at their best rates.

    Proof (weak duality). Prices are p_k >= 0 of a device of island k, N_k of them, scaled so that
    sum N_k p_k = B, the batch. If every pipeline did fewer samples than its devices cost, all
    together would do fewer than B. So some pipeline does m G >= P, m microbatches of G samples and
    P the price of its devices. With n units on a stage whose devices cost p, c seconds for both
    passes of a unit and K the longest stage, n c <= K, and so

        T >= m K >= P K / G = sum over stages p K / G >= sum n p c / G >= L min p c / G

    for L units in all. Of dp ranks of tp devices p / G is p_k tp / microbatch size. A stage of
    several parts has no less than the least of its parts. The prices for which this is most are in
    proportion to the rates r_k = max microbatch size / (c tp): then it is L B / sum N_k r_k.
    """
    job, rates = pricer.job, 0.0
    for at, island in enumerate(pricer.cluster.islands):
        rate = max(
            (
                shape.microbatch_size
                / (shape.tp * float(np.sum(pricer.unit_passes(at, shape, (NO_RECOMPUTE,)))))
                for shape in _shapes(pricer, at)
            ),
            default=0.0,
        )
        rates += island.num_usable_devices * rate
    if rates <= 0.0:
        return math.inf
    return pricer.units.count * job.global_batch_size / rates + job.data_loading_seconds


def _shapes(pricer: StagePricer, island: int) -> Iterator[Shape]:
    """Every tp and microbatch size whose activations fit; recomputing makes no stage faster."""
    job, place, model = pricer.job, pricer.cluster.islands[island], pricer.model
    experts = any(isinstance(run.layer.mlp, Experts) for run in model.layer_runs)
    for tp in divisors(place.devices_per_node):
        if model.slicing_faults(tp) or not place.num_usable_devices:
            continue
        parallel = target(job.target).sequence_parallel and job.pin.sequence_parallel is not False
        for size in range(1, job.global_batch_size):
            shape = Shape(
                tp=tp,
                dp=1,
                microbatch_size=size,
                etp=tp if experts else 1,
                sequence_parallel=parallel and tp > 1 and job.sequence_length % tp == 0,
            )
            kept = [
                pricer.stage_bytes(island, shape, each, 0).kept.each
                for each in (NO_RECOMPUTE, FULL_RECOMPUTE)
            ]
            if min(kept) > place.memory_bytes:
                break  # larger ones keep more
            yield shape
