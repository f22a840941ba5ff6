"""Good plans of several pipelines: templates, their flows, whole plans, and a search around them.

1. At a guess T of the step, candidates (`pool`: of every island alone, and what the bound met) and
   the flows that do most sequences (`master`); T is corrected until they do the batch.
2. Every choice of flows becomes a plan whose pipelines end together (`assembling`), priced whole.
3. The best plans are changed a little at a time (`local`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetplan.cost.arrays import Floats
from hetplan.plans.chosen import ChosenPlan
from hetplan.search.costs.placed import Placed
from hetplan.search.families.family import Mesh
from hetplan.search.several.assembling import Assembler, Whole, plan_of_flows
from hetplan.search.several.master import Flow, most_sequences
from hetplan.search.several.options import Options
from hetplan.search.several.paths import Path
from hetplan.search.several.pool import Candidate, Known, Pool
from hetplan.search.several.templates import MeshChoice
from hetplan.search.several.ticks import Tick

_MAX_PIPELINES = (2, 3, 4, 6)
_TURNS = 3
_EFFORT = 2.0
"""Deterministic seconds of the integer program; it mostly needs a tenth of a second."""


@dataclass(slots=True)
class Primal:
    """Finds plans of one job."""

    placed: Placed
    options: Options
    ticks: Sequence[Tick]
    assembler: Assembler
    check: Callable[[], None] | None = None
    """Called every now and then; may raise."""
    on_whole: Callable[[Whole], None] | None = None
    """Told of every plan at once."""
    keep: int = 60
    most_stages: int = 32

    def plans(self, prices: Floats, paths: Sequence[Path], guess_seconds: float) -> list[Whole]:
        """Whole plans near the best, best first; none where nothing fits.

        `paths`: pipelines that the bound met.
        """
        pool = Pool(
            options=self.options,
            cluster=self.placed.cluster,
            prices=prices,
            most_stages=min(self.most_stages, self.options.stage_limit),
            check=self.check,
            known=known_rows(paths, self.ticks, self.options),
        )
        found: dict[ChosenPlan, Whole] = {}
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
            [each.template for each in candidates],
            [each.flows for each in candidates],
            [each.microbatches for each in candidates],
            self.placed.cluster,
            most_pipelines=most_pipelines,
            effort=_EFFORT,
        )

    def _wholes(self, flows: Sequence[Flow], candidates: Sequence[Candidate]) -> list[Whole]:
        if not flows:
            return []
        counts = {id(each.template): each.microbatches for each in candidates}
        found = []
        sharded = (True, False) if self.options.most_shards > 1 else (False,)
        for shard in sharded:
            chosen = plan_of_flows(
                self.placed,
                self.options,
                flows,
                [counts[id(flow.template)] for flow in flows],
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


def known_rows(paths: Sequence[Path], ticks: Sequence[Tick], options: Options) -> tuple[Known, ...]:
    """Meshes and numbers of stages of paths whose meshes are on one island each.

    Islands of a class are taken in turn.
    """
    by_samples = {tick.samples: tick for tick in ticks}
    positions: dict[tuple[int, int, int], list[int]] = {}
    for o, option in enumerate(options.options):
        positions.setdefault((option.place, option.tp, option.microbatch_size), []).append(o)
    found: dict[Known, None] = {}
    for path in paths:
        tick = by_samples[path.samples]
        row = [int(tick.mesh[o]) for o in reversed(path.options)]
        meshes = [(tick.meshes[mesh], len([*same])) for mesh, same in itertools.groupby(row)]
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
    options: Options,
    positions: dict[tuple[int, int, int], list[int]],
) -> Known | None:
    places = {island: c for c, each in enumerate(options.classes) for island in each.islands}
    choices = []
    for mesh, _ in meshes:
        place, shape = places[mesh.islands[0]], mesh.shapes[0]
        islands = options.classes[place].islands
        which = positions.get((place, shape.tp, shape.microbatch_size))
        if which is None:
            return None
        choices.append(MeshChoice(island=islands[turn % len(islands)], options=tuple(which)))
    return Known(
        meshes=tuple(choices),
        counts=tuple(count for _, count in meshes),
        shards=min(mesh.shapes[0].dp for mesh, _ in meshes),
    )
