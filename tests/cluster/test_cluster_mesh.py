"""Nodes whose devices have a link of their own to every other: what pairs and groups get."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.predict.link import prior
from hetplan.profiling.samples import LinkOperation

TEXT = """schema: hetplan.cluster/3
name: mesh
regions:
  - name: here
    islands:
      - name: only
        device: amd-mi300x
        nodes: 1
        devices_per_node: 8
        intra_node: {bandwidth: BANDWIDTH, latency: 3 us}
"""


def node(folder: Path, bandwidth: str) -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(TEXT.replace("BANDWIDTH", bandwidth))
    return load_cluster(path)


@pytest.mark.parametrize(("ranks", "links"), [(2, 1), (4, 3), (8, 7)])
def test_a_group_of_a_mesh_has_its_ranks_links_to_each_other(
    tmp_path: Path, ranks: int, links: int
) -> None:
    """The time of the bytes is that of a node whose devices have so many times 64 GB/s."""
    mesh = node(tmp_path, "448 GB/s").islands[0].intra_node
    assert mesh.one_peer_bytes_per_second == pytest.approx(64e9)
    switched = prior.NODE.at(links * 64e9)
    found = prior.collective(mesh, LinkOperation.ALL_REDUCE.value, ranks, 1e9).seconds
    assert found == pytest.approx(switched.seconds(LinkOperation.ALL_REDUCE.value, ranks, 1e9, 1))
    assert prior.send(mesh).seconds_per_byte == pytest.approx(prior.NODE_SEND.bytes / 64e9)


def test_a_measured_bandwidth_of_a_mesh_scales_its_pairs(tmp_path: Path) -> None:
    assert node(tmp_path, "350 GB/s").islands[0].intra_node.one_peer_bytes_per_second == 50e9
    assert node(tmp_path, "64 GB/s").islands[0].intra_node.one_peer_bytes_per_second is None
