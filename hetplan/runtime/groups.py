"""The process groups of one rank: whom it reduces with, sends to and waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from hetplan.runtime.placement import RankPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Groups of one rank; None where the rank would be alone."""

    tensor: dist.ProcessGroup | None
    data: dist.ProcessGroup | None
    pipeline: dist.ProcessGroup | None
    tied: dist.ProcessGroup | None
    control: dist.ProcessGroup
    """All ranks of the plan, over gloo: barriers and measurements, never inside a timed step."""


def open_groups(
    places: Sequence[RankPlace], rank: int, *, collectives: str, timeout: timedelta
) -> Groups | None:
    """The groups of this rank; None where it has no place in the plan.

    Every rank of the default process group must call it, those without a place too: torch numbers
    groups in the order in which all processes make them. `collectives` is the torch.distributed
    backend that moves the memory of the ranks' devices.
    """
    members = [place.rank for place in places]
    control = _open(members, "gloo", timeout)
    kinds = (
        [place.tp_ranks for place in places],
        [place.dp_ranks for place in places],
        [place.pp_ranks for place in places],
        [place.tied_ranks for place in places],
    )
    mine: list[dist.ProcessGroup | None] = []
    for groups in kinds:
        own = None
        for ranks in dict.fromkeys(groups):
            if len(ranks) > 1:
                group = _open(ranks, collectives, timeout)
                own = group if rank in ranks else own
        mine.append(own)
    if rank not in members:
        return None
    tensor, data, pipeline, tied = mine
    return Groups(tensor=tensor, data=data, pipeline=pipeline, tied=tied, control=control)


def _open(ranks: Sequence[int], backend: str, timeout: timedelta) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(list(ranks), backend=backend, timeout=timeout)
    return group
