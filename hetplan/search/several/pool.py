"""Templates that are worth combining: the best of every island, and those that the bound met.

Memory depends on how many ranks share the optimizer's state, so templates are made for several
least numbers of them, and may then only be used with as many data-parallel ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Floats
from hetplan.search.several.master import flows_of
from hetplan.search.several.options import Options
from hetplan.search.several.templates import (
    MeshChoice,
    Template,
    TemplateMaker,
    mesh_choices,
    stage_counts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Meshes of a pipeline that the bound met, and stages of each."""

    meshes: tuple[MeshChoice, ...]
    counts: tuple[int, ...]
    shards: int
    """Least data-parallel ranks of a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A template, what it does in the time that was asked, and how it may be used."""

    template: Template
    microbatches: int
    flows: tuple[int, ...]
    worth: float
    """Microbatches per price of its devices."""


@dataclass(slots=True)
class Pool:
    """Makes candidates of one job."""

    options: Options
    cluster: Cluster
    prices: Floats
    """[C] of a device, by class."""
    most_stages: int
    check: Callable[[], None] | None = None
    """Called for every template; may raise."""
    known: Sequence[Known] = ()
    makers: dict[int, TemplateMaker] = field(default_factory=dict)

    @property
    def place_of(self) -> dict[int, int]:
        """Class of every island with usable nodes."""
        return {i: c for c, each in enumerate(self.options.classes) for i in each.islands}

    def shard_levels(self) -> tuple[int, ...]:
        """Least numbers of ranks that share the state."""
        most = self.options.most_shards
        return tuple(itertools.takewhile(lambda each: each <= most, (1, 8, 16, 32)))

    def candidates(self, seconds: float, levels: Sequence[int], *, keep: int) -> list[Candidate]:
        """The best ones for a step of so many seconds, likeliest first."""
        found = self._of_known(seconds)
        for shards in levels:
            found += self._of_level(seconds, shards, keep)
        return sorted(found, key=lambda each: -each.worth)

    def _of_level(self, seconds: float, shards: int, keep: int) -> list[Candidate]:
        maker = self._maker(shards)
        found: list[Candidate] = []
        for island, place in self.place_of.items():
            each = [
                self._tried(maker, (mesh,), counts, seconds)
                for mesh in mesh_choices(self.options, place, island)
                for counts in stage_counts((self.most_stages,), self.most_stages)
            ]
            good = sorted((one for one in each if one is not None), key=lambda one: -one.worth)
            found += good[:keep]
        return found

    def _of_known(self, seconds: float) -> list[Candidate]:
        found = (
            self._tried(self._maker(row.shards), row.meshes, row.counts, seconds)
            for row in self.known
        )
        return [one for one in found if one is not None]

    def _maker(self, shards: int) -> TemplateMaker:
        maker = self.makers.get(shards)
        if maker is None:
            maker = self.makers[shards] = TemplateMaker(
                options=self.options, most_stages=self.most_stages, shards=shards
            )
        return maker

    def _tried(
        self,
        maker: TemplateMaker,
        meshes: Sequence[MeshChoice],
        counts: Sequence[int],
        seconds: float,
    ) -> Candidate | None:
        if self.check is not None:
            self.check()
        made = maker.best(meshes, counts, seconds)
        if made is None:
            return None
        template, microbatches = made
        flows = flows_of(template, self.options, self.cluster, self.options.batch, maker.shards)
        if not flows:
            return None
        place = self.place_of
        price = sum(self.prices[place[island]] * use for island, use in template.use)
        worth = microbatches / price if price > 0 else np.inf
        return Candidate(template=template, microbatches=microbatches, flows=flows, worth=worth)
