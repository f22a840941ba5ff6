"""Rates and round trips of an emulation, 64 hosts, and gloo over it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from emulation_cases import cluster_text, four_hosts, needs_machine, traces, write_cluster

from hetplan.cluster.load import load_cluster
from hetplan.emulation import making
from hetplan.emulation.measuring import PORT, answering, ask, host_bytes, measure, pipe_bytes
from hetplan.emulation.running import emulated, run_on_all
from hetplan.emulation.tools import program

pytestmark = [needs_machine, pytest.mark.xdist_group("emulation"), pytest.mark.slow]
NAME = f"test-measured-{os.getpid()}"
TRIES = 5
"""Another process may take the cores for a moment; a wrong figure is wrong every time."""


def test_links_have_their_rates_and_round_trips() -> None:
    with emulated(four_hosts(), name=NAME) as emulation:
        for left in reversed(range(TRIES)):
            found = measure(emulation)
            right = all(
                abs(link.rate_share - 1) <= 0.1
                and abs(link.least_round_trip_seconds - link.round_trip_seconds) <= 1e-3
                for link in found
            )
            if right or not left:
                break
    assert [link.over for link in found] == ["north", "south", "north - south"]
    assert right, found


def test_hosts_share_a_long_link(tmp_path: Path) -> None:
    # Two senders of 100 Mbit/s together, through a buffer that drops what is too much.
    cluster = load_cluster(write_cluster(tmp_path, cluster_text(hosts=2)))
    with emulated(cluster, name=NAME) as emulation, answering(emulation, "r1h1", "r1h2"):
        began = time.monotonic()
        statuses = run_on_all(
            NAME,
            (
                *("sh", "-c"),
                'case $HETPLAN_HOST in r0*) exec "$0" "$@" rate '
                f"r1h${{HETPLAN_HOST#r0h}} {PORT} 12000000 ;; esac",
                *program("probes"),
            ),
            on_line=lambda *line: None,
        )
        seconds = time.monotonic() - began
        carried = pipe_bytes(emulation)[0].sent_bytes
    assert not any(each.status for each in statuses)
    assert carried > 2 * 12e6
    assert carried / seconds <= 12.5e6


def test_64_hosts_of_four_regions(tmp_path: Path) -> None:
    cluster = load_cluster(write_cluster(tmp_path, cluster_text(regions=4, hosts=16)))
    before = traces(NAME)
    emulation = making.make(cluster, name=NAME)
    try:
        assert len(traces(NAME).namespaces) == 65
        names = [host.name for host in emulation.hosts]
        with answering(emulation, *names[1:]):
            assert ask(emulation, names[0], "reach", 30, *names[1:]) == [*names[1:]]
        lines: list[tuple[str, bool, str]] = []
        statuses = run_on_all(NAME, ("true",), on_line=lambda *line: lines.append(line))
        assert [each.status for each in statuses] == [0] * 64, lines
    finally:
        making.remove(NAME)
    assert traces(NAME) == before


GLOO = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group(
    "gloo", init_method=f"tcp://{os.environ['HETPLAN_RENDEZVOUS_ADDRESS']}:29501",
    rank=int(os.environ["HETPLAN_HOST_NUMBER"]), world_size=int(os.environ["HETPLAN_HOSTS"]))
x = torch.full((500_000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
print(x[0].item(), x[-1].item(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_gloo_reduces_over_the_shaped_links() -> None:
    lines: list[str] = []
    with emulated(four_hosts(), name=NAME) as emulation:
        statuses = run_on_all(
            NAME,
            (sys.executable, "-W", "ignore", "-c", GLOO),
            on_line=lambda host, is_error, line: lines.append(line),
        )
        hosts, pipes = host_bytes(emulation), pipe_bytes(emulation)
    assert [each.status for each in statuses] == [0] * 4, lines
    assert lines.count("10.0 10.0") == 4
    # A ring of 4 sends 2 MB * 2 * 3/4 from each rank; meeting took the control network.
    assert all(each.sent_bytes > 3e6 for each in hosts)
    assert all(each.control_sent_bytes < 100_000 for each in hosts)
    assert all(each.sent_bytes > 3e6 for each in pipes)
