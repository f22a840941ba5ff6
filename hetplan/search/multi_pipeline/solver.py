"""All plans of several pipelines as one solver: a bound by prices, plans made of columns.

`improve` looks for plans (`heuristic`, `improved`), `prove` raises the bound: at coarse intervals
first.

Good plans are changed a little at a time: layers between stages, what stages recompute, shares.
Every change is priced whole, with the microbatches dealt out anew, because reductions between
pipelines of unlike cuts are priced nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np

from hetplan.errors import InputError
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage
from hetplan.plans.plan import RecomputeGranularity
from hetplan.search.multi_pipeline.assembly import Assembler, PricedPlan
from hetplan.search.multi_pipeline.bound import MultiPipelineBound, multi_pipeline_bound
from hetplan.search.multi_pipeline.enumerate import Enumeration
from hetplan.search.multi_pipeline.heuristic import Primal
from hetplan.search.multi_pipeline.paths import PathPricer
from hetplan.search.multi_pipeline.stage_options import MeshOptionsMaker, PartOptions, part_options
from hetplan.search.solver import Best, OrderFreeBound
from hetplan.search.table_maker import TableMaker


def improved(start: PricedPlan, assembler: Assembler, *, budget: int) -> PricedPlan:
    """The best that first improvements reach within so many prices."""
    best, spent, again = start, 0, True
    while again:
        again = False
        for chosen in _neighbours(best.chosen, assembler):
            if spent >= budget:
                return best
            spent += 1
            dealt = assembler.balanced(chosen)
            whole = None if dealt is None else assembler.whole(dealt)
            if whole is not None and whole.seconds < best.seconds * (1 - 1e-9):
                best, again = whole, True
                break
    return best


def _neighbours(chosen: ChosenPlan, assembler: Assembler) -> Iterator[ChosenPlan]:
    for p, pipeline in enumerate(chosen.pipelines):
        for changed in (*_moved_layers(pipeline, assembler), *_other_recompute(pipeline)):
            yield replace(
                chosen,
                pipelines=(*chosen.pipelines[:p], changed, *chosen.pipelines[p + 1 :]),
            )


def _moved_layers(pipeline: ChosenPipeline, assembler: Assembler) -> Iterator[ChosenPipeline]:
    """One layer unit less on the slowest stages, one more elsewhere."""
    step = assembler.layers_per_unit
    count = len(pipeline.stages)
    for distance in range(1, count):
        for source in range(count):
            for target in (source - distance, source + distance):
                if 0 <= target < count and pipeline.stages[source].layers[0] > step:
                    layers = [stage.layers[0] for stage in pipeline.stages]
                    layers[source] -= step
                    layers[target] += step
                    yield _with_layers(pipeline, layers)


def _with_layers(pipeline: ChosenPipeline, layers: list[int]) -> ChosenPipeline:
    return replace(
        pipeline,
        stages=tuple(
            replace(stage, layers=(held,))
            for stage, held in zip(pipeline.stages, layers, strict=True)
        ),
    )


def _other_recompute(pipeline: ChosenPipeline) -> Iterator[ChosenPipeline]:
    for s, stage in enumerate(pipeline.stages):
        if stage.recompute is not RecomputeGranularity.NONE:
            yield _with_stage(pipeline, s, replace(stage, recompute=RecomputeGranularity.NONE))


def _with_stage(pipeline: ChosenPipeline, at: int, stage: ChosenStage) -> ChosenPipeline:
    return replace(pipeline, stages=(*pipeline.stages[:at], stage, *pipeline.stages[at + 1 :]))


_ROUGH_RATIO, _ROUGH_ROUNDS = 0.03, 1
_RATIO, _ROUNDS = 3e-3, 6
"""Width of the intervals of the bottleneck's time, and linear programs, of the bound."""

_RISE = 0.003
"""A bound is told once it has risen by this part of itself."""

_LIKELY = 1.05
"""A step over its rough bound, where the first columns are made."""

_LOCAL_BUDGET = 100
"""Whole plans priced by one local search: of many stages about 50 ms each."""

_LISTED = {0: 1, 2: 5}
"""By effort of a proof: how much longer than usual a list of all plans may be."""

_FAR = 1.03
"""Plans that take longer than this over the best are not searched around."""

_KEPT = 2
"""Plans that a local search starts from."""


class MultiPipelineSolver:
    """Searches the plans of several pipelines of one job."""

    def __init__(self, index: int, maker: TableMaker) -> None:
        self.index = index
        self._maker = maker
        self._cluster, self._job = maker.cluster, maker.job
        self._placed = maker.stage_pricer
        self._known: MultiPipelineBound | None = None

    @cached_property
    def _options(self) -> PartOptions | None:
        """None where no layer fits anywhere."""
        try:
            return part_options(self._placed)
        except InputError:
            return None

    @cached_property
    def _assembler(self) -> Assembler:
        return Assembler(self._maker.evaluator, self._placed.units.layers_per_unit)

    @cached_property
    def _pricers(self) -> tuple[PathPricer, ...]:
        """By samples per microbatch; none where no pipeline is possible."""
        if not self._possible:
            return ()
        return tuple(PathPricer.of(options) for options in MeshOptionsMaker(self._placed).all())

    def _bound(self, best: Best, limit: float, ratio: float, rounds: int) -> MultiPipelineBound:
        """At most the limit, and never less than what is known; told to `best` as it rises."""
        if not self._pricers:
            return MultiPipelineBound(seconds=math.inf, prices=(), paths=())
        after = self._job.data_loading_seconds

        def tell(seconds: float) -> None:
            if seconds + after > best.bounds[self.index] * (1 + _RISE):
                best.raise_bound(self.index, seconds + after)
            best.check_time()

        for pricer in self._pricers:
            pricer.check = best.check_time
        found = multi_pipeline_bound(
            self._pricers,
            self._job.global_batch_size,
            limit - after,
            rounds=rounds,
            ratio=ratio,
            first=() if self._known is None else self._known.prices,
            on_bound=tell,
        )
        return replace(found, seconds=found.seconds + after)

    @property
    def _possible(self) -> bool:
        """Whether there are two devices, and no pin that forbids two pipelines.

        Their sends wait, so that a pinned depth does.
        """
        pin = self._job.pin
        devices = sum(island.num_usable_devices for island in self._cluster.islands)
        if devices < 2 or self._job.global_batch_size < 2:
            return False
        return pin.pipelines != 1 and not pin.depth

    def _coarse(self, best: Best) -> MultiPipelineBound:
        """The bound at coarse intervals, kept."""
        if self._known is None:
            self._known = self._bound(best, math.inf, _ROUGH_RATIO, _ROUGH_ROUNDS)
        return self._known

    @cached_property
    def order_free(self) -> OrderFreeBound:
        """Whether two pipelines are possible; the bound, seconds of work, comes with a proof."""
        return OrderFreeBound(
            bound_seconds=float("inf") if not self._possible or self._options is None else 0.0,
            estimate_seconds=float("inf"),
        )

    def sharpen(self, best: Best) -> None:
        """Nothing: its bounds take longer (`prove`)."""

    def improve(self, best: Best) -> None:
        """Offer plans made of columns, and what a local search makes of the best of them."""
        options = self._options
        if options is None:
            return
        coarse = self._coarse(best)
        if coarse.seconds == float("inf"):
            return

        def offer(whole: PricedPlan) -> None:
            best.offer(self.index, whole.chosen, whole.seconds)

        primal = Primal(
            placed=self._placed,
            options=options,
            mesh_options=[pricer.options for pricer in self._pricers],
            assembler=self._assembler,
            check=best.check_time,
            on_whole=offer,
        )
        before = self._assembler.replays
        plans = primal.plans(np.array(coarse.prices), coarse.paths, coarse.seconds * _LIKELY)
        for whole in plans[:_KEPT]:
            best.check_time()
            if whole.seconds > best.seconds * _FAR:
                break
            found = improved(whole, self._assembler, budget=_LOCAL_BUDGET)
            best.offer(self.index, found.chosen, found.seconds)
        best.replays += self._assembler.replays - before
        if best.wanted(self.index) == float("inf"):
            # Pins that no column keeps.
            simple = Enumeration(maker=self._maker, assembler=self._assembler, simple=True)
            simple.run(self.index, best)

    def prove(self, best: Best) -> None:
        """Raise the bound; list all plans where they are few."""
        if not self._possible or self._options is None:
            return
        scale = _LISTED.get(best.effort)
        if scale is not None:
            every = Enumeration(maker=self._maker, assembler=self._assembler, scale=scale)
            best.raise_bound(self.index, every.run(self.index, best))
        if best.open(self.index):
            best.raise_bound(self.index, self._coarse(best).seconds)
        if best.open(self.index) and best.stalled_at.get(self.index) != best.target:
            best.raise_bound(self.index, self._bound(best, best.target, _RATIO, _ROUNDS).seconds)
            best.stalled_at[self.index] = best.target
