"""What a stage does after its last backward pass, for every role and number of units at once.

Reduction, update and gathering are functions of the parameters on a rank, which are linear in the
units. Most laws are straight lines over long ranges of parameters, so they are asked at few of them
and read off in between: `filled` cuts a range where the lines at its ends meet, until three points
inside lie on its chord, to the last digits. A law that bends everywhere is asked everywhere.

Reduction and gathering that run beside compute take what is left of them
(`cost.step_model.overlap`). What is left in a plan depends on the recomputation, chunks, parts and
vocabulary of its stages. Here every stage hides as much as it could with any of them, so that no
plan takes less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from hetplan.cost.arrays import Floats
from hetplan.cost.step_model.end_of_step import EndOfStep
from hetplan.cost.step_model.groups import Copies, copies_of, holders_of
from hetplan.cost.step_model.overlap import bucket_count, least_added, slowdowns
from hetplan.cost.terms import Part, seconds_of_parts
from hetplan.plans.build import overlap_of
from hetplan.plans.chosen import Shape
from hetplan.plans.formats import reduction_precision
from hetplan.plans.plan import Sharding
from hetplan.search.space.family import Family, Mesh
from hetplan.search.space.stage_passes import alike_padded, part_passes
from hetplan.search.space.stage_pricer import StagePricer
from hetplan.search.space.stage_table import ROLES

_ON_CHORD = 1e-12
"""Sums in another order differ by less than this part of themselves."""
_FIRST_ASKED = 3
"""Points at the lower end of an update that are always asked: predictors know single points there
(that of one measured layer's parameters)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndTimes:
    """Seconds by role and number of units, [4, L + 1]; entries of no unit are 0.

    Beyond what fits in memory the last entry that was computed stands for all.
    """

    reduction: Floats
    update: Floats
    gathering: Floats
    most: tuple[int, ...]
    """By role, up to which number of units they are computed."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Ends of the step of a job's meshes; keeps what it has computed."""

    placed: StagePricer
    _known: dict[tuple[object, ...], EndTimes] = field(
        default_factory=dict, repr=False, compare=False
    )

    _groups: dict[tuple[object, ...], Copies] = field(
        default_factory=dict, repr=False, compare=False
    )

    def of(self, mesh: Mesh, slowest: int, family: Family, most: Sequence[int]) -> EndTimes:
        """Of the family's stages of this mesh with at most so many units, by role.

        `slowest`: the part that the others wait for.
        """
        key = (
            mesh.islands,
            family.sharding,
            family.offload,
            family.sharing_ranks,
            slowest,
            *[(each.tp, each.cp, each.dp, each.ep, each.etp) for each in mesh.shapes],
        )
        found = self._known.get(key)
        if found is None or any(have < want for have, want in zip(found.most, most, strict=True)):
            wanted = tuple(map(max, most, found.most)) if found else tuple(most)
            found = self._known[key] = self._computed(mesh, slowest, family, wanted)
        return found

    def least(
        self,
        mesh: Mesh,
        family: Family,
        most: Sequence[int],
        waited: npt.NDArray[np.bool_],
        *,
        chunked: bool,
    ) -> tuple[Floats, Floats]:
        """(reduction, update and gathering), each of the part that is waited for and has least.

        `waited`: [parts, 4, L + 1] whether the others may wait for a part. `chunked`: stages may
        have several chunks of their layers.
        """
        reduction, leaving = np.full(waited.shape[1:], np.inf), np.full(waited.shape[1:], np.inf)
        for part, here in enumerate(waited):
            if here.any():
                alone = self.of(mesh, part, family, most)
                end = self._hidden(alone, mesh, part, family, chunked=chunked)
                np.minimum(reduction, end.reduction, out=reduction, where=here)
                np.minimum(leaving, end.update + end.gathering, out=leaving, where=here)
        return reduction, leaving

    def _hidden(
        self, end: EndTimes, mesh: Mesh, part: int, family: Family, *, chunked: bool
    ) -> EndTimes:
        """The same with what the job's trainer hides beside compute, at most."""
        placed, shape = self.placed, mesh.shapes[part]
        overlap = overlap_of(placed.job, mesh.shapes, family.sharding)
        if not overlap.reduction:
            return end
        island = mesh.islands[part]
        passes = part_passes(placed, family, mesh, part)
        slow = slowdowns(placed.cluster.islands[island].device)
        n = np.arange(placed.units.count + 1, dtype=np.float64)
        # The last group of microbatches goes through one chunk after the other.
        turns = family.num_microbatches if chunked else 1
        plain = len(mesh.shapes) == 1 and not chunked and alike_padded(placed, family)
        buckets = self._buckets(shape, n) if plain else np.full((ROLES, n.size), np.inf)

        def left(seconds: Floats, unit: Floats, extra: Floats) -> Floats:
            longest = (unit[None, :, None] * n + extra[:, :, None]).max(axis=1) * turns
            return least_added(seconds, longest, buckets, slow)

        return replace(
            end,
            reduction=left(end.reduction, passes.backward, passes.extra_backward),
            gathering=(
                left(end.gathering, passes.forward, passes.extra_forward)
                if overlap.gathering
                else end.gathering
            ),
        )

    def _buckets(self, shape: Shape, n: Floats) -> Floats:
        """[4, L + 1] buckets of the gradients of a stage of so many units."""
        weights = self.placed.weights(shape)
        held = np.array([sum(each) for each in weights.extra])[:, None] + n * sum(weights.unit)
        ranks = shape.dp * shape.cp
        return np.array([[bucket_count(count, ranks) for count in row] for row in held.tolist()])

    def _computed(
        self, mesh: Mesh, slowest: int, family: Family, most: tuple[int, ...]
    ) -> EndTimes:
        placed = self.placed
        apart = any(each.ep > 1 or each.etp != each.tp for each in mesh.shapes)
        weights = placed.weights(mesh.shapes[slowest])
        n = np.arange(placed.units.count + 1, dtype=np.float64)
        plain, routed = (
            np.array([each[which] for each in weights.extra])[:, None] + n * weights.unit[which]
            for which in (0, 1)
        )
        dense = self._copies(mesh, family, expert=False)
        experts = dense
        if apart and routed.any():
            experts = self._copies(mesh, family, expert=True)
        end = self._end(mesh, slowest, dense, experts, family)
        return EndTimes(
            reduction=_both(end.reduction, plain, routed, most),
            update=self._update(mesh, slowest, end, (plain, routed), family, most),
            gathering=_both(end.gathering, plain, routed, most),
            most=most,
        )

    def _copies(self, mesh: Mesh, family: Family, *, expert: bool) -> Copies:
        """The ranks of a stage that hold the same weights, or the same experts."""
        placed = self.placed
        key = (
            mesh.islands,
            family.sharding is Sharding.NONE,
            family.sharing_ranks,
            expert,
            *[(each.tp, each.cp, each.dp, each.ep, each.etp) for each in mesh.shapes],
        )
        found = self._groups.get(key)
        if found is None:
            replicas = [
                placed.replica(island, shape)
                for island, shape in zip(mesh.islands, mesh.shapes, strict=True)
            ]
            shards, _ = family.shards(mesh, 0)
            found = self._groups[key] = copies_of(
                placed.cluster, holders_of(replicas, expert=expert), shards
            )
        return found

    def _end(
        self, mesh: Mesh, part: int, dense: Copies, experts: Copies, family: Family
    ) -> EndOfStep:
        placed = self.placed
        return EndOfStep(
            known=placed.known,
            island=placed.cluster.islands[mesh.islands[part]],
            job=placed.job,
            reduction_precision=reduction_precision(placed.job),
            dense=dense,
            experts=experts,
            sharding=family.sharding,
            offload=family.offload,
            predictor=placed.predictor,
        )

    def _update(
        self,
        mesh: Mesh,
        part: int,
        end: EndOfStep,
        weights: tuple[Floats, Floats],
        family: Family,
        most: Sequence[int],
    ) -> Floats:
        """Norm, scaling and update by the slowest part, which counts its own copies only."""
        plain, routed = weights
        shape = mesh.shapes[part]
        alone = max(shape.dp * shape.cp, shape.num_devices // (shape.ep * shape.etp))
        if shape.ep == 1 and shape.etp == shape.tp:
            alone = shape.dp * shape.cp
        counted = end.dense._replace(whole=replace(end.dense.whole, size=alone))
        own_end = self._end(mesh, part, counted, counted, family)
        own = plain + routed
        if end.sharding is not Sharding.NONE:
            own = plain / end.dense.shard.size + routed / end.experts.shard.size
        held = plain + routed

        def asked(one: float, whole: float) -> float:
            return seconds_of_parts(own_end.update_of(one, whole))

        if not routed.any():
            # What is held is a multiple of what is owned: one law for all roles.
            return _over(own, most, _beside(asked, held.ravel().tolist()), _FIRST_ASKED)
        rows = []
        for role in range(ROLES):
            here, whole = slice(role, role + 1), held[role].tolist()
            rows.append(_over(own[here], most[here], _beside(asked, whole), _FIRST_ASKED)[0])
        return np.stack(rows)


def _beside(law: Callable[[float, float], float], other: list[float]) -> Callable[..., float]:
    """The law of one number where the other one stands in a list."""
    return lambda one, at: law(one, other[at])


def _both(
    parts: Callable[[float, float], tuple[Part, ...]],
    plain: Floats,
    routed: Floats,
    most: Sequence[int],
) -> Floats:
    """Collectives of weights and of routed experts, which follow each other."""

    def seconds(one: float, two: float) -> float:
        return seconds_of_parts(parts(one, two))

    found = _over(plain, most, lambda count, _: seconds(count, 0.0))
    if routed.any():
        found = found + _over(routed, most, lambda count, _: seconds(0.0, count))
    return found


def _over(
    counts: Floats, most: Sequence[int], law: Callable[[float, int], float], asked: int = 1
) -> Floats:
    """The law of a number of parameters at all of these, [roles, L + 1], up to the `most` units.

    The law is told where the number stands, too; it is `asked` for so many of the first ones.
    """
    flat = counts.reshape(-1)
    n, limit = np.arange(counts.shape[1]), np.array(most)[:, None]
    positions = np.flatnonzero(((n > 0) & (n <= limit)).reshape(-1) & (flat > 0))
    found = np.zeros(flat.size)
    if positions.size:
        values, firsts, back = np.unique(flat[positions], return_index=True, return_inverse=True)
        at = positions[firsts]
        found[positions] = filled(values, lambda k: law(float(values[k]), int(at[k])), asked)[back]
    whole = found.reshape(counts.shape)
    result: Floats = np.take_along_axis(whole, np.minimum(n, limit), axis=1)
    return result


def filled(values: Floats, law: Callable[[int], float], first: int = 1) -> Floats:
    """`law(k)` for every k, asked only where it is no straight line over `values`, increasing.

    The `first` ones are always asked for.
    """
    return _Filling(values, law).whole(first)


class _Filling:
    """A law over increasing values, straight in pieces, mostly bent downwards where they meet."""

    def __init__(self, values: Floats, law: Callable[[int], float]) -> None:
        self._x = values.tolist()
        self._law = law
        self._y = np.full(values.size, np.nan)
        self._values = values

    def whole(self, first: int) -> Floats:
        """All of it."""
        last = len(self._x) - 1
        for k in range(min(first, last + 1)):
            self._at(k)
        waiting = [(min(first - 1, last), last)]
        while waiting:
            low, high = waiting.pop()
            if high - low < 4:
                for k in range(low, high + 1):
                    self._at(k)
            elif self._straight(low, high):
                self._fill(low, high)
            else:
                at = self._bend(low, high)
                waiting += [(low, at), (at + 1, high)]
        return self._y

    def _at(self, k: int) -> float:
        found = float(self._y[k])
        if found != found:
            found = self._law(k)
            self._y[k] = found
        return found

    def _on(self, k: int, low: int, high: int) -> bool:
        """Whether point k is on the line through two others."""
        part = (self._x[k] - self._x[low]) / (self._x[high] - self._x[low])
        line = self._at(low) + part * (self._at(high) - self._at(low))
        return bool(abs(self._at(k) - line) <= _ON_CHORD * abs(line))

    def _straight(self, low: int, high: int) -> bool:
        return (
            self._on(low + 1, low, high)
            and self._on(high - 1, low, high)
            and self._on((low + high) // 2, low, high)
        )

    def _fill(self, low: int, high: int) -> None:
        inside = slice(low + 1, high)
        part = (self._values[inside] - self._x[low]) / (self._x[high] - self._x[low])
        self._y[inside] = self._y[low] + part * (self._y[high] - self._y[low])

    def _bend(self, low: int, high: int) -> int:
        """The point before which the lines at both ends meet; the middle where they do not."""
        rise, later = (
            (self._at(k + 1) - self._at(k)) / (self._x[k + 1] - self._x[k]) for k in (low, high - 1)
        )
        if rise > later:
            run = self._at(high) - self._at(low) - later * (self._x[high] - self._x[low])
            meet = self._x[low] + run / (rise - later)
            if self._x[low + 1] < meet < self._x[high - 1]:
                at = int(np.searchsorted(self._values, meet, side="right")) - 1
                return min(max(at, low + 1), high - 2)
        return (low + high) // 2
