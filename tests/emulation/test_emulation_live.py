"""An emulation that is up: who reaches whom over what, commands on its hosts, and its rates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulation_cases import (
    FOUR_HOSTS,
    cluster_text,
    four_hosts,
    hetplan,
    needs_machine,
    traces,
    write_cluster,
)
from emulation_rates import PORT, answering, ask

from hetplan.cluster.load import load_cluster
from hetplan.emulation import making, namespaces
from hetplan.emulation.running import HostStatus, reached_from, run_on_all, start
from hetplan.emulation.traffic import host_bytes, pipe_bytes, relay_runs
from hetplan.emulation.values import Emulation
from hetplan.errors import HetplanError

# One worker for all of them: they look for what is left on the machine.
pytestmark = [needs_machine, pytest.mark.xdist_group("emulation")]
NAME = f"test-live-{os.getpid()}"
OTHER = f"{NAME}-other"


@pytest.fixture(scope="module")
def live() -> Iterator[Emulation]:
    before = traces(NAME)
    try:
        yield making.make(four_hosts(), name=NAME)
    finally:
        making.remove(NAME)
    assert traces(NAME) == before


def reached(emulation: Emulation, host: str, *names: str, seconds: float = 5.0) -> tuple[str, ...]:
    return reached_from(emulation, host, names, seconds=seconds, limit_seconds=120.0)


def output(emulation: Emulation, host: str, *command: str) -> str:
    process = start(emulation, host, command, stdout=subprocess.PIPE)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return text.decode()


def test_the_machine_s_own_network_is_untouched(live: Emulation) -> None:
    with_it = traces(NAME)
    assert len(with_it.namespaces) == 5
    other = traces("none")
    assert with_it.links == other.links
    assert with_it.settings == other.settings


def test_hosts_of_all_regions_reach_each_other_over_the_shaped_network(live: Emulation) -> None:
    for host in live.hosts:
        others = [other.name for other in live.hosts if other.number != host.number]
        names = (*others, *(f"{other}-control" for other in others))
        assert reached(live, host.name, *names) == names


def test_what_crosses_regions_crosses_the_relay_and_control_does_not(live: Emulation) -> None:
    size = 2_000_000
    with answering(live, "south1"):
        before, hosts_before = pipe_bytes(live), host_bytes(live)
        ask(live, "north1", "rate", "south1", PORT, size)
        after, hosts_after = pipe_bytes(live), host_bytes(live)
        assert after[0].source == "north"
        assert after[0].sent_bytes - before[0].sent_bytes > 2 * size
        assert hosts_after[0].sent_bytes - hosts_before[0].sent_bytes > 2 * size
        # The kernel asks for neighbours now and then.
        assert hosts_after[0].control_sent_bytes - hosts_before[0].control_sent_bytes < 10_000
        # The same over the control network: nothing on the link, all of it on the other interface.
        ask(live, "north1", "rate", "south1-control", PORT, size)
        assert pipe_bytes(live)[0].sent_bytes == after[0].sent_bytes
        control = host_bytes(live)[0].control_sent_bytes - hosts_after[0].control_sent_bytes
        assert control > 2 * size


def test_a_thread_that_was_on_a_host_leaves_it_before_it_ends(live: Emulation) -> None:
    """Or taking the emulation down would find this process there, and end it."""
    inodes = {os.stat(namespaces.path_of(live.hosts[0].namespace)).st_ino}
    for _ in range(200):
        namespaces.inside(live.hosts[0].namespace, lambda: None)
        assert not namespaces.is_in(os.getpid(), inodes)


def test_no_route_leads_around_the_shaped_link(live: Emulation) -> None:
    for host in live.hosts:
        routes = json.loads(output(live, host.name, "ip", "-j", "route", "show"))
        assert {(route["dst"], route["dev"]) for route in routes} == {
            (f"10.{live.network}.0.0/24", "eth0"),
            (f"10.{live.network}.1.0/24", "ctl0"),
        }
    output(live, "south1", "ip", "link", "set", "eth0", "down")
    try:
        # Its shaped address is not reached over the interface that is still there.
        for host in ("north1", "south2"):
            found = reached(live, host, "south1", "south1-control", seconds=0.5)
            assert found == ("south1-control",)
    finally:
        output(live, "south1", "ip", "link", "set", "eth0", "up")
    # It has lost its neighbours and asks for them.
    assert reached(live, "north1", "south1") == ("south1",)
    assert reached(live, "south2", "south1") == ("south1",)


def test_a_host_that_cannot_ask_says_why(live: Emulation) -> None:
    with pytest.raises(HetplanError, match=r"host away could not ask whom it reaches: .*away"):
        reached(live, "away", "north1")


def test_a_command_knows_where_it_is(live: Emulation) -> None:
    program = "import os, json; print(json.dumps([os.uname().nodename, dict(os.environ)]))"
    name, variables = json.loads(output(live, "south2", sys.executable, "-c", program))
    assert name == "south2"
    assert variables["HETPLAN_HOST"] == "south2"
    assert variables["HETPLAN_HOST_NUMBER"] == "3"
    assert variables["HETPLAN_DEVICE_KIND"] == "emulated-slow"
    assert variables["GLOO_SOCKET_IFNAME"] == "eth0"
    shown = output(live, "south2", "ls", "/sys/class/net").split()
    assert sorted(shown) == ["ctl0", "eth0", "lo"]
    assert os.uname().nodename != "south2"


def test_all_hosts_run_a_command_and_each_status_is_told(live: Emulation) -> None:
    lines: list[tuple[str, bool, str]] = []
    statuses = run_on_all(
        live.name,
        ("sh", "-c", 'echo "out $HETPLAN_HOST"; echo oops >&2; exit $HETPLAN_HOST_NUMBER'),
        on_line=lambda *line: lines.append(line),
    )
    assert statuses == tuple(
        HostStatus(host=host.name, status=at) for at, host in enumerate(live.hosts)
    )
    assert {line for line in lines if not line[1]} == {
        (host.name, False, f"out {host.name}") for host in live.hosts
    }
    assert sum(is_error and text == "oops" for _, is_error, text in lines) == 4


def test_one_failure_ends_the_others_when_asked_to(live: Emulation) -> None:
    statuses = run_on_all(
        live.name,
        ("sh", "-c", '[ "$HETPLAN_HOST" = south1 ] && exit 5; exec sleep 600'),
        on_line=lambda *line: None,
        end_others=True,
    )
    assert [each.status for each in statuses] == [143, 143, 5, 143]


@pytest.mark.parametrize(
    ("command", "status"),
    [(("sh", "-c", "exit 7"), 7), (("no-such-program",), 127), (("/etc/hosts",), 126)],
)
def test_the_exit_status_of_a_command_is_hetplan_s(
    live: Emulation, command: tuple[str, ...], status: int
) -> None:
    assert hetplan("emulate", "run", live.name, "north2", "--", *command).returncode == status


def test_a_name_that_is_up_is_refused_and_stays_up(live: Emulation) -> None:
    done = hetplan("emulate", "up", str(FOUR_HOSTS), "--name", live.name)
    assert done.returncode == 2
    assert "is up already" in done.stderr
    assert relay_runs(live)


# ---- of the right size, and with many hosts

TRIES = 5
"""Another process may take the cores for a moment; a wrong figure is wrong every time."""


PAYLOAD_SHARE = 1448 / 1514
"""Of a full frame: without Ethernet's 14 bytes, IPv4's 20, TCP's 20 and its timestamps' 12."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "destination", "rate", "round_trip"),
    [
        ("north1", "north2", 2e9 / 8, 0.0),
        ("south1", "south2", 2e9 / 8, 0.0),
        ("north1", "south1", 200e6 / 8, 10e-3),
    ],
)
def test_links_have_their_rates_and_round_trips(
    live: Emulation, source: str, destination: str, rate: float, round_trip: float
) -> None:
    for left in reversed(range(TRIES)):
        with answering(live, destination):
            trips = ask(live, source, "round-trip", destination, PORT, 50)
            received = ask(live, source, "rate", destination, PORT, round(2 * rate))
        share = received / (PAYLOAD_SHARE * rate)
        right = abs(share - 1) <= 0.1 and abs(min(trips) - round_trip) <= 1e-3
        if right or not left:
            break
    assert right, (share, min(trips))


@pytest.mark.slow
def test_64_hosts_of_four_regions(tmp_path: Path) -> None:
    cluster = load_cluster(write_cluster(tmp_path, cluster_text(regions=4, hosts=16)))
    before = traces(OTHER)
    emulation = making.make(cluster, name=OTHER)
    try:
        assert len(traces(OTHER).namespaces) == 65
        names = [host.name for host in emulation.hosts]
        assert reached(emulation, names[0], *names[1:], seconds=30) == tuple(names[1:])
        lines: list[tuple[str, bool, str]] = []
        statuses = run_on_all(OTHER, ("true",), on_line=lambda *line: lines.append(line))
        assert [each.status for each in statuses] == [0] * 64, lines
    finally:
        making.remove(OTHER)
    assert traces(OTHER) == before
