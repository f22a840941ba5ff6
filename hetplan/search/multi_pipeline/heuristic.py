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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Floats
from hetplan.plans.chosen import ChosenPlan, Shape
from hetplan.search.multi_pipeline.assembly import Assembler, PricedPlan, plan_of_flows
from hetplan.search.multi_pipeline.columns import (
    Column,
    ColumnMaker,
    Flow,
    MeshChoice,
    flows_of,
    mesh_choices,
    most_sequences,
    stage_counts,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A column, what it does in the time that was asked, and how it may be used."""

    column: Column
    microbatches: int
    flows: tuple[int, ...]
    worth: float
    """Microbatches per price of its devices."""


@dataclass(slots=True)
class Pool:
    """Makes candidates of one job."""

    options: PartOptions
    cluster: Cluster
    prices: Floats
    """[C] of a device, by class."""
    most_stages: int
    check: Callable[[], None] | None = None
    """Called for every column; may raise."""
    known: Sequence[Known] = ()
    makers: dict[int, ColumnMaker] = field(default_factory=dict)

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

    def _maker(self, shards: int) -> ColumnMaker:
        maker = self.makers.get(shards)
        if maker is None:
            maker = self.makers[shards] = ColumnMaker(
                options=self.options, most_stages=self.most_stages, shards=shards
            )
        return maker

    def _tried(
        self,
        maker: ColumnMaker,
        meshes: Sequence[MeshChoice],
        counts: Sequence[int],
        seconds: float,
    ) -> Candidate | None:
        if self.check is not None:
            self.check()
        made = maker.best(meshes, counts, seconds)
        if made is None:
            return None
        column, microbatches = made
        flows = flows_of(column, self.options, self.cluster, self.options.batch, maker.shards)
        if not flows:
            return None
        place = self.place_of
        price = sum(self.prices[place[island]] * use for island, use in column.use)
        worth = microbatches / price if price > 0 else np.inf
        return Candidate(column=column, microbatches=microbatches, flows=flows, worth=worth)


_MAX_PIPELINES = (2, 3, 4, 6)
_TURNS = 3
_EFFORT = 2.0
"""Deterministic seconds of the integer program; it mostly needs a tenth of a second."""


@dataclass(slots=True)
class Primal:
    """Finds plans of one job."""

    placed: StagePricer
    options: PartOptions
    mesh_options: Sequence[MeshOptions]
    assembler: Assembler
    check: Callable[[], None] | None = None
    """Called every now and then; may raise."""
    on_whole: Callable[[PricedPlan], None] | None = None
    """Told of every plan at once."""
    keep: int = 60
    most_stages: int = 32

    def plans(
        self, prices: Floats, paths: Sequence[Path], guess_seconds: float
    ) -> list[PricedPlan]:
        """Whole plans near the best, best first; none where nothing fits.

        `paths`: pipelines that the bound met.
        """
        pool = Pool(
            options=self.options,
            cluster=self.placed.cluster,
            prices=prices,
            most_stages=min(self.most_stages, self.options.stage_limit),
            check=self.check,
            known=known_rows(paths, self.mesh_options, self.options),
        )
        found: dict[ChosenPlan, PricedPlan] = {}
        seconds, batch = guess_seconds, self.options.batch
        levels = pool.shard_levels()
        for turn in range(_TURNS):
            # The step is found roughly first; then every number of shards counts.
            last = turn == _TURNS - 1
            candidates = pool.candidates(
                seconds,
                levels if last else levels[-2:],
                keep=self.keep,
            )
            most = 0
            for count in _MAX_PIPELINES:
                sequences, flows = self._flows(candidates, count)
                if sequences <= most:
                    continue
                most = sequences
                for whole in self._wholes(flows, candidates):
                    found[whole.chosen] = whole
            seconds *= batch / most if most else 1.5
        return sorted(found.values(), key=lambda each: each.seconds)

    def _flows(
        self, candidates: Sequence[Candidate], most_pipelines: int
    ) -> tuple[int, tuple[Flow, ...]]:
        return most_sequences(
            [each.column for each in candidates],
            [each.flows for each in candidates],
            [each.microbatches for each in candidates],
            self.placed.cluster,
            most_pipelines=most_pipelines,
            effort=_EFFORT,
        )

    def _wholes(self, flows: Sequence[Flow], candidates: Sequence[Candidate]) -> list[PricedPlan]:
        if not flows:
            return []
        counts = {id(each.column): each.microbatches for each in candidates}
        found = []
        sharded = (True, False) if self.options.most_shards > 1 else (False,)
        for shard in sharded:
            chosen = plan_of_flows(
                self.placed,
                self.options,
                flows,
                [counts[id(flow.column)] for flow in flows],
                shard=shard,
            )
            balanced = self.assembler.balanced(chosen)
            whole = None if balanced is None else self.assembler.whole(balanced)
            if self.check is not None:
                self.check()
            if whole is not None:
                found.append(whole)
                if self.on_whole is not None:
                    self.on_whole(whole)
        return found


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
