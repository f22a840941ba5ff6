"""Solver of 1F1B families: improve, sharpen, prove, list.

`improve` looks for rows of slots by local search (`heuristic`), cuts and polishes them by replay.
`prove` asks the programs over orders and cuts (`bound`) whether any plan is below the target, and
lists all plans (`enumerate`) where they are few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from hetplan.cost.arrays import Ints
from hetplan.plans.chosen import ChosenPlan
from hetplan.search.family_solver import FamilySolver, chosen_of_slots
from hetplan.search.one_f_one_b.bound import Met, Proof, apart, prove, prove_by_any, together
from hetplan.search.one_f_one_b.enumerate import Row, cheapest, few_plans, kept_cuts
from hetplan.search.one_f_one_b.heuristic import MANY, expand, kept_rows, polish, search_rows
from hetplan.search.one_f_one_b.order_program import OrderProgram
from hetplan.search.one_f_one_b.rows import Slots, cut, depth_of, step_seconds
from hetplan.search.solver import Best, Grounds
from hetplan.search.space.family import Family
from hetplan.search.space.row import NEVER
from hetplan.search.space.stage_table import StageTable, most_stages, num_islands


def chosen_of_row(
    family: Family, table: StageTable, islands: Sequence[str], row: Slots
) -> ChosenPlan:
    """The plan of a row of slots; `islands` are the names of the cluster's."""
    mesh, extra = row.mesh.tolist(), row.extra.tolist()
    depth = [depth_of(len(mesh), s, more, table.num_microbatches) for s, more in enumerate(extra)]
    return chosen_of_slots(family, table, islands, mesh, row.variant, row.units, depth)


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

_PASSES_BUDGET = 2e7
"""The same of a first proof without ends of the step, about 0.1 s."""

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

_IMPOSSIBLE = 1e24
"""Scores of rows that are no plans are larger."""


class OneFOneBSolver(FamilySolver):
    """Searches the plans of one family with one pipeline under 1F1B."""

    @cached_property
    def space(self) -> StageTable:
        """The family's numbers."""
        return self._maker.space(self.family)

    def _improve(self, best: Best) -> None:
        """Offer the best of some rows that local search finds."""
        part = self._maker.likely(self.family)
        if part is not self.family:
            # The space of all meshes takes longer than the search.
            type(self)(self.index, part, self._maker)._search_rows(best)
            return
        self._search_rows(best)

    def _search_rows(self, best: Best) -> None:
        """Offer the best rows of all meshes, and of those of each region: from a plan over several
        regions most steps towards one within a region lead through worse ones.
        """
        regions = self.space.region
        every = np.arange(len(regions))
        self._search_among(self.space, every, best)
        for region in np.unique(regions[regions >= 0]).tolist():
            some = every[regions == region]
            if len(some) < len(every):
                self._search_among(self.space.of_meshes(some), some, best)

    def _search_among(self, table: StageTable, meshes: Ints, best: Best) -> None:
        """Offer the best rows of these meshes of the space, which the table has."""
        most = max(1, min(len(meshes), num_islands(table.island_mask)))
        kept = kept_rows(_KEPT, most)
        search_rows(table, most_stages(table), best.seed, _ROUNDS, _LOCAL_BUDGET, kept)
        for runs, count, score in zip(kept.runs, kept.counts, kept.scores, strict=True):
            if score < min(_IMPOSSIBLE, best.seconds * _WORTH_POLISHING):
                row = expand(runs, count)
                self.offer_row(row._replace(mesh=meshes[row.mesh]), best)
                best.check_time()

    def offer_row(self, row: Slots, best: Best) -> None:
        """Cut and polish a row of slots; offer the fastest."""
        tried: list[tuple[float, Slots]] = []
        for slack in _SLACKS:
            if tried and best.late:
                break
            if cut(self.space, row, slack, NEVER):
                tried.append((step_seconds(self.space, row), row.copy()))
                best.replays += 1
        if tried:
            self.offer_cut(min(tried, key=lambda one: one[0])[1], best)

    def offer_cut(self, row: Slots, best: Best) -> float:
        """Polish a cut near the best and offer it; its step."""
        step = step_seconds(self.space, row)
        best.replays += 1
        if step < min(NEVER, best.seconds * _WORTH_POLISHING) and not best.late:
            row, spent = row.copy(), np.zeros(2, dtype=np.int64)
            step = polish(self.space, row, _POLISH_BUDGET, spent)
            best.replays += int(spent[1])
        if step < min(NEVER, best.wanted(self.index)):
            chosen = self._chosen(row)
            if self._priced_whole:
                step = self._maker.evaluator.seconds(chosen)
            best.offer(self.index, chosen, float(step))
        return float(step)

    def _prove(self, best: Best) -> None:
        """By the programs, and by listing all plans."""
        walker = self
        if self._closed_by_passes(best):
            return
        if len(self.family.meshes) > MANY:
            # The space of all meshes can take longer than the walk.
            part = self._maker.below(self.family, best.target)
            if part is not self.family:
                walker = type(self)(self.index, part, self._maker)
        # Plans without the meshes of the part are not below the target.
        others = best.target if walker is not self else NEVER
        if not walker._walk(best):
            walker._list(best, others)

    def _closed_by_passes(self, best: Best) -> bool:
        """Whether a walk closes the family that leaves out what follows the last pass: most of the
        time of a stage table goes into that. A lower cost of every plan, so a valid bound. First a
        walk over all families that are alike (`FamilyTable.loosest`): stages of the loosest one
        have equal passes and transfers and room for as much, so its bound is one of all of them.
        """
        if best.effort or len(self.family.meshes) > MANY:
            return False
        ceiling = min(best.target, NEVER)
        loosest = self._maker.families.loosest(self.family)
        if loosest is not self.family:
            target, shared = self._maker.walked.get(id(loosest), (0.0, 0.0))
            if target != ceiling:
                shared = self._passes_proof(loosest, best).bound_seconds
                self._maker.walked[id(loosest)] = ceiling, shared
            best.raise_bound(self.index, shared if shared < NEVER else float("inf"))
        if best.open(self.index):
            proof = self._passes_proof(self.family, best)
            best.explored += proof.programs
            bound = proof.bound_seconds
            best.raise_bound(self.index, bound if bound < NEVER else float("inf"))
        return not best.open(self.index)

    def _passes_proof(self, family: Family, best: Best) -> Proof:
        """One walk over the family without ends of the step."""
        ceiling = min(best.target, NEVER)
        program, _ = together(self._maker.passes_space(family), ceiling)
        return prove(program, ceiling, _PASSES_BUDGET, check=best.check_time)

    def _walk(self, best: Best) -> bool:
        """Whether the programs over orders close the family; what they meet is offered."""
        ceiling = min(best.target, NEVER)
        if best.stalled_at.get(self.index, float("inf")) <= ceiling * (1.0 + _SAME_TARGET):
            return best.effort == 1 and self._lift(best)
        # Walks that take seconds do not begin anew where a plan is found on the way.
        many = len(self.family.meshes) > MANY
        whole = many and best.effort == 0
        if whole:
            program, meshes = together(self.space, ceiling)
            return self._walk_over((((program,), meshes),), best)
        return self._walk_over(apart(self.space, ceiling), best)

    def _walk_over(self, parts: Sequence[tuple[Sequence[OrderProgram], Ints]], best: Best) -> bool:
        """Whether the programs of these parts, which have all plans of the family, close it."""
        ceiling, many = min(best.target, NEVER), len(self.family.meshes) > MANY
        while best.open(self.index):
            before = best.target
            bound, finished = ceiling, True
            for programs, meshes in parts:
                proof = prove_by_any(
                    programs,
                    min(best.target if many else before, NEVER),
                    _PROGRAM_BUDGETS[best.effort],
                    check=best.check_time,
                    on_met=self._offering(meshes, best) if many else None,
                )
                best.explored += proof.programs
                bound, finished = min(bound, proof.bound_seconds), finished and proof.finished
                for met in proof.met[: 1 if many else _MAX_MET]:
                    self._offer_met(met, meshes, best)
            best.raise_bound(self.index, bound if bound < NEVER else float("inf"))
            settled = best.target >= before or many
            if finished and settled and best.open(self.index):
                best.stalled_at[self.index] = best.target
            if settled:
                return not best.open(self.index)
        return True

    def _offering(self, meshes: Ints, best: Best) -> Callable[[Met], float]:
        """Offers what a walk meets, the first ones; the target from then on."""
        left = [_MAX_MET]

        def on_met(met: Met) -> float:
            left[0] -= 1
            if left[0] >= 0:
                self._offer_met(met, meshes, best)
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
            for programs, _ in apart(self.space, middle):
                budget = _PROGRAM_BUDGETS[best.effort]
                proof = prove_by_any(programs, middle, budget, check=best.check_time)
                best.explored += proof.programs
                bound = min(bound, proof.bound_seconds)
            high = middle if bound < middle else high
            low = max(low, min(bound, middle))
            best.raise_bound(self.index, low)
        return not best.open(self.index)

    def _offer_met(self, met: Met, meshes: Ints, best: Best) -> None:
        """Polish and offer a pipeline of the programs over these meshes of the space."""
        order = met.order
        arrays = (order.meshes, order.variants, order.units, order.extra)
        row = Slots(*[np.array(values, dtype=np.int64) for values in arrays])
        self.offer_cut(row._replace(mesh=meshes[row.mesh]), best)

    def _list(self, best: Best, others: float) -> bool:
        """Replay every plan below the target where they are few; whether that was all of them.

        others: no plan that is not in the space is below.
        """
        every = few_plans(self.space, _FEW_PLANS, best.check_time)
        if every is None:
            return False
        spent = np.zeros(3, dtype=np.int64)
        least = others
        for row in every:
            best.check_time()
            below = self._list_row(row, best, spent)
            if below is None:
                return False
            least = min(least, below)
        best.listed += 1
        best.raise_bound(self.index, float("inf") if least >= NEVER else least, Grounds.EVERY_PLAN)
        return True

    def _list_row(self, runs: Row, best: Best, spent: Ints) -> float | None:
        """No plan of the row has a shorter step, or one was offered; None: too many operations."""
        row = expand(np.array(runs, dtype=np.int64), len(runs))
        most = _MAX_WHOLE if self._priced_whole else 1
        kept = kept_cuts(most, len(row.mesh))
        before, ceiling = int(spent[1]), min(NEVER, best.target)
        count = cheapest(self.space, row, ceiling, _EXACT_BUDGET, kept, spent, best.check_time)
        best.replays += int(spent[1]) - before
        if count < 0:
            return None
        if not self._priced_whole:
            if count:
                self.offer_cut(row._replace(variant=kept.variants[0], units=kept.units[0]), best)
            return float(kept.steps[0]) if count else ceiling
        least = ceiling if count < most else float(kept.steps.max())
        for k in np.argsort(kept.steps[:count], kind="stable").tolist():
            if kept.steps[k] >= best.target:
                # So are all that follow.
                return min(least, float(kept.steps[k]))
            chosen = self._chosen(row._replace(variant=kept.variants[k], units=kept.units[k]))
            whole = self._maker.evaluator.seconds(chosen)
            best.offer(self.index, chosen, whole)
            least = min(least, whole)
        return least

    def _chosen(self, row: Slots) -> ChosenPlan:
        return chosen_of_row(self.family, self.space, self._maker.island_names, row)

    @cached_property
    def _priced_whole(self) -> bool:
        """Whether plans are offered at what they cost as they are placed.

        Where the space is a little low and the family small enough that all can be priced so.
        """
        if self._maker.exact(self.family):
            return False
        return few_plans(self.space, _FEW_WHOLE) is not None
