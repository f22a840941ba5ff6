"""What the lower bound of a search rests on, for its certificate (`hetplan verify`).

Most families are excluded by their order-free bound, which anybody can compute again from the
inputs. The certificate names the others, each with its bound and its grounds.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

from hetplan.cost.arrays import Floats
from hetplan.search.result import FamilyBound, Proof
from hetplan.search.solver import Best, Grounds
from hetplan.search.space.family import Family, FamilyTable

_SAME = 1e-9
"""Bounds closer than this part of each other are one."""


def proof_of(
    families: FamilyTable, order_free_seconds: Floats, best: Best, lower_bound_seconds: float
) -> Proof:
    """What a lower bound over these families rests on.

    `order_free_seconds`: [N] of every family; `best` has the bounds of N solvers, and that of
    several pipelines behind them where there is one.
    """
    count = len(families)
    below = np.flatnonzero(order_free_seconds < lower_bound_seconds * (1.0 - _SAME))
    several = best.bounds[count] if len(best.bounds) > count else math.inf
    has_several = len(best.bounds) > count and several < math.inf
    return Proof(
        families=count,
        families_sha256=families_digest(families),
        raised=tuple(
            FamilyBound(
                family=at,
                plans=family_words(families[at]),
                bound_seconds=None if math.isinf(best.bounds[at]) else best.bounds[at],
                grounds=best.grounds.get(at, Grounds.ORDER_FREE),
            )
            for at in below.tolist()
        ),
        several_bound_seconds=several if has_several else None,
        several_grounds=best.grounds.get(count, Grounds.ORDER_FREE) if has_several else "",
    )


def families_digest(families: FamilyTable) -> str:
    """sha256 of the list: batches, schedules, shardings and recomputations in their order."""
    blocks = [(each.samples, each.num_microbatches, len(each.meshes)) for each in families.blocks]
    digest = hashlib.sha256(repr((blocks, [each.order for each in families.kinds])).encode())
    for column in (families.block, families.kind):
        digest.update(np.ascontiguousarray(column, dtype=np.int64).tobytes())
    return digest.hexdigest()


def family_words(family: Family) -> str:
    """What the plans of a family have in common."""
    schedule = family.schedule
    if family.schedule == "interleaved-1f1b":
        schedule += f" of {family.virtual_stages} chunks"
    if family.early_sends:
        schedule += f" with early sends, {family.most_extra_depth} deeper"
    choices = " or ".join(each.words for each in family.recompute)
    return (
        f"{schedule}, {family.num_microbatches} x {family.samples} samples, "
        f"recompute {choices}, sharding {family.sharding}"
        + (f", {family.offload:.0%} of the optimizer offloaded" if family.offload else "")
    )
