"""What could be different: single changes of a cluster or a job, in words.

A shadow price asks what one of them is worth. Only what exists can be changed: links that join two
islands of the cluster, islands with usable nodes, pins and forbids that the job has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hetplan.cluster.spec import Cluster, Island, IslandLink, Link
from hetplan.job.spec import Forbids, Job, Pins
from hetplan.units import format_bytes, format_rate, format_seconds

_MORE_NODES = 0.1
"""Part of an island's nodes that is added, at least one node."""
_MORE_MEMORY = 1.25
"""Times as much memory per device: a quarter more."""
_LONG_SECONDS = 0.5e-3
"""Round trips from here on are of links between places; halving a shorter one is no offer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference and the inputs that have it."""

    words: str
    cluster: Cluster
    job: Job


def changes(cluster: Cluster, job: Job) -> Iterator[Change]:
    """Links twice as wide, round trips half as long, more nodes, more memory, fewer demands."""
    yield from _links(cluster, job)
    yield from _islands(cluster, job)
    yield from _demands(cluster, job)


def _links(cluster: Cluster, job: Job) -> Iterator[Change]:
    usable = [island for island in cluster.islands if island.usable_nodes]
    done: list[tuple[str, str]] = []
    for at, one in enumerate(usable):
        for two in usable[at + 1 :]:
            places = (one.region, two.region)
            across = one.region != two.region and not cluster.lists_link(one.name, two.name)
            if across and (places in done or places[::-1] in done):
                continue
            done.append(places)
            named = places if across else (one.name, two.name)
            link = cluster.link_between(one.name, two.name)
            yield Change(
                words=f"twice the bandwidth between {named[0]} and {named[1]} (+{_rate(link)})",
                cluster=_with_links(cluster, one, two, across, _wider),
                job=job,
            )
            if link.round_trip_seconds >= _LONG_SECONDS:
                yield Change(
                    words=f"half the round trip between {named[0]} and {named[1]} "
                    f"(-{format_seconds(link.round_trip_seconds / 2)})",
                    cluster=_with_links(cluster, one, two, across, _nearer),
                    job=job,
                )


def _rate(link: Link) -> str:
    shared = link.shared_bandwidth_bytes_per_second
    return format_rate(8 * (link.bandwidth_bytes_per_second if shared is None else shared), "bit/s")


def _wider(link: Link) -> Link:
    shared = link.shared_bandwidth_bytes_per_second
    return replace(
        link,
        bandwidth_bytes_per_second=2 * link.bandwidth_bytes_per_second,
        shared_bandwidth_bytes_per_second=None if shared is None else 2 * shared,
        samples=None,
    )


def _nearer(link: Link) -> Link:
    return replace(link, latency_seconds=link.latency_seconds / 2, samples=None)


def _with_links(
    cluster: Cluster, one: Island, two: Island, across: bool, changed: Callable[[Link], Link]
) -> Cluster:
    """The cluster with this link, or all links between the two regions, changed."""
    names = {one.name, two.name}
    if not across:
        kept = tuple(each for each in cluster.links if set(each.between) != names)
        link = changed(cluster.link_between(one.name, two.name))
        return replace(cluster, links=(*kept, IslandLink(between=(one.name, two.name), link=link)))
    pairs = [
        IslandLink(between=(a.name, b.name), link=changed(cluster.link_between(a.name, b.name)))
        for a in cluster.islands
        for b in cluster.islands
        if (a.region, b.region) == (one.region, two.region)
        and not cluster.lists_link(a.name, b.name)
    ]
    return replace(cluster, links=(*cluster.links, *pairs))


def _islands(cluster: Cluster, job: Job) -> Iterator[Change]:
    for island in cluster.islands:
        if not island.usable_nodes or island.name in job.forbid.islands:
            continue
        if island.nodes > 1:
            nics = island.nics
            if nics is not None:
                nics = replace(nics, bandwidth_bytes_per_second=2 * nics.bandwidth_bytes_per_second)
            yield Change(
                words=f"twice the bandwidth between the nodes of {island.name} "
                f"(+{format_rate(8 * island.inter_node.bandwidth_bytes_per_second, 'bit/s')} "
                "per device)",
                cluster=_with_island(
                    cluster, replace(island, inter_node=_wider(island.inter_node), nics=nics)
                ),
                job=job,
            )
        yield Change(
            words=f"a quarter more memory on {island.name} "
            f"(+{format_bytes((_MORE_MEMORY - 1) * island.memory_bytes)} per device)",
            cluster=_with_island(
                cluster, replace(island, memory_bytes=_MORE_MEMORY * island.memory_bytes)
            ),
            job=job,
        )
        more = max(1, round(_MORE_NODES * len(island.usable_nodes)))
        yield Change(
            words=f"{more} more node{'s' * (more > 1)} of {island.name}",
            cluster=_with_island(
                cluster,
                # The new ones have no names.
                replace(island, nodes=island.nodes + more, node_names=()),
            ),
            job=job,
        )


def _with_island(cluster: Cluster, changed: Island) -> Cluster:
    return replace(
        cluster,
        islands=tuple(changed if each.name == changed.name else each for each in cluster.islands),
    )


def _demands(cluster: Cluster, job: Job) -> Iterator[Change]:
    for name in Pins.__dataclass_fields__:
        value = getattr(job.pin, name)
        if value is not None:
            shown = str(value).lower() if isinstance(value, bool) else value
            yield Change(
                words=f"without pin {name}: {shown}",
                cluster=cluster,
                job=replace(job, pin=replace(job.pin, **{name: None})),
            )
    if job.forbid != Forbids():
        yield Change(
            words="with the forbidden islands and nodes",
            cluster=cluster,
            job=replace(job, forbid=Forbids()),
        )
    if job.memory_reserve_fraction > 0:
        yield Change(
            words=f"memory_reserve_fraction 0 instead of {job.memory_reserve_fraction:g}",
            cluster=cluster,
            job=replace(job, memory_reserve_fraction=0.0),
        )
    yield Change(
        words=f"global_batch_size {2 * job.global_batch_size} instead of {job.global_batch_size}",
        cluster=cluster,
        job=replace(job, global_batch_size=2 * job.global_batch_size),
    )
