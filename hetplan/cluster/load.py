"""From a cluster file to a Cluster. The work grows with islands, not with devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

from hetplan.cluster.catalogue import device_kind, load_catalogue
from hetplan.cluster.check import check_islands, check_links
from hetplan.cluster.devices import CPU_KIND, DeviceKind
from hetplan.cluster.file_form import (
    CLUSTER_SCHEMA,
    ClusterForm,
    IslandForm,
    IslandLinkForm,
    LinkForm,
)
from hetplan.cluster.spec import Cluster, Island, IslandLink, Link, Transport
from hetplan.files.reading import decode, read_document

CLUSTER_VALUE_SCHEMA = "hetplan.cluster-value/1"
"""Schema of the Cluster value's own JSON form, in which every figure is in base units."""


def load_cluster(path: str | Path, catalogue: Sequence[DeviceKind] | None = None) -> Cluster:
    """The cluster that the file describes; one InputError with every fault otherwise.

    `catalogue`: device kinds that islands may name beside the file's own, instead of the shipped
    ones.
    """
    document = read_document(Path(path))
    known = {kind.kind: kind for kind in (load_catalogue() if catalogue is None else catalogue)}
    checks = (partial(check_islands, catalogue=known), partial(check_links, catalogue=known))
    form = decode(document, ClusterForm, schema=CLUSTER_SCHEMA, checks=checks)
    kinds = known | {device.kind: device_kind(device) for device in form.devices}
    islands = tuple(
        _island(island, region.name, kinds) for region in form.regions for island in region.islands
    )
    return Cluster(name=form.name, islands=islands, links=tuple(_links(form, islands)))


def _island(form: IslandForm, region: str, kinds: Mapping[str, DeviceKind]) -> Island:
    device = kinds[form.device]
    memory_bytes = form.memory or device.memory_bytes
    if not device.memory_bytes:
        device = replace(device, memory_bytes=memory_bytes)
    # A CPU core has no accelerator library; everything else is expected to have its maker's.
    direct = Transport.HOST_STAGED if device.kind == CPU_KIND else Transport.DEVICE_DIRECT
    return Island(
        name=form.name,
        region=region,
        device=device,
        nodes=form.nodes,
        devices_per_node=form.devices_per_node,
        intra_node=_link(form.intra_node, direct),
        inter_node=_link(form.inter_node, direct),
        memory_bytes=memory_bytes,
        nodes_out=tuple(sorted(form.nodes_out)),
    )


def _link(form: LinkForm | IslandLinkForm, transport: Transport) -> Link:
    return Link(
        bandwidth_bytes_per_second=form.bandwidth,
        latency_seconds=form.latency,
        transport=form.transport or transport,
        samples=form.samples,
    )


def _links(form: ClusterForm, islands: Sequence[Island]) -> Iterator[IslandLink]:
    """The link of every pair of islands, in file order."""
    listed = {frozenset(link.between): link for link in form.links}
    default = form.links_default
    for left, right in combinations(islands, 2):
        found: LinkForm | IslandLinkForm | None = listed.get(frozenset((left.name, right.name)))
        if found is None and default is not None:
            same = left.region == right.region
            found = default.within_region if same else default.across_regions
        if found is not None:
            link = _link(found, Transport.HOST_STAGED)
            yield IslandLink(between=(left.name, right.name), link=link)
