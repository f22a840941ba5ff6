from itertools import combinations

import pytest
from cluster_texts import DEFAULTS, cluster, island, many_islands
from counted_steps import steps_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cluster import hosts as topology
from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.load import load_cluster
from hetplan.cluster.node import Nics, count_names, expand_names
from hetplan.cluster.spec import Cluster

KINDS = load_catalogue()
steady = settings(derandomize=True, deadline=None, max_examples=100)


def read(tmp_path, text: str) -> Cluster:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return load_cluster(path, KINDS)


@given(
    per_node=st.integers(1, 16), devices=st.integers(1, 16), most=st.integers(1, 4), data=st.data()
)
@steady
def test_no_nic_is_promised_twice(per_node, devices, most, data):
    of_device = data.draw(
        st.just(()) | st.lists(st.integers(0, per_node - 1), min_size=devices, max_size=devices)
    )
    nics = Nics(
        per_node=per_node,
        bandwidth_bytes_per_second=1.0,
        most_per_device=most,
        of_device=tuple(of_device),
    )
    load = [0.0] * per_node
    share = nics.share_bytes_per_second(devices)
    for local in range(devices):
        own = nics.of(local, devices)
        assert own
        assert len(own) <= most
        for nic in own:
            load[nic] += share / len(own)
    assert max(load) <= 1 + 1e-9
    assert max(load) == pytest.approx(1) or (devices % per_node and not of_device)


@given(first=st.integers(0, 500), count=st.integers(1, 500), width=st.integers(1, 5))
@steady
def test_ranges_of_names_stand_for_what_they_say(first, count, width):
    entry = f"n[{first:0{width}d}-{first + count - 1}]x"
    names = tuple(expand_names((entry,)))
    assert len(names) == count_names(entry) == len(set(names))
    assert names[0] == f"n{first:0{width}d}x"
    assert [int(name[1:-1]) for name in names] == list(range(first, first + count))


def scan(cluster: Cluster, device: int) -> tuple[str, int, int]:
    """Where a device is, found by walking."""
    for each in cluster.islands:
        if device < each.num_devices:
            return each.name, device // each.devices_per_node, device % each.devices_per_node
        device -= each.num_devices
    raise AssertionError


@given(data=st.data())
@steady
def test_look_ups_agree_with_a_walk(tmp_path_factory, data):
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=6))
    islands = "".join(
        island(f"i{n}", nodes=nodes, per_node=devices) for n, (nodes, devices) in enumerate(sizes)
    )
    found = read(
        tmp_path_factory.mktemp("walk"),
        cluster({"r": island("first") + islands, "s": island("last")}, DEFAULTS),
    )
    for device in range(found.num_devices):
        place = topology.place_of(found, device)
        assert (place.island.name, place.node, place.local) == scan(found, device)
        assert found.first_device(place.island.name) <= device


def test_a_device_of_131072_is_placed_without_a_walk_over_the_islands(tmp_path):
    def place_last(found):
        last = found.num_devices - 1
        found.island_of_device(last)
        found.node_of_device(last)

    few, many = (read(tmp_path, many_islands(count, 17)) for count in (10, 1000))
    assert many.num_devices >= 131_072
    assert steps_of(lambda: place_last(many)) == steps_of(lambda: place_last(few))


def test_a_thousand_islands_keep_their_defaults(tmp_path):
    path = tmp_path / "many.yaml"
    path.write_text(many_islands(1000, 13))
    found = load_cluster(path, KINDS)
    assert (len(found.islands), found.num_devices) == (1000, 104_000)
    assert (found.links, found.region_links) == ((), ())
    for left, right in list(combinations(found.islands, 2))[::9973]:
        link = found.link_between(left.name, right.name)
        latency = 2e-5 if left.region == right.region else 0.015
        assert link.latency_seconds == pytest.approx(latency)
