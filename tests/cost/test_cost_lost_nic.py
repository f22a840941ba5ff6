"""What a lost NIC leaves, and what it does not touch."""

import pytest
from network_clusters import island, path, two_regions

from hetplan.cluster.node import Nics
from hetplan.cluster.spec import Cluster, IslandLink
from hetplan.cost.goodput.lost_nic import kept_bandwidth, without_nic
from hetplan.errors import InputError


def test_eight_nics_keep_what_was_measured_others_between_one_for_two_and_an_even_spread():
    assert kept_bandwidth(8) == pytest.approx(0.766)
    assert kept_bandwidth(1) == 0.0
    kept = [kept_bandwidth(nics) for nics in range(2, 65)]
    assert kept == sorted(kept)
    assert kept[0] == 0.5
    assert all(0.5 <= part <= (n - 1) / n for n, part in zip(range(2, 65), kept, strict=True))
    with pytest.raises(InputError):
        kept_bandwidth(0)


def test_links_out_of_the_island_are_no_faster_than_its_ports():
    nics = Nics(per_node=4, bandwidth_bytes_per_second=1e10)
    cluster = Cluster(
        name="three",
        islands=(island("a", nics=nics), island("b", nics=nics), island("c", nics=nics)),
        links=(
            IslandLink(between=("b", "a"), link=path(1e10)),
            IslandLink(between=("a", "c"), link=path(1e9)),
            IslandLink(between=("b", "c"), link=path(1e10)),
        ),
    )
    lost = without_nic(cluster, "a", 0, 0)
    most = kept_bandwidth(4) * 1e10
    figures = {
        pair: lost.after.link_between(*pair).bandwidth_bytes_per_second
        for pair in (("a", "b"), ("b", "a"), ("a", "c"), ("b", "c"))
    }
    assert figures == {
        ("a", "b"): pytest.approx(most),
        ("b", "a"): pytest.approx(most),
        ("a", "c"): 1e9,
        ("b", "c"): 1e10,
    }
    assert lost.before.link_between("a", "b") == cluster.link_between("a", "b")


def test_the_only_nic_takes_its_node_with_it():
    nics = Nics(per_node=1, bandwidth_bytes_per_second=4e10)
    cluster = Cluster(name="one", islands=(island("a", nics=nics),))
    lost = without_nic(cluster, "a", 1, 0)
    assert lost.kept == 0.0
    assert lost.after.islands[0].nodes_out == (1,)
    assert "the node is out" in lost.notes[0]
    with pytest.raises(InputError, match="out already"):
        without_nic(lost.after, "a", 1, 0)


def test_what_is_not_there_cannot_be_lost():
    cluster = two_regions()
    for where in (("x", 0, 0), ("a", 2, 0), ("a", -1, 0), ("a", 0, 4), ("a", 0, -1)):
        with pytest.raises(InputError):
            without_nic(cluster, *where)
