"""What the solvers of families with one pipeline have in common.

Both work alike (`hetplan.search.solver.Solver`), and their folders have the same modules:

    solver.py      improve: offer good plans; sharpen: raise the bound by what boundaries between
                   islands cost; prove: raise it to the target; list: price every plan
    heuristic.py   good plans, fast, without proof
    bound.py       no plan has a shorter step than it says
    enumerate.py   every plan, where they are few
    rows.py        a row of slots as compiled code takes it, and its replay
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

from hetplan.cost.arrays import Ints
from hetplan.plans.chosen import ChosenPlan
from hetplan.plans.v_schedules import stage_of
from hetplan.search.solver import Best, OrderFreeBound
from hetplan.search.space.family import Family
from hetplan.search.space.stage_table import StageTable
from hetplan.search.table_maker import TableMaker


class FamilySolver(ABC):
    """Searches the plans of one family; what it does depends on the space and on `Best` alone, so
    that a search that is resumed goes on as if it had never stopped.
    """

    def __init__(self, index: int, family: Family, maker: TableMaker) -> None:
        self.index = index
        self.family = family
        self._maker = maker

    @cached_property
    def order_free(self) -> OrderFreeBound:
        """Order-free bound and estimate of the family."""
        return self._maker.order_free(self.family)

    def improve(self, best: Best) -> None:
        """Offer good plans."""
        if self._still_open(best):
            self._improve(best)

    def sharpen(self, best: Best) -> None:
        """Raise the bound by what boundaries between islands cost."""
        self._still_open(best)

    def prove(self, best: Best) -> None:
        """Raise the bound to the target, or as far as it goes."""
        if self._still_open(best):
            self._prove(best)

    def _still_open(self, best: Best) -> bool:
        return best.still_open(
            self.index, lambda enough: self._maker.crossing_bound(self.family, enough)
        )

    @abstractmethod
    def _improve(self, best: Best) -> None: ...

    @abstractmethod
    def _prove(self, best: Best) -> None: ...


def chosen_of_slots(
    family: Family,
    table: StageTable,
    islands: Sequence[str],
    mesh: Sequence[int],
    variant: Ints,
    units: Ints,
    depth: Sequence[int],
) -> ChosenPlan:
    """The plan of a row of slots: mesh, recomputation, layer units and depth of each.

    Units are dealt over the chunks of a stage as evenly as possible, the first ones one more.
    `islands` are the names of the cluster's.
    """
    chunks, stages = family.virtual_stages, []
    head = stage_of(family.schedule, chunks * len(mesh) - 1, len(mesh))
    for s, at in enumerate(mesh):
        share, rest = divmod(int(units[s]), chunks)
        layers = [(share + (c < rest)) * table.layers_per_unit for c in range(chunks)]
        layers[0] += table.front_layers * (s == 0)
        layers[-1] += table.back_layers * (s == head)
        recompute = family.recompute[int(variant[s])]
        stages.append(family.meshes[at].stage(islands, tuple(layers), recompute, depth[s]))
    return family.plan(stages)
