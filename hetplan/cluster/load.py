"""From a cluster file to a Cluster. The work grows with islands and with what the file lists."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from hetplan.cluster.catalogue import device_kind, load_catalogue
from hetplan.cluster.check import check_islands, check_limits_of, check_nodes, check_sites
from hetplan.cluster.check_links import check_link_figures, check_links
from hetplan.cluster.devices import CPU_KIND, DeviceKind
from hetplan.cluster.file_form import (
    CLUSTER_SCHEMA,
    BetweenForm,
    ClusterForm,
    IslandForm,
    LinkForm,
    NicsForm,
)
from hetplan.cluster.launch_form import check_launch, launch_domain
from hetplan.cluster.links import ETHERNET_SEGMENT_BYTES, Link, Transport
from hetplan.cluster.names import with_kind_names
from hetplan.cluster.node import Nics, spread_evenly
from hetplan.cluster.spec import Cluster, Island, IslandLink, RegionLink, Site, Storage
from hetplan.cluster.templates import links_of, with_templates
from hetplan.errors import InputError
from hetplan.files.quantities import value_of
from hetplan.files.reading import Document, decode, read_document


def load_cluster(
    path: str | Path | Document, catalogue: Sequence[DeviceKind] | None = None
) -> Cluster:
    """The cluster that the file describes; one InputError with every fault otherwise.

    `catalogue`: device kinds that islands may name beside the file's own, instead of the shipped
    ones.
    """
    with _collector_paused():
        return _load(read_document(path), catalogue)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Python's cycle collector stands still: all that is read is kept, so it would search in vain.

    Half of the time of a file of thousands of islands.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _load(document: Document, catalogue: Sequence[DeviceKind] | None) -> Cluster:
    known = {kind.kind: kind for kind in (load_catalogue() if catalogue is None else catalogue)}
    document, faults = with_templates(with_kind_names(document, known.values()), known)
    unknown = [fault for fault in faults if fault.field.endswith(".node")]
    if unknown:
        # What such an island lacks would only repeat it.
        raise InputError(*unknown)
    checks = (
        lambda _: faults,
        partial(check_islands, catalogue=known),
        check_nodes,
        check_sites,
        check_link_figures,
        partial(check_links, catalogue=known),
        partial(check_launch, catalogue=known),
    )
    form = decode(document, ClusterForm, schema=CLUSTER_SCHEMA, checks=checks)
    cluster = _cluster(form, known | {device.kind: device_kind(device) for device in form.devices})
    too_low = [*check_limits_of(document, cluster)]
    if too_low:
        raise InputError(*too_low)
    return cluster


def _cluster(form: ClusterForm, kinds: Mapping[str, DeviceKind]) -> Cluster:
    default = form.links_default
    return Cluster(
        name=form.name,
        islands=tuple(
            _island(island, region.name, kinds)
            for region in form.regions
            for island in region.islands
        ),
        links=tuple(
            IslandLink(between=(entry.between[0], entry.between[1]), link=_between(entry))
            for entry in form.links
        ),
        region_links=tuple(
            RegionLink(between=(entry.between[0], entry.between[1]), link=_between(entry))
            for entry in form.region_links
        ),
        within_region=_between(default.within_region)
        if default and default.within_region
        else None,
        across_regions=(
            _between(default.across_regions) if default and default.across_regions else None
        ),
        sites=tuple(
            value_of(
                Site,
                site,
                regions=tuple(region.name for region in form.regions if region.site == site.name),
                power_limit_watts=site.power_limit,
                price_usd_per_joule=site.energy_price,
                storage=site.storage
                and Storage(
                    read_bytes_per_second=site.storage.read,
                    write_bytes_per_second=site.storage.write,
                    shares_uplink=site.storage.shares_uplink,
                ),
            )
            for site in form.sites
        ),
        launch_domains=tuple(launch_domain(domain) for domain in form.launch),
        max_nodes=form.max_nodes,
    )


def _island(form: IslandForm, region: str, kinds: Mapping[str, DeviceKind]) -> Island:
    if form.device is None or form.devices_per_node is None or form.intra_node is None:
        raise InputError(f"island {form.name} has no device, devices_per_node or intra_node")
    device = kinds[form.device]
    memory_bytes = form.memory or device.memory_bytes
    if not device.memory_bytes:
        device = replace(device, memory_bytes=memory_bytes)
    # A CPU core has no accelerator library; everything else is expected to have its vendor's.
    direct = Transport.HOST_STAGED if device.kind == CPU_KIND else Transport.DEVICE_DIRECT
    nics = _nics(form.nics) if form.nics else None
    intra_node = _link(form.intra_node, form.intra_node.bandwidth or 0.0, direct)
    intra_node = replace(intra_node, one_peer_bytes_per_second=_one_peer(form, device, intra_node))
    inter_node = intra_node
    if form.inter_node is not None:
        port = nics.own_bytes_per_second(form.devices_per_node) if nics else 0.0
        inter_node = _link(form.inter_node, form.inter_node.bandwidth or port, direct)
    return value_of(
        Island,
        form,
        region=region,
        device=device,
        intra_node=intra_node,
        inter_node=inter_node,
        memory_bytes=memory_bytes,
        nodes_out=tuple(sorted(form.nodes_out)),
        nics=nics,
        switch_of_device=_of_device(form.pcie_switches, form.devices_per_node),
        numa_node_of_device=_of_device(form.numa_nodes, form.devices_per_node),
        price_usd_per_device_hour=form.price,
        power_watts=form.power,
        power_cap_watts=form.power_cap,
        host_launch_seconds=form.host_launch,
        host_memory_bytes=form.host_memory,
    )


def _one_peer(form: IslandForm, device: DeviceKind, link: Link) -> float | None:
    """Of all its links a device has an equal part to one other: by the node's fabric, else where
    the catalogue says so.
    """
    rate, links = link.bandwidth_bytes_per_second, links_of(form)
    if link.transport is not Transport.DEVICE_DIRECT:
        return None
    if links is not None:
        return rate / links if links > 1 else None
    usual = device.scale_up
    if usual is None or not usual.one_peer_bytes_per_second:
        return None
    if rate <= usual.one_peer_bytes_per_second:
        return None  # a pair's figure already
    return rate * usual.one_peer_bytes_per_second / usual.bandwidth_bytes_per_second


def _nics(form: NicsForm) -> Nics:
    return value_of(Nics, form, bandwidth_bytes_per_second=form.bandwidth)


def _of_device(spread: int | tuple[int, ...] | None, devices: int) -> tuple[int, ...]:
    if spread is None:
        return ()
    return spread_evenly(spread, devices) if isinstance(spread, int) else spread


def _between(form: BetweenForm) -> Link:
    shared = form.bandwidth_shared
    # One device alone may take all of a capacity that no other figure limits.
    own = form.bandwidth_per_device or form.bandwidth or shared or 0.0
    return replace(
        _link(form, own, Transport.HOST_STAGED), shared_bandwidth_bytes_per_second=shared
    )


def _link(form: LinkForm, bandwidth_bytes_per_second: float, transport: Transport) -> Link:
    latency = form.latency
    if latency is None:
        latency = (form.round_trip or 0.0) / 2
    return value_of(
        Link,
        form,
        bandwidth_bytes_per_second=bandwidth_bytes_per_second,
        latency_seconds=latency,
        transport=form.transport or transport,
        window_bytes=form.window,
        segment_bytes=form.segment or ETHERNET_SEGMENT_BYTES,
        price_usd_per_byte=form.price,
    )
