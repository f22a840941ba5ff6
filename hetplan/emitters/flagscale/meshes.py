"""Which meshes is a plan for FlagScale, and does every rank find its place in them?

A mesh is a run of stages of one device kind with one tp, dp and microbatch size. FlagScale is told
[tp, cp, ep, dp, pp] of each and a device type for each. It orders ranks by the *first* place of
their type in the list of types, then by rank (flagscale/train/hetero/parallel_context.py,
RankMapper), and deals them to the meshes in that order. Two meshes whose types have one name are
therefore filled as one: of A, B, A the second A would take what is meant for B. Every mesh gets a
name of its own, but for meshes that share a host, which is of one type: those, and the meshes
between them, get one name, and the order of ranks alone decides, which is that of the stages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from hetplan.cluster.links import Transport
from hetplan.emitters.quoting import file_name
from hetplan.emitters.sheet import Agent, LaunchSheet
from hetplan.emitters.vendors import libraries
from hetplan.plans.pieces import data_ranks
from hetplan.plans.plan import Plan, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Neighbouring stages that share degrees and device kind."""

    first_stage: int
    stages: tuple[Stage, ...]
    first_rank: int
    tp: int
    dp: int
    etp: int
    """Tensor-parallel degree inside an expert."""
    microbatch_size: int
    device_kind: str
    device_type: str = ""
    """FlagScale's name for the devices of the mesh."""

    @property
    def pp(self) -> int:
        """Stages."""
        return len(self.stages)

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return self.tp * self.dp * self.pp

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """tp, cp, ep, dp, pp: an entry of --hetero-process-meshes."""
        return self.tp, 1, 1, self.dp, self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """How a plan is told to FlagScale."""

    hetero: bool
    """With --enable-hetero. Otherwise the plan is one that Megatron-LM has, told in its words, and
    `meshes` has one entry for each device kind all the same."""
    meshes: tuple[Mesh, ...]
    cpu_communication: bool
    """What meshes send each other goes through the hosts' memory, by gloo."""

    @property
    def first_data_ranks(self) -> int:
        """Degree dp of the first mesh, by which FlagScale reads --micro-batch-size."""
        return self.meshes[0].dp


def meshes_of(plan: Plan, sheet: LaunchSheet) -> Meshes:
    """The meshes of a plan of one pipeline that is legal for target flagscale.

    Without --enable-hetero where one tp, dp and microbatch size, one collective library and one
    recomputation hold for all stages. FlagScale reads what stages recompute for themselves only
    with meshes (megatron/training/initialize.py, patched: post_validate_args), of which one will
    do.
    """
    stages = plan.pipelines[0].stages
    sizes = [sum(replica.num_devices for replica in stage.replicas) for stage in stages]
    starts = [*accumulate(sizes, initial=0)][:-1]
    kinds = [agent_at(sheet, start).host.device_kind for start in starts]
    keys = [(*_shape(stage), kind) for stage, kind in zip(stages, kinds, strict=True)]
    found, at = [], 0
    for key, run in groupby(keys):
        count = len([*run])
        tp, dp, etp, size, kind = key
        found.append(
            Mesh(
                first_stage=at,
                stages=stages[at : at + count],
                first_rank=starts[at],
                tp=tp,
                dp=dp,
                etp=etp,
                microbatch_size=size,
                device_kind=kind,
            )
        )
        at += count
    several = len(libraries(sheet.agents)) > 1
    hetero = (
        several
        or len({_shape(stage) for stage in stages}) > 1
        or len({stage.recompute for stage in stages}) > 1
    )
    meshes = _named(found, sheet) if hetero else tuple(found)
    between = transports_between(plan, meshes)
    staged = bool(between) and all(each == Transport.HOST_STAGED for each in between)
    return Meshes(hetero=hetero, meshes=meshes, cpu_communication=hetero and (several or staged))


def transports_between(plan: Plan, meshes: Sequence[Mesh]) -> tuple[str, ...]:
    """Of the boundaries between meshes, in order."""
    boundaries = plan.pipelines[0].boundaries
    return tuple(boundaries[mesh.first_stage - 1].transport for mesh in meshes[1:])


def _shape(stage: Stage) -> tuple[int, int, int, int]:
    """Degrees of a stage, whose replica entries agree in all but dp."""
    first = stage.replicas[0]
    return first.tp, data_ranks(stage), first.etp, first.microbatch_size


def agent_at(sheet: LaunchSheet, rank: int) -> Agent:
    """The agent that starts this rank."""
    return sheet.agents[bisect_right(sheet.agents, rank, key=lambda each: each.first_rank) - 1]


def agent_types(meshes: Sequence[Mesh], sheet: LaunchSheet) -> tuple[str, ...]:
    """FlagScale's device type of every agent, in the order of node ranks.

    An agent with ranks of several meshes has the one name of all of them.
    """
    starts = [mesh.first_rank for mesh in meshes]
    return tuple(
        meshes[bisect_right(starts, agent.first_rank) - 1].device_type for agent in sheet.agents
    )


def mapped_ranks(meshes: Sequence[Mesh], sheet: LaunchSheet) -> tuple[int, ...]:
    """The rank that FlagScale takes for each position of the meshes, mesh after mesh.

    Position p of a plan is its rank p, so that a launch is right where this counts up from 0.
    """
    order = [mesh.device_type for mesh in meshes]
    types = agent_types(meshes, sheet)
    rows = [
        (order.index(name), rank)
        for agent, name in zip(sheet.agents, types, strict=True)
        for rank in range(agent.first_rank, agent.first_rank + agent.num_ranks)
    ]
    return tuple(rank for _, rank in sorted(rows))


def _named(meshes: Sequence[Mesh], sheet: LaunchSheet) -> tuple[Mesh, ...]:
    """The meshes with their device types: kinds of devices, numbered where one comes twice."""
    groups = _sharing_hosts(meshes, sheet)
    kinds: dict[int, str] = {}
    for mesh, group in zip(meshes, groups, strict=True):
        kinds.setdefault(group, file_name(mesh.device_kind))
    numbered = len(set(kinds.values())) < len(kinds)
    names = {group: f"mesh{group}-{kind}" if numbered else kind for group, kind in kinds.items()}
    return tuple(
        replace(mesh, device_type=names[group]) for mesh, group in zip(meshes, groups, strict=True)
    )


def _sharing_hosts(meshes: Sequence[Mesh], sheet: LaunchSheet) -> list[int]:
    """A number for each mesh, the same for meshes that share a host and those between them."""
    starts = [mesh.first_rank for mesh in meshes]
    last_of_host: dict[str, int] = {}
    first_of_host: dict[str, int] = {}
    for agent in sheet.agents:
        last_rank = agent.first_rank + agent.num_ranks - 1
        first_of_host.setdefault(agent.host.name, bisect_right(starts, agent.first_rank) - 1)
        last_of_host[agent.host.name] = bisect_right(starts, last_rank) - 1
    joined = [0] * len(meshes)  # whether the mesh belongs to the group of the one before it
    for name, first in first_of_host.items():
        for mesh in range(first + 1, last_of_host[name] + 1):
            joined[mesh] = 1
    return [*accumulate((1 - each for each in joined[1:]), initial=0)]
