"""A node whose devices reach each other over PCIe switches: what their uplinks leave a collective.

Eight L40S, PCIe 4.0 x16: 16 lanes of 16 GT/s with 128 of 130 bits. By hand, with the law of nodes
without a fabric of their own (`predict.link.prior`, BUS and BUS_EXCHANGE).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.cost.collectives import collective, group_shape
from hetplan.predict.fit import FittedPredictor
from hetplan.profiling.samples import LinkOperation

TEXT = """schema: hetplan.cluster/4
name: tree
regions:
  - name: here
    islands:
      - name: only
        device: nvidia-l40s
        nodes: {nodes}
        devices_per_node: 8
        fabric: {fabric}
        {more}
        inter_node: {{bandwidth: 100 GB/s, latency: 5 us}}
"""
PORT = 16 * 16e9 * 128 / 130 / 8
UPLINK = PORT / 1.2
"""The host bridge between two switches takes 6/5 of what crosses it."""
SIZE = 2.0**30
PREDICTOR = FittedPredictor.datasheet_only()


def tree(folder: Path, more: str, nodes: int = 1, fabric: str = "pcie-tree") -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(TEXT.format(more=more, nodes=nodes, fabric=fabric))
    return load_cluster(path)


def seconds(cluster: Cluster, operation: LinkOperation, ranks: int = 8) -> float:
    shape = group_shape(cluster, range(ranks))
    return collective(cluster, shape, operation, SIZE, PREDICTOR).seconds


def all_reduce(rate: float, ranks: int) -> float:
    """2 (n - 1) steps of 1 / n of the bytes."""
    steps = 2 * (ranks - 1)
    per_byte = (2.68 + 2.39 / ranks) / rate
    return 41.7e-6 + steps * 4.43e-6 + steps / ranks * SIZE * per_byte


def all_to_all(rate: float, ranks: int) -> float:
    """A seventh of (n - 1) / n of the bytes goes to each other rank."""
    steps = ranks - 1
    per_byte = (2.78 + 1.26 / ranks) / rate
    return 72.2e-6 + steps * 49.7e-6 + steps / ranks * SIZE * per_byte


def test_an_all_reduce_over_two_switches_by_hand(tmp_path: Path) -> None:
    flat = seconds(tree(tmp_path, "pcie_switches: 1"), LinkOperation.ALL_REDUCE)
    assert flat == pytest.approx(all_reduce(PORT, 8), rel=1e-6)
    two = seconds(tree(tmp_path, "pcie_switches: 2"), LinkOperation.ALL_REDUCE)
    # The ring crosses each uplink once in each direction.
    assert two == pytest.approx(all_reduce(UPLINK, 8), rel=1e-6)
    assert two > 1.19 * flat


def test_an_exchange_shares_the_uplinks_by_hand(tmp_path: Path) -> None:
    flat = seconds(tree(tmp_path, "pcie_switches: 1"), LinkOperation.ALL_TO_ALL)
    assert flat == pytest.approx(all_to_all(PORT, 8), rel=1e-6)
    # Four devices send 4/8 of their bytes over an uplink, 2 S; a port alone has 7/8 S to send.
    two = seconds(tree(tmp_path, "pcie_switches: 2"), LinkOperation.ALL_TO_ALL)
    assert two == pytest.approx(all_to_all(UPLINK * (7 / 8) / 2, 8), rel=1e-6)
    # Two devices send 6/8 each, 1.5 S.
    four = seconds(tree(tmp_path, "pcie_switches: 4"), LinkOperation.ALL_TO_ALL)
    assert four == pytest.approx(all_to_all(UPLINK * (7 / 8) / 1.5, 8), rel=1e-6)


@pytest.mark.parametrize("operation", [LinkOperation.ALL_REDUCE, LinkOperation.ALL_TO_ALL])
def test_a_group_at_one_switch_has_its_ports(tmp_path: Path, operation: LinkOperation) -> None:
    flat, two = (tree(tmp_path, f"pcie_switches: {count}") for count in (1, 2))
    for ranks in range(2, 9):
        slower = seconds(two, operation, ranks) > seconds(flat, operation, ranks)
        assert slower == bool(4 % ranks)
    # Of unlike switches the fullest counts.
    unlike = tree(tmp_path, "pcie_switches: [0, 0, 0, 0, 0, 0, 1, 1]")
    assert seconds(unlike, operation, 6) == seconds(flat, operation, 6)
    assert seconds(unlike, operation, 7) > seconds(flat, operation, 7)
    # Groups are neighbours: of pairs, the last one has devices at both.
    split = tree(tmp_path, "pcie_switches: [0, 0, 0, 0, 0, 0, 0, 1]")
    assert seconds(split, operation, 2) > seconds(flat, operation, 2)


@pytest.mark.parametrize("operation", [LinkOperation.ALL_REDUCE, LinkOperation.ALL_TO_ALL])
def test_over_nodes_the_uplinks_count_inside_each(tmp_path: Path, operation: LinkOperation) -> None:
    flat, two = (tree(tmp_path, f"pcie_switches: {count}", nodes=2) for count in (1, 2))
    assert seconds(two, operation, 16) > seconds(flat, operation, 16)


@pytest.mark.parametrize(
    ("fabric", "more"),
    [
        ("mesh", "link: 50 GB/s"),
        ("nvswitch", "intra_node: {bandwidth: 300 GB/s}"),
        # What was measured knows the switches.
        ("pcie-tree", "intra_node: {bandwidth: 20 GB/s, measured: true}"),
    ],
)
def test_switches_take_nothing_of_other_links(tmp_path: Path, fabric: str, more: str) -> None:
    found = []
    for switches in ("pcie_switches: 1", "pcie_switches: 2"):
        cluster = tree(tmp_path, f"{more}\n        {switches}", fabric=fabric)
        found.append(seconds(cluster, LinkOperation.ALL_REDUCE))
    assert found[0] == found[1]
