"""The best of all plans of a small job, by trying every one of them.

Pipelines alone are tried row by row in compiled loops over layers and recomputation, with tables of
what a stage takes and whether it fits. Several pipelines are put together from all rows whose
samples make up the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import numpy as np
import numpy.typing as npt
from oracle_costs import Costs, PlacedPipeline, Replicas
from oracle_meshes import Mesh
from oracle_plans import chosen_plan
from oracle_price import Prices
from oracle_replay import Floats, Ints, Program
from oracle_space import Row, SmallSpace
from oracle_tables import VARIANTS, Tables, best_of_row

from hetplan.cost.step_model.pricer import Pricer
from hetplan.plans.build import plan_of
from hetplan.plans.plan import RecomputeGranularity, Sharding

Bools = npt.NDArray[np.bool_]


class TooManyPlansError(Exception):
    """The instance is too large to try everything."""


@dataclass(frozen=True)
class Found:
    """A plan and its step."""

    seconds: float
    pipelines: tuple[PlacedPipeline, ...]
    rows: tuple[Row, ...]
    sharding: Sharding


@dataclass
class Optimum:
    """What trying everything gives."""

    best: Found | None = None
    plans: int = 0
    """All that were looked at."""
    fitting: int = 0

    def offer(self, found: Found) -> None:
        """Keep the faster one."""
        if self.best is None or found.seconds < self.best.seconds:
            self.best = found


@dataclass
class Enumeration:
    """Tries every plan of one job."""

    space: SmallSpace
    prices: Prices
    most_plans: int = 10**9
    only_count: bool = False
    """Nothing is priced."""
    product: Pricer | None = None
    """Prices the plans instead of the oracle's own sums."""
    found: Optimum = field(default_factory=Optimum)

    @cached_property
    def tables(self) -> Tables:
        """What stages take."""
        return Tables(self.space, self.prices)

    def run(self) -> Optimum:
        """The optimum; TooManyPlansError past `most_plans`."""
        pipelines = self.space.job.pin.pipelines
        if pipelines in (None, 1):
            for row in self.space.rows():
                self._row(row)
        if self.space.trainer.several_pipelines and pipelines != 1:
            self._several(pipelines)
        return self.found

    def _count(self, plans: int) -> None:
        self.found.plans += plans
        if self.found.plans > self.most_plans:
            raise TooManyPlansError

    def _row(self, row: Row) -> None:
        space, prices = self.space, self.prices
        placed = space.placed((row,))
        if placed is None:
            return
        replicas = placed[0]
        cuts = np.array(space.cuts(row), dtype=np.int64)
        choices = space.recomputes(row)
        variants = np.array([[VARIANTS.index(one) for one in each] for each in choices])
        if not cuts.size or not variants.size:
            return
        run = prices.program(
            len(replicas), row.microbatches, row.virtual, row.depths, early=row.early
        )
        ranks = [sum(one.dp * one.cp for one in each) for each in replicas]
        together = any(len(each) > 1 for each in replicas)
        tps = [one.tp for each in replicas for one in each]
        for sharding in space.shardings(row, ranks):
            self._count(len(cuts) * len(variants))
            if self.only_count:
                continue
            if self.product is not None:
                for each in self._all(row, replicas):
                    self._product((row,), (each,), sharding)
                continue
            shards = 1 if sharding is Sharding.NONE else math.lcm(*ranks)
            costs = prices.of(tps, sharding, shards)
            if together and len(replicas) > 1 and space.model.tied_embeddings:
                # Which part of a stage is the slowest decides who sums the matrix: plan by plan.
                ready = [*self._ready(costs, [*self._all(row, replicas)])]
                self._combine(costs, (row,), [ready], [])
                continue
            self._try(row, replicas, costs, cuts, variants, choices, run, together)

    def _all(self, row: Row, replicas: tuple[Replicas, ...]) -> Iterator[PlacedPipeline]:
        for cut in self.space.cuts(row):
            for recompute in self.space.recomputes(row):
                yield self.space.pipeline(row, replicas, cut, recompute)

    def _try(
        self,
        row: Row,
        replicas: tuple[Replicas, ...],
        costs: Costs,
        cuts: Ints,
        variants: Ints,
        choices: list[tuple[RecomputeGranularity, ...]],
        run: Program,
        together: bool,
    ) -> None:
        used = np.unique(variants)
        stages = range(len(replicas))
        # Lists of tables: one per stage.
        tables = [
            self.tables.table(costs, row, replicas, s, np.unique(cuts[:, s]), used, together)
            for s in stages
        ]
        fits = np.stack([self.tables.fits(costs, row, replicas, s, cuts, used) for s in stages])
        sample = self.space.pipeline(row, replicas, tuple(cuts[0]), choices[0])
        hops = self.prices.hops(costs, sample)
        send = [x for hop in hops for x in (hop.send_forward_seconds, hop.send_backward_seconds)]
        reduction = np.stack([table.reduction for table in tables])
        if costs.model.tied_embeddings and len(replicas) > 1:
            tied = self.prices.tied(costs, replicas[0][0], replicas[-1][0])
            reduction[0] += tied
            reduction[-1] += tied
        offset = costs.job.data_loading_seconds
        if self.prices.clips:
            offset += self._norm(costs, sample)
        best = math.inf if self.found.best is None else self.found.best.seconds - offset
        step, c, r, fitting = best_of_row(
            run.steps,
            run.first,
            run.lane_of,
            run.lanes,
            run.lane_first,
            run.hop_of,
            np.stack([table.seconds for table in tables]),
            reduction,
            np.stack([table.leaving for table in tables]),
            fits,
            cuts,
            variants,
            np.array(send, dtype=np.float64),
            np.array([hop.wire_latency_seconds for hop in hops], dtype=np.float64),
            np.array([hop.rendezvous_extra_seconds for hop in hops], dtype=np.float64),
            self.prices.rendezvous and not row.early,
            self.prices.clips,
            best,
        )
        self.found.fitting += fitting
        if c >= 0:
            cut = tuple(int(n) for n in cuts[c])
            pipeline = self.space.pipeline(row, replicas, cut, choices[r])
            self.found.offer(Found(step + offset, (pipeline,), (row,), costs.sharding))

    def _norm(self, costs: Costs, sample: PlacedPipeline) -> float:
        return self.prices.norm(costs, [sample], [sample.stages[0].replicas[0]])

    def _several(self, wanted: int | None) -> None:
        for rows in self.sequences(wanted):
            self._pipelines(rows)

    def sequences(self, wanted: int | None) -> list[tuple[Row, ...]]:
        """Pipelines, in order, that make up the batch and may have room together."""
        rows = list(self._partial_rows())
        batch = self.space.job.global_batch_size
        islands = self.space.cluster.islands
        room = [
            len(nodes) * island.devices_per_node
            for nodes, island in zip(self.space.usable, islands, strict=True)
        ]
        need = [self._devices(row) for row in rows]

        def chosen(left: int, free: list[int], taken: list[int]) -> Iterator[list[int]]:
            if left == 0 and len(taken) > 1 and wanted in (None, len(taken)):
                yield taken
            if left == 0 or (wanted is not None and len(taken) == wanted):
                return
            for at, row in enumerate(rows):
                if row.samples > left:
                    continue
                rest = [a - b for a, b in zip(free, need[at], strict=True)]
                if min(rest) >= 0:
                    yield from chosen(left - row.samples, rest, [*taken, at])

        found = [tuple(rows[at] for at in taken) for taken in chosen(batch, room, [])]
        if not self.space.job.pin.same_degrees:
            return found
        return [each for each in found if len({m.parts[0][1] for r in each for m in r.slots}) == 1]

    def _devices(self, row: Row) -> list[int]:
        found = [0] * len(self.space.cluster.islands)
        for mesh in row.slots:
            for at, shape in mesh.parts:
                found[at] += shape.num_devices
        return found

    def _partial_rows(self) -> Iterator[Row]:
        """Pipelines of 1F1B with waiting sends, every number of microbatches below the batch."""
        by_samples: dict[int, list[Mesh]] = {}
        for mesh in self.space.meshes(alike=False):
            by_samples.setdefault(mesh.samples, []).append(mesh)
        for samples, meshes in by_samples.items():
            if self.space.job.global_batch_size % samples:
                continue
            for m in range(1, (self.space.job.global_batch_size - 1) // samples + 1):
                rows = self.space.arranged(meshes, m, interleaves=False)
                # Pipelines beside others send in the usual way and have the usual warm-up.
                yield from (row for row in rows if not row.early)

    def _pipelines(self, rows: tuple[Row, ...]) -> None:
        space, prices = self.space, self.prices
        placed = space.placed(rows)
        if placed is None:
            return
        ranks = [sum(one.dp * one.cp for one in each) for row in placed for each in row]
        open_choices: list[list[PlacedPipeline]] = []
        counts: list[int] = []
        for row, replicas in zip(rows, placed, strict=True):
            counts.append(len(space.cuts(row)) * len(space.recomputes(row)))
            if not self.only_count:
                open_choices.append([*self._all(row, replicas)])
        tps = [one.tp for row in placed for each in row for one in each]
        for sharding in space.shardings(rows[0], ranks):
            shards = 1 if sharding is Sharding.NONE else math.lcm(*ranks)
            costs = prices.of(tps, sharding, shards)
            self._count(math.prod(counts))
            if self.only_count:
                continue
            if self.product is not None:
                for every in product(*open_choices):
                    self._product(rows, every, sharding)
                continue
            ready = [[*self._ready(costs, each)] for each in open_choices]
            self._combine(costs, rows, ready, [])

    def _product(
        self, rows: tuple[Row, ...], pipelines: tuple[PlacedPipeline, ...], sharding: Sharding
    ) -> None:
        """The product's price of a plan."""
        space = self.space
        chosen = chosen_plan(space, pipelines, rows, sharding)
        assert self.product is not None
        step = self.product.step(plan_of(space.model, space.cluster, space.job, chosen))
        if all(use.fits for memory in step.memory for use in memory):
            self.found.fitting += 1
            self.found.offer(Found(step.step_seconds, pipelines, rows, sharding))

    def _ready(
        self, costs: Costs, pipelines: list[PlacedPipeline]
    ) -> Iterator[tuple[PlacedPipeline, list[int], Floats]]:
        """Those that fit, with their slowest parts and ends."""
        for each in pipelines:
            if all(
                self.prices.fits(costs, each, s, one)
                for s, stage in enumerate(each.stages)
                for one in stage.replicas
            ):
                times = [costs.stage(stage) for stage in each.stages]
                ends = self.prices.ends(costs, each, times)
                if ends is not None:
                    yield each, [slow for slow, _, _ in times], ends

    def _combine(
        self,
        costs: Costs,
        rows: tuple[Row, ...],
        ready: list[list[tuple[PlacedPipeline, list[int], Floats]]],
        taken: list[tuple[PlacedPipeline, list[int], Floats]],
    ) -> None:
        if len(taken) < len(ready):
            for one in ready[len(taken)]:
                self._combine(costs, rows, ready, [*taken, one])
            return
        self.found.fitting += 1
        pipelines = tuple(each for each, _, _ in taken)
        step = self.prices.compose(
            costs, pipelines, [slow for _, slow, _ in taken], [ends for _, _, ends in taken]
        )
        self.found.offer(Found(step, pipelines, rows, costs.sharding))


def optimum(space: SmallSpace, prices: Prices, product: Pricer | None = None) -> Optimum:
    """The best of all plans; by the oracle's own prices, or by the product's."""
    return Enumeration(space, prices, product=product).run()


def number_of_plans(space: SmallSpace, prices: Prices, most: int) -> int:
    """How many plans there are to try; TooManyPlansError where there are more than `most`."""
    return Enumeration(space, prices, most, only_count=True).run().plans
