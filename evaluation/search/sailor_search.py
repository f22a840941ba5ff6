"""Two ways to plan a case with hetplan's search: Sailor's formula as cost, and hetplan's own cost.

Both use the families of the search (`hetplan.search.space`), one microbatch size at a time so
that every plan has Sailor's form, its local search over rows of stages and its proofs
(`hetplan.search.one_f_one_b.solver`).

`sailor_search`: the spaces hold Sailor's cost. With c_s, x_s, u_s and r_s of the formula
(`evaluation.search.sailor`)

    step = (N - 1) max (c_s + x_s) + sum (c_s + x_s) + max u_s + max r_s

a slot's passes take c_s and the least that its sends can take, a boundary what its sends take
beyond that, and the end of the step u_s + r_s. The replay of such slots is never longer than the
formula's step (a property test over random rows), so bounds of the search hold for the formula.
Rows are cut into layers, and priced, by the formula itself.

`own_search`: hetplan's cost of Sailor's profiles (`ProfilePredictor`); the rule of Sailor's
simulator, 24 bytes per parameter, says what fits in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations

import numpy as np

from evaluation.search.family_order import (
    FamilySearch,
    ProfilePredictor,
    SailorJudge,
    families_of,
    parts_of,
    search_families,
)
from evaluation.search.sailor import SailorFiles
from evaluation.search.sailor_tables import (
    ReplicaClass,
    Stage,
    Tables,
    cut,
    rings_of,
    sends_of,
    slowest_send,
)
from hetplan.cost.arrays import Floats, Ints
from hetplan.plans.chosen import ChosenPlan
from hetplan.search.one_f_one_b.rows import Slots, uncut
from hetplan.search.one_f_one_b.solver import OneFOneBSolver
from hetplan.search.result import Inputs
from hetplan.search.solver import Best, OrderFreeBound
from hetplan.search.space.allowed import most_stages_of
from hetplan.search.space.family import Family, Mesh
from hetplan.search.space.plan_evaluator import PlanEvaluator
from hetplan.search.space.stage_table import (
    BOTH,
    FIRST,
    LAST,
    MAX_FREE_ISLANDS,
    MIDDLE,
    SEND_BACKWARD,
    SEND_FORWARD,
    StageTable,
    num_islands,
)
from hetplan.search.table_maker import TableMaker

_NO_PATH_SECONDS = 1e9
_ROLES = (MIDDLE, FIRST, LAST, BOTH)


@dataclass(frozen=True, kw_only=True)
class SailorEvaluator(PlanEvaluator):
    """Prices whole plans by Sailor's formula."""

    price: Callable[[ChosenPlan], float]

    def seconds(self, chosen: ChosenPlan) -> float:
        """By the formula; infinite where the plan does not fit."""
        return self.price(chosen)


@dataclass(frozen=True, kw_only=True)
class SailorMaker(TableMaker):
    """Spaces of families of one microbatch size; islands are the case's rooms, in order."""

    tables: Tables
    price: Callable[[ChosenPlan], float]
    """The formula; infinite where the plan does not fit or is disqualified."""
    _spaces: dict[Family, StageTable] = field(default_factory=dict, repr=False, compare=False)
    _orders: dict[tuple[int, ...], tuple[int, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _known_fits: dict[tuple[frozenset[ReplicaClass], int], Ints] = field(
        default_factory=dict, repr=False, compare=False
    )

    def space(self, family: Family) -> StageTable:
        """See the head of the file."""
        if family not in self._spaces:
            self._spaces[family] = self._made(family)
        return self._spaces[family]

    def passes_space(self, family: Family) -> StageTable:
        """The whole table: it is made in no time."""
        return self.space(family)

    def order_free(self, family: Family) -> OrderFreeBound:
        """By work and the least end of the step; infinite where nothing fits."""
        space = self.space(family)
        seconds = _least_each(space)
        sends = (space.extra_forward + space.extra_backward)[MIDDLE, 0]
        fits = space.most_layers[0, :, :, 1:].max(axis=(0, 2))
        alone = space.most_layers[0, BOTH, :, 1] >= space.num_layers
        # Without a path between stages only one stage is left.
        if not (fits > 0).any() or not (has_paths(space) or alone.any()):
            return OrderFreeBound(bound_seconds=math.inf, estimate_seconds=math.inf)
        used = fits > 0
        rate, most = np.zeros(len(self.cluster.islands)), 0.0
        for m in np.flatnonzero(used).tolist():
            mesh = family.meshes[m]
            taken = sum(shape.tp * shape.dp for shape in mesh.shapes)
            for island in mesh.islands:
                each = self.cluster.islands[island]
                # Every device of a stage has an equal part of what the stage does.
                share = each.nodes * each.devices_per_node / taken
                rate[island] = max(rate[island], share / float(seconds[m]))
            most = max(most, float(space.max_stages[m]))
        layers, count = space.num_layers, space.num_microbatches
        least = float(seconds[used].min())
        longest = max(layers / float(rate.sum()), least)
        ends = float(space.after[:, used, 1].min())
        bound = (count - 1) * longest + layers * least + ends
        fast = int(np.argmin(np.where(used, seconds, math.inf)))
        stages = max(1, min(round(layers * least / longest), layers))
        if alone.any() and stages == 1:
            sends = np.zeros_like(sends)
        tick = longest + float(sends[fast])
        units = max(1, min(layers, math.ceil(layers / stages)))
        guess = (count - 1 + stages) * tick + float(space.after[MIDDLE, fast, units])
        return OrderFreeBound(bound_seconds=bound, estimate_seconds=guess)

    def likely(self, family: Family) -> Family:
        """All meshes: hetplan's own cost says nothing of the formula."""
        return family

    def below(self, family: Family, seconds: float) -> Family:
        """All meshes, for the same reason."""
        return family

    def crossing_bound(self, family: Family, enough: float = math.inf) -> float:
        """None is known."""
        return self.order_free(family).bound_seconds

    def exact(self, family: Family) -> bool:
        """The formula is a little above what its space says."""
        return False

    @cached_property
    def evaluator(self) -> SailorEvaluator:
        """By the formula."""
        return SailorEvaluator(
            model=self.model,
            cluster=self.cluster,
            job=self.job,
            predictor=self.predictor,
            price=self.price,
        )

    # ---- one family

    def stage(self, mesh: Mesh) -> Stage:
        """The replicas of one stage of the mesh, in the best order for their ring."""
        runs = [
            (ReplicaClass(island, shape.tp), shape.dp)
            for island, shape in zip(mesh.islands, mesh.shapes, strict=True)
        ]
        return tuple(runs[at] for at in self.part_order(mesh))

    def part_order(self, mesh: Mesh) -> tuple[int, ...]:
        """Parts so that the slowest path between neighbours is fast; the same for equal islands."""
        if mesh.islands not in self._orders:
            every = permutations(range(len(mesh.islands)))
            self._orders[mesh.islands] = min(
                every,
                key=lambda order: (self.tables.ring([mesh.islands[at] for at in order]), order),
            )
        return self._orders[mesh.islands]

    @cached_property
    def _layers(self) -> int:
        return self.tables.files.num_layers - 2

    def _made(self, family: Family) -> StageTable:
        meshes, units, layers = family.meshes, self.units(), self._layers
        limit = most_stages_of(self.job, units, family.num_microbatches, family.virtual_stages)
        most_stages = np.array([min(each.max_stages, layers) for each in meshes])
        flights = max(1, min(limit, int(most_stages.sum()), family.num_microbatches))
        count = len(meshes)
        forward, backward = np.zeros((1, count)), np.zeros((1, count))
        extra_forward, extra_backward = (np.zeros((len(_ROLES), 1, count)) for _ in range(2))
        after = np.zeros((len(_ROLES), count, layers + 1))
        most = np.zeros((1, len(_ROLES), count, flights + 1), dtype=np.int64)
        least, links = self._sends(meshes, most_stages)
        for m, mesh in enumerate(meshes):
            stage = self.stage(mesh)
            seconds = self.tables.seconds(frozenset(each for each, _ in stage))
            slope, ends = _affine(seconds, layers)
            # A third of a pass is forward in the profiles; only the sum counts in the formula.
            forward[0, m], backward[0, m] = slope / 3, slope * 2 / 3
            ends += np.array([2, 1, 2, 0]) * (least[m] if math.isfinite(least[m]) else 0.0)
            extra_forward[:, 0, m], extra_backward[:, 0, m] = ends / 3, ends * 2 / 3
            after[:, m] = self._ends_of(stage, layers)
            for flight in range(1, flights + 1):
                most[0, :, m, flight] = self._fits(stage, flight, layers)
        masks = np.array([mesh.mask for mesh in meshes], dtype=np.int64)
        return StageTable(
            num_layers=layers,
            layers_per_unit=1,
            front_layers=0,
            back_layers=0,
            num_microbatches=family.num_microbatches,
            most_extra_depth=family.most_extra_depth,
            stages=self.job.pin.pp or 0,
            stage_limit=limit,
            regions_apart=num_islands(masks) > MAX_FREE_ISLANDS,
            rendezvous=True,
            clips_gradients=False,
            region=np.array([self._zone(mesh) for mesh in meshes], dtype=np.int64),
            island_mask=masks,
            max_stages=most_stages,
            forward=forward,
            backward=backward,
            extra_forward=extra_forward,
            extra_backward=extra_backward,
            links=links,
            node_links=links.diagonal(axis1=1, axis2=2).copy(),
            stages_per_node=np.ones(count, dtype=np.int64),
            tied=np.zeros((count, count)),
            most_layers=most,
            after=after,
            leaving=np.zeros_like(after),
            norm_inside=np.zeros(count),
            norm_links=np.zeros((count, count)),
            norm_node_links=np.zeros(count),
            may_be_first=np.ones(count, dtype=np.bool_),
            may_be_last=np.ones(count, dtype=np.bool_),
        ).contiguous()

    def _zone(self, mesh: Mesh) -> int:
        zones = {self.cluster.islands[at].region for at in mesh.islands}
        return self.cluster.regions.index(min(zones)) if len(zones) == 1 else -1

    def _sends(self, meshes: Sequence[Mesh], most_stages: Ints) -> tuple[Floats, Floats]:
        """[M] seconds that a send of the mesh takes at least, and what boundaries add to that.

        The formula charges a send to its sender, forward as well as backward. A boundary of the
        space holds both its ends, so it has half of what is beyond the least of both.
        """
        count = len(meshes)
        stages = [self.stage(mesh) for mesh in meshes]
        each = np.full((count, count), math.inf)
        for i, one in enumerate(stages):
            for j, other in enumerate(stages):
                apart = not meshes[i].mask & meshes[j].mask
                if apart or (i == j and most_stages[i] > 1):
                    each[i, j] = slowest_send(one, other, self.tables)
        both = np.minimum(each, each.T)
        least = both.min(axis=1)
        more = np.where(np.isfinite(both), both, _NO_PATH_SECONDS)
        beyond = np.maximum(more - np.maximum(least[:, None], least[None, :]), 0.0) / 2
        beyond = np.where(np.isfinite(both), beyond, _NO_PATH_SECONDS)
        links = np.zeros((4, count, count))
        links[[SEND_FORWARD, SEND_BACKWARD]] = beyond
        return least, links

    def _ends_of(self, stage: Stage, layers: int) -> Floats:
        """[4, L + 1] the stage's reduction and update, the least over where its layers lie."""
        replicas = sum(number for _, number in stage)
        tp = min(each.tp for each, _ in stage)
        found = _by_role(self.tables.reductions(rings_of(stage), tp, replicas), layers)
        # Numbers of layers that are in no plan: without any, and both ends with a part of them.
        found[:, 0] = found[:, 1]
        found[BOTH] = found[BOTH, layers]
        known = np.isfinite(found[MIDDLE])
        found[MIDDLE, ~known] = found[MIDDLE, known].max(initial=0.0)
        return found + self.tables.least_update()

    def _fits(self, stage: Stage, flight: int, layers: int) -> Ints:
        """[4] most layers of a stage with so many microbatches in flight."""
        key = (frozenset(each for each, _ in stage), flight)
        if key not in self._known_fits:
            known = np.isfinite(_by_role(self.tables.ticks(*key), layers))
            known[:, 0] = True
            self._known_fits[key] = np.asarray(layers - np.argmax(known[:, ::-1], axis=1))
        return self._known_fits[key]


def has_paths(space: StageTable) -> bool:
    """Whether any two stages can send to each other."""
    return bool((space.links[SEND_FORWARD] < _NO_PATH_SECONDS).any())


def _least_each(space: StageTable) -> Floats:
    """[M] seconds of one layer at least, whatever the role and the number of layers beside it."""
    n = np.arange(1, space.num_layers + 1)
    slopes = (space.forward + space.backward)[0][:, None]
    ends = (space.extra_forward + space.extra_backward)[:, 0, :, None]
    found: Floats = ((slopes * n + ends) / n).min(axis=(0, 2))
    # Both ends are in a plan with all layers only.
    return found


def _affine(seconds: Floats, layers: int) -> tuple[float, Floats]:
    """(slope, [4] by role): slope * n + role's is at most what any n layers in that role take."""
    slope = float(seconds[1, layers + 1]) / layers
    least = _by_role(seconds, layers)
    ends = (least - slope * np.arange(layers + 1))[:, 1:]
    found: Floats = np.where(np.isfinite(ends), ends, np.inf).min(axis=1)
    found[BOTH] = float(seconds[0, layers + 2]) - slope * layers
    # A model with one layer or two has no slots in the middle.
    found[~np.isfinite(found)] = 0.0
    return slope, found


def _by_role(spans: Floats, layers: int) -> Floats:
    """[4, L + 1] the least of n transformer layers in a role, from sums over layers a to e - 1.

    Layer 0 is the embedding, L + 1 the head.
    """
    found = np.full((len(_ROLES), layers + 1), np.inf)
    n = np.arange(1, layers + 1)
    found[FIRST, 1:] = spans[0, n + 1]
    found[LAST, 1:] = spans[layers + 1 - n, layers + 2]
    found[BOTH, layers] = spans[0, layers + 2]
    # Rows are n, columns where its layers begin: the first and the last slot hold a layer each.
    starts = np.arange(2, layers + 1)[None, :]
    stops = starts + n[:, None]
    inside = spans[np.broadcast_to(starts, stops.shape), np.minimum(stops, layers)]
    found[MIDDLE, 1:] = np.where(stops <= layers, inside, np.inf).min(axis=1, initial=np.inf)
    return found


_FEW_MESHES = 12
"""Families of more are searched in parts as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """The best plan in the families of the search, by the cost that led it."""

    chosen: ChosenPlan
    seconds: float
    bound_seconds: float
    """No plan of the families is faster by that cost."""
    families: int
    searched: int
    scored: int
    """Plans that Sailor's formula looked at."""
    proof_cpu_seconds: float


class SailorSolver(OneFOneBSolver):
    """A family's solver whose rows are cut and priced by the formula."""

    def __init__(self, index: int, family: Family, maker: SailorMaker) -> None:
        super().__init__(index, family, maker)
        self._sailor = maker

    def improve(self, best: Best) -> None:
        """Pipelines of one stage, and what local search finds where stages have a path."""
        for m in range(len(self.family.meshes)):
            self.offer_row(uncut(np.array([m]), np.zeros(1, dtype=np.int64)), best)
        if has_paths(self.space):
            super().improve(best)

    def offer_row(self, row: Slots, best: Best) -> None:
        """Cut a row of slots by the formula and offer it."""
        meshes = [self.family.meshes[m] for m in row.mesh.tolist()]
        tables, last = self._sailor.tables, len(meshes) - 1
        stages = tuple(self._sailor.stage(each) for each in meshes)
        sends = sends_of(stages, tables)
        if not np.all(np.isfinite(sends)) or last >= self.space.num_layers:
            return
        ticks, reductions = tables.row(stages, sends)
        ends = np.zeros(len(meshes), dtype=np.int64)
        if cut(ticks, reductions, self.space.num_microbatches, ends) == math.inf:
            return
        units = np.diff(ends, prepend=0)
        units[0] -= 1
        units[last] -= 1
        chosen = self._ordered(row.mesh, units)
        best.replays += 1
        best.offer(self.index, chosen, self._sailor.price(chosen))

    def _ordered(self, mesh: Ints, units: Ints) -> ChosenPlan:
        """The plan of a row, parts of its stages in the order of their ring."""
        found = self._chosen(uncut(mesh, np.zeros_like(mesh))._replace(units=units))
        (pipeline,) = found.pipelines
        stages = tuple(
            replace(
                stage,
                parts=tuple(
                    stage.parts[at] for at in self._sailor.part_order(self.family.meshes[m])
                ),
            )
            for stage, m in zip(pipeline.stages, mesh.tolist(), strict=True)
        )
        return replace(found, pipelines=(replace(pipeline, stages=stages),))

    def offer_cut(self, row: Slots, best: Best) -> float:
        """The row of it: `offer_row`."""
        self.offer_row(row, best)
        return best.wanted(self.index)


def sailor_search(inputs: Inputs, files: SailorFiles, every: list[Tables]) -> Searched | None:
    """The best plan and a bound; None where no family has a plan that fits.

    `every`: tables of each microbatch size.
    """
    judge, makers = _makers(inputs, files, every)
    solvers: list[SailorSolver] = []
    parts: set[int] = set()
    for tables, maker in zip(every, makers, strict=True):
        for family in families_of(inputs, tables):
            solvers.append(SailorSolver(len(solvers), family, maker))
            if len(family.meshes) > _FEW_MESHES:
                for part in parts_of(family):
                    parts.add(len(solvers))
                    solvers.append(SailorSolver(len(solvers), part, maker))
    return _searched(search_families(solvers, inputs.job.seed, parts=parts), judge)


def _makers(
    inputs: Inputs, files: SailorFiles, every: list[Tables]
) -> tuple[SailorJudge, list[SailorMaker]]:
    """Sailor's cost of a case, and its makers of tables."""
    judge = SailorJudge(
        files=files, cluster=inputs.cluster, global_batch_size=inputs.job.global_batch_size
    )
    return judge, [
        SailorMaker(
            model=inputs.model, cluster=inputs.cluster, job=inputs.job,
            predictor=ProfilePredictor(files=files), tables=tables, price=judge.seconds,
        )
        for tables in every
    ]  # fmt: skip


def _searched(outcome: FamilySearch, judge: SailorJudge) -> Searched | None:
    """None without a plan that fits and is not disqualified."""
    best = outcome.best
    if best.chosen is None or judge.seconds(best.chosen) == math.inf:
        return None
    return Searched(
        chosen=best.chosen,
        seconds=best.seconds,
        bound_seconds=best.lower_bound,
        families=outcome.families,
        searched=outcome.searched,
        scored=judge.scored,
        proof_cpu_seconds=outcome.proof_cpu_seconds,
    )


_MUCH_MEMORY = 16
"""Times the memory of a device: hetplan's own rule is to exclude nothing."""


@dataclass(frozen=True, kw_only=True)
class OwnMaker(TableMaker):
    """hetplan's spaces with what fits by Sailor's rule."""

    sailor: SailorMaker
    _wholes: dict[Family, StageTable] = field(default_factory=dict, repr=False, compare=False)
    _part_of: dict[Family, Family] = field(default_factory=dict, repr=False, compare=False)

    def parts(self, family: Family) -> tuple[Family, ...]:
        """Parts of the family (`parts_of`), whose spaces are cut out of its own."""
        found = tuple(parts_of(family))
        self._part_of.update(dict.fromkeys(found, family))
        return found

    def order_free(self, family: Family) -> OrderFreeBound:
        """hetplan's, but for families without a plan that fits."""
        if self.sailor.order_free(family).bound_seconds == math.inf:
            return OrderFreeBound(bound_seconds=math.inf, estimate_seconds=math.inf)
        return super().order_free(family)

    def space(self, family: Family) -> StageTable:
        """See the head of the file."""
        whole = self._part_of.get(family, family)
        if whole not in self._wholes:
            found, other = super().space(whole), self.sailor.space(whole)
            most = np.zeros_like(found.most_layers)
            flights = np.minimum(np.arange(most.shape[3]), other.most_layers.shape[3] - 1)
            most[:] = other.most_layers[..., flights]
            self._wholes[whole] = found._replace(most_layers=most)
        if whole == family:
            return self._wholes[whole]
        kept = [at for at, mesh in enumerate(whole.meshes) if mesh in family.meshes]
        return self._wholes[whole].of_meshes(np.array(kept, dtype=np.int64))

    def passes_space(self, family: Family) -> StageTable:
        """The whole table: it is made in no time."""
        return self.space(family)


def own_search(inputs: Inputs, files: SailorFiles, every: list[Tables]) -> Searched | None:
    """The plan; None where the best one does not fit or is disqualified."""
    islands = tuple(
        replace(each, memory_bytes=_MUCH_MEMORY * each.memory_bytes)
        for each in inputs.cluster.islands
    )
    roomy = replace(inputs, cluster=replace(inputs.cluster, islands=islands))
    judge, makers = _makers(inputs, files, every)
    solvers: list[OneFOneBSolver] = []
    parts: set[int] = set()
    for tables, sailor in zip(every, makers, strict=True):
        maker = OwnMaker(
            model=roomy.model, cluster=roomy.cluster, job=roomy.job, predictor=sailor.predictor,
            sailor=sailor,
        )  # fmt: skip
        for family in families_of(roomy, tables):
            solvers.append(OneFOneBSolver(len(solvers), family, maker))
            for part in maker.parts(family):
                parts.add(len(solvers))
                solvers.append(OneFOneBSolver(len(solvers), part, maker))
    return _searched(search_families(solvers, inputs.job.seed, parts=parts), judge)
