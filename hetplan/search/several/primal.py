"""Good plans of several pipelines: templates, their flows, whole plans, and a search around them.

1. At a guess T of the step, candidates (`pool`) and the flows that do most sequences (`master`);
   T is corrected until they do the batch.
2. Every choice of flows becomes a plan whose pipelines end together (`assembling`), priced whole.
3. The best plans are changed a little at a time (`local`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hetplan.cost.arrays import Floats
from hetplan.plans.chosen import ChosenPlan
from hetplan.plans.targets import target
from hetplan.search.costs.placed import Placed
from hetplan.search.several.assembling import Assembler, Whole, plan_of_flows
from hetplan.search.several.master import Flow, most_sequences
from hetplan.search.several.options import Options
from hetplan.search.several.pool import Candidate, Pool

_MOST_PIPELINES = (1, 2, 3, 4)
_TURNS = 3
_EFFORT = 2.0
"""Deterministic seconds of the integer program; it mostly needs a tenth of a second."""


@dataclass(slots=True)
class Primal:
    """Finds plans of one job."""

    placed: Placed
    options: Options
    assembler: Assembler
    check: Callable[[], None] | None = None
    """Called every now and then; may raise."""
    on_whole: Callable[[Whole], None] | None = None
    """Told of every plan at once."""
    keep: int = 60
    shapes_per_island: int = 4
    most_stages: int = 32

    def plans(self, prices: Floats, guess_seconds: float) -> list[Whole]:
        """Whole plans near the best, best first; none where nothing fits."""
        pool = Pool(
            options=self.options,
            cluster=self.placed.cluster,
            prices=prices,
            most_stages=min(self.most_stages, self.options.stage_limit),
            check=self.check,
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
                shapes_per_island=self.shapes_per_island,
            )
            most = 0
            for count in _MOST_PIPELINES:
                sequences, flows = self._flows(candidates, count)
                if sequences <= most and count > 1:
                    continue
                most = max(most, sequences)
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
        trainer = target(self.placed.job.target)
        earlier = (True, False) if trainer.overlap.send else (False,)
        sharded = (True, False) if self.options.most_shards > 1 else (False,)
        for shard, early in itertools.product(sharded, earlier):
            chosen = plan_of_flows(
                self.placed,
                self.options,
                flows,
                [counts[id(flow.template)] for flow in flows],
                shard=shard,
            )
            balanced = self.assembler.balanced(replace(chosen, early_sends=early))
            whole = None if balanced is None else self.assembler.whole(balanced)
            if self.check is not None:
                self.check()
            if whole is not None:
                found.append(whole)
                if self.on_whole is not None:
                    self.on_whole(whole)
        return found
