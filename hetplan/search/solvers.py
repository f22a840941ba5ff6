"""Who searches which part of the space of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload

from hetplan.job.spec import SPLIT_WEIGHTS, Job
from hetplan.plans.targets import target
from hetplan.search.interleaved.solver import InterleavedSolver
from hetplan.search.multi_pipeline.solver import MultiPipelineSolver
from hetplan.search.one_f_one_b.solver import OneFOneBSolver
from hetplan.search.solver import Solver
from hetplan.search.space.family import Family
from hetplan.search.split_backward import SplitSolver
from hetplan.search.table_maker import TableMaker


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solvers(Sequence[Solver]):
    """One per family, and one for plans of several pipelines where the target has them.

    Each is made when it is looked at: of thousands a search asks a few.
    """

    families: Sequence[Family]
    maker: TableMaker
    several: MultiPipelineSolver | None
    """The last one."""
    _made: dict[int, Solver] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.families) + (self.several is not None)

    @overload
    def __getitem__(self, at: int) -> Solver: ...

    @overload
    def __getitem__(self, at: slice) -> list[Solver]: ...

    def __getitem__(self, at: int | slice) -> Solver | list[Solver]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(at)
        if self.several is not None and at == len(self.families):
            return self.several
        found = self._made.get(at)
        if found is None:
            found = self._made[at] = solver_of(at, self.families[at], self.maker)
        return found


def solver_of(index: int, family: Family, maker: TableMaker) -> Solver:
    """The solver of one family."""
    if family.splits:
        return SplitSolver(index, family, maker)
    made = OneFOneBSolver if family.schedule == "1f1b" else InterleavedSolver
    return made(index, family, maker)


def may_have_several(job: Job) -> bool:
    """Whether plans of several pipelines are searched: they are 1F1B, split the optimizer alone and
    keep it on the devices.
    """
    pin = job.pin
    plain = pin.schedule in (None, "1f1b") and pin.sharding not in SPLIT_WEIGHTS
    several = plain and pin.pipelines != 1 and not pin.optimizer_offload
    return several and target(job.target).several_pipelines


def solvers_of(maker: TableMaker) -> Solvers:
    """Those of all plans of the job's target that pins leave."""
    families, job, several = maker.families, maker.job, None
    if may_have_several(job):
        several = MultiPipelineSolver(len(families), maker)
    return Solvers(families=families, maker=maker, several=several)
