"""What check.py looks for on every host before a plan is started.

check.py is the program `check_program.py` with one more line, a comment of JSON: what it looks for,
and the other files of the folder with their sha256. It needs nothing but Python.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetplan.cost.traffic import checkpoint_bytes_per_parameter
from hetplan.files.encoding import to_plain
from hetplan.plans.pieces import Places, stage_array
from hetplan.schedulers.launch import EmissionOptions, EmittedFile, TrainerLaunch
from hetplan.schedulers.rank_layout import Host, RankLayout, used_devices
from hetplan.search.result import SearchResult
from hetplan.version import __version__

CHECK_FILE = "check.py"
SCHEMA = "hetplan.emitted/3"
# Trainers in which every rank reads its own samples (torchtitan: components/dataloader.py); in
# Megatron-LM and what is made of it first and last stage do (pretrain_gpt.py, get_batch).
_ALL_READ = ("torchtitan",)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedHost:
    """What one host must have."""

    name: str
    address: str
    vendor: str
    device_kind: str
    devices: tuple[int, ...]
    """Devices of the host that ranks use."""
    memory_bytes: float
    """What the plan needs on the fullest of them."""
    interface: str
    """Network interface that must be up; empty: any."""
    fabric_devices: tuple[str, ...]
    reads_data: bool
    container: bool
    """Its ranks run in an image: what is installed beside it does not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostChecks:
    """Everything that check.py knows of a plan."""

    port: int
    """Of the rendezvous, on the first host."""
    hosts: tuple[CheckedHost, ...]
    """In the order of their agents; rank 0 is on the first one."""
    python: str
    trainer_folder: str
    """Empty: the variable TRAINER_FOLDER of the environment."""
    program: str
    """File of the trainer, relative to its folder; empty: it has none there."""
    data: tuple[str, ...]
    save: str
    load: str
    checkpoint_bytes: float
    """Weights and optimizer state of the whole model."""


def check_text(checks: HostChecks, files: Iterable[EmittedFile]) -> str:
    """The program with what it looks for; `files` are the other files of the folder."""
    program = Path(__file__).with_name("check_program.py").read_text(encoding="utf-8")
    texts = {CHECK_FILE: program, **{each.path: each.text for each in files}}
    emitted = {
        "schema": SCHEMA,
        "hetplan_version": __version__,
        "files": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()},
        "checks": to_plain(checks),
    }
    return f"{program}# {json.dumps(emitted, sort_keys=True)}\n"


def host_checks(
    result: SearchResult, ranks: RankLayout, launch: TrainerLaunch, options: EmissionOptions
) -> HostChecks:
    """What the plan needs of its hosts."""
    program = launch.program[0]
    parameters = result.inputs.model.parameter_count
    return HostChecks(
        port=ranks.port,
        hosts=_checked_hosts(result, ranks, every=launch.target in _ALL_READ),
        python=options.python,
        trainer_folder=options.trainer_folder,
        program="" if program.startswith(("-", "/", "{")) else program,
        data=options.data,
        save=options.save,
        load=options.load,
        checkpoint_bytes=float(parameters * checkpoint_bytes_per_parameter(result.inputs.job)),
    )


def _checked_hosts(
    result: SearchResult, ranks: RankLayout, *, every: bool
) -> tuple[CheckedHost, ...]:
    """`every`: all ranks read data."""
    places = Places(cluster=result.inputs.cluster)
    used = used_devices(ranks)
    memory: dict[int, float] = {}
    readers: set[int] = set()
    costs = iter(result.estimate.stages)
    for pipeline in result.plan.pipelines:
        ends = (pipeline.stages[0], pipeline.stages[-1])
        for stage in pipeline.stages:
            nodes = np.unique(places.nodes(stage_array(stage))).tolist()
            cost = next(costs, None)
            for node in nodes:
                needed = cost.memory.total_bytes if cost else 0.0
                memory[node] = max(memory.get(node, 0.0), needed)
            if every or stage in ends:
                readers.update(nodes)
    return tuple(
        CheckedHost(
            name=host.name,
            address=host.address,
            vendor=host.vendor,
            device_kind=host.device_kind,
            devices=used[host.name],
            memory_bytes=memory[_node_number(places, host)],
            interface=host.domain.interface,
            fabric_devices=host.domain.fabric_devices,
            reads_data=_node_number(places, host) in readers,
            container=bool(host.domain.image_of(host.device_kind)),
        )
        for host in ranks.hosts
    )


def _node_number(places: Places, host: Host) -> int:
    """The host's node, counted through the whole cluster as `Places.nodes` does."""
    before = 0
    for island in places.cluster.islands:
        if island.name == host.island:
            break
        before += island.nodes
    return before + host.node
