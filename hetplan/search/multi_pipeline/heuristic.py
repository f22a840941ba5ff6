"""Good plans of several pipelines: columns, their flows, whole plans, and a search around them.

1. At a guess T of the step, candidates (the best columns of every island alone, and what the
   bound met) and the flows that do most sequences (`columns.flows`); T is corrected until they do
   the batch.
2. Every choice of flows becomes a plan whose pipelines end together (`assembly`), priced whole.
3. The best plans are changed a little at a time (`solver`).

Memory depends on how many ranks share the optimizer's state, so columns are made for several
least numbers of them, and may then only be used with as many data-parallel ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetplan.cost.arrays import Floats
from hetplan.plans.chosen import ChosenPlan, Shape
from hetplan.plans.plan import Sharding
from hetplan.search.multi_pipeline.assembly import Assembler, PricedPlan, plan_of_flows
from hetplan.search.multi_pipeline.columns import (
    Candidate,
    ColumnMaker,
    Flow,
    MeshChoice,
    flows_of,
    mesh_choices,
    most_sequences,
)
from hetplan.search.multi_pipeline.paths import Path
from hetplan.search.multi_pipeline.stage_options import MeshOptions, PartOptions
from hetplan.search.space.family import Mesh
from hetplan.search.space.stage_pricer import StagePricer


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Meshes of a pipeline that the bound met, and stages of each."""

    meshes: tuple[MeshChoice, ...]
    counts: tuple[int, ...]
    shards: int
    """Least data-parallel ranks of a stage."""


_MAX_PIPELINES = (2, 3, 4, 6)
_TURNS = 3
_SHARD_LEVELS = (1, 8, 16, 32)
"""Least numbers of ranks that share the optimizer's state."""
_KEPT = 60
"""Candidates of every island and number of shards."""
_MAX_STAGES = 32
_EFFORT = 2.0
"""Deterministic seconds of the integer program; it mostly needs a tenth of a second."""


@dataclass(slots=True, kw_only=True)
class Primal:
    """Finds plans of one job."""

    placed: StagePricer
    options: PartOptions
    prices: Floats
    """[C] of a device, by class."""
    known: Sequence[Known]
    """Pipelines that the bound met."""
    assembler: Assembler
    check: Callable[[], None]
    """Called every now and then; may raise."""
    on_whole: Callable[[PricedPlan], None]
    """Told of every plan at once."""
    _makers: dict[int, ColumnMaker] = field(default_factory=dict)

    def plans(self, guess_seconds: float) -> list[PricedPlan]:
        """Whole plans near the best, best first; none where nothing fits."""
        found: dict[ChosenPlan, PricedPlan] = {}
        seconds, batch = guess_seconds, self.options.batch
        levels = [each for each in _SHARD_LEVELS if each <= self.options.most_shards]
        for turn in range(_TURNS):
            # The step is found roughly first; then every number of shards counts.
            last = turn == _TURNS - 1
            candidates = self._candidates(seconds, levels if last else levels[-2:])
            most = 0
            for count in _MAX_PIPELINES:
                sequences, flows = most_sequences(
                    candidates, self.placed.cluster, most_pipelines=count, effort=_EFFORT
                )
                if sequences > most:
                    most = sequences
                    for whole in self._wholes(flows):
                        found[whole.chosen] = whole
            seconds *= batch / most if most else 1.5
        return sorted(found.values(), key=lambda each: each.seconds)

    def _candidates(self, seconds: float, levels: Sequence[int]) -> list[Candidate]:
        """The best ones for a step of so many seconds, likeliest first."""
        tried = (
            self._tried(self._maker(row.shards), row.meshes, row.counts, seconds)
            for row in self.known
        )
        found = [each for each in tried if each is not None]
        for shards in levels:
            found += self._of_level(seconds, shards)
        return sorted(found, key=lambda each: -each.worth)

    def _of_level(self, seconds: float, shards: int) -> list[Candidate]:
        """Columns on single islands."""
        maker, found = self._maker(shards), []
        for island, place in self._places.items():
            tried = [
                self._tried(maker, (mesh,), (stages,), seconds)
                for mesh in mesh_choices(self.options, place, island)
                for stages in range(1, self._most_stages + 1)
            ]
            good = [each for each in tried if each is not None]
            found += sorted(good, key=lambda each: -each.worth)[:_KEPT]
        return found

    @property
    def _places(self) -> dict[int, int]:
        """Class of every island with usable nodes."""
        return {i: c for c, each in enumerate(self.options.classes) for i in each.islands}

    @property
    def _most_stages(self) -> int:
        return min(_MAX_STAGES, self.options.stage_limit)

    def _maker(self, shards: int) -> ColumnMaker:
        maker = self._makers.get(shards)
        if maker is None:
            maker = self._makers[shards] = ColumnMaker(
                options=self.options, most_stages=self._most_stages, shards=shards
            )
        return maker

    def _tried(
        self,
        maker: ColumnMaker,
        meshes: Sequence[MeshChoice],
        counts: Sequence[int],
        seconds: float,
    ) -> Candidate | None:
        self.check()
        made = maker.best(meshes, counts, seconds)
        if made is None:
            return None
        column, microbatches = made
        cluster, options = self.placed.cluster, self.options
        flows = flows_of(column, options, cluster, options.batch, maker.shards)
        if not flows:
            return None
        price = sum(self.prices[self._places[island]] * use for island, use in column.use)
        worth = microbatches / price if price > 0 else np.inf
        return Candidate(column=column, microbatches=microbatches, flows=flows, worth=worth)

    def _wholes(self, flows: Sequence[Flow]) -> Iterator[PricedPlan]:
        """The plans of these flows, sharded and not."""
        several = self.options.most_shards > 1
        for sharding in (Sharding.OPTIMIZER, Sharding.NONE) if several else (Sharding.NONE,):
            if not flows:
                return
            chosen = plan_of_flows(self.placed, self.options, flows, sharding)
            balanced = self.assembler.balanced(chosen)
            whole = None if balanced is None else self.assembler.whole(balanced)
            self.check()
            if whole is not None:
                self.on_whole(whole)
                yield whole


def known_rows(
    paths: Sequence[Path], mesh_options: Sequence[MeshOptions], options: PartOptions
) -> tuple[Known, ...]:
    """Meshes and numbers of stages of paths whose meshes are on one island each.

    Islands of a class are taken in turn.
    """
    by_samples = {each.samples: each for each in mesh_options}
    positions: dict[tuple[int, Shape], list[int]] = {}
    for o, option in enumerate(options.options):
        positions.setdefault((option.place, option.shape), []).append(o)
    found: dict[Known, None] = {}
    for path in paths:
        own = by_samples[path.samples]
        row = [int(own.mesh[o]) for o in reversed(path.options)]
        meshes = [(own.meshes[mesh], len([*same])) for mesh, same in itertools.groupby(row)]
        if any(len(mesh.islands) > 1 for mesh, _ in meshes):
            continue
        for turn in range(max(len(each.islands) for each in options.classes)):
            known = _known(meshes, turn, options, positions)
            if known is not None:
                found[known] = None
    return tuple(found)


def _known(
    meshes: Sequence[tuple[Mesh, int]],
    turn: int,
    options: PartOptions,
    positions: dict[tuple[int, Shape], list[int]],
) -> Known | None:
    places = {island: c for c, each in enumerate(options.classes) for island in each.islands}
    choices = []
    for mesh, _ in meshes:
        place, shape = places[mesh.islands[0]], mesh.shapes[0]
        islands = options.classes[place].islands
        which = positions.get((place, replace(shape, dp=1)))
        if which is None:
            return None
        choices.append(MeshChoice(island=islands[turn % len(islands)], options=tuple(which)))
    return Known(
        meshes=tuple(choices),
        counts=tuple(count for _, count in meshes),
        shards=min(mesh.shapes[0].dp for mesh, _ in meshes),
    )
