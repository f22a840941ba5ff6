"""Templates that are worth combining: the best of every island and of every two, at device prices.

Memory depends on how many ranks share the optimizer's state, so templates are made for several
least numbers of them, and may then only be used with as many data-parallel ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
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

_NEAR = 0.94
"""Templates worth less than this part of the best are not made."""

_FILL = 0.9
"""Stage times by which each further stage fills the pipeline, a little less than it takes."""


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
    makers: dict[int, TemplateMaker] = field(default_factory=dict)
    best_worth: float = 0.0
    """Of the templates over several islands so far."""

    @property
    def place_of(self) -> dict[int, int]:
        """Class of every island with usable nodes."""
        return {i: c for c, each in enumerate(self.options.classes) for i in each.islands}

    def shard_levels(self) -> tuple[int, ...]:
        """Least numbers of ranks that share the state."""
        most = self.options.most_shards
        return tuple(itertools.takewhile(lambda each: each <= most, (1, 8, 16, 32)))

    def candidates(
        self, seconds: float, levels: Sequence[int], *, keep: int, shapes_per_island: int
    ) -> list[Candidate]:
        """The best ones for a step of so many seconds, likeliest first."""
        found: list[Candidate] = []
        for shards in levels:
            self.best_worth = 0.0
            found += self._of_level(seconds, shards, keep, shapes_per_island)
        return sorted(found, key=lambda each: -each.worth)

    def _of_level(
        self, seconds: float, shards: int, keep: int, shapes_per_island: int
    ) -> list[Candidate]:
        maker = self.makers.get(shards)
        if maker is None:
            maker = self.makers[shards] = TemplateMaker(
                options=self.options, most_stages=self.most_stages, shards=shards
            )
        alone: dict[int, list[Candidate]] = {}
        shapes: dict[int, list[MeshChoice]] = {}
        for island, place in self.place_of.items():
            each = [
                (mesh, self._tried(maker, (mesh,), counts, seconds))
                for mesh in mesh_choices(self.options, place, island)
                for counts in stage_counts((self.most_stages,), self.most_stages)
            ]
            good = sorted(
                ((mesh, one) for mesh, one in each if one is not None),
                key=lambda pair: -pair[1].worth,
            )
            alone[island] = [one for _, one in good][:keep]
            shapes[island] = self._shapes(
                island, place, [mesh for mesh, _ in good], shapes_per_island
            )
        found = [one for ones in alone.values() for one in ones]
        both = [
            one
            for left, right in itertools.permutations(shapes, 2)
            if self._near(left, right)
            for one in self._pairs(maker, shapes[left], shapes[right], seconds)
        ]
        both.sort(key=lambda each: -each.worth)
        return found + both[: 4 * keep]

    def _shapes(
        self, island: int, place: int, good: Sequence[MeshChoice], count: int
    ) -> list[MeshChoice]:
        """Those with the best templates, then those with the cheapest layers."""
        every = mesh_choices(self.options, place, island)

        def price(mesh: MeshChoice) -> float:
            o = mesh.options[0]
            return float((self.options.forward[o] + self.options.backward[o]) * self.options.use[o])

        small = [mesh for mesh in every if self.options.microbatch_size[mesh.options[0]] <= 2]
        return list(dict.fromkeys([*good, *sorted(small, key=price)]))[:count]

    def _near(self, left: int, right: int) -> bool:
        """Whether templates over both islands are tried."""
        return self.cluster.islands[left].region == self.cluster.islands[right].region

    def _pairs(
        self,
        maker: TemplateMaker,
        left: Sequence[MeshChoice],
        right: Sequence[MeshChoice],
        seconds: float,
    ) -> Iterable[Candidate]:
        most = min(14, self.most_stages)
        for one, two in itertools.product(left, right):
            for counts in stage_counts((most, most), self.most_stages):
                found = self._tried(maker, (one, two), counts, seconds)
                if found is not None:
                    yield found

    def _hopeless(
        self, meshes: Sequence[MeshChoice], counts: Sequence[int], seconds: float
    ) -> bool:
        """Whether a template over several islands is far from the best even with free memory."""
        if len(meshes) == 1:
            return False
        options, place = self.options, self.place_of
        speed = price = 0.0
        for mesh, count in zip(meshes, counts, strict=True):
            o = mesh.options[0]
            speed += count / float(options.forward[o] + options.backward[o])
            price += count * float(options.use[o] * self.prices[place[mesh.island]])
        microbatches = seconds * speed / options.num_layers - _FILL * (sum(counts) - 1)
        return microbatches < _NEAR * self.best_worth * price

    def _tried(
        self,
        maker: TemplateMaker,
        meshes: Sequence[MeshChoice],
        counts: Sequence[int],
        seconds: float,
    ) -> Candidate | None:
        if self.check is not None:
            self.check()
        if self._hopeless(meshes, counts, seconds):
            return None
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
        if len(meshes) > 1:
            self.best_worth = max(self.best_worth, worth)
        return Candidate(template=template, microbatches=microbatches, flows=flows, worth=worth)
