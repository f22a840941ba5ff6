"""How do hosts and environment stand in FlagScale's files, and can its own runner start them?

The runner (flagscale/runner/runner_train.py) reads `host slots=N type=T` lines, takes their order
for node ranks, and starts by ssh on each host a script that it writes: it exports the environment
in front of torchrun and pastes the whole command between double quotes, with the name of the type
of the host's line. A host has one line, so one agent. It needs a variable that ends in
_VISIBLE_DEVICES for every host (run_node reads what it set only where there is one).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hetplan.cluster.launch_domains import Scheduler
from hetplan.emitters.flagscale.configs import FOLDER_OF_YAML
from hetplan.emitters.sheet import Agent, LaunchSheet
from hetplan.emitters.vendors import vendor_of

EXPERIMENT, TRAIN = "flagscale", "plan"
EXPERIMENT_FILE, TRAIN_FILE, HOST_FILE = f"{EXPERIMENT}.yaml", f"train/{TRAIN}.yaml", "hostfile"
PROGRAM = "flagscale/train/train_gpt.py"

_PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)
"""What shlex.quote leaves as it is: quoted assignments would be taken for a command."""


def host_file(sheet: LaunchSheet, types: Sequence[str]) -> str:
    """Lines of the hostfile; without types where there are none."""
    lines = []
    for agent, name in zip(sheet.agents, types, strict=True):
        end = f" type={name}" if name else ""
        lines.append(f"{agent.host.address} slots={agent.num_ranks}{end}\n")
    return "".join(lines)


def one_agent_each(sheet: LaunchSheet) -> bool:
    """Whether no host has two agents, for which a hostfile has no words."""
    return len(sheet.hosts) == len(sheet.agents)


def runner_obstacles(
    sheet: LaunchSheet, environment: Sequence[Sequence[tuple[str, str]]]
) -> Iterator[str]:
    """Why FlagScale's own runner cannot start this launch; nothing where it can."""
    if not one_agent_each(sheet):
        yield "a host runs several agents, and a hostfile has one line for it"
    others = {
        host.domain.scheduler.value
        for host in sheet.hosts
        if host.domain.scheduler is not Scheduler.HOSTS
    }
    if others:
        yield f"hosts are started by {', '.join(sorted(others))}, and it starts all by ssh"
    if len({host.domain.ssh_port for host in sheet.hosts}) > 1:
        yield "domains have ssh ports of their own, and it takes one for all"
    for agent in sheet.agents:
        if not visible_name(agent):
            yield (
                f"no variable is known that says which devices of {agent.host.device_kind} a "
                "process sees"
            )
            break
    if any(not _PLAIN.fullmatch(value) for each in environment for _, value in each):
        yield "the environment has values that it would have to quote, which it does wrongly"


def visible_name(agent: Agent) -> str:
    """The variable that limits devices, where its name is one that the runner looks for."""
    name = vendor_of(agent.host.vendor, agent.host.device_kind).visible
    return name if name.endswith("_VISIBLE_DEVICES") else ""


def node_environment(
    sheet: LaunchSheet, environment: Sequence[Sequence[tuple[str, str]]]
) -> dict[str, dict[str, str]]:
    """Environment of every host by its name in the hostfile, with its devices."""
    found: dict[str, dict[str, str]] = {}
    for agent, variables in zip(sheet.agents, environment, strict=True):
        own = dict(variables)
        name = visible_name(agent)
        if name:
            own.setdefault(name, ",".join(map(str, agent.local_devices)))
        found[agent.host.address] = own
    return found


def experiment_config(
    sheet: LaunchSheet, name: str, nodes: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """The experiment: where it writes, how it is started, what every host sees."""
    return {
        "defaults": [{"train": TRAIN}, "_self_"],
        "experiment": {
            "exp_name": name,
            "exp_dir": f"{FOLDER_OF_YAML}/run",
            "task": {"type": "train", "backend": "megatron", "entrypoint": PROGRAM},
            "runner": {
                "backend": "torchrun",
                "hostfile": f"{FOLDER_OF_YAML}/{HOST_FILE}",
                # Meshes want static rendezvous, which alone keeps the order of hosts.
                "rdzv_backend": "static",
                "ssh_port": sheet.master.domain.ssh_port,
                "master_addr": sheet.master.address,
                "master_port": sheet.port,
            },
            "envs": {"node_specific": {host: dict(each) for host, each in nodes.items()}},
        },
        "action": "run",
        "hydra": {"run": {"dir": "${experiment.exp_dir}/hydra"}},
    }
