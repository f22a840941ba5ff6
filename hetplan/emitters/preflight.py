"""What must hold on every host before a plan is started, as files that check it there.

check.json   what the plan needs: hosts with their devices, memory, ports and paths, and which hosts
             send to each other, at which rate and round trip (`CheckSheet`)
check.py     checks it, on hosts with Python 3.6 or newer and nothing else; check_*.py
             are its parts (hetplan/emitters/preflight_program)

Figures of the network are those of the cluster's links. A socket tells them of links over which
data is staged through host memory; what a vendor's library reaches over its own network it cannot.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetplan.cluster.links import Transport
from hetplan.cluster.spec import Cluster
from hetplan.cost.traffic.count import checkpoint_bytes_per_parameter
from hetplan.emitters.schedulers.tables import used_devices
from hetplan.emitters.sheet import Host, LaunchSheet
from hetplan.emitters.trainer_launch import EmitOptions, EmittedFile, TrainerLaunch
from hetplan.files.encoding import encode
from hetplan.plans.pieces import Devices, Places, device_array, stage_array
from hetplan.plans.plan import Plan, ReductionGroup
from hetplan.search.result import SearchResult

SCHEMA = "hetplan.check/1"
CHECK_FILE, SHEET_FILE = "check.py", "check.json"
PROGRAM_FILES = (
    CHECK_FILE,
    "check_devices.py",
    "check_host.py",
    "check_network.py",
    "check_report.py",
)
MAX_PAIRS = 32
"""Measured one after the other, a few seconds each: two minutes."""
MAX_STREAMS = 16
"""Most connections of one measurement (a choice)."""
FREE_STREAMS = 4
"""Connections of one device's transfer where the cluster does not say how many (a choice)."""
# Trainers in which every rank reads its own samples (torchtitan: components/dataloader.py); in
# Megatron-LM and what is made of it first and last stage do (pretrain_gpt.py, get_batch).
_ALL_READ = ("torchtitan",)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedHost:
    """What one host must have."""

    name: str
    address: str
    island: str
    region: str
    domain: str
    scheduler: str
    interface: str
    """Network interface that must be up; empty: any."""
    fabric_devices: tuple[str, ...]
    first_port: int
    """On which it answers probes; others of the domain's ports are reached where this one is."""
    ssh_user: str
    ssh_port: int
    container: bool
    """Its ranks run in an image, so that what is installed beside it does not matter."""
    device_kind: str
    vendor: str
    devices: tuple[int, ...]
    """Devices of the host that ranks use."""
    memory_bytes: float
    """What the plan needs on the fullest of them."""
    needs_data: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPair:
    """Two hosts of which the first sends to the second."""

    sender: str
    receiver: str
    why: str
    round_trip_seconds: float
    bandwidth_bytes_per_second: float
    """Of all devices of the sender that send to the receiver at one time."""
    streams: int
    """Connections to measure it with."""
    comparable: bool
    """Whether sockets are what the plan sends over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSheet:
    """Everything that check.py knows of a plan."""

    schema: str
    model: str
    cluster: str
    target: str
    token: str
    """Two checks of different plans do not take part in each other."""
    port: int
    """Of the rendezvous, on the first host."""
    barrier_port: int
    hosts: tuple[CheckedHost, ...]
    """In the order of their agents; the first one is that of rank 0."""
    pairs: tuple[CheckedPair, ...]
    all_pairs: int
    """Pairs that the plan sends over, of which `pairs` are some."""
    python: str
    trainer_folder: str
    """Empty: the variable TRAINER_FOLDER of the environment."""
    program: str
    """File of the trainer, relative to its folder; empty: it has none there."""
    needs_torch: bool
    data: tuple[str, ...]
    save: str
    load: str
    checkpoint_bytes: float
    """Weights and optimizer state of the whole model."""


def preflight_files(
    result: SearchResult, sheet: LaunchSheet, launch: TrainerLaunch, options: EmitOptions
) -> tuple[EmittedFile, ...]:
    """check.py, its parts and its sheet."""
    checked = check_sheet(result, sheet, options, launch=launch)
    return (
        *program_files(),
        EmittedFile(path=SHEET_FILE, text=encode(checked, schema=SCHEMA)),
    )


def program_files() -> tuple[EmittedFile, ...]:
    """The program alone."""
    folder = Path(__file__).with_name("preflight_program")
    return tuple(
        EmittedFile(
            path=name,
            text=(folder / name).read_text(encoding="utf-8"),
            executable=name == CHECK_FILE,
        )
        for name in PROGRAM_FILES
    )


def check_sheet(
    result: SearchResult,
    sheet: LaunchSheet,
    options: EmitOptions,
    *,
    launch: TrainerLaunch | None = None,
) -> CheckSheet:
    """What the plan needs of its hosts; without a launch: by hetplan's own trainer."""
    plan, inputs = result.plan, result.inputs
    places = Places(cluster=inputs.cluster)
    name_of = {_node_number(places, host): host.name for host in sheet.hosts}
    flows = _flows(plan, places)
    pairs = tuple(_pair(inputs.cluster, places, name_of, flow) for flow in _sampled(flows))
    program = launch.program[0] if launch is not None else ""
    parameters = inputs.model.parameter_count
    target = launch.target if launch is not None else plan.target
    return CheckSheet(
        schema=SCHEMA,
        model=inputs.model.name,
        cluster=inputs.cluster.name,
        target=target,
        token=_token(sheet, target),
        port=sheet.port,
        barrier_port=sheet.barrier_port,
        hosts=tuple(_checked_hosts(result, sheet, places, every=target in _ALL_READ)),
        pairs=pairs,
        all_pairs=len(flows),
        python=options.python,
        trainer_folder=options.trainer_folder,
        program="" if program.startswith(("-", "/", "{")) else program,
        needs_torch=launch is not None,
        data=options.data,
        save=options.save,
        load=options.load,
        checkpoint_bytes=float(parameters * checkpoint_bytes_per_parameter(inputs.job)),
    )


# ---- hosts


def _node_number(places: Places, host: Host) -> int:
    """The host's node, counted through the whole cluster as `Places.nodes` does."""
    before = 0
    for island in places.cluster.islands:
        if island.name == host.island:
            return before + host.node
        before += island.nodes
    raise ValueError(f"no island {host.island}")


def _token(sheet: LaunchSheet, target: str) -> str:
    """Of hosts, ports and target."""
    words = [target, str(sheet.port), *(each.host.name for each in sheet.agents)]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def _checked_hosts(
    result: SearchResult, sheet: LaunchSheet, places: Places, *, every: bool
) -> Iterator[CheckedHost]:
    stages = [stage for pipeline in result.plan.pipelines for stage in pipeline.stages]
    used = used_devices(sheet)
    memory: dict[int, float] = {}
    for stage, cost in zip(stages, result.estimate.stages, strict=True):
        for node in np.unique(places.nodes(stage_array(stage))).tolist():
            memory[node] = max(memory.get(node, 0.0), cost.memory.total_bytes)
    ends = {
        node
        for pipeline in result.plan.pipelines
        for stage in (pipeline.stages[0], pipeline.stages[-1])
        for node in np.unique(places.nodes(stage_array(stage))).tolist()
    }
    for host in sheet.hosts:
        domain, node = host.domain, _node_number(places, host)
        yield CheckedHost(
            name=host.name,
            address=host.address,
            island=host.island,
            region=host.region,
            domain=domain.name,
            scheduler=domain.scheduler.value,
            interface=domain.interface,
            fabric_devices=domain.fabric_devices,
            first_port=domain.first_port,
            ssh_user=domain.ssh_user,
            ssh_port=domain.ssh_port,
            container=bool(domain.image_of(host.device_kind)),
            device_kind=host.device_kind,
            vendor=host.vendor,
            devices=used[host.name],
            memory_bytes=memory[node],
            needs_data=every or node in ends,
        )


# ---- who sends to whom

_Flow = tuple[int, int, str, int]
"""Sending node, receiving node, why, devices that send at one time."""


def _flows(plan: Plan, places: Places) -> tuple[_Flow, ...]:
    """Every two nodes of which one sends to the other: over stage boundaries, around the rings of
    reductions, and between the ends of a tied matrix; each pair of nodes once, in one direction.
    """
    found: dict[tuple[int, int], tuple[str, int]] = {}
    for why, left, right in _streams_of(plan):
        senders, receivers = places.nodes(left), places.nodes(right)
        apart = senders != receivers
        nodes = zip(senders[apart].tolist(), receivers[apart].tolist(), strict=True)
        for pair, count in Counter(nodes).items():
            known = found.get(pair) or found.get(pair[::-1])
            more = known is not None and pair in found and (why, count) > known and why == known[0]
            if known is None or more:
                found[pair] = (why, count)
    return tuple((*pair, *rest) for pair, rest in found.items())


def _streams_of(plan: Plan) -> Iterator[tuple[str, Devices, Devices]]:
    """(why, devices that send, devices that receive), position by position."""
    for p, pipeline in enumerate(plan.pipelines):
        name = f"pipeline {p}, " if len(plan.pipelines) > 1 else ""
        for s, (one, two) in enumerate(zip(pipeline.stages, pipeline.stages[1:], strict=False)):
            left, right = stage_array(one), stage_array(two)
            # Of stages of unlike size each device of the larger has one of the smaller.
            size = max(left.size, right.size)
            at = np.arange(size)
            yield (
                f"{name}stage {s} to {s + 1}",
                left[at * left.size // size],
                right[at * right.size // size],
            )
    for group in plan.reduction_groups:
        yield from _ring(plan, group)
    tied = device_array(plan.tied_embedding_devices)
    if tied.size >= 2:
        yield (
            "tied embedding, first to last stage",
            tied[: tied.size // 2],
            tied[-(tied.size // 2) :],
        )


def _ring(plan: Plan, group: ReductionGroup) -> Iterator[tuple[str, Devices, Devices]]:
    """The ring over copies of the same slice: devices of equal position in tp."""
    members = device_array(group.members)
    # Copies of a slice stand this many devices apart (`ReductionGroup.members`).
    apart = members.size // group.degree if group.degree else 0
    if apart and members.size % apart == 0 and group.degree > 1:
        why = f"reduction of layers {group.layers.start} to {group.layers.stop - 1}"
        yield why, members, np.roll(members, -apart)


def _sampled(flows: tuple[_Flow, ...]) -> Iterable[_Flow]:
    """At most `MAX_PAIRS` of them, some of every reason."""
    if len(flows) <= MAX_PAIRS:
        return flows
    by_reason: dict[str, list[_Flow]] = {}
    for flow in flows:
        by_reason.setdefault(flow[2], []).append(flow)
    chosen: list[_Flow] = []
    depth = 0
    while len(chosen) < MAX_PAIRS:
        chosen += [each[depth] for each in by_reason.values() if depth < len(each)]
        depth += 1
    return chosen[:MAX_PAIRS]


def _pair(cluster: Cluster, places: Places, name_of: dict[int, str], flow: _Flow) -> CheckedPair:
    sender, receiver, why, devices = flow
    left, right = (_island_of_node(cluster, node) for node in (sender, receiver))
    link = cluster.link_between(left, right)
    return CheckedPair(
        sender=name_of[sender],
        receiver=name_of[receiver],
        why=why,
        round_trip_seconds=link.round_trip_seconds,
        bandwidth_bytes_per_second=devices * link.among(devices).goodput_bytes_per_second,
        streams=min(MAX_STREAMS, devices * (link.streams or FREE_STREAMS)),
        comparable=link.transport is Transport.HOST_STAGED,
    )


def _island_of_node(cluster: Cluster, node: int) -> str:
    for island in cluster.islands:
        if node < island.nodes:
            return island.name
        node -= island.nodes
    raise ValueError("no such node")
