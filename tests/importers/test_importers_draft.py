"""Drafts: what goes in comes out of load_cluster, and nothing is filled in that nobody said."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topologies_rendered import nvidia_topologies

from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.load import load_cluster
from hetplan.cluster.node import expand_names
from hetplan.cluster.spec import Link, Transport
from hetplan.errors import InputError
from hetplan.files.nodes import plain, read_yaml
from hetplan.importers.draft import (
    ClusterDraft,
    IslandDraft,
    NicsDraft,
    draft_text,
    host_ranges,
    listable,
    scalar,
)
from hetplan.importers.link_figures import (
    Figure,
    LinkFigures,
    from_samples,
    from_topology,
    nearest_nics,
    nic_layout,
    pcie_switches,
)
from hetplan.importers.records import (
    NodeTopology,
    TopologyDevice,
    TopologyPath,
)
from hetplan.importers.table import Gives, import_text
from hetplan.predict.link.prior import collective, send
from hetplan.profiling.samples import LinkOperation, LinkSample
from hetplan.units import format_bandwidth

KINDS = {kind.kind: kind for kind in load_catalogue()}
A100 = KINDS["nvidia-a100-80gb-sxm"]


def sample(operation: str, ranks: int, size: int, seconds: float) -> LinkSample:
    return LinkSample(
        link="x", operation=operation, backend="nccl", group_size=ranks, message_bytes=size,
        median_seconds=seconds, p10_seconds=seconds, p90_seconds=seconds, repeats=1, outliers=0,
    )  # fmt: skip


def link(figures: LinkFigures) -> Link:
    assert figures.bandwidth is not None
    assert figures.latency is not None
    return Link(
        bandwidth_bytes_per_second=figures.bandwidth.value,
        latency_seconds=figures.latency.value,
        transport=Transport.DEVICE_DIRECT,
        measured=figures.measured,
    )


@settings(deadline=None)
@given(
    operation=st.sampled_from([each for each in LinkOperation]),
    ranks=st.integers(2, 64),
    latency=st.floats(1e-6, 1e-3),
    bandwidth=st.floats(1e8, 1e12),
    hardware=st.booleans(),
)
def test_figures_from_samples_give_the_measured_times_back(
    operation: LinkOperation, ranks: int, latency: float, bandwidth: float, hardware: bool
) -> None:
    """Whatever law made the times: that of the hardware's figures, or of measured ones."""
    true = Link(
        bandwidth_bytes_per_second=bandwidth,
        latency_seconds=latency,
        transport=Transport.DEVICE_DIRECT,
        measured=not hardware,
    )

    def seconds(of: Link, size: int) -> float:
        if operation == LinkOperation.SEND_RECV:
            law = send(of)
            return law.rendezvous_latency_seconds + size * law.seconds_per_byte
        if operation == LinkOperation.SEND_RECV_LATE:
            law = send(of)
            return law.wire_latency_seconds + size * law.seconds_per_byte
        return collective(of, operation, ranks, size).seconds

    # So large that latency is nothing, so small that bandwidth is nothing.
    large, small = 10**18, 1
    rows = [sample(operation, ranks, size, seconds(true, size)) for size in (small, large)]
    found = link(from_samples(rows, "x"))
    if not hardware:
        assert found.bandwidth_bytes_per_second == pytest.approx(bandwidth, rel=1e-2)
    assert found.measured
    assert seconds(found, large) == pytest.approx(seconds(true, large), rel=1e-2)
    assert seconds(found, small) == pytest.approx(seconds(true, small), rel=0.2)


def test_the_file_says_which_figures_were_measured(tmp_path: Path) -> None:
    rows = [sample("all_reduce", 8, 1 << 30, 0.0083), sample("all_reduce", 8, 1 << 10, 2e-5)]
    found = from_samples(rows, "x")
    given_latency = replace(found, latency=figure(3e-6))
    given_bandwidth = replace(found, bandwidth=figure(3e11))
    for link, measured in ((found, True), (given_latency, True), (given_bandwidth, False)):
        cluster = loaded(draft(island(intra_node=link)), tmp_path)
        (read,) = cluster.islands  # type: ignore[attr-defined]
        assert (read.intra_node.measured, read.inter_node.measured) == (measured, False)
    # Without the samples an estimate still gives back what they say.
    read = loaded(draft(island(intra_node=found)), tmp_path).islands[0]  # type: ignore[attr-defined]
    seconds = collective(read.intra_node, "all_reduce", 8, 1 << 30).seconds
    assert seconds == pytest.approx(0.0083, rel=0.01)


@pytest.mark.parametrize(("ranks", "share"), [(16, 8), (8, 1), (2, 1)])
def test_between_nodes_the_devices_of_a_node_share_what_a_ring_reaches(ranks, share) -> None:
    rows = [sample("all_reduce", ranks, 1 << 30, 0.01)]
    alone = from_samples(rows, "x").bandwidth
    found = from_samples(rows, "x", devices_per_node=8).bandwidth
    assert alone is not None
    assert found is not None
    assert found.value * share == pytest.approx(alone.value)
    assert ("shared by its 8 devices" in found.source) == (share > 1)
    pairs = from_samples([sample("send_recv", ranks, 1 << 30, 0.01)], "x", devices_per_node=8)
    assert pairs == from_samples([sample("send_recv", ranks, 1 << 30, 0.01)], "x")


@settings(max_examples=15, deadline=None)
@given(topology=nvidia_topologies)
def test_layouts_hold_for_any_node(topology: NodeTopology) -> None:
    names = [nic.name for nic in topology.nics]
    layout = nic_layout(topology)
    near = {place.device: place.nics for place in nearest_nics(topology)}
    assert (layout is None) == (not names or not near)
    if layout is not None and layout.of_device:
        assert len(layout.of_device) == len(topology.devices)
        for device, number in zip(topology.devices, layout.of_device, strict=True):
            assert layout.nics[number] in near[device.name]
        assert set(layout.of_device) == set(range(len(layout.nics)))
    seen: set[str] = set()
    for switch in pcie_switches(topology):
        members = {*switch.devices, *switch.nics}
        assert not members & seen
        seen |= members
    for path in topology.paths:
        if path.path in ("PIX", "PXB") and any(end.startswith("GPU") for end in path.between):
            assert set(path.between) <= seen


@settings(deadline=None)
@given(
    st.lists(
        st.from_regex(r"(node|n|a-b\.)?[0-9]{0,4}(-ib|x)?", fullmatch=True).filter(listable),
        max_size=60,
        unique=True,
    )
)
def test_ranges_stand_for_the_same_names(names: list[str]) -> None:
    assert list(expand_names(host_ranges(names))) == names


def test_one_range_stands_for_many_names() -> None:
    many = [f"node{at:05d}" for at in range(1, 12_501)]
    assert host_ranges(many) == ("node[00001-12500]",)


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_one_scalar(text: str) -> None:
    if any("\ud800" <= each <= "\udfff" for each in text):
        return
    assert plain(read_yaml("f", f"a: {scalar(text)}\nb: 1\n")) == {"a": text, "b": 1}


def figure(value: float, source: str = "given") -> Figure:
    return Figure(value=value, source=source)


def island(name: str = "a", **changes: object) -> IslandDraft:
    known = LinkFigures(bandwidth=figure(2e10), latency=figure(5e-6))
    whole = IslandDraft(
        name=name, region="here", device=A100, nodes=2, devices_per_node=8,
        intra_node=known, inter_node=known,
    )  # fmt: skip
    return replace(whole, **changes)  # type: ignore[arg-type]


def draft(*islands: IslandDraft, across: LinkFigures | None = None) -> ClusterDraft:
    return ClusterDraft(name="c", islands=islands, across=across or LinkFigures())


def loaded(value: ClusterDraft, folder: Path) -> object:
    path = folder / "cluster.yaml"
    path.write_text(draft_text(value), encoding="utf-8")
    return load_cluster(path)


@settings(max_examples=15, deadline=None)
@given(
    topology=nvidia_topologies,
    nodes=st.integers(1, 40),
    bandwidth=st.floats(1e6, 1e13),
    latency=st.floats(1e-9, 1.0),
    source=st.text(max_size=200),
    with_nics=st.booleans(),
    extra=st.integers(1, 5),
)
def test_every_draft_is_a_cluster(
    tmp_path_factory: pytest.TempPathFactory,
    topology: NodeTopology,
    nodes: int,
    bandwidth: float,
    latency: float,
    source: str,
    with_nics: bool,
    extra: int,
) -> None:
    known = LinkFigures(bandwidth=figure(bandwidth, source), latency=figure(latency, source))
    layout = nic_layout(topology)
    devices = len(topology.devices)
    per_node = len(layout.nics) if layout is not None else devices * extra
    made = island(
        device=A100, nodes=nodes, devices_per_node=devices, topology=topology,
        intra_node=known, inter_node=known, hosts=tuple(f"n{at}" for at in range(nodes)),
        nics=NicsDraft(per_node=per_node, bandwidth=figure(2.5e10, source), layout=layout)
        if with_nics
        else None,
    )  # fmt: skip
    cluster = loaded(draft(made), tmp_path_factory.mktemp("draft"))
    (read,) = cluster.islands  # type: ignore[attr-defined]
    assert (read.nodes, read.devices_per_node) == (nodes, devices)
    if devices > 1:
        assert read.intra_node.bandwidth_bytes_per_second == pytest.approx(bandwidth, rel=1e-3)
        assert read.intra_node.latency_seconds == pytest.approx(latency, rel=1e-3)
    assert list(expand_names(read.node_names)) == [f"n{at}" for at in range(nodes)]


GOLDEN = Path(__file__).parents[1] / "golden" / "importers"


def node(pairs: str | list[str], devices: int = 4) -> NodeTopology:
    """Devices whose pairs have these words, or all this one."""
    names = [f"GPU{at}" for at in range(devices)]
    ends = [*combinations(names, 2)]
    words = [pairs] * len(ends) if isinstance(pairs, str) else pairs
    return NodeTopology(
        vendor="nvidia",
        devices=tuple(TopologyDevice(index=at, name=name) for at, name in enumerate(names)),
        paths=tuple(
            TopologyPath(between=pair, path=word) for pair, word in zip(ends, words, strict=True)
        ),
    )


def golden(name: str) -> NodeTopology:
    path = GOLDEN / name
    topology = import_text(path.read_text(), str(path), gives=(Gives.TOPOLOGY,)).topology
    assert topology is not None
    return topology


# DGX-1: six NVLinks of each V100; what it has none to is reached over PCIe.
_CUBE = {
    1: ((0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)),
    2: ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)),
}
CUBE = [
    next((f"NV{links}" for links, pairs in _CUBE.items() if pair in pairs), "SYS")
    for pair in combinations(range(8), 2)
]


@pytest.mark.parametrize(
    ("device", "topology", "fabric", "link", "whole", "pair"),
    [
        ("amd-mi300x", golden("rocm-topo/mi300x-8.json"), "xgmi-mesh", None, 448e9, 64e9),
        ("huawei-ascend-910b2-64gb", golden("npu-topo/910b-8.txt"), "hccs-mesh", None, 196e9, 28e9),
        ("nvidia-a100-80gb-sxm", golden("nvidia-topo/a100-8.txt"), "nvswitch", None, 300e9, None),
        ("amd-mi210", golden("rocm-topo/mi210-8.json"), "pcie-tree", None, 31.5e9, None),
        ("nvidia-l40s", golden("nvidia-topo/l40s-2.txt"), "pcie-tree", None, 31.5e9, None),
        # Twelve NVLinks, four to each of three others.
        ("nvidia-a100-80gb-sxm", node("NV4"), "mesh", 100e9, 300e9, 100e9),
        ("nvidia-h100-80gb-sxm", node("NV6"), "mesh", 150e9, 450e9, 150e9),
        ("nvidia-h20-96gb-sxm", node("NV18", 8), "nvswitch", None, 450e9, None),
        ("nvidia-v100-32gb-sxm", node(CUBE, 8), "nvlink", None, 150e9, None),
        # Links to less than all others, of no known fabric: the slowest pair's.
        (
            "nvidia-v100-32gb-sxm",
            node(["NV1", "NV1", "NV2", "NV2", "NV1", "NV1"]),
            None,
            None,
            25e9,
            None,
        ),
        (
            "huawei-ascend-910c-die-64gb",
            golden("npu-topo/910-two-dies.txt"),
            None,
            None,
            196e9,
            None,
        ),
    ],
)
def test_a_draft_says_the_fabric_that_the_paths_show(
    tmp_path: Path,
    device: str,
    topology: NodeTopology,
    fabric: str | None,
    link: float | None,
    whole: float,
    pair: float | None,
) -> None:
    found = from_topology(topology, KINDS[device])
    made = island(
        device=KINDS[device],
        nodes=1,
        devices_per_node=len(topology.devices),
        topology=topology,
        intra_node=replace(found, latency=figure(3e-6)),
    )
    text = draft_text(draft(made))
    keys = plain(read_yaml("f", text))["regions"][0]["islands"][0]  # type: ignore[index,call-overload]
    assert keys.get("fabric") == fabric
    assert keys.get("link") == (None if link is None else f"{link / 1e9:g} GB/s")
    assert ("bandwidth" in keys["intra_node"]) == (fabric is None)
    if fabric is not None:
        (line,) = (at for at, each in enumerate(text.splitlines()) if "fabric:" in each)
        assert f"{format_bandwidth(whole).split('.')[0]}" in text.splitlines()[line - 1]
    (read,) = loaded(draft(made), tmp_path).islands  # type: ignore[attr-defined]
    assert read.intra_node.bandwidth_bytes_per_second == pytest.approx(whole, rel=1e-3)
    assert read.intra_node.one_peer_bytes_per_second == (
        None if pair is None else pytest.approx(pair)
    )


def test_a_measured_mesh_has_both_and_pairs_their_part(tmp_path: Path) -> None:
    """What a ring of all devices reached is no pair's figure."""
    rows = [sample("all_reduce", 4, 1 << 30, 0.0069), sample("all_reduce", 4, 1 << 10, 2e-5)]
    measured = from_samples(rows, "x")
    for device, words, links in (("nvidia-a100-80gb-sxm", "NV4", 3), (A100.kind, "NV12", 1)):
        topology = node(words)
        whole = from_topology(topology, KINDS[device]).bandwidth
        made = island(
            nodes=1,
            devices_per_node=4,
            topology=topology,
            intra_node=measured.of_one_pair(whole),
        )
        (read,) = loaded(draft(made), tmp_path).islands  # type: ignore[attr-defined]
        link, rate = read.intra_node, measured.bandwidth.value  # type: ignore[union-attr]
        assert link.measured
        assert link.bandwidth_bytes_per_second == pytest.approx(rate, rel=1e-3)
        pair = link.one_peer_bytes_per_second
        assert (pair or rate) == pytest.approx(rate / links, rel=1e-3)


def test_names_that_cannot_be_are_refused_and_addresses_become_a_comment() -> None:
    with pytest.raises(InputError, match="--name"):
        draft_text(replace(draft(island()), name="two words"))
    with pytest.raises(InputError, match="--region"):
        draft_text(draft(island(region="x: y")))
    text = draft_text(draft(island(hosts=("fe80::1", "fe80::2"))))
    assert "# Their names cannot be node_names: fe80::1 fe80::2" in text


def test_a_comment_cannot_end_its_line() -> None:
    source = "evil\nname: other\r\u2028x: 1\x85\x00"
    text = draft_text(draft(island(intra_node=LinkFigures(
        bandwidth=figure(1e9, source), latency=figure(1e-6)))))  # fmt: skip
    assert "\\nname: other" in text
    root = plain(read_yaml("f", text))
    assert isinstance(root, dict)
    assert root["name"] == "c"
