"""What a stage does after its last backward pass, for every role and number of units at once.

Reduction, update and gathering are functions of the parameters on a rank, which are linear in the
units. Most laws are straight lines over long ranges of parameters, so they are asked at few of them
and read off in between: `filled` halves a range until two points inside lie on its chord, to the
last digits. A law that bends everywhere is asked everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetplan.cost.priced.end_of_step import EndOfStep
from hetplan.cost.priced.groups import Copies, Holders, copies_of
from hetplan.cost.priced.values import seconds_of_parts
from hetplan.plans.plan import Replica, Sharding, expand
from hetplan.search.costs.placed import ROLES, Placed
from hetplan.search.families.family import Mesh
from hetplan.search.single.space import Floats

_ON_CHORD = 1e-12
"""Sums in another order differ by less than this part of themselves."""
_FIRST_ASKED = 3
"""Points at the lower end that are always asked: predictors know single points there (the update of
one measured layer's parameters)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndTimes:
    """Seconds by role and number of units, [4, L + 1]; entries of no unit are 0."""

    reduction: Floats
    update: Floats
    gathering: Floats


@dataclass(frozen=True, slots=True)
class Ends:
    """Ends of the step of a job's meshes; keeps what it has computed."""

    placed: Placed
    _known: dict[tuple[object, ...], EndTimes] = field(
        default_factory=dict, repr=False, compare=False
    )

    def of(self, mesh: Mesh, slowest: int, sharding: Sharding) -> EndTimes:
        """Of stages of this mesh; `slowest`: the part that the others wait for."""
        key = (
            mesh.islands,
            sharding,
            slowest,
            *[(each.tp, each.cp, each.dp, each.ep, each.etp) for each in mesh.shapes],
        )
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._computed(mesh, slowest, sharding)
        return found

    def _computed(self, mesh: Mesh, slowest: int, sharding: Sharding) -> EndTimes:
        placed = self.placed
        replicas = [
            placed.replica(island, shape)
            for island, shape in zip(mesh.islands, mesh.shapes, strict=True)
        ]
        copies = sum(each.dp * each.cp for each in mesh.shapes)
        shards = 1 if sharding is Sharding.NONE else copies
        apart = any(each.ep > 1 or each.etp != each.tp for each in mesh.shapes)
        weights = placed.weights(mesh.shapes[slowest])
        n = np.arange(placed.units.count + 1, dtype=np.float64)
        plain, routed = (
            np.array([each[which] for each in weights.extra])[:, None] + n * weights.unit[which]
            for which in (0, 1)
        )
        dense = copies_of(placed.cluster, _holders(replicas, expert=False), shards)
        experts = dense
        if apart and routed.any():
            experts = copies_of(placed.cluster, _holders(replicas, expert=True), shards)
        end = self._end(mesh, slowest, dense, experts, sharding)
        return EndTimes(
            reduction=_both(end.reduction, plain, routed),
            update=self._update(mesh, slowest, end, plain, routed),
            gathering=_both(end.gathering, plain, routed),
        )

    def _end(
        self, mesh: Mesh, part: int, dense: Copies, experts: Copies, sharding: Sharding
    ) -> EndOfStep:
        placed = self.placed
        return EndOfStep(
            known=placed.known,
            island=placed.cluster.islands[mesh.islands[part]],
            job=placed.job,
            dense=dense,
            experts=experts,
            sharding=sharding,
            offload=0.0,
            predictor=placed.predictor,
        )

    def _update(
        self, mesh: Mesh, part: int, end: EndOfStep, plain: Floats, routed: Floats
    ) -> Floats:
        """Norm, scaling and update by the slowest part, which counts its own copies only."""
        shape = mesh.shapes[part]
        alone = max(shape.dp * shape.cp, shape.num_devices // (shape.ep * shape.etp))
        if shape.ep == 1 and shape.etp == shape.tp:
            alone = shape.dp * shape.cp
        counted = replace(end.dense, whole=replace(end.dense.whole, size=alone))
        own_end = self._end(mesh, part, counted, counted, end.sharding)
        own = plain + routed
        if end.sharding is not Sharding.NONE:
            own = plain / end.dense.shard.size + routed / end.experts.shard.size
        held = plain + routed

        def asked(one: float, whole: float) -> float:
            return seconds_of_parts(own_end.update_of(one, whole))

        if not routed.any():
            # What is held is a multiple of what is owned: one law for all roles.
            return _over(own, lambda one, at: asked(one, float(held.ravel()[at])))
        return np.stack(
            [
                _over(own[role], lambda one, at, role=role: asked(one, float(held[role][at])))
                for role in range(ROLES)
            ]
        )


def _holders(replicas: Sequence[Replica], *, expert: bool) -> Holders:
    return [(expand(each.devices), each.ep * each.etp if expert else each.tp) for each in replicas]


def _both(parts: Callable[[float, float], object], plain: Floats, routed: Floats) -> Floats:
    """Collectives of weights and of routed experts, which follow each other."""

    def seconds(one: float, two: float) -> float:
        return seconds_of_parts(parts(one, two))  # type: ignore[arg-type]

    found = _over(plain, lambda count, _: seconds(count, 0.0))
    if routed.any():
        found = found + _over(routed, lambda count, _: seconds(0.0, count))
    return found


def _over(counts: Floats, law: Callable[[float, int], float]) -> Floats:
    """The law of a number of parameters at all of these, [..., L + 1]; 0 for no unit at all.

    The law is told where the number stands, too.
    """
    flat = counts.reshape(-1)
    wanted = np.ones(counts.shape, dtype=np.bool_)
    wanted[..., 0] = False
    positions = np.flatnonzero(wanted.reshape(-1) & (flat > 0))
    found = np.zeros(flat.size)
    if positions.size:
        values, firsts, back = np.unique(
            flat[positions], return_index=True, return_inverse=True
        )
        at = positions[firsts]
        found[positions] = filled(values, lambda k: law(float(values[k]), int(at[k])))[back]
    return found.reshape(counts.shape)


def filled(values: Floats, law: Callable[[int], float]) -> Floats:
    """`law(k)` for every k, asked only where it is no straight line over `values`, increasing."""
    last = values.size - 1
    found = np.full(values.size, np.nan)
    for k in (*range(min(_FIRST_ASKED, last + 1)), last):
        found[k] = law(k)
    waiting = [(min(_FIRST_ASKED - 1, last), last)]
    while waiting:
        low, high = waiting.pop()
        if high - low < 2:
            continue
        middle, other = (low + high) // 2, low + 1 + (high - low - 1) * 2 // 7
        straight = True
        for k in dict.fromkeys((middle, other)):
            if np.isnan(found[k]):
                found[k] = law(k)
            part = (values[k] - values[low]) / (values[high] - values[low])
            chord = found[low] + part * (found[high] - found[low])
            straight = straight and bool(abs(found[k] - chord) <= _ON_CHORD * abs(chord))
        if straight:
            inside = slice(low + 1, high)
            part = (values[inside] - values[low]) / (values[high] - values[low])
            found[inside] = found[low] + part * (found[high] - found[low])
        else:
            waiting += [(low, middle), (middle, high)]
    return found
