"""All plans of several pipelines as one solver: a bound by prices, plans by templates.

`improve` looks for plans (`primal`, `local`), `prove` raises the bound: at coarse intervals first.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.search.costs.maker import SpaceMaker
from hetplan.search.costs.placed import Placed
from hetplan.search.several.assembling import Assembler, Whole
from hetplan.search.several.bound import SeveralBound, several_bound
from hetplan.search.several.listing import Listing
from hetplan.search.several.local import improved
from hetplan.search.several.options import Options, make_options
from hetplan.search.several.paths import PathPricer
from hetplan.search.several.primal import Primal
from hetplan.search.several.ticks import Ticks
from hetplan.search.solver import Best, Rough

_ROUGH_RATIO, _ROUGH_ROUNDS = 0.03, 1
_RATIO, _ROUNDS = 3e-3, 6
"""Width of the intervals of the bottleneck's time, and linear programs, of the bound."""

_RISE = 0.003
"""A bound is told once it has risen by this part of itself."""

_LIKELY = 1.05
"""A step over its rough bound, where the first templates are made."""

_LOCAL_BUDGET = 100
"""Whole plans priced by one local search: of many stages about 50 ms each."""

_LISTED = {0: 1, 2: 5}
"""By effort of a proof: how much longer than usual a list of all plans may be."""

_FAR = 1.03
"""Plans that take longer than this over the best are not searched around."""

_KEPT = 2
"""Plans that a local search starts from."""


class SeveralSolver:
    """Searches the plans of several pipelines of one job."""

    def __init__(
        self,
        index: int,
        maker: SpaceMaker,
        cluster: Cluster,
        job: Job,
    ) -> None:
        self.index = index
        self._maker = maker
        self._cluster = cluster
        self._job = job
        self._known: SeveralBound | None = None

    @cached_property
    def _placed(self) -> Placed:
        maker = self._maker
        return Placed(
            model=maker.model, cluster=self._cluster, job=self._job, predictor=maker.predictor
        )

    @cached_property
    def _options(self) -> Options | None:
        """None where no layer fits anywhere."""
        try:
            return make_options(self._placed)
        except InputError:
            return None

    @cached_property
    def _assembler(self) -> Assembler:
        maker = self._maker
        return Assembler(
            maker.model,
            self._cluster,
            self._job,
            maker.predictor,
            self._placed.units.layers_per_unit,
        )

    @cached_property
    def _pricers(self) -> tuple[PathPricer, ...]:
        """Of every tick; none where no pipeline is possible."""
        if not self._possible:
            return ()
        return tuple(PathPricer.of(tick) for tick in Ticks(self._placed).all())

    def _bound(self, best: Best, limit: float, ratio: float, rounds: int) -> SeveralBound:
        """At most the limit, and never less than what is known; told to `best` as it rises."""
        if not self._pricers:
            return SeveralBound(seconds=math.inf, prices=(), paths=())
        after = self._job.data_loading_seconds

        def tell(seconds: float) -> None:
            if seconds + after > best.bounds[self.index] * (1 + _RISE):
                best.raise_bound(self.index, seconds + after)
            best.check_time()

        for pricer in self._pricers:
            pricer.check = best.check_time
        found = several_bound(
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

    def _coarse(self, best: Best) -> SeveralBound:
        """The bound at coarse intervals, kept."""
        if self._known is None:
            self._known = self._bound(best, math.inf, _ROUGH_RATIO, _ROUGH_ROUNDS)
        return self._known

    @cached_property
    def rough(self) -> Rough:
        """Whether two pipelines are possible; the bound, seconds of work, comes with a proof."""
        return Rough(
            bound_seconds=float("inf") if not self._possible or self._options is None else 0.0,
            estimate_seconds=float("inf"),
        )

    def sharpen(self, best: Best) -> None:
        """Nothing: its bounds take longer (`prove`)."""

    def improve(self, best: Best) -> None:
        """Offer plans made of templates, and what a local search makes of the best of them."""
        options = self._options
        if options is None:
            return
        coarse = self._coarse(best)
        if coarse.seconds == float("inf"):
            return

        def offer(whole: Whole) -> None:
            best.offer(self.index, whole.chosen, whole.seconds)

        primal = Primal(
            placed=self._placed,
            options=options,
            ticks=[pricer.tick for pricer in self._pricers],
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
            # Pins that no template keeps.
            listing = Listing(assembler=self._assembler, units=self._placed.units, simple=True)
            listing.run(self.index, best)

    def prove(self, best: Best) -> None:
        """Raise the bound; list all plans where they are few."""
        if not self._possible or self._options is None:
            return
        scale = _LISTED.get(best.effort)
        if scale is not None:
            listing = Listing(assembler=self._assembler, units=self._placed.units, scale=scale)
            best.raise_bound(self.index, listing.run(self.index, best))
        if best.open(self.index):
            best.raise_bound(self.index, self._coarse(best).seconds)
        if best.open(self.index) and best.stood.get(self.index) != best.target:
            best.raise_bound(self.index, self._bound(best, best.target, _RATIO, _ROUNDS).seconds)
            best.stood[self.index] = best.target
