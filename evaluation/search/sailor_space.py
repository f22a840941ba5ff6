"""What are the numbers of a family of plans where Sailor's formula is the cost?

A `SpaceMaker` whose spaces hold, instead of hetplan's own cost, that of
`evaluation.search.sailor_cost`, so that the families, the local search and the proofs of
hetplan's search can be asked under it. With c_s, x_s, u_s and r_s of that formula

    step = (N - 1) max (c_s + x_s) + sum (c_s + x_s) + max u_s + max r_s

a slot's passes take c_s and the least that its sends can take, a boundary what its sends take
beyond that, and the end of the step u_s + r_s. The replay of such slots is never longer than the
formula's step (a property test over random rows), so bounds of the search hold for the formula.
What a plan costs is the formula itself (`whole_seconds`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations

import numpy as np

from evaluation.search.rows import slowest_send
from evaluation.search.sailor_tables import Class, Stage, Tables, rings_of
from hetplan.cost.arrays import Floats, Ints
from hetplan.plans.chosen import ChosenPlan
from hetplan.search.costs.maker import SpaceMaker
from hetplan.search.costs.rough import most_stages_of
from hetplan.search.families.family import Family, Mesh
from hetplan.search.families.space import BOTH, FIRST, LAST, MIDDLE, Links, Space
from hetplan.search.solver import Rough

_NO_PATH_SECONDS = 1e9
_ROLES = (MIDDLE, FIRST, LAST, BOTH)


@dataclass(frozen=True, kw_only=True)
class SailorMaker(SpaceMaker):
    """Spaces of families of one microbatch size; islands are the case's rooms, in order."""

    tables: Tables
    price: Callable[[ChosenPlan], float]
    """The formula; infinite where the plan does not fit or is disqualified."""
    _spaces: dict[Family, Space] = field(default_factory=dict, repr=False, compare=False)
    _orders: dict[tuple[int, ...], tuple[int, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _known_fits: dict[tuple[frozenset[Class], int], Ints] = field(
        default_factory=dict, repr=False, compare=False
    )

    def space(self, family: Family) -> Space:
        """See the head of the file."""
        if family not in self._spaces:
            self._spaces[family] = self._made(family)
        return self._spaces[family]

    def rough(self, family: Family) -> Rough:
        """By work and the least end of the step; infinite where nothing fits."""
        space = self.space(family)
        seconds = _least_each(space)
        sends = (space.extra_forward + space.extra_backward)[MIDDLE, 0]
        fits = space.most_layers[0, :, :, 1:].max(axis=(0, 2))
        alone = space.most_layers[0, BOTH, :, 1] >= space.num_layers
        # Without a path between stages only one stage is left.
        if not (fits > 0).any() or not (has_paths(space) or alone.any()):
            return Rough(bound_seconds=math.inf, estimate_seconds=math.inf)
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
        return Rough(bound_seconds=bound, estimate_seconds=guess)

    def likely(self, family: Family) -> Family:
        """All meshes: hetplan's own cost says nothing of the formula."""
        return family

    def below(self, family: Family, seconds: float) -> Family:
        """All meshes, for the same reason."""
        return family

    def sharper_bound(self, family: Family, enough: float = math.inf) -> float:
        """None is known."""
        return self.rough(family).bound_seconds

    def exact(self, family: Family) -> bool:
        """The formula is a little above what its space says."""
        return False

    def whole_seconds(self, chosen: ChosenPlan) -> float:
        """By the formula."""
        return self.price(chosen)

    # ---- one family

    def stage(self, mesh: Mesh) -> Stage:
        """The replicas of one stage of the mesh, in the best order for their ring."""
        runs = [
            (Class(island, shape.tp), shape.dp)
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

    def _made(self, family: Family) -> Space:
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
        zeros = np.zeros(count)
        return Space(
            family=family,
            num_layers=layers,
            layers_per_unit=1,
            front_layers=0,
            back_layers=0,
            num_microbatches=family.num_microbatches,
            stages=self.job.pin.pp or 0,
            stage_limit=limit,
            region=np.array([self._zone(mesh) for mesh in meshes], dtype=np.int64),
            island_mask=np.array([mesh.mask for mesh in meshes], dtype=np.int64),
            max_stages=most_stages,
            forward=forward,
            backward=backward,
            extra_forward=extra_forward,
            extra_backward=extra_backward,
            links=links,
            node_links=Links(
                send_forward=links.send_forward.diagonal().copy(),
                send_backward=links.send_backward.diagonal().copy(),
                wire_latency=zeros,
                rendezvous_extra=zeros,
            ),
            stages_per_node=np.ones(count, dtype=np.int64),
            tied=np.zeros((count, count)),
            rendezvous=True,
            most_layers=most,
            after=after,
            leaving=np.zeros_like(after),
            norm=None,
            may_be_first=np.ones(count, dtype=np.bool_),
            may_be_last=np.ones(count, dtype=np.bool_),
        )

    def _zone(self, mesh: Mesh) -> int:
        zones = {self.cluster.islands[at].region for at in mesh.islands}
        return self.cluster.regions.index(min(zones)) if len(zones) == 1 else -1

    def _sends(self, meshes: Sequence[Mesh], most_stages: Ints) -> tuple[Floats, Links]:
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
        nothing = np.zeros((count, count))
        return least, Links(
            send_forward=beyond, send_backward=beyond, wire_latency=nothing,
            rendezvous_extra=nothing,
        )  # fmt: skip

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


def has_paths(space: Space) -> bool:
    """Whether any two stages can send to each other."""
    return bool((space.links.send_forward < _NO_PATH_SECONDS).any())


def _least_each(space: Space) -> Floats:
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
