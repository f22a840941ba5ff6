"""Hosts, networks, long links and the lines for ip and tc, from cluster files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from emulation_cases import ROOT, cluster_text, four_hosts, write_cluster

from hetplan.cluster.load import load_cluster
from hetplan.emulation import recipe
from hetplan.emulation.layout import lay_out
from hetplan.emulation.values import SCHEMA, Emulation, check_name
from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document


def made(folder: Path, text: str) -> Emulation:
    return lay_out(load_cluster(write_cluster(folder, text)), name="test")


def all_lines(emulation: Emulation) -> list[str]:
    return [
        *recipe.namespace_lines(emulation),
        *recipe.fabric_lines(emulation),
        *recipe.tap_lines(emulation),
        *recipe.fabric_queue_lines(emulation),
        *(
            line
            for host in emulation.hosts
            for line in (*recipe.host_lines(emulation, host), *recipe.host_queue_lines(host))
        ),
    ]


def test_islands_of_a_region_with_a_slow_link_get_networks_of_their_own(tmp_path: Path) -> None:
    text = four_hosts_text().replace(
        "within_region: {bandwidth_per_device: 2 Gbit/s, latency: 50 us",
        "within_region: {bandwidth_per_device: 500 Mbit/s, latency: 2 ms",
    )
    emulation = made(tmp_path, text)
    assert [segment.name for segment in emulation.segments] == [
        "north",
        "south/medium",
        "south/slow",
    ]
    pipes = {pipe.between: pipe for pipe in emulation.pipes}
    assert set(pipes) == {("north", "south"), ("medium", "slow")}
    # Both islands of the south share the link of the regions.
    assert pipes["north", "south"].islands == ((0, 1), (0, 2))
    assert pipes["medium", "slow"].rate_bytes_per_second == 62.5e6
    assert pipes["medium", "slow"].delay_seconds == 0.002


def four_hosts_text() -> str:
    return (ROOT / "configs/clusters/emulated-two-regions.yaml").read_text()


def test_a_host_carries_what_its_devices_or_its_nics_do(tmp_path: Path) -> None:
    text = cluster_text(devices=4)
    emulation = made(tmp_path, text)
    assert emulation.hosts[0].nic_bytes_per_second == 4 * 125e6
    # Four ranks of 1 GB/s are more than a machine's loopback device: left as it is, and said.
    assert emulation.hosts[0].loopback_bytes_per_second is None
    assert any("loopback" in note for note in emulation.notes)
    slower = made(tmp_path, text.replace("bandwidth: 1 GB/s", "bandwidth: 1 Gbit/s"))
    assert slower.hosts[0].loopback_bytes_per_second == 4 * 125e6
    nics = text.replace(
        "        inter_node: {bandwidth: 1 Gbit/s, latency: 50 us}",
        "        nics: {per_node: 2, bandwidth: 1 Gbit/s}\n        inter_node: {latency: 50 us}",
    )
    assert made(tmp_path, nics).hosts[0].nic_bytes_per_second == 2 * 125e6


def test_nodes_that_are_out_are_not_made_and_keep_their_device_numbers(tmp_path: Path) -> None:
    text = cluster_text(regions=1, hosts=3).replace(
        "        memory: 1 GiB", "        memory: 1 GiB\n        nodes_out: [1]"
    )
    emulation = made(tmp_path, text)
    assert [(host.name, host.first_device) for host in emulation.hosts] == [
        ("r0h1", 0),
        ("r0h3", 2),
    ]
    assert emulation.pipes == ()
    assert recipe.tap_lines(emulation) == ()


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("streams: 4, window: 1 MiB", "streams, window"),
        ("streams: 4, loss: 0.001", "streams, loss"),
        ("bandwidth_per_device: 10 Mbit/s", "one device's share"),
    ],
)
def test_what_is_not_played_is_said(tmp_path: Path, limit: str, said: str) -> None:
    link = f"{{bandwidth_shared: 100 Mbit/s, round_trip: 20 ms, {limit}}}"
    emulation = made(tmp_path, cluster_text(link=link))
    assert any(said in note for note in emulation.notes), emulation.notes


@pytest.mark.parametrize("name", ["control", "localhost", "a-control"])
def test_names_of_the_emulation_s_own_are_refused(tmp_path: Path, name: str) -> None:
    text = cluster_text(regions=1, hosts=1).replace('"r0h[1-1]"', name)
    with pytest.raises(InputError, match="cannot be named"):
        made(tmp_path, text)


@pytest.mark.parametrize("name", ["", "-x", "a;b", "../x", "x" * 64, "a\n"])
def test_names_of_emulations_are_checked(name: str) -> None:
    with pytest.raises(InputError, match="cannot be named"):
        check_name(name)


def test_64_hosts_have_64_addresses_and_short_interface_names(tmp_path: Path) -> None:
    emulation = made(tmp_path, cluster_text(regions=4, hosts=16))
    assert len({host.data_address for host in emulation.hosts}) == 64
    assert len({host.mac for host in emulation.hosts}) == 64
    interfaces = re.findall(
        r"(?:link add|dev|link set|name|master) (\S+)", "\n".join(all_lines(emulation))
    )
    assert interfaces
    assert max(map(len, interfaces)) <= 15  # IFNAMSIZ, less the closing zero


def test_no_word_of_the_cluster_file_is_in_a_line_for_ip_or_tc() -> None:
    emulation = lay_out(four_hosts(), name="own-name")
    text = "\n".join(all_lines(emulation))
    for word in ("north", "south", "fast", "medium", "slow", "own-name", "emulated"):
        assert word not in text


def test_an_emulation_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    emulation = lay_out(four_hosts(), name="test")
    path = tmp_path / "emulation.json"
    path.write_text(encode(emulation, schema=SCHEMA))
    assert decode(read_document(path), Emulation, schema=SCHEMA) == emulation
