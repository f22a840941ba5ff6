"""All plans of several pipelines as one solver: a bound by prices, plans made of columns.

`improve` makes plans of columns and changes the best of them a little at a time (`heuristic`).
`prove` lists all plans where they are few (`enumerate`) and raises the bound (`bound`), at coarse
intervals first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np

from hetplan.errors import InputError
from hetplan.search.multi_pipeline.assembly import Assembler, PricedPlan
from hetplan.search.multi_pipeline.bound import (
    MultiPipelineBound,
    busy_bound,
    raised_bound,
)
from hetplan.search.multi_pipeline.enumerate import Enumeration
from hetplan.search.multi_pipeline.heuristic import Primal, improved, known_rows
from hetplan.search.multi_pipeline.stage_options import OptionsMaker, PartOptions
from hetplan.search.multi_pipeline.within import WithinPricer
from hetplan.search.solver import Best, Grounds, OrderFreeBound
from hetplan.search.table_maker import TableMaker

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
        self._options = OptionsMaker(pricer=maker.stage_pricer, check=maker.check)
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
        if self._parts is not None and self._pricer is not None:
            batch, after = self._job.global_batch_size, self._job.data_loading_seconds
            bound = busy_bound(self._pricer, batch).seconds + after
        return OrderFreeBound(bound_seconds=bound, estimate_seconds=math.inf)

    def least_price(self, of_island: Sequence[float]) -> float:
        """What no plan of it pays for a step, by the price of a device and second of each island
        (`hetplan.search.least_price`); infinite where there is none.
        """
        pricer = None if self._parts is None else self._pricer
        if pricer is None:
            return math.inf
        least = [min(of_island[at] for at in each.islands) for each in self._options.classes]
        each = (pricer.layer * (pricer.use @ np.array(least))).min()
        return self._job.global_batch_size * pricer.num_layers * float(each)

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
            known=known_rows(coarse.near, self._options.stages(), parts),
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
            self._tell(best, self._coarse(best).seconds)
        if best.open(self.index) and best.stalled_at.get(self.index) != best.target:
            self._raise(best)
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
    def _pricer(self) -> WithinPricer | None:
        """None where no pipeline is possible."""
        stages = self._options.stages() if self._possible else {}
        batch = self._job.global_batch_size
        return WithinPricer(tuple(stages.values()), batch) if stages else None

    def _coarse(self, best: Best) -> MultiPipelineBound:
        """The best bound so far of the pipelines alone, at first a rough one."""
        if self._known is None:
            if self._pricer is None:
                return MultiPipelineBound(seconds=math.inf, prices=())
            self._known = busy_bound(self._pricer, self._job.global_batch_size)
            self._raise(best, rough=True)
        return self._known

    def _raise(self, best: Best, *, rough: bool = False) -> None:
        """As far as prices prove it, up to the step that is looked for."""
        limit = best.target - self._job.data_loading_seconds
        known, pricer = self._known, self._pricer
        if known is not None and pricer is not None and known.seconds < limit:
            tell, batch = partial(self._tell_risen, best), self._job.global_batch_size
            self._known = raised_bound(pricer, batch, known, limit, tell, rough=rough)
            self._tell(best, self._known.seconds)

    def _tell_risen(self, best: Best, seconds: float) -> None:
        """Where it has risen enough; raises where time is up."""
        if seconds + self._job.data_loading_seconds > best.bounds[self.index] * (1 + _RISE):
            self._tell(best, seconds)
        best.check_time()

    def _tell(self, best: Best, seconds: float) -> None:
        bound = seconds + self._job.data_loading_seconds
        best.raise_bound(self.index, bound, Grounds.PRICES)
