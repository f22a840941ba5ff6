"""Which devices of a stage communicate with each other, where they lie, and what that costs.

The ranks of a replica stand in (dp, cp, tp) order, tp fastest. Groups of equal ranks lie alike
wherever a stage fills nodes, or parts of them, evenly; where they do not, the group that spans the
most nodes stands for all. Expert-parallel groups count the same ranks in (expert dp, ep, etp)
order, etp fastest. Groups of one kind communicate at the same time and share what they share
(`hetplan.cost.network.group_shares.group_share`), less what hash collisions on equal-cost paths
cost in the mean (`hetplan.cost.network.hash_collisions`).

Groups whose devices share NICs on a measured link. A link's bandwidth in the cluster file is one
device's share of its node's NICs, so groups that use their shares do not slow each other
(`hetplan.cost.network.group_shares`). Samples are another thing: they say what one group reached
with the NICs to itself. Of k lanes over the busiest NIC, o of them of one group, that group keeps

    share = min(1, (o / k) * C / min(o * r, C))        C = max(NIC's bandwidth, r)

where r is the rate that one pair reached: o lanes alone get what they ask for, up to the NIC's
rate, and all k together the NIC's rate, each an equal part.

What groups of different stages leave each other. Stages that lie on the same nodes share NICs and
PCIe switches, those that span the same islands the link between them, and all of an island its
rails. Two phases of a step are looked at:

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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from hetplan.cluster.node import Nics
from hetplan.cluster.spec import Cluster, Link
from hetplan.cost.arrays import Ints
from hetplan.cost.collectives import GroupShape, collective, group_shape
from hetplan.cost.collectives.values import Algorithm, Routing
from hetplan.cost.network.group_shares import group_share, group_shares, ring_share
from hetplan.cost.network.hash_collisions import link_collisions
from hetplan.cost.network.segments import crosses_pcie
from hetplan.cost.terms import Term
from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.job.trainer import TrainerSettings, trainer_settings
from hetplan.plans.plan import DeviceRange, Replica, expand
from hetplan.predict.predictor import MEASURED, Predictor
from hetplan.profiling.samples import LinkOperation


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Lanes over the busiest NIC of groups that communicate at the same time."""

    link: Link
    """Between their nodes; has samples."""
    lanes: int
    own: int
    """Of one group, the most."""
    bytes_per_second: float
    """Of the NIC."""

    def share(self, predictor: Predictor, message_bytes: float) -> float:
        """Part of its speed alone that a group keeps, at most 1."""
        law = predictor.send(self.link, message_bytes, nodes=2)
        if law.source != MEASURED:
            return 1.0
        rate = 1.0 / law.seconds_per_byte if law.seconds_per_byte > 0 else self.bytes_per_second
        nic = max(self.bytes_per_second, rate)
        return min(1.0, self.own / self.lanes * nic / min(self.own * rate, nic))


def crowd_of(cluster: Cluster, groups: Sequence[Sequence[int]]) -> Crowd | None:
    """The crowd of equal groups that span nodes; None where nothing is measured or shared."""
    islands = {cluster.island_of_device(device).name for device in groups[0]}
    if len(islands) != 1 or len(groups) < 2:
        return None
    island = cluster.island(islands.pop())
    link, nics = island.inter_node, island.nics
    if nics is None or link.samples is None:
        return None
    first = cluster.first_device(island.name)
    devices = np.array([device for each in groups for device in each], dtype=np.int64) - first
    if devices.min() < 0 or devices.max() >= island.num_devices:
        return None  # Other groups of the same kind lie elsewhere.
    owner = np.repeat(np.arange(len(groups)), [len(each) for each in groups])
    used = _nics_of(devices, nics, island.devices_per_node)
    _, place, lanes = np.unique(used, return_inverse=True, return_counts=True)
    busiest = int(lanes.argmax())
    own = np.bincount(owner[place == busiest])
    if lanes[busiest] == own.max():
        return None
    return Crowd(
        link=link,
        lanes=int(lanes[busiest]),
        own=int(own.max()),
        bytes_per_second=nics.bandwidth_bytes_per_second * len(nics.of(0, island.devices_per_node)),
    )


def _nics_of(devices: Ints, nics: Nics, devices_per_node: int) -> Ints:
    """The first NIC of each device, numbered over all nodes of the island."""
    each = devices_per_node
    own = np.array([nics.of(local, each)[0] for local in range(each)], dtype=np.int64)
    found: Ints = devices // each * nics.per_node + own[devices % each]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One of several equal groups that communicate at the same time."""

    shape: GroupShape
    size: int
    """Ranks."""
    share: float = 1.0
    """Part of its own speed that it keeps beside other groups, less what collisions cost."""
    among: float = 1.0
    """Share beside the other groups of its kind on the same stage, without collisions."""
    crowd: Crowd | None = None
    """Groups that share its NICs, where the link was measured with one group alone."""

    def beside(self, kept: float) -> Group:
        """The group with its share scaled by what groups of other stages leave it."""
        return self if kept >= 1 else replace(self, share=self.share * kept)


class Kept(NamedTuple):
    """Parts of their speed that a replica's groups keep beside those of other stages."""

    passes: tuple[float, ...] = (1.0,) * 4
    """In the order of `Groups`."""
    dense: tuple[float, ...] = (1.0,) * 3
    """Ranks with the same weights, in the order of `Copies`."""
    experts: tuple[float, ...] = (1.0,) * 3


ALL_KEPT = Kept()


class Groups(NamedTuple):
    """The groups of a replica by what they do; a group of one rank communicates nothing."""

    tensor: Group
    context: Group
    expert: Group
    expert_tensor: Group

    @property
    def share(self) -> bool:
        """Whether groups of one kind slow each other."""
        return any(group.among < 1 for group in self)

    def beside(self, kept: Kept) -> Groups:
        """The groups with their shares scaled for contention from other stages."""
        return Groups(*(group.beside(part) for group, part in zip(self, kept.passes, strict=True)))


Members = Sequence[Sequence[int]]
"""Devices of groups that communicate at the same time."""


KnownGroups = dict[tuple[tuple[DeviceRange, ...], int, int], Group]
"""By devices, size and stride: replicas of unlike degrees on equal devices have many in common."""


def groups_of(cluster: Cluster, replica: Replica, known: KnownGroups | None = None) -> Groups:
    """The groups of this replica; InputError where its degrees do not divide its devices.

    `known`: groups of replicas that were looked at before.
    """
    found = {} if known is None else known
    devices = _divided(replica)
    for size, stride in _cuts(replica):
        key = (replica.devices, size, stride)
        if key not in found:
            found[key] = group_among(cluster, _blocks(devices, size, stride))
    return Groups(*[found[replica.devices, *cut] for cut in _cuts(replica)])


def members_of(replica: Replica) -> tuple[Members, Members, Members, Members]:
    """(tensor, context, expert, expert-tensor) groups of this replica; an InputError likewise."""
    devices = _divided(replica)
    one, two, three, four = [_blocks(devices, size, stride) for size, stride in _cuts(replica)]
    return one, two, three, four


def _cuts(replica: Replica) -> tuple[tuple[int, int], ...]:
    """(size, stride) of its groups, in the order of `Groups`."""
    tp, ep, etp = replica.tp, replica.ep, replica.etp
    return (tp, 1), (replica.cp, tp), (ep, etp), (etp, 1)


def _divided(replica: Replica) -> Sequence[int]:
    """Its devices; an InputError where its degrees do not divide them."""
    devices = expand(replica.devices)
    tp, cp, ep, etp = replica.tp, replica.cp, replica.ep, replica.etp
    count = len(devices)
    if count % (tp * cp) or count % (ep * etp):
        raise InputError(
            f"{count} devices are no multiple of tp {tp} x cp {cp} and of ep {ep} x etp {etp}"
        )
    return devices


def _blocks(devices: Sequence[int], size: int, stride: int) -> list[Sequence[int]]:
    """Groups of `size` devices, `stride` apart, that cover all of them."""
    block = size * stride
    return [
        devices[start + offset : start + block : stride]
        for start in range(0, len(devices), block)
        for offset in range(stride)
    ]


def group_among(cluster: Cluster, groups: Members) -> Group:
    """The group that spans most nodes, with the share that is left to it beside the others."""
    size = len(groups[0])
    if size == 1:
        return Group(shape=group_shape(cluster, groups[0]), size=1)
    nodes = _nodes(cluster, groups)
    widest, across = groups[int(nodes.argmax())], bool(nodes.max() > 1)
    among = left = 1.0
    if len(groups) > 1 and (across or _over_pcie(cluster, groups)):
        among = min(1.0, group_share(cluster, groups))
    share = among
    if across:
        left = _after_collisions(cluster, widest, size * len(groups))
        share = min(among, ring_share(cluster, groups))
    return Group(
        shape=group_shape(cluster, widest),
        size=size,
        share=share * left,
        among=among,
        crowd=crowd_of(cluster, groups) if across else None,
    )


def can_meet(cluster: Cluster, groups: Members) -> bool:
    """Whether these groups use anything that devices of a cluster have in common."""
    if not groups or len(groups[0]) < 2:
        return False
    return bool(_nodes(cluster, groups).max() > 1) or _over_pcie(cluster, groups)


def _over_pcie(cluster: Cluster, groups: Members) -> bool:
    """Whether a group lies on an island whose devices reach each other over PCIe switches."""
    places = np.unique(_places(cluster, np.array([group[0] for group in groups])))
    return any(crosses_pcie(cluster.islands[at]) for at in places.tolist())


def _after_collisions(cluster: Cluster, group: Sequence[int], senders: int) -> float:
    """What hash collisions leave of the slowest link between the group's nodes, in the mean.

    Any two of its islands may be neighbours in a ring or a tree, so all pairs count.
    """
    nodes: dict[str, set[int]] = {}
    for device in group:
        name = cluster.island_of_device(device).name
        nodes.setdefault(name, set()).add(cluster.node_of_device(device))
    left = [
        link_collisions(cluster.link_between(one, two), senders)
        for one in nodes
        for two in nodes
        if one != two or len(nodes[one]) > 1
    ]
    return min(left, default=1.0)


def _places(cluster: Cluster, devices: Ints) -> Ints:
    """The islands of these devices, as numbers."""
    starts = [cluster.first_device(each.name) for each in cluster.islands]
    return np.searchsorted(starts, devices, side="right") - 1


def _nodes(cluster: Cluster, groups: Members) -> Ints:
    """[G] how many nodes each of these groups of equal size lies in."""
    devices = np.array(groups, dtype=np.int64)
    place = _places(cluster, devices)
    starts = np.array([cluster.first_device(each.name) for each in cluster.islands])
    sizes = np.array([each.devices_per_node for each in cluster.islands])
    first = devices - (devices - starts[place]) % sizes[place]  # device of the node
    first.sort(axis=1)
    found: Ints = 1 + np.count_nonzero(np.diff(first, axis=1), axis=1)
    return found


@dataclass(slots=True)
class KnownCollectives:
    """Collectives that were priced before, on one cluster and by one predictor."""

    cluster: Cluster
    predictor: Predictor
    by_levels: bool = False
    """Whether hetplan's own trainer makes the sums (`cost.collectives.direct_levels`)."""
    held: Algorithm | None = None
    """What the library is held to in sums; None: it chooses."""
    terms: dict[
        tuple[GroupShape, float, Crowd | None, LinkOperation, float, str, Routing | None],
        tuple[Term, ...],
    ] = field(default_factory=dict)

    def of(
        self,
        group: Group,
        operation: LinkOperation,
        message_bytes: float,
        what: str,
        routing: Routing | None = None,
    ) -> tuple[Term, ...]:
        """The predicted parts of one collective; none for a group of one."""
        if group.size == 1 or message_bytes <= 0:
            return ()
        key = (group.shape, group.share, group.crowd, operation, message_bytes, what, routing)
        found = self.terms.get(key)
        if found is None:
            crowd = group.crowd
            kept = 1.0 if crowd is None else crowd.share(self.predictor, message_bytes)
            priced = collective(
                self.cluster,
                group.shape,
                operation,
                message_bytes,
                self.predictor,
                # Where the link was measured, what its figure leaves each device is not a share
                # of what the samples say.
                share=min(group.share, kept),
                by_levels=self.by_levels,
                held=self.held,
                routing=routing,
            ).terms
            found = self.terms[key] = tuple([replace(term, what=what) for term in priced])
        return found


def known_of(cluster: Cluster, job: Job, predictor: Predictor) -> KnownCollectives:
    """No collectives yet, of the trainer of this job."""
    settings = trainer_settings(job)
    return KnownCollectives(
        cluster,
        predictor,
        by_levels=settings.sums_by_messages,
        held=held_algorithm(settings),
    )


def held_algorithm(settings: TrainerSettings) -> Algorithm | None:
    """What the library is held to in sums."""
    held = settings.collective_algorithm
    return None if held is None else Algorithm(held.value)


class Copies(NamedTuple):
    """The ranks that hold copies of the same weights, and how they share the state of them."""

    whole: Group
    shard: Group
    """Ranks that split one copy of the state; `whole` where nothing else divides them."""
    across: Group
    """Ranks with the same shard."""

    def beside(self, kept: tuple[float, ...]) -> Copies:
        """The groups with their shares scaled for contention from other stages."""
        return Copies(*(group.beside(part) for group, part in zip(self, kept, strict=True)))


Holders = Sequence[tuple[Sequence[int], int]]
"""(devices, slices) of replicas: every slices-th device holds the same weights."""


def holders_of(replicas: Sequence[Replica], *, expert: bool) -> Holders:
    """The ranks of these replicas, and how many of each hold different weights, or experts."""
    return [(expand(each.devices), each.ep * each.etp if expert else each.tp) for each in replicas]


def copies_of(cluster: Cluster, holders: Holders, shards: int) -> Copies:
    """The copies among these replicas, `shards` of which split the state if so many divide them."""
    ranks, sharded, across = copied_among(holders, shards)
    whole = group_among(cluster, ranks)
    return Copies(
        whole=whole,
        shard=whole if len(sharded[0]) == len(ranks[0]) else group_among(cluster, sharded),
        across=group_among(cluster, across),
    )


def copied_among(holders: Holders, shards: int) -> tuple[Members, Members, Members]:
    """(all ranks with the same weights, sharding groups, ranks with the same shard).

    Where replicas are cut into different numbers of slices, the first slice of each stands for all:
    a rank of the coarsest cut takes part with everything it holds. `shards` neighbouring ranks
    split the state, or as many as divide the copies.
    """
    slices = min(count for _, count in holders)
    ranks = [
        [
            device
            for devices, count in holders
            for device in devices[offset * count // slices :: count]
        ]
        for offset in range(slices)
    ]
    size = len(ranks[0])
    own = math.gcd(shards, size)
    sharded = [group[at : at + own] for group in ranks for at in range(0, size, own)]
    across = [group[at::own] for group in ranks for at in range(own)]
    return ranks, sharded, across


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
    passes = zip(*_columns(cluster, [_passes(each) for each in parties]), strict=True)
    ends = zip(*_columns(cluster, [_copies(each, shards) for each in parties]), strict=True)
    return tuple(
        Kept(passes=inside, dense=after[:3], experts=after[3:])
        for inside, after in zip(passes, ends, strict=True)
    )


def kept_by_reductions(
    cluster: Cluster,
    reductions: Sequence[tuple[Holders, Copies]],
    shards: int,
    apart: Callable[[int, int], bool],
) -> tuple[tuple[float, ...], ...]:
    """What reduction groups keep beside those that are active with them.

    `apart`: whether two have no stage in common; those that have one take turns. With each group
    are taken, in their order, all that take turns neither with it nor with one that was taken.
    """
    if len(reductions) < 2 or not shares_anything(cluster):
        return (ALL_KEPT.dense,) * len(reductions)
    kinds = [_of_copies(copies, holders, shards) for holders, copies in reductions]
    known: dict[tuple[int, ...], tuple[tuple[float, ...], ...]] = {}
    found = []
    for at in range(len(reductions)):
        taken = [at]
        for other in range(len(reductions)):
            if other != at and all(apart(other, each) for each in taken):
                taken.append(other)
        key = tuple(sorted(taken))
        if key not in known:
            columns = _columns(cluster, [kinds[each] for each in key])
            known[key] = tuple(zip(*columns, strict=True))
        found.append(known[key][key.index(at)])
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
    return [
        _Kind(members, group.among)
        for members, group in zip(members_of(party.replica), party.groups, strict=True)
    ]


def _copies(party: Party, shards: int) -> list[_Kind]:
    """Of the dense weights and of the experts, three each."""
    dense = _of_copies(party.dense, holders_of((party.replica,), expert=False), shards)
    if party.experts is None:
        return [*dense, *[_Kind((), 1.0)] * len(dense)]
    experts = holders_of((party.replica,), expert=True)
    return [*dense, *_of_copies(party.experts, experts, shards)]


def _of_copies(copies: Copies, holders: Holders, shards: int) -> list[_Kind]:
    return [
        _Kind(members, group.among)
        for members, group in zip(copied_among(holders, shards), copies, strict=True)
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
