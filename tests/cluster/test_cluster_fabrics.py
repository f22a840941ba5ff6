"""`fabric` and `link` of an island: what a device and a pair get, and what contradicts them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cluster.fabrics import Fabric
from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Link
from hetplan.cluster.templates import node_templates
from hetplan.errors import InputError
from hetplan.predict.link import prior
from hetplan.profiling.samples import LinkOperation

HEAD = """schema: hetplan.cluster/4
name: fabrics
regions:
  - name: here
    islands:
      - name: only
        nodes: 1
"""
OWN = """devices:
  - kind: mine
    vendor: me
    memory: 80 GiB
    provenance: datasheet
    source: invented for a test
"""
MI300X = ("device: amd-mi300x", "devices_per_node: 8")
A100 = "device: nvidia-a100-80gb-sxm"
L40S = ("device: nvidia-l40s", "devices_per_node: 8")
steady = settings(derandomize=True, deadline=None, max_examples=40)


def inside(folder: Path, *lines: str, own: str = "") -> Link:
    """The link inside the node of an island of these lines; `own`: scale_up of a kind `mine`."""
    text = HEAD + "".join(f"        {line}\n" for line in lines)
    if own:
        text += f"{OWN}    scale_up: {own}\n"
    path = folder / "cluster.yaml"
    path.write_text(text)
    return load_cluster(path).islands[0].intra_node


@pytest.mark.parametrize(
    ("lines", "whole", "pair"),
    [
        ((*MI300X, "fabric: xgmi-mesh"), 448e9, 64e9),
        ((*MI300X, "fabric: mesh", "link: 50 GB/s"), 350e9, 50e9),
        (("device: amd-mi300x", "devices_per_node: 4", "fabric: xgmi-mesh"), 192e9, 64e9),
        (
            ("device: huawei-ascend-910b2-64gb", "devices_per_node: 8", "fabric: hccs-mesh"),
            196e9,
            28e9,
        ),
        # Twelve links of 25 GB/s over three others: the catalogue has only their sum.
        ((A100, "devices_per_node: 4", "fabric: mesh"), 300e9, 100e9),
        ((A100, "devices_per_node: 8", "fabric: nvswitch"), 300e9, None),
        # The catalogue calls it a mesh; the file knows better.
        (
            ("device: intel-gaudi3", "devices_per_node: 8", "fabric: ring", "link: 50 GB/s"),
            100e9,
            50e9,
        ),
        (("device: nvidia-v100-32gb-sxm", "devices_per_node: 8", "fabric: nvlink"), 150e9, None),
        ((*L40S, "fabric: pcie-tree"), 16 * 16e9 * 128 / 130 / 8, None),
        ((*L40S, "fabric: pcie-tree", "link: 15.75 GB/s"), 15.75e9, None),
        # What the island says itself stands, and pairs have their part of it.
        ((*MI300X, "fabric: xgmi-mesh", "intra_node: {bandwidth: 350 GB/s}"), 350e9, 50e9),
        (
            (*MI300X, "fabric: mesh", "intra_node: {bandwidth: 210 GB/s, measured: true}"),
            210e9,
            30e9,
        ),
    ],
)
def test_what_a_device_and_a_pair_get(
    tmp_path: Path, lines: tuple[str, ...], whole: float, pair: float | None
) -> None:
    link = inside(tmp_path, *lines)
    assert link.bandwidth_bytes_per_second == pytest.approx(whole)
    assert link.one_peer_bytes_per_second == (None if pair is None else pytest.approx(pair))
    assert 3e-6 <= link.latency_seconds <= 10e-6


@pytest.mark.parametrize("name", node_templates())
def test_a_node_is_its_device_and_fabric(tmp_path: Path, name: str) -> None:
    template = node_templates()[name]
    lines = [
        f"device: {template.device}",
        f"devices_per_node: {template.devices}",
        f"fabric: {template.fabric}",
    ]
    if template.link is not None:
        lines.append(f"link: {template.link} B/s")
    assert inside(tmp_path, *lines) == inside(tmp_path, f"node: {name}")


@steady
@given(devices=st.integers(3, 16), gigabytes=st.integers(10, 400))
def test_a_mesh_of_n_is_the_catalogues_entry_of_n_less_one_links(
    tmp_path_factory: pytest.TempPathFactory, devices: int, gigabytes: int
) -> None:
    folder = tmp_path_factory.mktemp("mesh")
    entry = (
        f"{{name: links, bandwidth: {(devices - 1) * gigabytes} GB/s, "
        f"one_peer: {gigabytes} GB/s, peers: {devices - 1}}}"
    )
    island = ("device: mine", f"devices_per_node: {devices}")
    by_entry = inside(
        folder,
        *island,
        f"intra_node: {{bandwidth: {(devices - 1) * gigabytes} GB/s, latency: 5 us}}",
        own=entry,
    )
    by_catalogue = inside(folder, *island, "fabric: mesh", own=entry)
    by_link = inside(
        folder,
        *island,
        "fabric: mesh",
        f"link: {gigabytes} GB/s",
        own="{name: links, bandwidth: 10 TB/s}",
    )
    for found in (by_catalogue, by_link):
        assert found.bandwidth_bytes_per_second == by_entry.bandwidth_bytes_per_second
        assert found.one_peer_bytes_per_second == pytest.approx(gigabytes * 1e9, rel=1e-12)
        for ranks in (2, devices):
            times = [
                prior.collective(each, LinkOperation.ALL_REDUCE.value, ranks, 1e9).seconds
                for each in (by_entry, found)
            ]
            assert times[0] == pytest.approx(times[1], rel=1e-12)


@steady
@given(
    fabric=st.sampled_from([each for each in Fabric if each.has_links and not each.vendor]),
    devices=st.integers(2, 16),
    gigabytes=st.integers(1, 400),
    more=st.integers(1, 400),
    size=st.floats(1e3, 1e10),
    operation=st.sampled_from([LinkOperation.ALL_REDUCE, LinkOperation.ALL_TO_ALL]),
    data=st.data(),
)
def test_more_of_a_link_is_never_slower(
    tmp_path_factory: pytest.TempPathFactory,
    fabric: Fabric,
    devices: int,
    gigabytes: int,
    more: int,
    size: float,
    operation: LinkOperation,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("more")
    ranks = data.draw(st.integers(2, devices))
    island = ("device: mine", f"devices_per_node: {devices}", f"fabric: {fabric}")
    slow, fast = (
        inside(folder, *island, f"link: {rate} GB/s", own="{name: links, bandwidth: 10 TB/s}")
        for rate in (gigabytes, gigabytes + more)
    )
    assert prior.send(fast).seconds_per_byte <= prior.send(slow).seconds_per_byte
    one, two = (prior.collective(each, operation.value, ranks, size) for each in (slow, fast))
    # From the law of PCIe to that of a node's own links the fixed part of a small message grows.
    if slow.one_peer_bytes_per_second or fast.bandwidth_bytes_per_second <= 64e9 or size > 1e9:
        assert two.seconds <= one.seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("lines", "field", "words"),
    [
        ((*MI300X, "fabric: xgmi-msh"), "fabric", "did you mean xgmi-mesh"),
        ((*MI300X, "fabric: [mesh]"), "fabric", "write one of nvswitch"),
        (("node: mi300x-oam-8", "fabric: xgmi-mesh"), "fabric", "one of fabric and node out"),
        ((*MI300X, "fabric: hccs-mesh"), "fabric", "(another mesh is `mesh`)"),
        (
            ("device: amd-mi300x", "devices_per_node: 16", "fabric: xgmi-mesh"),
            "fabric",
            "15 links each, and amd-mi300x has 7",
        ),
        ((*MI300X, "fabric: xgmi-mesh", "link: 64 GB"), "link", "'GB' is a unit of memory"),
        ((*MI300X, "fabric: xgmi-mesh", "link: 64"), "link", "without a unit"),
        (
            (*MI300X, "fabric: xgmi-mesh", "link: 128 GB/s"),
            "link",
            "both directions together; one link of amd-mi300x has 64 GB/s",
        ),
        ((*MI300X, "fabric: xgmi-mesh", "link: 512 GB/s"), "link", "bits taken for bytes"),
        ((*MI300X, "fabric: xgmi-mesh", "link: 448 GB/s"), "link", "that of 7 links"),
        ((*L40S, "fabric: pcie-tree", "link: 63 GB/s"), "link", "both directions together"),
        ((A100, "devices_per_node: 8", "fabric: nvswitch", "link: 25 GB/s"), "link", "leave it"),
        (
            (*MI300X, "link: 64 GB/s", "intra_node: {bandwidth: 448 GB/s, latency: 3 us}"),
            "link",
            "add fabric",
        ),
        (("node: mi300x-oam-8", "link: 64 GB/s"), "link", "add fabric"),
        (
            (*MI300X, "fabric: xgmi-mesh", "intra_node: {bandwidth: 64 GB/s}"),
            "intra_node.bandwidth",
            "what one of 7 links has; the fabric, xgmi-mesh of 8 amd-mi300x, has 448 GB/s",
        ),
        (
            (*MI300X, "fabric: xgmi-mesh", "intra_node: {bandwidth: 896 GB/s, measured: true}"),
            "intra_node.bandwidth",
            "both directions together",
        ),
        (
            (*MI300X, "fabric: xgmi-mesh", "intra_node: {bandwidth: 56 GB/s}"),
            "intra_node.bandwidth",
            "an eighth",
        ),
        (
            ("node: mi300x-oam-8", "intra_node: {bandwidth: 64 GB/s}"),
            "intra_node.bandwidth",
            "what one of 7 links has; a mi300x-oam-8 has 448 GB/s",
        ),
        (
            ("device: hygon-k100-64gb", "devices_per_node: 8", "fabric: mesh"),
            "link",
            "add what one link has in one direction",
        ),
        ((*L40S, "fabric: nvswitch"), "intra_node.bandwidth", "nothing of nvidia-l40s's links"),
        (("device: amd-mi300x", "fabric: xgmi-mesh"), "devices_per_node", "missing"),
        (("device: amd-mi30x", "devices_per_node: 8", "fabric: mesh"), "device", "unknown device"),
        (MI300X, "intra_node", "add it, or fabric or node"),
    ],
)
def test_what_contradicts_the_fabric_is_one_fault(
    tmp_path: Path, lines: tuple[str, ...], field: str, words: str
) -> None:
    with pytest.raises(InputError) as error:
        inside(tmp_path, *lines)
    (fault,) = error.value.faults
    assert fault.field == f"regions[0].islands[0].{field}"
    assert words in fault.message
    assert fault.line >= 6
