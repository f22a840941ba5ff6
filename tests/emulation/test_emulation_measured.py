"""Rates and round trips of an emulation, 64 hosts, and gloo over it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from emulation_cases import cluster_text, four_hosts, needs_machine, traces, write_cluster

from hetplan.cluster.load import load_cluster
from hetplan.emulation import making
from hetplan.emulation.measuring import PORT, answering, ask, measure, pipe_bytes
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
