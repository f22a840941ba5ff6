"""The best of all plans of a small job, by trying every one of them.

Every sequence of pipelines that makes up the batch is placed; of each pipeline every cut and every
recomputation is replayed, and every combination of them composed. What a stage takes, and whether
it fits, is made once for each pipeline and number of layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from oracle_price import Costs, PlacedPipeline, Prices, Replicas, State, shape_of
from oracle_replay import Floats
from oracle_space import Mesh, Row, SmallSpace

from hetplan.cost.step_model.pricer import Pricer
from hetplan.plans.build import plan_of
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import Schedule


class TooManyPlansError(Exception):
    """The instance is too large to try everything."""


@dataclass(frozen=True)
class Found:
    """A plan and its step."""

    seconds: float
    pipelines: tuple[PlacedPipeline, ...]
    rows: tuple[Row, ...]
    state: State


_Ended = tuple[PlacedPipeline, list[int], Floats]
"""A pipeline, the slowest part of every stage, and when the stages end."""


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
    plans: int = 0
    """All that were looked at."""
    best: Found | None = None

    def run(self, *, only_several: bool = False) -> Found | None:
        """The best plan, or the best of several pipelines; TooManyPlansError past `most_plans`."""
        wanted = self.space.job.pin.pipelines
        if wanted in (None, 1) and not only_several:
            for row in self.space.rows():
                self._try((row,))
        if self.space.trainer.several_pipelines and wanted != 1:
            for rows in self.sequences(wanted):
                self._try(rows)
        return self.best

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

    def _try(self, rows: tuple[Row, ...]) -> None:
        space, prices = self.space, self.prices
        placed = space.placed(rows)
        if placed is None:
            return
        ranks = [sum(one.dp * one.cp for one in each) for row in placed for each in row]
        tps = [one.tp for row in placed for each in row for one in each]
        several = len(rows) > 1
        counts = [
            len(space.cuts(row)) * len(space.recomputes(row, several=several)) for row in rows
        ]
        for state in space.states(rows, ranks):
            self.plans += math.prod(counts)
            if self.plans > self.most_plans:
                raise TooManyPlansError
            if self.only_count:
                continue
            pairs = zip(rows, placed, strict=True)
            every = [[*self._all(row, replicas, several=several)] for row, replicas in pairs]
            if self.product is not None:
                for pipelines in product(*every):
                    self._product(rows, pipelines, state)
                continue
            costs = prices.of(tps, state, state.shards(math.lcm(*ranks)))
            for ended in product(*([*self._ended(costs, each)] for each in every)):
                pipelines, slow, ends = zip(*ended, strict=True)
                self._offer(prices.compose(costs, pipelines, slow, ends), pipelines, rows, state)

    def _all(
        self, row: Row, replicas: tuple[Replicas, ...], *, several: bool
    ) -> Iterator[PlacedPipeline]:
        choices = self.space.recomputes(row, several=several)
        for cut, recompute in product(self.space.cuts(row), choices):
            yield self.space.pipeline(row, replicas, cut, recompute)

    def _ended(self, costs: Costs, pipelines: list[PlacedPipeline]) -> Iterator[_Ended]:
        """Those cuts and recomputations of one placed row that fit."""
        stages: dict[object, tuple[int, tuple[float, ...], tuple[float, ...]] | None] = {}
        for each in pipelines:
            times = []
            for s, stage in enumerate(each.stages):
                key = (s, stage.chunks, stage.recompute)
                if key not in stages:
                    fits = all(self.prices.fits(costs, each, s, one) for one in stage.replicas)
                    stages[key] = costs.stage(stage) if fits else None
                times.append(stages[key])
            known = [time for time in times if time is not None]
            ends = self.prices.ends(costs, each, known) if len(known) == len(times) else None
            if ends is not None:
                yield each, [slow for slow, _, _ in known], ends

    def _product(
        self, rows: tuple[Row, ...], pipelines: tuple[PlacedPipeline, ...], state: State
    ) -> None:
        """By the product's price."""
        space = self.space
        chosen = chosen_plan(space, pipelines, rows, state)
        assert self.product is not None
        step = self.product.step(plan_of(space.model, space.cluster, space.job, chosen))
        if all(use.fits for memory in step.memory for use in memory):
            self._offer(step.step_seconds, pipelines, rows, state)

    def _offer(
        self,
        seconds: float,
        pipelines: tuple[PlacedPipeline, ...],
        rows: tuple[Row, ...],
        state: State,
    ) -> None:
        if self.best is None or seconds < self.best.seconds:
            self.best = Found(seconds, pipelines, rows, state)


# ---- in the product's words


def chosen_plan(
    space: SmallSpace,
    pipelines: tuple[PlacedPipeline, ...],
    rows: tuple[Row, ...],
    state: State,
) -> ChosenPlan:
    """The same choices in the product's words; devices are left to it."""
    return ChosenPlan(
        pipelines=tuple(
            _pipeline(space, each, row) for each, row in zip(pipelines, rows, strict=True)
        ),
        sharding=state.sharding,
        early_sends=rows[0].early,
        optimizer_offload=state.offload,
        sharing_ranks=state.ranks,
    )


def _pipeline(space: SmallSpace, placed: PlacedPipeline, row: Row) -> ChosenPipeline:
    # Layers of multi-token prediction go with the head.
    islands, last = space.cluster.islands, len(space.model.layers) - 1 - space.model.num_mtp_layers
    m, count = placed.microbatches, len(placed.stages)
    name = row.split or ("1f1b" if row.virtual == 1 else "interleaved-1f1b")
    stages = []
    for s, (stage, mesh) in enumerate(zip(placed.stages, row.slots, strict=True)):
        depth = stage.depth
        if row.virtual > 1 or row.split:
            depth = own_depth(name, s, count, m, row.virtual)
        stages.append(
            ChosenStage(
                parts=tuple(
                    Part(island=islands[at].name, shape=shape_of(replica))
                    for (at, _), replica in zip(mesh.parts, stage.replicas, strict=True)
                ),
                layers=tuple(min(stop, last) - max(start, 1) for start, stop in stage.chunks),
                recompute=stage.recompute,
                warmup_depth=depth,
            )
        )
    return ChosenPipeline(
        stages=tuple(stages),
        num_microbatches=m,
        schedule=Schedule(name=name, virtual_stages=row.virtual),
    )
