"""Plans whose hosts are addresses of this machine's loopback, to check them for real."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "launchers"))
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from launch_results import result_of
from runtime_cases import GPT, job, plan_of
from runtime_cases import island as any_island

from hetplan.cluster.launch_domains import LaunchDomain
from hetplan.cluster.links import Link, Transport
from hetplan.cluster.spec import Cluster, IslandLink
from hetplan.emitters.placement import sheet_of
from hetplan.emitters.preflight import CheckSheet, check_sheet
from hetplan.emitters.trainer_launch import EmitOptions
from hetplan.search.result import SearchResult

SLOW = Link(
    bandwidth_bytes_per_second=5e6,
    latency_seconds=1e-4,
    transport=Transport.HOST_STAGED,
    streams=1,
)


def free_ports(count: int) -> list[int]:
    """So many ports next to each other that nothing listens on now."""
    for _ in range(100):
        with socket.socket() as first:
            first.bind(("", 0))
            start = first.getsockname()[1]
        try:
            for port in range(start, start + count):
                with socket.socket() as each:
                    each.bind(("", port))
        except (OSError, OverflowError):
            continue
        return list(range(start, start + count))
    raise RuntimeError("no free ports")


def two_hosts(link: Link = SLOW) -> Cluster:
    """Two islands of one host each, `one` and `two`, on addresses of the loopback."""
    islands = tuple(
        replace(any_island(name, "cpu", 2), node_names=(host,), region=region)
        for name, host, region in (("a", "one", "here"), ("b", "two", "there"))
    )
    ports = free_ports(4)
    domains = tuple(
        LaunchDomain(
            name=f"d{name}",
            islands=(name,),
            addresses=((host, f"127.0.0.{at + 1}"),),
            first_port=ports[2 * at],
            last_port=ports[2 * at + 1],
        )
        for at, (name, host) in enumerate((("a", "one"), ("b", "two")))
    )
    return Cluster(
        name="loopback",
        islands=islands,
        links=(IslandLink(between=("a", "b"), link=link),),
        launch_domains=domains,
    )


def two_host_result(link: Link = SLOW) -> SearchResult:
    """A pipeline of two stages, tp 2, one on each host."""
    machines, task = two_hosts(link), job()
    plan = plan_of(GPT, task, (3, 1), machines, "ab", tp=2, microbatch_size=2)
    return result_of(GPT, machines, task, plan)


def sheet_for(result: SearchResult, options: EmitOptions | None = None) -> CheckSheet:
    """What check.py is told of it."""
    sheet = sheet_of(result.plan, result.inputs.cluster)
    return check_sheet(result, sheet, options or EmitOptions(python=sys.executable))
