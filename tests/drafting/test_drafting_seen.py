"""What hosts and topologies say: what goes in comes out of load_cluster."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topologies_rendered import nvidia_topologies

from hetplan.cluster.load import load_cluster
from hetplan.cluster.node import expand_names
from hetplan.cluster.spec import Island
from hetplan.drafting.cluster import draft_cluster_text
from hetplan.drafting.seen import Seen
from hetplan.drafting.text import comment, host_ranges, listable, scalar
from hetplan.errors import InputError
from hetplan.files.nodes import plain, read_yaml
from hetplan.files.reading import document_of
from hetplan.importers.records import Host, NodeTopology, TopologyDevice, TopologyPath
from hetplan.importers.table import Gives, import_text
from hetplan.importers.topology import nearest_nics, nic_layout, pcie_switches


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


def drafted(nodes: str, topology: NodeTopology | None = None, *hosts: Host) -> str:
    seen = Seen(hosts=[*hosts])
    if topology is not None:
        seen.topologies["topo.txt"] = topology
    return draft_cluster_text([nodes], (), seen).text


def loaded(text: str) -> Island:
    (island,) = load_cluster(document_of("c.yaml", text.encode())).islands
    return island


@settings(max_examples=15, deadline=None)
@given(topology=nvidia_topologies, nodes=st.integers(1, 40))
def test_every_draft_is_a_cluster(topology: NodeTopology, nodes: int) -> None:
    hosts = [Host(name=f"n{at}", slots=len(topology.devices)) for at in range(nodes)]
    text = drafted(f"{nodes}x{len(topology.devices)} a100-80gb-sxm", topology, *hosts)
    read = loaded(text)
    assert (read.nodes, read.devices_per_node) == (nodes, len(topology.devices))
    assert list(expand_names(read.node_names)) == [host.name for host in hosts]
    layout = nic_layout(topology)
    if layout is not None and nodes > 1:
        assert read.nics is not None
        assert read.nics.of_device == layout.of_device


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
    device: str,
    topology: NodeTopology,
    fabric: str | None,
    link: float | None,
    whole: float,
    pair: float | None,
) -> None:
    text = drafted(f"1x{len(topology.devices)} {device}", topology)
    keys = plain(read_yaml("f", text))["regions"][0]["islands"][0]  # type: ignore[index,call-overload]
    assert keys.get("fabric") == fabric
    assert keys.get("link") == (None if link is None else f"{link / 1e9:g} GB/s")
    assert ("intra_node" in keys) == (fabric is None)
    assert "assumed:" not in text.partition("regions:")[2]
    read = loaded(text)
    assert read.intra_node.bandwidth_bytes_per_second == pytest.approx(whole, rel=1e-3)
    assert read.intra_node.one_peer_bytes_per_second == (
        None if pair is None else pytest.approx(pair)
    )


def test_nics_without_a_number_are_those_of_the_topology_or_one() -> None:
    shown = golden("nvidia-topo/a100-8.txt")
    for words, topology, per_node in (
        ("200Gbit", shown, 4),
        ("4x200Gbit", shown, 4),
        ("200Gbit", None, 1),
        ("1x200Gbit", None, 1),
    ):
        nics = loaded(drafted(f"2x8 a100-80gb-sxm {words}", topology)).nics
        assert nics is not None
        assert (nics.per_node, nics.bandwidth_bytes_per_second) == (per_node, 25e9)
        assert bool(nics.of_device) == (topology is not None)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_number_of_nics_that_the_topology_has_not_is_refused(count: int) -> None:
    with pytest.raises(InputError, match=f"has 4 NICs that devices use, not {count}") as caught:
        drafted(f"2x8 a100-80gb-sxm {count}x200Gbit", golden("nvidia-topo/a100-8.txt"))
    assert len(caught.value.faults) == 1


HOSTS = (
    *(Host(name=f"a{at}", slots=8, device="A100-80GB-SXM") for at in (1, 2, 3)),
    *(Host(name=f"m{at}", slots=8, device="MI300X") for at in (1, 2)),
)


def test_hosts_go_to_the_islands_of_their_type() -> None:
    nodes = ("2x8 a100-80gb-sxm @A", "2x8 mi300x @B", "1x8 a100-80gb-sxm @B")
    text = draft_cluster_text(nodes, ("A B 10Gbit 30ms",), Seen(hosts=[*HOSTS])).text
    cluster = load_cluster(document_of("c.yaml", text.encode()))
    names = [tuple(expand_names(island.node_names)) for island in cluster.islands]
    assert names == [("a1", "a2"), ("m1", "m2"), ("a3",)]


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ("3x8 a100-80gb-sxm", "2 hosts are of no island: m1, m2"),
        ("4x8 a100-80gb-sxm", "lists 3 hosts for it of type a100-80gb-sxm"),
        ("3x8 a100", "there are A100-80GB-SXM, MI300X"),
        ("3x4 a100-80gb-sxm", "host a1 has 8 slots, the nodes 4 devices"),
    ],
)
def test_hosts_that_do_not_fit_are_named(nodes: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        drafted(nodes, None, *HOSTS)


def test_topologies_that_fit_no_island_or_two_are_named() -> None:
    with pytest.raises(InputError, match="4 devices of nvidia fit no island"):
        drafted("2x8 a100-80gb-sxm", node("NV4"))
    seen = Seen(topologies={"a.txt": node("NV4"), "b.txt": node("NV12")})
    with pytest.raises(InputError, match=r"a\.txt and b\.txt fit it"):
        draft_cluster_text(["2x4 a100-80gb-sxm"], (), seen)


A100_FILE, H100_FILE = golden("nvidia-topo/a100-8.txt"), node("NV18", 8)


def islands(nodes: tuple[str, ...], topologies: dict[str, NodeTopology]) -> list[Island]:
    between = ("A B 10Gbit 30ms",) if any("@B" in text for text in nodes) else ()
    text = draft_cluster_text(nodes, between, Seen(topologies=topologies)).text
    return list(load_cluster(document_of("c.yaml", text.encode())).islands)


@pytest.mark.parametrize(
    "names",
    [("A100", "h100"), ("nvidia-a100-80gb-sxm", "H100"), ("a100", ""), ("", "h100")],
)
def test_each_kind_has_the_topology_that_is_called_so(names: tuple[str, str]) -> None:
    one, two = (f"{name}=f{at}.txt" if name else f"f{at}.txt" for at, name in enumerate(names))
    a100, h100 = islands(("2x8 a100", "2x8 h100"), {one: A100_FILE, two: H100_FILE})
    assert a100.nics is not None
    assert h100.nics is not None
    assert a100.intra_node.bandwidth_bytes_per_second == 300e9
    assert h100.intra_node.bandwidth_bytes_per_second == 450e9
    assert (a100.nics.per_node, a100.nics.of_device) == (4, (0, 0, 1, 1, 2, 2, 3, 3))
    assert (h100.nics.per_node, h100.nics.of_device) == (8, ())


def test_a_named_topology_is_no_other_kind_s() -> None:
    a100, h100 = islands(("2x8 a100", "2x8 h100"), {"a100=topo.txt": A100_FILE})
    assert a100.nics is not None
    assert h100.nics is not None
    assert (a100.nics.per_node, h100.nics.per_node) == (4, 8)
    assert h100.intra_node.bandwidth_bytes_per_second == 450e9


def test_an_island_s_name_comes_before_its_kind() -> None:
    nodes = ("1x4 a100-80gb-sxm @A", "1x4 a100-80gb-sxm @B", "1x8 a100-80gb-sxm @B")
    files = {"a100-80gb-sxm=a.txt": node("NV4"), "a100-80gb-sxm-B=b.txt": node("NV2")}
    rates = [each.intra_node.bandwidth_bytes_per_second for each in islands(nodes, files)]
    assert rates == [300e9, 150e9, 300e9]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (("topo.txt",), "topo.txt: 8 devices of nvidia fit several kinds: write KIND=FILE, "
         "a100=topo.txt or h100=topo.txt"),
        (("a.txt", "./h=1.txt"), "./h=1.txt: 8 devices of nvidia fit several kinds: write "
         "KIND=FILE, a100=./h=1.txt or h100=./h=1.txt"),
        (("b200=topo.txt",), "b200=topo.txt: no nodes are called b200; there are a100, h100, v100"),
        (("v100=topo.txt",), "v100=topo.txt: 8 devices of nvidia; nodes of v100 have 4 of nvidia"),
        (("a100=a.txt", "A100=b.txt"), "a100=a.txt and A100=b.txt fit it; give one of them"),
        (("a100=a.txt", "h100=h.txt", "x.txt"), "x.txt: each island that it fits has another"),
    ],
)  # fmt: skip
def test_a_topology_that_may_be_of_several_or_of_none_is_refused(
    files: tuple[str, ...], says: str
) -> None:
    with pytest.raises(InputError) as caught:
        islands(("2x8 a100", "2x8 h100", "1x4 v100"), dict.fromkeys(files, A100_FILE))
    assert says in str(caught.value).splitlines()[-1]


def test_addresses_become_a_comment() -> None:
    hosts = [Host(name=name) for name in ("fe80::1", "fe80::2")]
    text = drafted("2x8 a100-80gb-sxm", None, *hosts)
    assert "# Their names cannot be node_names: fe80::1 fe80::2" in text


def test_a_comment_cannot_end_its_line() -> None:
    (line,) = comment("evil\nname: other\r\u2028x: 1\x85\x00", 0)
    assert line.isprintable()
    assert line.startswith("# evil")
