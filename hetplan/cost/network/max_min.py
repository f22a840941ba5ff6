"""How transfers that are under way at the same time share what they cross: max-min fair shares.

Rates x of transfers f with weights w and demands d over segments s of capacity C are max-min fair
when sum(x_f over s) <= C_s, x_f <= d_f, and no rate can grow unless one that is no larger (per
weight) shrinks. Equivalently every transfer has its demand or a bottleneck: a full segment on which
none has a larger x / w (Bertsekas and Gallager, Data Networks, 2nd edition, section 6.5.2).

Progressive filling raises all rates together and freezes the transfers of each segment that fills
up. Here every segment that is the first to fill for all its transfers is frozen in the same round,
because its level cannot change: all its transfers wait for it, and levels elsewhere only rise.
Equal transfers on equal parts of a cluster therefore take one round of array arithmetic together,
however many they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Floats
from hetplan.cost.network.paths import STORAGE, Paths, paths
from hetplan.cost.network.segments import TrafficClass

# Levels this close are one level: it saves rounds, and rates stay far more exact than figures are.
_SAME_LEVEL = 1 + 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One transfer that is under way while others are."""

    source: int | None
    """Device; None: storage."""
    target: int | None
    """Device; None: storage."""
    traffic: TrafficClass
    demand_bytes_per_second: float = math.inf
    """Most that it can use."""
    weight: float = 1.0
    """Connections that it is split into, each of which gets a fair share."""


def shares(cluster: Cluster, flows: Sequence[Flow]) -> tuple[float, ...]:
    """Bytes per second of each transfer, max-min fair; infinite from a device to itself."""
    ends = [
        np.array([STORAGE if each is None else each for each in side], dtype=np.int64)
        for side in ([flow.source for flow in flows], [flow.target for flow in flows])
    ]
    found = paths(cluster, ends[0], ends[1])
    rates = fill(
        found,
        np.array([flow.demand_bytes_per_second for flow in flows]),
        np.array([flow.weight for flow in flows]),
    )
    return tuple(rates.tolist())


def fill(crossed: Paths, demands: Floats, weights: Floats) -> Floats:
    """Rates by progressive filling; infinite for a transfer that nothing limits."""
    rates = np.full(crossed.num_flows, math.inf)
    left = crossed.capacities.astype(np.float64).copy()
    bounded = np.isfinite(left)[crossed.segment]
    flow, segment = crossed.flow[bounded], crossed.segment[bounded]
    limits = demands / weights
    active = np.ones(crossed.num_flows, dtype=bool)
    while True:
        load = np.bincount(segment, weights=weights[flow], minlength=left.size)
        with np.errstate(divide="ignore", invalid="ignore"):
            level = np.where(load > 0, np.maximum(left, 0.0) / load, math.inf)
        least = np.where(active, limits, math.inf)
        np.minimum.at(least, flow, level[segment])
        first = level.copy()
        np.minimum.at(first, segment, least[flow])
        # Segments no transfer of which is held up elsewhere first.
        full = level <= first * _SAME_LEVEL
        done = np.zeros(crossed.num_flows, dtype=bool)
        done[flow[full[segment]]] = True
        done |= active & (limits <= least)
        done &= active
        if not np.any(done) or np.all(np.isinf(least[done])):
            break
        rates[done] = least[done] * weights[done]
        active &= ~done
        gone = done[flow]
        left -= np.bincount(segment[gone], weights=rates[flow[gone]], minlength=left.size)
        flow, segment = flow[~gone], segment[~gone]
        if not np.any(active):
            break
    return rates
