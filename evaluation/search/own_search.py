"""Which plan does hetplan's search find under its own cost, and which of its plans would Sailor's
formula choose?

The search's families, solvers and proofs by hetplan's cost of Sailor's profiles
(`sailor_predictor`); what fits in memory goes by the rule of Sailor's simulator, 24 bytes per
parameter. All plans that came near the best of their family are candidates; among those, without
any further step, the formula chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from evaluation.search.family_order import drive, families_of, parts_of
from evaluation.search.sailor_cost import SailorScore
from evaluation.search.sailor_files import SailorFiles
from evaluation.search.sailor_predictor import ProfilePredictor
from evaluation.search.sailor_score import Judge
from evaluation.search.sailor_space import SailorMaker
from evaluation.search.sailor_tables import Tables
from hetplan.plans.chosen import ChosenPlan
from hetplan.search.costs.maker import SpaceMaker
from hetplan.search.families.family import Family
from hetplan.search.families.space import Space
from hetplan.search.result import Inputs
from hetplan.search.single.likely import part_of
from hetplan.search.single_solver import SingleSolver
from hetplan.search.solver import Rough

_MUCH_MEMORY = 16
"""Times the memory of a device: hetplan's own rule is to exclude nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan of the search under hetplan's own cost."""

    chosen: ChosenPlan
    own_seconds: float
    """By hetplan's cost."""
    score: SailorScore


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSearched:
    """What the search under its own cost offers."""

    own: Candidate
    """Best by hetplan's cost."""
    chosen: Candidate
    """Best by Sailor's formula."""
    bound_seconds: float
    """No plan of the families is faster by hetplan's cost."""
    candidates: int
    searched: int
    proof_cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class OwnMaker(SpaceMaker):
    """hetplan's spaces with what fits by Sailor's rule."""

    sailor: SailorMaker
    _wholes: dict[Family, Space] = field(default_factory=dict, repr=False, compare=False)
    _part_of: dict[Family, Family] = field(default_factory=dict, repr=False, compare=False)

    def parts(self, family: Family) -> tuple[Family, ...]:
        """Parts of the family (`parts_of`), whose spaces are cut out of its own."""
        found = tuple(parts_of(family))
        self._part_of.update(dict.fromkeys(found, family))
        return found

    def rough(self, family: Family) -> Rough:
        """hetplan's, but for families without a plan that fits."""
        if self.sailor.rough(family).bound_seconds == math.inf:
            return Rough(bound_seconds=math.inf, estimate_seconds=math.inf)
        return super().rough(family)

    def space(self, family: Family) -> Space:
        """See the head of the file."""
        whole = self._part_of.get(family, family)
        if whole not in self._wholes:
            found, other = super().space(whole), self.sailor.space(whole)
            most = np.zeros_like(found.most_layers)
            flights = np.minimum(np.arange(most.shape[3]), other.most_layers.shape[3] - 1)
            most[:] = other.most_layers[..., flights]
            self._wholes[whole] = replace(found, most_layers=most)
        if whole == family:
            return self._wholes[whole]
        kept = [at for at, mesh in enumerate(whole.meshes) if mesh in family.meshes]
        return part_of(self._wholes[whole], np.array(kept, dtype=np.int64))


def own_search(inputs: Inputs, files: SailorFiles, every: list[Tables]) -> OwnSearched | None:
    """The plans; None where no family has a plan that fits and is not disqualified."""
    islands = tuple(
        replace(each, memory_bytes=_MUCH_MEMORY * each.memory_bytes)
        for each in inputs.cluster.islands
    )
    roomy = replace(inputs, cluster=replace(inputs.cluster, islands=islands))
    judge = Judge(
        files=files, cluster=inputs.cluster, global_batch_size=inputs.job.global_batch_size
    )
    predictor = ProfilePredictor(files=files)
    solvers: list[SingleSolver] = []
    parts: set[int] = set()
    for tables in every:
        sailor = SailorMaker(
            model=inputs.model, cluster=inputs.cluster, job=inputs.job, predictor=predictor,
            tables=tables, price=judge.seconds,
        )  # fmt: skip
        maker = OwnMaker(
            model=roomy.model, cluster=roomy.cluster, job=roomy.job, predictor=predictor,
            sailor=sailor,
        )  # fmt: skip
        for family in families_of(roomy, tables):
            solvers.append(SingleSolver(len(solvers), family, maker))
            for part in maker.parts(family):
                parts.add(len(solvers))
                solvers.append(SingleSolver(len(solvers), part, maker))
    driven = drive(solvers, inputs.job.seed, parts=parts, diverse=True)
    scored = [
        Candidate(chosen=chosen, own_seconds=seconds, score=found)
        for chosen, seconds in driven.best.seen.items()
        if (found := judge.score(chosen)) is not None
    ]
    if not scored:
        return None
    return OwnSearched(
        own=min(scored, key=lambda each: each.own_seconds),
        chosen=min(scored, key=lambda each: each.score.step_seconds),
        bound_seconds=driven.best.lower_bound if driven.best.chosen else math.inf,
        candidates=len(scored),
        searched=driven.searched,
        proof_cpu_seconds=driven.proof_cpu_seconds,
    )
