"""One row of stages by tables: what each takes with so many units, whether it fits, and the best.

A stage's seconds, reduction, update and memory depend on its units, its recomputation and its place
in the pipeline, not on where its units stand; so they are made once, and the compiled loop over all
layers and recomputations only looks them up and replays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from numba import njit
from oracle_costs import Costs, PlacedPipeline, PlacedStage, Replicas, copies
from oracle_price import Prices
from oracle_replay import Floats, Ints, interpret
from oracle_space import Row, SmallSpace

from hetplan.plans.plan import RecomputeGranularity

Bools = npt.NDArray[np.bool_]
VARIANTS = (
    RecomputeGranularity.NONE,
    RecomputeGranularity.SELECTIVE,
    RecomputeGranularity.FULL,
)


@dataclass(frozen=True)
class Table:
    """One stage by recomputation and units."""

    seconds: Floats
    """[V, U + 1, 2 * chunks]"""
    reduction: Floats
    """[V, U + 1]"""
    leaving: Floats


@njit(cache=True)
def best_of_row(
    steps: Ints,
    first: Ints,
    lane_of: Ints,
    lanes: Ints,
    lane_first: Ints,
    hop_of: Ints,
    seconds: Floats,
    reduction: Floats,
    leaving: Floats,
    fits: Bools,
    cuts: Ints,
    variants: Ints,
    send: Floats,
    latency: Floats,
    extra: Floats,
    rendezvous: bool,
    clips: bool,
    best: float,
) -> tuple[float, int, int, int]:
    """(least step, its cut, its recomputation, plans that fit); norm and the like not counted."""
    stages = cuts.shape[1]
    now = np.empty((stages, seconds.shape[3]))
    ends = np.empty(stages)
    at_cut = at_variant = -1
    fitting = 0
    for c in range(cuts.shape[0]):
        for r in range(variants.shape[0]):
            fit = True
            for s in range(stages):
                fit = fit and fits[s, variants[r, s], cuts[c, s]]
            if not fit:
                continue
            fitting += 1
            for s in range(stages):
                now[s] = seconds[s, variants[r, s], cuts[c, s]]
            if not interpret(
                steps,
                first,
                lane_of,
                lanes,
                lane_first,
                hop_of,
                now,
                send,
                latency,
                extra,
                rendezvous,
                ends,
            ):
                continue
            arrive = leave = both = 0.0
            for s in range(stages):
                one = ends[s] + reduction[s, variants[r, s], cuts[c, s]]
                two = leaving[s, variants[r, s], cuts[c, s]]
                arrive, leave, both = max(arrive, one), max(leave, two), max(both, one + two)
            step = arrive + leave if clips else both
            if step < best:
                best, at_cut, at_variant = step, c, r
    return best, at_cut, at_variant, fitting


@dataclass
class Tables:
    """Tables of all stages of one instance."""

    space: SmallSpace
    prices: Prices
    tables: dict[object, Table] = field(default_factory=dict)
    fit_kept: dict[object, bool] = field(default_factory=dict)

    def _stage(
        self, row: Row, replicas: tuple[Replicas, ...], s: int, n: int, variant: int
    ) -> PlacedStage:
        """A stage of n units at this place; where its units stand does not matter."""
        slots, units = len(replicas), self.space.units.count
        v, end = row.virtual, len(self.space.model.layers)
        chunks = []
        for chunk in range(v):
            held = n // v + (chunk < n % v)
            head = chunk == v - 1 and s == slots - 1
            embedding = chunk == 0 and s == 0
            at = 0 if embedding else units - held if head else min(1, units - held)
            a, b = self.space.units.range(at, at + held, embedding=embedding, head=head)
            chunks.append((a, end if head else b))
        return PlacedStage(replicas[s], tuple(chunks), VARIANTS[variant], row.depths[s])

    def table(
        self,
        costs: Costs,
        row: Row,
        replicas: tuple[Replicas, ...],
        s: int,
        counts: Ints,
        used: Ints,
        together: bool,
    ) -> Table:
        slots = len(replicas)
        role = (s == 0, s == slots - 1)
        key = (id(costs), replicas[s], row.virtual, role, together, *counts, -1, *used)
        found = self.tables.get(key)
        if found is None:
            shape = (len(VARIANTS), self.space.units.count + 1)
            found = Table(np.zeros((*shape, 2 * row.virtual)), np.zeros(shape), np.zeros(shape))
            for n in counts:
                for variant in used:
                    stage = self._stage(row, replicas, s, int(n), int(variant))
                    slow, fore, back = costs.stage(stage)
                    found.seconds[variant, n] = [*fore, *back]
                    ends = self._end(costs, stage, slow, together)
                    found.reduction[variant, n], found.leaving[variant, n] = ends
            self.tables[key] = found
        return found

    def _end(
        self, costs: Costs, stage: PlacedStage, slow: int, together: bool
    ) -> tuple[float, float]:
        """(reduction, update and gathering) of a stage that reduces by itself."""
        lead = stage.replicas[slow]
        held = own = sum(costs.parameters(lead, stage.chunks))
        groups = []
        if together:
            # Layers that follow each other in the pipeline are reduced chunk by chunk.
            holders = tuple(
                (tuple(d for r in one.devices for d in r.devices()), one.tp)
                for one in stage.replicas
            )
            if copies(stage) > 1:
                for chunk in stage.chunks:
                    groups.append((costs.ranks(holders), sum(costs.parameters(lead, (chunk,)))))
        else:
            devices = tuple(d for r in lead.devices for d in r.devices())
            dense, routed = costs.parameters(lead, stage.chunks)
            groups.append((costs.ranks(((devices, lead.tp),)), dense))
            if routed:
                groups.append((costs.ranks(((devices, lead.ep * lead.etp),)), routed))
        reduction = leaving = 0.0
        for ranks, count in groups:
            reduction += costs.reduction(ranks, count)
            leaving += costs.gathering(ranks, count)
            own += count / costs.sharded_by(ranks) - count
        unit = costs.layers(lead, stage.recompute)[0]
        leaving += sum(part.seconds for part in unit.end.update_of(own, held))
        return reduction, leaving

    def fits(
        self,
        costs: Costs,
        row: Row,
        replicas: tuple[Replicas, ...],
        s: int,
        cuts: Ints,
        used: Ints,
    ) -> Bools:
        found = np.zeros((len(VARIANTS), self.space.units.count + 1), dtype=np.bool_)
        m, slots = row.microbatches, len(replicas)
        for n in np.unique(cuts[:, s]):
            for variant in used:
                place: tuple[object, ...] = (s == 0, s == slots - 1, row.depths[s], row.early)
                if row.virtual > 1:
                    place = (s, slots)
                shapes = tuple(
                    (one.devices[0].start, one.tp, one.microbatch_size) for one in replicas[s]
                )
                key = (
                    costs.vocabulary,
                    costs.sharding,
                    replicas[s],
                    shapes,
                    row.virtual,
                    m,
                    place,
                    int(n),
                    int(variant),
                )
                known = self.fit_kept.get(key)
                if known is None:
                    stage = self._stage(row, replicas, s, int(n), int(variant))
                    filler = [PlacedStage(each, (), stage.recompute, 1) for each in replicas]
                    filler[s] = stage
                    whole = PlacedPipeline(tuple(filler), m, row.early)
                    known = all(self.prices.fits(costs, whole, s, one) for one in replicas[s])
                    self.fit_kept[key] = known
                found[variant, n] = known
        return found
