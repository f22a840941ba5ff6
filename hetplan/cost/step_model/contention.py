"""What the groups of different stages leave each other while they communicate at the same time.

Stages that lie on the same nodes share NICs and PCIe switches, those that span the same islands the
link between them, and all of an island its rails. Two phases of a step are looked at:

    microbatches   tensor-, context- and expert-parallel groups of all stages
    end of step    reductions and gatherings of all stages, or of all reduction groups that meet

A stage does one kind of traffic at a time, its groups of that kind all together. When stages meet
is not known, so each kind is looked at once with all stages at it; those that have none of it are
at the kind that they have. What a stage's slowest group then gets, over what the stage's groups of
this kind leave each other anyway, is the part that it keeps: never more than 1, because max-min
shares of some can grow when others come.

Sends between stages share wires in the replay (`hetplan.cost.step_model.hops`) and are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetplan.cluster.spec import Cluster
from hetplan.cost.network.group_shares import group_shares
from hetplan.cost.step_model.groups import (
    ALL_KEPT,
    Copies,
    Groups,
    Holders,
    Kept,
    Members,
    can_meet,
    copied_among,
    members_of,
)
from hetplan.plans.plan import Replica, expand

_SURE = 1e-9
"""Shares that differ by less do so because sums were made in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """One replica entry of a stage: its groups and what they leave each other."""

    replica: Replica
    groups: Groups
    dense: Copies
    experts: Copies | None
    """None where it has none that are cut or copied otherwise than the rest."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Groups of one kind of a party, or of members of a reduction."""

    members: Members
    among: float


def kept_by_stages(cluster: Cluster, parties: Sequence[Party], shards: int) -> tuple[Kept, ...]:
    """What each of these replicas of all stages keeps beside the others."""
    if len(parties) < 2 or not shares_anything(cluster):
        return (ALL_KEPT,) * len(parties)
    passes = [_passes(each) for each in parties]
    inside = _columns(cluster, passes)
    ends = [_copies(each, shards) for each in parties]
    after = _columns(cluster, ends)
    return tuple(
        Kept(
            tensor=inside[0][at],
            context=inside[1][at],
            expert=inside[2][at],
            expert_tensor=inside[3][at],
            dense=(after[0][at], after[1][at], after[2][at]),
            experts=(after[3][at], after[4][at], after[5][at]),
        )
        for at in range(len(parties))
    )


def kept_by_reductions(
    cluster: Cluster,
    reductions: Sequence[tuple[Holders, Copies]],
    shards: int,
    apart: Callable[[int, int], bool],
) -> tuple[tuple[float, float, float], ...]:
    """What reduction groups keep beside those that are active with them.

    `apart`: whether two have no stage in common; those that have one take turns. With each group
    are taken, in their order, all that take turns neither with it nor with one that was taken.
    """
    whole = (1.0, 1.0, 1.0)
    if len(reductions) < 2 or not shares_anything(cluster):
        return (whole,) * len(reductions)
    kinds = [_of_copies(copies, holders, shards) for holders, copies in reductions]
    known: dict[tuple[int, ...], list[list[float]]] = {}
    found = []
    for at in range(len(reductions)):
        taken = [at]
        for other in range(len(reductions)):
            if other != at and all(apart(other, each) for each in taken):
                taken.append(other)
        key = tuple(sorted(taken))
        if key not in known:
            known[key] = _columns(cluster, [kinds[each] for each in key])
        place = key.index(at)
        found.append((known[key][0][place], known[key][1][place], known[key][2][place]))
    return tuple(found)


def shares_anything(cluster: Cluster) -> bool:
    """Whether different devices of the cluster have something in common that can be too narrow."""
    links = [entry.link for entry in cluster.links]
    links += [entry.link for entry in cluster.region_links]
    links += [each for each in (cluster.within_region, cluster.across_regions) if each is not None]
    return any(
        island.nics is not None or island.switch_of_device for island in cluster.islands
    ) or any(link.shared_bandwidth_bytes_per_second is not None for link in links)


def _passes(party: Party) -> list[_Kind]:
    groups = party.groups
    each = (groups.tensor, groups.context, groups.expert, groups.expert_tensor)
    return [
        _Kind(members, group.among)
        for members, group in zip(members_of(party.replica), each, strict=True)
    ]


def _copies(party: Party, shards: int) -> list[_Kind]:
    """Of the dense weights and of the experts, three each."""
    replica = party.replica
    devices = expand(replica.devices)
    dense = _of_copies(party.dense, [(devices, replica.tp)], shards)
    if party.experts is None:
        return [*dense, *[_Kind((), 1.0)] * len(dense)]
    return [*dense, *_of_copies(party.experts, [(devices, replica.ep * replica.etp)], shards)]


def _of_copies(copies: Copies, holders: Holders, shards: int) -> list[_Kind]:
    each = (copies.whole, copies.shard, copies.across)
    return [
        _Kind(members, group.among)
        for members, group in zip(copied_among(holders, shards), each, strict=True)
    ]


def _columns(cluster: Cluster, rows: Sequence[Sequence[_Kind]]) -> list[list[float]]:
    """[kind][party]: what each party keeps while all are at this kind of traffic."""
    usable = [[kind if can_meet(cluster, kind.members) else None for kind in row] for row in rows]
    found = []
    for column in range(len(rows[0])):
        active: list[_Kind | None] = []
        for row in usable:
            own = row[column]
            active.append(own or next((each for each in row if each is not None), None))
        kept = [1.0] * len(rows)
        if any(row[column] for row in usable) and sum(each is not None for each in active) > 1:
            kept = _kept(cluster, active)
        found.append(
            [
                part if row[column] is not None else 1.0
                for part, row in zip(kept, usable, strict=True)
            ]
        )
    return found


def _kept(cluster: Cluster, active: Sequence[_Kind | None]) -> list[float]:
    groups: list[Sequence[int]] = []
    owners: list[int] = []
    for at, kind in enumerate(active):
        members = kind.members if kind is not None else ()
        groups += members
        owners += [at] * len(members)
    worst = [1.0] * len(active)
    for owner, got in zip(owners, group_shares(cluster, groups), strict=True):
        worst[owner] = min(worst[owner], got.share)
    kept = []
    for part, kind in zip(worst, active, strict=True):
        rest = 1.0 if kind is None else part / kind.among
        kept.append(rest if rest < 1.0 - _SURE else 1.0)
    return kept
