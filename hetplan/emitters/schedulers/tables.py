"""What does each host's script read about its agents: which ranks, devices, environment, arguments?

Tables are tab-separated lines with a heading, so that bash reads them with `read` and no text of
theirs is ever evaluated. Scripts of a plan for a thousand hosts are as small as those for two.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hetplan.cluster.devices import CPU_KIND
from hetplan.cluster.launch_domains import Scheduler
from hetplan.emitters.quoting import check_printable
from hetplan.emitters.sheet import Agent, Host, LaunchSheet
from hetplan.emitters.trainer_launch import TrainerLaunch
from hetplan.emitters.vendors import vendor_of
from hetplan.errors import Fault, InputError

AGENTS_FILE = "agents.tsv"
ENVIRONMENT_FILE = "agents-environment.tsv"
ARGUMENTS_FILE = "agents-arguments.tsv"
AGENTS_HEADING = (
    "node_rank",
    "host",
    "address",
    "domain",
    "first_rank",
    "ranks",
    "local_devices",
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_CELL = re.compile(r"[A-Za-z0-9._:,-]+", re.ASCII)

Variables = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """What all hosts share, and what differs by agent."""

    common: Variables
    """Environment of all agents."""
    agents: str
    environment: str
    """Environment of single agents; the heading alone where there is none."""
    arguments: str
    token: str
    """Of this job at its barrier: two that differ in any of these have two."""


def tables_of(sheet: LaunchSheet, launch: TrainerLaunch) -> Tables:
    """The tables; an InputError where agents of one host cannot be kept to their own devices."""
    for each in (launch.agent_environment, launch.agent_arguments):
        if each and len(each) != len(sheet.agents):
            raise ValueError(f"{len(each)} entries for {len(sheet.agents)} agents")
    given = launch.agent_environment or ((),) * len(sheet.agents)
    used = used_devices(sheet)
    own = [
        _settled((*launch.environment, *variables, *_pod_devices(agent, used[agent.host.name])))
        for agent, variables in zip(sheet.agents, given, strict=True)
    ]
    _check_apart(sheet, own)
    common = tuple(pair for pair in own[0] if all(pair in each for each in own))
    shared = set(common)
    agents = _table(AGENTS_HEADING, (_agent_row(agent) for agent in sheet.agents))
    environment = _table(
        ("node_rank", "variable"),
        (
            (str(agent.node_rank), f"{name}={value}")
            for agent, variables in zip(sheet.agents, own, strict=True)
            for name, value in variables
            if (name, value) not in shared
        ),
    )
    arguments = _table(
        ("node_rank", "word"),
        (
            (str(agent.node_rank), word)
            for agent, flags in zip(sheet.agents, launch.agent_arguments, strict=False)
            for flag in flags
            for word in flag
        ),
    )
    whole = repr((agents, environment, arguments, common, launch.program, launch.arguments))
    return Tables(
        common=common,
        agents=agents,
        environment=environment,
        arguments=arguments,
        token=hashlib.sha256(whole.encode()).hexdigest()[:16],
    )


def _settled(variables: Variables) -> Variables:
    """Every variable once, with its last value."""
    for name, value in variables:
        if not _VARIABLE.fullmatch(name):
            raise InputError(f"{name[:60]!a} is no name of an environment variable")
        check_printable(value, "table")
    return tuple(dict(variables).items())


def _agent_row(agent: Agent) -> tuple[str, ...]:
    host = agent.host
    row = (
        str(agent.node_rank),
        host.name,
        host.address,
        host.domain.name,
        str(agent.first_rank),
        str(agent.num_ranks),
        ",".join(map(str, agent.local_devices)),
    )
    for cell in row:
        # An empty cell would shift those after it, as bash reads them.
        if not _CELL.fullmatch(cell):
            raise InputError(f"{cell[:60]!a} cannot stand in {AGENTS_FILE}: rename the host")
    return row


def _table(heading: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["\t".join(heading)]
    for row in rows:
        for cell in row:
            check_printable(cell, "table")
        lines.append("\t".join(row))
    return "\n".join(lines) + "\n"


def used_devices(sheet: LaunchSheet) -> dict[str, tuple[int, ...]]:
    """By host its devices that hold ranks, ascending."""
    found: dict[str, list[int]] = {}
    for agent in sheet.agents:
        found.setdefault(agent.host.name, []).extend(agent.local_devices)
    return {host: tuple(sorted(devices)) for host, devices in found.items()}


def _pod_devices(agent: Agent, used: tuple[int, ...]) -> Variables:
    """Visible devices of one of several agents in a pod.

    A pod counts its own devices from 0, so that they are named by their places among those of the
    host that hold ranks.
    """
    host = agent.host
    visible = vendor_of(host.vendor, host.device_kind).visible
    if host.domain.scheduler is not Scheduler.KUBERNETES or not visible:
        return ()
    if agent.local_devices == used:
        return ()
    places = {device: place for place, device in enumerate(used)}
    return ((visible, ",".join(str(places[device]) for device in agent.local_devices)),)


def _check_apart(sheet: LaunchSheet, own: list[Variables]) -> None:
    """Agents of one host see their own devices only, by a variable that their software reads."""
    counts = Counter(agent.host.name for agent in sheet.agents)
    for agent, variables in zip(sheet.agents, own, strict=True):
        host = agent.host
        visible = vendor_of(host.vendor, host.device_kind).visible
        if counts[host.name] < 2 or host.device_kind == CPU_KIND:
            continue
        if not visible or visible not in dict(variables):
            message = (
                f"host {host.name} runs {counts[host.name]} agents, each on some of its devices, "
                f"and no variable is known by which {host.vendor}'s software shows a process only "
                "some: pin tp, or the stages' devices, so that ranks of a host follow each other"
            )
            raise InputError(Fault(field="plan.pipelines", message=message))


def uniform_groups(sheet: LaunchSheet, domain: str) -> tuple[tuple[Host, ...], ...]:
    """A domain's hosts, those together that hold as many devices of one kind.

    In the order of their first agents.
    """
    used = used_devices(sheet)
    groups: dict[tuple[str, int, int], list[Host]] = {}
    for host in sheet.hosts:
        if host.domain.name == domain:
            key = (host.device_kind, host.devices_per_node, len(used[host.name]))
            groups.setdefault(key, []).append(host)
    return tuple(tuple(hosts) for hosts in groups.values())
