"""All plans of several pipelines as one solver: a bound by prices, plans made of columns.

`improve` makes plans of columns and changes the best of them a little at a time (`heuristic`).
`prove` lists all plans where they are few (`enumerate`) and raises the bound (`bound`), at coarse
intervals first.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

import numpy as np

from hetplan.errors import InputError
from hetplan.search.multi_pipeline.assembly import Assembler, PricedPlan
from hetplan.search.multi_pipeline.bound import (
    MultiPipelineBound,
    busy_seconds,
    multi_pipeline_bound,
)
from hetplan.search.multi_pipeline.enumerate import Enumeration
from hetplan.search.multi_pipeline.heuristic import Primal, improved, known_rows
from hetplan.search.multi_pipeline.paths import PathPricer
from hetplan.search.multi_pipeline.stage_options import OptionsMaker, PartOptions
from hetplan.search.solver import Best, Grounds, OrderFreeBound
from hetplan.search.table_maker import TableMaker

_ROUGH_RATIO, _ROUGH_ROUNDS = 0.03, 1
_RATIO, _ROUNDS = 3e-3, 12
"""Width of the intervals of the bottleneck's time, and linear programs, of the bound."""

_RISE = 0.003
"""A bound is told once it has risen by this part of itself."""

_LIKELY = 1.05
"""A step over what is known of its bound, where the first columns are made."""

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
        self._maker, self._job = maker, maker.job
        self._options = OptionsMaker(pricer=maker.stage_pricer)
        self._assembler = Assembler(maker.evaluator)
        self._known: MultiPipelineBound | None = None

    @cached_property
    def _parts(self) -> PartOptions | None:
        """None where no layer fits anywhere."""
        try:
            return self._options.parts()
        except InputError:
            return None

    @property
    def _possible(self) -> bool:
        """Whether there are two devices, and no pin that forbids two pipelines.

        Their sends wait, so that a pinned depth does.
        """
        pin = self._job.pin
        devices = sum(island.num_usable_devices for island in self._maker.cluster.islands)
        if devices < 2 or self._job.global_batch_size < 2:
            return False
        return pin.pipelines != 1 and not pin.depth

    @cached_property
    def order_free(self) -> OrderFreeBound:
        """All devices busy all the time; infinite where two pipelines are not possible."""
        bound = math.inf
        if self._parts is not None and self._pricers:
            batch, after = self._job.global_batch_size, self._job.data_loading_seconds
            bound = busy_seconds(self._pricers, batch) + after
        return OrderFreeBound(bound_seconds=bound, estimate_seconds=math.inf)

    def improve(self, best: Best) -> None:
        """Offer plans made of columns, and what a local search makes of the best of them."""
        parts = self._parts
        if parts is None:
            return
        coarse = self._coarse(best)
        if coarse.seconds == math.inf:
            return

        def offer(whole: PricedPlan) -> None:
            best.offer(self.index, whole.chosen, whole.seconds)

        primal = Primal(
            maker=self._options,
            options=parts,
            prices=np.array(coarse.prices),
            known=known_rows(coarse.paths, self._options.stages(), parts),
            assembler=self._assembler,
            check=best.check_time,
            on_whole=offer,
        )
        before = self._assembler.replays
        guess = max(coarse.seconds, self.order_free.bound_seconds) * _LIKELY
        for whole in primal.plans(guess)[:_KEPT]:
            best.check_time()
            if whole.seconds > best.seconds * _FAR:
                break
            offer(improved(whole, self._assembler, self._options, budget=_LOCAL_BUDGET))
        best.replays += self._assembler.replays - before
        if best.wanted(self.index) == math.inf:
            # Pins that no column keeps.
            self._enumeration(simple=True).run(self.index, best)

    def sharpen(self, best: Best) -> None:
        """Nothing: its bounds take longer (`prove`)."""

    def prove(self, best: Best) -> None:
        """Raise the bound; list all plans where they are few."""
        if self.order_free.bound_seconds == math.inf:
            best.raise_bound(self.index, math.inf)
            return
        scale = _LISTED.get(best.effort)
        if scale is not None:
            every = self._enumeration(scale=scale)
            best.raise_bound(self.index, every.run(self.index, best), Grounds.EVERY_PLAN)
        if best.open(self.index):
            best.raise_bound(self.index, self._coarse(best).seconds, Grounds.PRICES)
        if best.open(self.index) and best.stalled_at.get(self.index) != best.target:
            bound = self._bound(best, best.target, _RATIO, _ROUNDS)
            best.raise_bound(self.index, bound.seconds, Grounds.PRICES)
            best.stalled_at[self.index] = best.target

    def _enumeration(self, scale: int = 1, *, simple: bool = False) -> Enumeration:
        return Enumeration(
            maker=self._options,
            transfers=self._maker.transfers,
            assembler=self._assembler,
            scale=scale,
            simple=simple,
        )

    @cached_property
    def _pricers(self) -> tuple[PathPricer, ...]:
        """By samples per microbatch; none where no pipeline is possible."""
        stages = self._options.stages() if self._possible else {}
        return tuple(PathPricer(options) for options in stages.values())

    def _coarse(self, best: Best) -> MultiPipelineBound:
        """The bound at coarse intervals, kept."""
        if self._known is None:
            self._known = self._bound(best, math.inf, _ROUGH_RATIO, _ROUGH_ROUNDS)
        return self._known

    def _bound(self, best: Best, limit: float, ratio: float, rounds: int) -> MultiPipelineBound:
        """At most the limit, and never less than what is known; told to `best` as it rises."""
        if not self._pricers:
            return MultiPipelineBound(seconds=math.inf, prices=(), paths=())
        after = self._job.data_loading_seconds

        def tell(seconds: float) -> None:
            if seconds + after > best.bounds[self.index] * (1 + _RISE):
                best.raise_bound(self.index, seconds + after, Grounds.PRICES)
            best.check_time()

        for pricer in self._pricers:
            pricer.check = best.check_time
        bound = multi_pipeline_bound(
            self._pricers,
            self._job.global_batch_size,
            limit - after,
            rounds=rounds,
            ratio=ratio,
            first=() if self._known is None else self._known.prices,
            on_bound=tell,
        )
        return replace(bound, seconds=bound.seconds + after)
