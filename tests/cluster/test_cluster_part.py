"""What is left of a cluster: any hosts may be gone, and every device stays where it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import cluster_texts
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetplan.cluster.hosts import host_names, host_of_device, part_back, part_left
from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.errors import InputError
from hetplan.job.spec import Forbids, Job, Optimizer, Precision
from hetplan.search.space.allowed import allowed_cluster


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Cluster]:
    """Two regions of unlike islands: with names, without, with nodes out."""
    island = cluster_texts.island
    named = '        node_names: ["h[1-3]"]\n'
    out = "        nodes_out: [1]\n"
    texts = [
        cluster_texts.cluster({"r": island("a", nodes=3, per_node=2)}),
        cluster_texts.cluster(
            {
                "north": island("a", nodes=3, per_node=4, more=named)
                + island("b", nodes=2, per_node=1),
                "south": island("c", nodes=4, per_node=8, more=out) + island("d", nodes=1),
            },
            cluster_texts.DEFAULTS,
        ),
    ]
    folder = tmp_path_factory.mktemp("clusters")
    return [_load(folder / f"{at}.yaml", text) for at, text in enumerate(texts)]


def _load(path: Path, text: str) -> Cluster:
    path.write_text(text)
    return load_cluster(path)


def usable(cluster: Cluster, device: int) -> bool:
    return not cluster.island_of_device(device).is_out(cluster.node_of_device(device))


@given(data=st.data())
def test_every_device_stays_on_its_host(clusters: Sequence[Cluster], data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from(clusters))
    gone = data.draw(st.sets(st.sampled_from(host_names(whole))))
    left = part_left(whole, gone)

    assert left.num_devices == whole.num_devices
    assert host_names(left) == tuple(name for name in host_names(whole) if name not in gone)
    for device in range(whole.num_devices):
        host = host_of_device(whole, device)
        assert host_of_device(left, device) == host
        assert usable(left, device) == (usable(whole, device) and host not in gone)
        assert left.island_of_device(device).name == whole.island_of_device(device).name


@given(data=st.data())
def test_what_is_left_does_not_depend_on_the_order_of_losses(
    clusters: Sequence[Cluster], data: st.DataObject
) -> None:
    whole = data.draw(st.sampled_from(clusters))
    names = st.sets(st.sampled_from(host_names(whole)))
    first, second = data.draw(names), data.draw(names)
    at_once = part_left(whole, first | second)
    assert part_left(part_left(whole, first), second) == at_once
    assert part_left(part_left(whole, second), first) == at_once


def test_hosts_that_are_gone_are_forbidden_nodes(clusters: Sequence[Cluster]) -> None:
    """The search sees what is left as it sees a job that forbids those nodes."""
    job = Job(
        name="j",
        global_batch_size=8,
        sequence_length=8,
        precision=Precision.FLOAT32,
        optimizer=Optimizer.SGD,
        target="native",
    )
    whole = clusters[1]
    forbidding = replace(job, forbid=Forbids(nodes=("a/1", "c/3")))
    left = part_left(whole, {"h2", "c-3"})
    assert left == part_left(whole, {"a/1", "c/3"})
    assert allowed_cluster(left, job) == allowed_cluster(whole, forbidding)
    named = replace(job, forbid=Forbids(nodes=("h2", "c-3")))
    assert allowed_cluster(whole, named) == allowed_cluster(whole, forbidding)
    assert part_back(left, "a/1") == part_back(left, "h2") == part_left(whole, {"c/3"})


def test_an_unknown_host_is_named_with_those_that_are_near(clusters: Sequence[Cluster]) -> None:
    with pytest.raises(InputError, match="unknown host 'h4'; nearest: h3"):
        part_left(clusters[1], {"h4"})
    with pytest.raises(InputError, match="island c has no node 9; it has c/0 to c/"):
        part_left(clusters[1], {"c/9"})
    with pytest.raises(InputError, match="unknown island 'A/c'"):
        part_left(clusters[1], {"A/c/1"})
