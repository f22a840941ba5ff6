"""The best plan of one 1F1B family: local search first, then the programs' proof.

`improve` looks for rows of slots by local search (`heuristic`), cuts and polishes them by replay.
`prove` asks the programs over orders and cuts (`certified_sweep`) whether any plan is below the
target, and lists all plans (`enumerate`) where they are few. Both depend on the space and on `Best`
alone, so that a search that is resumed goes on as if it had never stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from hetplan.cost.arrays import Ints
from hetplan.plans.chosen import ChosenPlan
from hetplan.search.one_f_one_b.certified_sweep import Met, apart, prove, together
from hetplan.search.one_f_one_b.cut import cut
from hetplan.search.one_f_one_b.enumerate import Row, cheapest, few_plans, row_arrays
from hetplan.search.one_f_one_b.heuristic import expand, polish, search_rows
from hetplan.search.one_f_one_b.likely_meshes import MANY
from hetplan.search.one_f_one_b.order_program import Order, OrderProgram
from hetplan.search.one_f_one_b.replay import NEVER, role_of, step_seconds
from hetplan.search.solver import RESOLUTION, Best, OrderFreeBound
from hetplan.search.space.family import Family
from hetplan.search.space.stage_table import StageTable, most_stages, num_islands
from hetplan.search.table_maker import TableMaker, transformer_layers


def chosen_of_row(
    family: Family, table: StageTable, islands: Sequence[str], row: tuple[Ints, Ints, Ints, Ints]
) -> ChosenPlan:
    """The plan of a row of slots: mesh, variant, units and extra depth of each; `islands` are the
    names of the cluster's.
    """
    mesh, variant, units, extra = row
    slots = len(mesh)
    return family.plan(
        [
            family.meshes[int(mesh[s])].stage(
                islands,
                (transformer_layers(table, role_of(slots, s), int(units[s])),),
                family.recompute[int(variant[s])],
                min(slots - s + int(extra[s]), table.num_microbatches),
            )
            for s in range(slots)
        ]
    )


_KEPT = 6
"""Rows that are cut and replayed after a local search."""

_ROUNDS = 12
"""Times that the best row is shaken."""

_LOCAL_BUDGET = 500_000
"""Slots cut in one local search: 0.02 to 0.2 s (measured), by the number of recomputations."""

_POLISH_BUDGET = 6_000_000
"""Passes replayed to polish one row: about 40 ms at 6 ns each (measured)."""

_SLACKS = (0.0, 0.003, 0.01, 0.03)
"""Parts by which X is above the least one in the cuts that are tried."""

_WORTH_POLISHING = 1.03
"""A cut further above the best does not become the best by moving single layers."""

_PROGRAM_BUDGETS = (1e9, 4e9, 2e10)
"""Additions and comparisons of the programs in one proof, by effort; 1e9 take some seconds."""

_SAME_TARGET = 1e-3
"""A walk that has ended below a target ends there again where the target falls by less."""

_LIFTED = 5e-3
"""Part of the target within which a bound is lifted."""

_MAX_MET = 8
"""Pipelines of the programs that are polished."""

_FEW_PLANS = 2_000_000
"""Plans of a family that are listed one by one."""

_FEW_WHOLE = 100_000
"""Plans of a family whose plans are priced as they are placed: some milliseconds each."""

_MAX_WHOLE = 256
"""Plans of a row that are priced so in a proof."""

_EXACT_BUDGET = 1_000_000_000
"""Passes replayed to list a family: about 6 s."""


class OneFOneBSolver:
    """Searches the plans of one family with one pipeline under 1F1B."""

    def __init__(self, index: int, family: Family, maker: TableMaker) -> None:
        self.index = index
        self.family = family
        self._maker = maker

    @cached_property
    def order_free(self) -> OrderFreeBound:
        """Order-free bound and estimate of the family."""
        return self._maker.order_free(self.family)

    @cached_property
    def space(self) -> StageTable:
        """The family's numbers."""
        return self._maker.space(self.family)

    def improve(self, best: Best) -> None:
        """Offer the best of some rows that local search finds."""
        if not best.still_open(self.index, self._crossing_bound):
            return
        part = self._maker.likely(self.family)
        if part is self.family:
            self._search_rows(best)
            if self.space.regions_apart:
                # Where the meshes of a region stand together, most steps of a local search lead
                # nowhere; the programs meet plans on their way.
                self._walk(best, again=False)
        else:
            # The space of all meshes takes longer than the search.
            type(self)(self.index, part, self._maker)._search_rows(best)

    def _search_rows(self, best: Best) -> None:
        table = self.space
        most = max(1, min(len(table.max_stages), num_islands(table.island_mask)))
        keep = np.zeros((_KEPT, most, 3), dtype=np.int64)
        counts = np.zeros(_KEPT, dtype=np.int64)
        scores = np.full(_KEPT, np.inf)
        search_rows(
            *(table, most_stages(table), best.seed, _ROUNDS, _LOCAL_BUDGET),
            *(keep, counts, scores),
        )
        for k in range(_KEPT):
            if scores[k] < min(NEVER, best.seconds * _WORTH_POLISHING) and scores[k] < _IMPOSSIBLE:
                mesh, extra = expand(keep[k], counts[k])
                self.offer_row(mesh, extra, best)
                best.check_time()

    def sharpen(self, best: Best) -> None:
        """By the bound that knows boundaries between islands."""
        best.still_open(self.index, self._crossing_bound)

    def _crossing_bound(self, enough: float) -> float:
        return self._maker.crossing_bound(self.family, enough)

    def offer_row(self, mesh: Ints, extra: Ints, best: Best) -> None:
        """Cut and polish a row of slots; offer the fastest."""
        slots = len(mesh)
        tried: list[tuple[float, Ints, Ints]] = []
        for slack in _SLACKS:
            variant, units = np.zeros(slots, dtype=np.int64), np.zeros(slots, dtype=np.int64)
            if cut(self.space, mesh, extra, slack, NEVER, variant, units):
                step = step_seconds(self.space, mesh, variant, units, extra)
                tried.append((step, variant, units))
                best.replays += 1
        if tried:
            _, variant, units = min(tried, key=lambda each: each[0])
            self.offer_cut(mesh, variant, units, extra, best)

    def offer_cut(self, mesh: Ints, variant: Ints, units: Ints, extra: Ints, best: Best) -> float:
        """Polish a cut near the best and offer it; its step."""
        step = step_seconds(self.space, mesh, variant, units, extra)
        best.replays += 1
        if step < min(NEVER, best.seconds * _WORTH_POLISHING):
            variant, units = variant.copy(), units.copy()
            spent = np.zeros(2, dtype=np.int64)
            step = polish(
                self.space, mesh, variant, units, extra, RESOLUTION, _POLISH_BUDGET, spent
            )
            best.replays += int(spent[1])
        if step < min(NEVER, best.wanted(self.index)):
            chosen = self._chosen(mesh, variant, units, extra)
            if self._priced_whole:
                step = self._maker.evaluator.seconds(chosen)
            best.offer(self.index, chosen, float(step))
        return float(step)

    def _chosen(self, mesh: Ints, variant: Ints, units: Ints, extra: Ints) -> ChosenPlan:
        return chosen_of_row(
            self.family, self.space, self._maker.island_names, (mesh, variant, units, extra)
        )

    @cached_property
    def _priced_whole(self) -> bool:
        """Whether plans are offered at what they cost as they are placed.

        Where the space is a little low and the family small enough that all can be priced so.
        """
        if self._maker.exact(self.family):
            return False
        return few_plans(self.space, _FEW_WHOLE) is not None

    def prove(self, best: Best) -> None:
        """Raise the family's bound to the target, by the programs and by listing all plans."""
        if not best.still_open(self.index, self._crossing_bound):
            return
        walker = self
        if len(self.family.meshes) > MANY:
            # The space of all meshes can take longer than the walk.
            part = self._maker.below(self.family, best.target)
            if part is not self.family:
                walker = type(self)(self.index, part, self._maker)
        if not walker._walk(best):
            self._list(best)

    def _walk(self, best: Best, *, again: bool = True) -> bool:
        """Whether the programs over orders close the family; what they meet is offered.

        again: as long as that makes the target lower.
        """
        ceiling = min(best.target, NEVER)
        if best.stalled_at.get(self.index, float("inf")) <= ceiling * (1.0 + _SAME_TARGET):
            return best.effort == 1 and self._lift(best)
        # Walks that take seconds do not begin anew where a plan is found on the way.
        many = len(self.family.meshes) > MANY
        whole = many and best.effort == 0
        parts = (together(self.space, ceiling),) if whole else apart(self.space, ceiling)
        programs = [(OrderProgram(part), part, at) for part, at in parts]
        while best.open(self.index):
            before = best.target
            bound, finished = ceiling, True
            for program, part, at in programs:
                found = prove(
                    part,
                    min(best.target if many else before, NEVER),
                    budget=_PROGRAM_BUDGETS[best.effort],
                    check=best.check_time,
                    on_met=self._offering(at, best) if many else None,
                    program=program,
                    most=_PROGRAM_BUDGETS[best.effort],
                )
                best.explored += found.programs
                bound, finished = min(bound, found.bound_seconds), finished and found.finished
                for met in found.met[: 1 if many else _MAX_MET]:
                    self._offer_order(met.order, at, best)
            best.raise_bound(self.index, bound if bound < NEVER else float("inf"))
            if best.target >= before or not again or many:
                if finished and (best.target >= before or many) and best.open(self.index):
                    best.stalled_at[self.index] = best.target
                return not best.open(self.index)
        return True

    def _offering(self, meshes: Ints, best: Best) -> Callable[[Met], float]:
        """Offers what a walk meets, the first ones; the target from then on."""
        left = [_MAX_MET]

        def on_met(met: Met) -> float:
            left[0] -= 1
            if left[0] >= 0:
                self._offer_order(met.order, meshes, best)
            return min(best.target, NEVER)

        return on_met

    def _lift(self, best: Best) -> bool:
        """Whether walks below the target close the family, whose walk from there came to an end.

        A slot of a plan with a shorter step holds less (`within`). So walks from steps in between
        can end higher: no plan is below both such a step and what its walk says.
        """
        low, high = best.bounds[self.index], best.target
        while high - low > _LIFTED * high:
            middle, bound = 0.5 * (low + high), NEVER
            for part, _ in apart(self.space, middle):
                budget = _PROGRAM_BUDGETS[best.effort]
                found = prove(part, middle, budget=budget, check=best.check_time, most=budget)
                best.explored += found.programs
                bound = min(bound, found.bound_seconds)
            high = middle if bound < middle else high
            low = max(low, min(bound, middle))
            best.raise_bound(self.index, low)
        return not best.open(self.index)

    def _offer_order(self, order: Order, meshes: Ints, best: Best) -> None:
        """Polish and offer a pipeline of the programs over these meshes of the space."""
        arrays = (order.meshes, order.variants, order.units, order.extra)
        mesh, variant, units, extra = (np.array(each, dtype=np.int64) for each in arrays)
        self.offer_cut(meshes[mesh], variant, units, extra, best)

    def _list(self, best: Best) -> bool:
        """Replay every plan below the target where they are few; whether that was all of them."""
        found = few_plans(self.space, _FEW_PLANS, best.check_time)
        if found is None:
            return False
        spent = np.zeros(3, dtype=np.int64)
        least = float("inf")
        for row in found:
            best.check_time()
            below = self._list_row(row, best, spent)
            if below is None:
                return False
            least = min(least, below)
        best.listed += 1
        best.raise_bound(self.index, float("inf") if least >= NEVER else least)
        return True

    def _list_row(self, row: Row, best: Best, spent: Ints) -> float | None:
        """No plan of the row has a shorter step, or one was offered; None: too many operations."""
        mesh, extra = row_arrays(row)
        most = _MAX_WHOLE if self._priced_whole else 1
        steps = np.zeros(most)
        variants, units = (np.zeros((most, len(mesh)), dtype=np.int64) for _ in range(2))
        before = int(spent[1])
        ceiling = min(NEVER, best.target)
        kept = cheapest(
            *(self.space, mesh, extra, ceiling, _EXACT_BUDGET),
            *(steps, variants, units, spent, best.check_time),
        )
        best.replays += int(spent[1]) - before
        if kept < 0:
            return None
        if not self._priced_whole:
            if kept:
                self.offer_cut(mesh, variants[0], units[0], extra, best)
            return float(steps[0]) if kept else ceiling
        least = ceiling if kept < most else float(steps.max())
        for k in np.argsort(steps[:kept], kind="stable").tolist():
            if steps[k] >= best.target:
                # So are all that follow.
                return min(least, float(steps[k]))
            chosen = self._chosen(mesh, variants[k], units[k], extra)
            whole = self._maker.evaluator.seconds(chosen)
            best.offer(self.index, chosen, whole)
            least = min(least, whole)
        return least


_IMPOSSIBLE = 1e24
"""Scores of rows that are no plans are larger."""
