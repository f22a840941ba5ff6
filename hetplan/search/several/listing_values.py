"""Values of a list of plans: cuts of a row that fit, when they end, transfers, parts on devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.step_model.hops import Hop
from hetplan.plans.plan import Replica

Replicas = tuple[tuple[Replica, ...], ...]
"""Of every stage."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Variants:
    """Cuts and recomputations of a row that fit; V of them, P stages."""

    positions: Ints
    """[V, P + 1] layers where stages begin."""
    units: Ints
    """[V, P]"""
    choices: Ints
    """[V, P] of the recomputations of the tables."""
    slow: Ints
    """[V, P] the part that counts."""
    forward: Floats
    """[V, P]"""
    backward: Floats
    """[V, P]"""
    busy: Floats
    """[V] seconds; no pipeline of it ends earlier."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ended:
    """Variants of a placed row in the order in which they end, W of those below some limit."""

    which: Ints
    """[W] of the variants."""
    ends: Floats
    """[W, P]"""
    last: Floats
    """[W]"""
    limit: float
    """Those that end no earlier are left out."""
    hops: tuple[Hop, ...]


NO_TIMES = (0.0, 0.0, 0.0, 0.0)


def times_of(hop: Hop) -> tuple[float, float, float, float]:
    """Seconds on the wire there and back, until arrived, and of a waiting sender."""
    return (
        hop.send_forward_seconds,
        hop.send_backward_seconds,
        hop.wire_latency_seconds,
        hop.rendezvous_extra_seconds,
    )


def least_of(
    hops: Sequence[tuple[float, float, float, float]],
) -> tuple[float, float, float, float]:
    """The least of each of the times."""
    a, b, c, d = (min(each) for each in zip(*hops, strict=True))
    return a, b, c, d


def cuts(units: int, stages: int) -> Ints:
    """[C, P] every way to deal so many units out, at least one to each stage."""
    found = [
        [b - a for a, b in pairwise((0, *inner, units))]
        for inner in combinations(range(1, units), stages - 1)
    ]
    return np.array(found, dtype=np.int64).reshape(len(found), stages)


def number_of_variants(units: int, recompute: int, stages: Sequence[int]) -> int:
    """Cuts and recomputations of pipelines with so many stages, all together."""
    return math.prod(math.comb(units - 1, count - 1) * recompute**count for count in stages)
