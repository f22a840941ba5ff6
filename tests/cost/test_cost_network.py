"""Which segments a transfer crosses: by hand, by law; the NICs of one transfer by themselves."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from network_clusters import PLAIN, WITH_HOST, clusters, island, path, two_regions

from hetplan.cluster.node import Nics
from hetplan.cluster.spec import Cluster, IslandLink
from hetplan.cost.network.group_shares import _KINDS, _PLACE_BITS, Paths, paths
from hetplan.cost.network.segments import SegmentKind, nics_crossed
from hetplan.errors import InputError

steady = settings(derandomize=True, deadline=None, max_examples=150)


def crossed(cluster: Cluster, *pairs: tuple[int, int]) -> Paths:
    return paths(cluster, *(np.array(ends, dtype=np.int64) for ends in zip(*pairs, strict=True)))


def segments(cluster: Cluster, source: int, target: int) -> dict[tuple[str, int, str], float]:
    """(kind, device or NIC of the cluster, way) of what one transfer crosses, with capacities."""
    found = crossed(cluster, (source, target))
    named = {}
    for number, capacity in zip(found.numbers.tolist(), found.capacities.tolist(), strict=True):
        code = number >> 2 * _PLACE_BITS
        place = number & ((1 << _PLACE_BITS) - 1)
        named[_KINDS[code >> 1].name, place, "out" if code & 1 else "in"] = capacity
    assert len(named) == found.numbers.size
    return named


def kinds(cluster: Cluster, source: int, target: int) -> set[str]:
    return {f"{kind} {place} {way}" for kind, place, way in segments(cluster, source, target)}


def test_paths_by_hand():
    cluster = two_regions()
    assert segments(cluster, 3, 3) == {}
    assert kinds(cluster, 0, 3) == {"FABRIC_PORT 0 out", "FABRIC_PORT 3 in"}
    ports = {"DEVICE_PORT 1 out", "NIC 1 out", "RAIL 1 out", "NIC 5 in", "DEVICE_PORT 5 in"}
    assert kinds(cluster, 1, 5) == ports
    # Rails are separate: the bytes change to rail 2 inside the sender's node.
    assert kinds(cluster, 1, 6) == {
        "FABRIC_PORT 1 out", "FABRIC_PORT 2 in", "DEVICE_PORT 1 out", "NIC 2 out", "RAIL 2 out",
        "NIC 6 in", "DEVICE_PORT 6 in",
    }  # fmt: skip
    # Across regions bytes are staged, and share a line.
    line = {each for each in kinds(cluster, 0, 17) if "REGION_LINK" in each}
    assert len(line) == 1
    assert kinds(cluster, 0, 17) - line == {
        "DEVICE_PORT 0 out", "HOST_PORT 0 out", "NIC 0 out", "NIC 17 in", "HOST_PORT 17 in",
        "DEVICE_PORT 17 in",
    }  # fmt: skip


def shared(cluster: Cluster, *pairs: tuple[int, int]) -> set[str]:
    """Kinds of what all of these transfers cross together."""
    found = crossed(cluster, *pairs)
    users = np.bincount(found.segment, minlength=found.numbers.size)
    codes = found.numbers[users == len(pairs)] >> 2 * _PLACE_BITS + 1
    return {_KINDS[code].name for code in codes.tolist()}


def test_what_transfers_share():
    cluster = two_regions()
    # All islands of two regions share their line, one line in each direction.
    assert shared(cluster, (0, 16), (9, 20)) == {"REGION_LINK"}
    assert shared(cluster, (0, 16), (16, 0)) == set()
    # A listed link is its own.
    own = IslandLink(between=("c", "a"), link=path(1e9, shared=3e9))
    listed = replace(cluster, links=(own,))
    assert 3e9 in segments(listed, 0, 16).values()
    assert shared(listed, (0, 16), (9, 20)) == set()
    assert segments(listed, 8, 16) == segments(cluster, 8, 16)
    # Two devices share a NIC, and a lone one has no more than its share of it.
    nics = Nics(per_node=2, bandwidth_bytes_per_second=1e10)
    one = Cluster(name="one", islands=(island("a", nics=nics, inter_node=path(5e9)),))
    assert "NIC" in shared(one, (0, 4), (1, 5))
    assert "NIC" not in shared(one, (0, 4), (2, 6))
    assert segments(one, 0, 4)["DEVICE_PORT", 0, "out"] == 5e9
    # A port that nobody described is shared by all links, each with a figure of its own.
    two = Cluster(
        name="two",
        islands=(island("a"), island("b")),
        links=(IslandLink(between=("a", "b"), link=path(1.2e10)),),
    )
    assert shared(two, (0, 4), (0, 8)) == {"NIC"}
    assert segments(two, 0, 4)["NIC", 0, "out"] == 1.2e10


def test_switch_uplinks_carry_what_is_staged_or_changes_the_switch():
    switches = (0, 0, 1, 1)
    between = path(1e10, staged=True)
    made = island(
        "a", device=WITH_HOST, switch_of_device=switches, intra_node=path(3e10), inter_node=between
    )
    staged = Cluster(name="one", islands=(made,))
    assert {"PCIE_SWITCH 0 out", "PCIE_SWITCH 5 in"} < kinds(staged, 1, 6)
    # No fabric but PCIe: to a device at the other switch over both uplinks, to the neighbour none.
    assert {"PCIE_SWITCH 0 out", "PCIE_SWITCH 1 in"} < kinds(staged, 0, 2)
    assert len(segments(staged, 0, 1)) == 2
    # Straight from the device to a NIC: over the uplink where the NIC hangs at another switch.
    nics = Nics(per_node=2, bandwidth_bytes_per_second=1e10, of_device=(0, 1, 1, 1))
    made = island("a", device=WITH_HOST, switch_of_device=switches, nics=nics)
    direct = Cluster(name="one", islands=(made,))
    assert "PCIE_SWITCH 0 out" in kinds(direct, 1, 6)  # its NIC 1 is at switch 1
    assert not any("SWITCH" in each for each in kinds(direct, 0, 4))
    # What the kind does not say limits nothing.
    unknown = replace(direct, islands=(replace(made, device=PLAIN),))
    assert not any("SWITCH" in each for each in kinds(unknown, 1, 6))


def test_wrong_ends_are_refused():
    cluster = two_regions()
    for ends in ((0, 24), (-3, 0)):
        with pytest.raises(InputError):
            crossed(cluster, ends)
    with pytest.raises(InputError, match="no link"):
        crossed(replace(cluster, across_regions=None), (0, 16))
    assert paths(cluster, *[np.zeros(0, dtype=np.int64)] * 2).num_flows == 0


@given(cluster=clusters(), data=st.data())
@steady
def test_there_and_back_are_different_segments_and_nics_are_those_of_one_transfer(cluster, data):
    device = st.integers(0, cluster.num_devices - 1)
    pair = data.draw(device), data.draw(device)
    ways = [crossed(cluster, ends) for ends in (pair, pair[::-1])]
    rail = _KINDS.index(SegmentKind.RAIL)
    numbers = [
        {number for number in way.numbers.tolist() if number >> 2 * _PLACE_BITS + 1 != rail}
        for way in ways
    ]
    assert not numbers[0] & numbers[1]
    assert all(way.capacities.min(initial=math.inf) > 0 for way in ways)
    for kind in (SegmentKind.NIC, SegmentKind.DEVICE_PORT, SegmentKind.HOST_PORT):
        codes = [[n >> 2 * _PLACE_BITS + 1 for n in way.numbers.tolist()] for way in ways]
        assert codes[0].count(_KINDS.index(kind)) == codes[1].count(_KINDS.index(kind))
    # NICs that are described, as the many transfers of arrays have them.
    for ends in (pair, pair[::-1]):
        found = sorted(way for kind, _, way in segments(cluster, *ends) if kind == "NIC")
        own = [each for each in nics_crossed(cluster, *ends)]
        described = [cluster.island_of_device(end).nics is not None for end in ends]
        wanted = ["out"] * described[0] + ["in"] * described[1] if found else []
        assert ["out" if each.outgoing else "in" for each in own] == wanted
