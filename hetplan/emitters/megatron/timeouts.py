"""How long may a rank of Megatron-LM wait for another before the run is given up?

`--distributed-timeout-minutes` is 10 unless given (megatron/training/config/common_config.py).
Those minutes are for what every run has: loading, compiling, slow disks. Long links add

    bootstrap   before its first collective a communicator gathers addresses, devices and rings from
                all of its ranks, each time around a ring of all W of them (NCCL, bootstrap.cc and
                init.cc): BOOTSTRAP_RINGS * (W - 1) * latency of the longest link, for the
                default group, which has all ranks
    steps       a rank waits up to a step for its partner, a transfer may take what is left of
                another, and the first step builds communicators group by group: three of them
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

from hetplan.emitters.sheet import LaunchSheet
from hetplan.search.result import SearchResult

OWN_MINUTES = 10
"""What Megatron-LM waits unless told otherwise."""
BOOTSTRAP_RINGS = 3
"""Addresses, devices, rings: the gathers of a communicator's start."""
STEPS = 3
"""Derived above."""
HCCL_CONNECT_SECONDS = (120, 7200)
"""Range of HCCL_CONNECT_TIMEOUT; the least is its default (hiascend.com, CANN 8.2)."""
HCCL_EXEC_SECONDS = (1836, 17340)
"""Default of HCCL_EXEC_TIMEOUT, and the most that every Ascend training product takes."""


def longest_latency_seconds(result: SearchResult, sheet: LaunchSheet) -> float:
    """One way, of the longest link between two of the launch's hosts."""
    cluster = result.inputs.cluster
    names = dict.fromkeys(agent.host.island for agent in sheet.agents)
    inside = [cluster.island(name).inter_node.latency_seconds for name in names]
    between = [
        cluster.link_between(left, right).latency_seconds for left, right in combinations(names, 2)
    ]
    return max(*inside, *between, 0.0)


def bootstrap_seconds(result: SearchResult, sheet: LaunchSheet) -> float:
    """What the default group's start takes over the longest link."""
    rings = BOOTSTRAP_RINGS * (sheet.world_size - 1)
    return rings * longest_latency_seconds(result, sheet)


def added_seconds(result: SearchResult, sheet: LaunchSheet) -> float:
    """What this plan's longest wait adds to that of any run."""
    estimate = result.estimate
    slow = estimate.step_seconds if estimate.p95_seconds is None else estimate.p95_seconds
    return bootstrap_seconds(result, sheet) + STEPS * max(slow, estimate.step_seconds)


def timeout_minutes(result: SearchResult, sheet: LaunchSheet) -> int | None:
    """Minutes to give; None where Megatron-LM's own have room for them (a tenth)."""
    added = added_seconds(result, sheet) / 60
    return None if added <= OWN_MINUTES / 10 else OWN_MINUTES + math.ceil(added)


def timeout_arguments(result: SearchResult, sheet: LaunchSheet) -> Iterator[tuple[str, str]]:
    """The flag of Megatron-LM and of trainers made from it; nothing where its own minutes do."""
    minutes = timeout_minutes(result, sheet)
    if minutes is not None:
        yield "--distributed-timeout-minutes", str(minutes)


def hccl_timeouts(result: SearchResult, sheet: LaunchSheet) -> tuple[tuple[str, str], ...]:
    """HCCL's own two timeouts, in seconds, where their defaults are too short."""
    minutes = timeout_minutes(result, sheet)
    if minutes is None:
        return ()
    wanted = 60 * minutes
    ranges = (
        ("HCCL_CONNECT_TIMEOUT", HCCL_CONNECT_SECONDS),
        ("HCCL_EXEC_TIMEOUT", HCCL_EXEC_SECONDS),
    )
    return tuple((name, str(min(wanted, most))) for name, (own, most) in ranges if wanted > own)
