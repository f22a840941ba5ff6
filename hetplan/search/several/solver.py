"""All plans of several pipelines as one solver: a bound by prices, plans by templates.

`rough` is the bound at coarse intervals; `improve` looks for plans (`primal`, `local`); `prove`
refines the bound. Plans of one pipeline under 1F1B obey the bound too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.plans.targets import target
from hetplan.search.costs.maker import SpaceMaker
from hetplan.search.costs.placed import Placed
from hetplan.search.families.family import Family
from hetplan.search.several.assembling import Assembler, Whole
from hetplan.search.several.bound import SeveralBound, several_bound
from hetplan.search.several.listing import Listing
from hetplan.search.several.local import improved
from hetplan.search.several.options import Options, make_options
from hetplan.search.several.paths import PathPricer
from hetplan.search.several.primal import Primal
from hetplan.search.solver import Best, Rough

_ROUGH_RATIO, _ROUGH_ROUNDS = 0.03, 6
_RATIO, _ROUNDS = 3e-3, 30
"""Width of the intervals of the bottleneck's time, and linear programs, of the bound."""

_LIKELY = 1.05
"""A step over its rough bound, where the first templates are made."""

_LOCAL_BUDGET = 300
"""Whole plans priced by one local search: about 5 ms each (measured)."""

_LISTED = {0: 1, 2: 5}
"""By effort of a proof: how much longer than usual a list of all plans may be."""

_KEPT = 2
"""Plans that a local search starts from."""


class SeveralSolver:
    """Searches the plans of several pipelines of one job."""

    def __init__(
        self,
        index: int,
        families: Sequence[Family],
        maker: SpaceMaker,
        cluster: Cluster,
        job: Job,
    ) -> None:
        self.index = index
        self.families = families
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

    def _bound(
        self, limit: float, ratio: float, rounds: int, check: Callable[[], None] | None = None
    ) -> SeveralBound:
        options = self._options
        if options is None or not self._possible:
            return SeveralBound(seconds=float("inf"), prices=(), paths=())
        trainer, islands = target(self._job.target), sum(len(e.islands) for e in options.classes)
        pricers = [PathPricer.of(options)]
        if trainer.overlap.send and trainer.rendezvous_sends and self._job.pin.depth != 0:
            # One mesh has the schedule's own depth, so has one island.
            depth = trainer.most_extra_depth if islands > 1 else 0
            pricers.append(PathPricer.of(options, early_sends=True, extra_depth=depth))
        found = []
        for pricer in pricers:
            pricer.check = check
            found.append(several_bound(pricer, limit, rounds=rounds, ratio=ratio))
        return min(found, key=lambda each: each.seconds)

    @property
    def _possible(self) -> bool:
        """Whether there are two devices, and no pin that forbids two pipelines."""
        pin = self._job.pin
        devices = sum(island.num_usable_devices for island in self._cluster.islands)
        return devices >= 2 and pin.pipelines != 1 and self._job.global_batch_size >= 2

    def _coarse(self, best: Best) -> SeveralBound:
        """The bound at a few coarse intervals, kept."""
        if self._known is None:
            self._known = self._bound(float("inf"), _ROUGH_RATIO, _ROUGH_ROUNDS, best.check_time)
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
            assembler=self._assembler,
            check=best.check_time,
            on_whole=offer,
        )
        before = self._assembler.replays
        plans = primal.plans(np.array(coarse.prices), coarse.seconds * _LIKELY)
        for whole in plans[:_KEPT]:
            best.check_time()
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
        if best.effort > 0 and best.open(self.index):
            found = self._bound(best.seconds, _RATIO, _ROUNDS, best.check_time)
            best.raise_bound(self.index, found.seconds)
