"""The plan that a launch runs on a cluster.

Hosts are found by their names in the cluster file, or by their addresses in its launch domains. A
launch without a list of hosts is put on the cluster's usable nodes in their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from hetplan.cluster.spec import Cluster, Island
from hetplan.errors import Fault, InputError
from hetplan.importers.lines import shown
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.spec import ModelSpec
from hetplan.plans.assemble import assemble_pipeline, assemble_plan
from hetplan.plans.build import chunks_of
from hetplan.plans.check import check_plan
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import (
    Plan,
    Replica,
    Schedule,
    Sharding,
    Stage,
    compress,
)
from hetplan.plans.rules import experts_of
from hetplan.trainers.launch_values import (
    LaunchFacts,
    LaunchHost,
    LaunchMesh,
    LaunchText,
    fault_of,
    flag,
    number_of,
)
from hetplan.trainers.read import facts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLaunch:
    """A launch as a plan for a cluster."""

    facts: LaunchFacts
    job: Job
    """Batch, sequence, precision and options are the launch's."""
    plan: Plan
    remarks: tuple[str, ...]
    """What was left out, or is priced a little otherwise, a line each."""


def launch_plan(
    text: LaunchText,
    model: ModelSpec,
    cluster: Cluster,
    job: Job | None = None,
    target: str | None = None,
    islands: tuple[str, ...] = (),
) -> PlannedLaunch:
    """The legal plan of a launch on its hosts, or on the cluster's usable nodes in their order.

    `job` gives what a launch does not say (objective, reserve of memory); `target` is whose limits
    the plan must keep, its trainer's by default; `islands` those whose nodes a launch without
    hosts takes, in this order. An InputError where the launch contradicts the
    model, has no place on the cluster, or asks for what plans cannot have.
    """
    facts = facts_of(text, model.num_layers)
    faults = (*facts.refusals, *_contradictions(facts, model), *_layer_faults(facts, model))
    if faults:
        raise InputError(*faults)
    own_job = job_of(facts, job, text.trainer if target is None else target)
    devices = devices_of_ranks(facts, cluster, islands)
    plan = _plan(facts, model, cluster, own_job, devices)
    illegal = check_plan(plan, model, cluster, own_job)
    if illegal:
        raise InputError(*_named(facts, illegal))
    return PlannedLaunch(
        facts=facts,
        job=own_job,
        plan=plan,
        remarks=tuple(_remarks(facts, model, plan, job, own_job)),
    )


# ---- the job


def job_of(facts: LaunchFacts, job: Job | None, target: str) -> Job:
    """The job of a launch; what it does not say is that of `job`, or a job's own default."""
    if facts.sequence_length is None:
        message = "says no sequence length; give --set seq-length=N"
        raise InputError(fault_of(None, facts.text, message))
    if facts.precision not in tuple(Precision):
        message = f"precision {facts.precision} is not one of {', '.join(Precision)}"
        raise InputError(fault_of(None, facts.text, message))
    stem = facts.text.file.rpartition("/")[2].partition(".")[0]
    said: dict[str, Any] = {
        "global_batch_size": facts.global_batch_size,
        "sequence_length": facts.sequence_length,
        "precision": Precision(facts.precision),
        "optimizer": Optimizer(facts.optimizer),
        "target": target,
        "gradient_clipping": None if facts.gradient_clipping else False,
        "trainer": facts.options,
    }
    if job is None:
        name = stem if stem.isprintable() and stem else "launch"
        return Job(name=name, **said)
    if job.sequence_length != facts.sequence_length:
        said["sequence_lengths"] = ()
    return replace(job, **said)


# ---- what does not agree


def _contradictions(facts: LaunchFacts, model: ModelSpec) -> Iterator[Fault]:
    """Sizes that the launch and the model file give differently."""
    attention = model.layer_runs[0].layer.attention
    for name, size in (
        ("num-layers", model.num_layers),
        ("hidden-size", model.hidden_size),
        ("num-attention-heads", getattr(attention, "num_heads", None)),
    ):
        said = number_of(facts.text, None, name)
        if said is not None and size is not None and said != size:
            message = f"{said}, and the model {model.name} has {size}; is it another model?"
            yield fault_of(flag(facts.text, name), facts.text, message)
    if facts.tied_embeddings not in (None, model.tied_embeddings):
        here, there = "ties", "does not tie"
        if model.tied_embeddings:
            here, there = there, here
        setting = flag(facts.text, "untie-embeddings-and-output-weights")
        message = (
            f"the launch {here} embedding and head (--untie-embeddings-and-output-weights), the "
            f"model {model.name} {there} them"
        )
        yield fault_of(setting, facts.text, message)


def _layer_faults(facts: LaunchFacts, model: ModelSpec) -> Iterator[Fault]:
    """Layers that the launch loses, and batches that do not divide; a plan has all of both."""
    placed = sum(sum(row) for row in facts.layers)
    if placed != model.num_layers:
        setting = flag(facts.text, "pipeline-model-parallel-layout", "num-layers", "n-layers")
        message = (
            f"{placed} layers are on its {facts.pp} stages, the model has {model.num_layers}; a "
            "plan holds every layer: give uneven stages their numbers (Megatron-LM: "
            "--pipeline-model-parallel-layout)"
        )
        yield fault_of(setting, facts.text, message)
    dp, size = facts.meshes[0].dp, facts.meshes[0].microbatch_size
    if facts.global_batch_size % (dp * size):
        setting = flag(facts.text, "global-batch-size")
        message = f"{facts.global_batch_size} is no multiple of dp {dp} x microbatch size {size}"
        yield fault_of(setting, facts.text, message)


def _named(facts: LaunchFacts, faults: tuple[Fault, ...]) -> Iterator[Fault]:
    """Faults of the plan as faults of the launch, each once."""
    file = facts.text.file
    seen: set[str] = set()
    for fault in faults:
        if fault.message in seen:
            continue
        seen.add(fault.message)
        mend = ""
        if not facts.text.hosts and ".stages" in fault.field:
            mend = "; --island A,B says whose nodes are taken, --hosts FILE which"
        if fault.message.endswith("[the target can express it]"):
            mend += "; --target any prices it all the same"
        yield Fault(file=file, field=fault.field, message=f"as a plan: {fault.message}{mend}")


# ---- the plan


def _plan(
    facts: LaunchFacts, model: ModelSpec, cluster: Cluster, job: Job, devices: tuple[int, ...]
) -> Plan:
    virtual, count = facts.virtual_stages, facts.pp
    schedule = Schedule(name=facts.schedule, virtual_stages=virtual)
    chunks = chunks_of(model, schedule, facts.layers)
    meshes = [mesh for mesh in facts.meshes for _ in range(mesh.pp)]
    experts = bool(experts_of(model, 0, len(model.layers)))
    stages = []
    for s, (mesh, ranks) in enumerate(zip(meshes, stage_ranks(facts), strict=True)):
        depth = own_depth(facts.schedule, s, count, facts.num_microbatches, virtual)
        numbers = [devices[rank] for rank in ranks]
        stage = Stage(
            chunks=chunks[s],
            replicas=tuple(_replicas(facts, mesh, numbers, cluster, experts, s)),
            warmup_depth=depth,
        )
        if facts.stage_recompute:
            stage = replace(stage, recompute=facts.stage_recompute[s])
        stages.append(stage)
    sharding, shards = _sharding(facts)
    pipeline = assemble_pipeline(
        cluster,
        job,
        stages,
        num_microbatches=facts.num_microbatches,
        schedule=schedule,
    )
    return assemble_plan(
        model,
        cluster,
        job,
        (pipeline,),
        sharding=sharding,
        optimizer_shards=shards,
        optimizer_offload=facts.optimizer_offload,
        # Without shards nothing is gathered, whatever the flag says.
        overlap=replace(
            facts.overlap, gathering=facts.overlap.gathering and sharding is not Sharding.NONE
        ),
    )


def _replicas(
    facts: LaunchFacts,
    mesh: LaunchMesh,
    devices: list[int],
    cluster: Cluster,
    experts: bool,
    stage: int,
) -> Iterator[Replica]:
    """An entry for each run of copies on one island."""
    slice_ = mesh.tp * mesh.cp
    copies = [devices[at : at + slice_] for at in range(0, len(devices), slice_)]
    islands = []
    for copy in copies:
        names = {cluster.island_of_device(each).name for each in copy}
        if len(names) > 1:
            message = (
                f"a copy of stage {stage} (tp {mesh.tp} x cp {mesh.cp}) lies on islands "
                f"{' and '.join(sorted(names))}; plans keep it on one: name the hosts in another "
                "order with --hosts FILE, or the islands with --island A,B"
            )
            raise InputError(fault_of(None, facts.text, message))
        islands.append(names.pop())
    for _, run in groupby(zip(islands, copies, strict=True), key=lambda pair: pair[0]):
        numbers = [each for _, copy in run for each in copy]
        yield Replica(
            devices=compress(numbers),
            tp=mesh.tp,
            cp=mesh.cp,
            ep=mesh.ep,
            # Without experts there is nothing to cut: 1 by definition.
            etp=mesh.etp if experts else 1,
            microbatch_size=mesh.microbatch_size,
            sequence_parallel=facts.sequence_parallel and mesh.tp > 1,
        )


def _sharding(facts: LaunchFacts) -> tuple[Sharding, int]:
    if not facts.sharded_optimizer:
        return Sharding.NONE, 1
    every = math.lcm(*(mesh.dp * mesh.cp for mesh in facts.meshes))
    shards = every // facts.optimizer_instances
    if every % facts.optimizer_instances:
        setting = flag(facts.text, "num-distributed-optimizer-instances")
        message = f"{facts.optimizer_instances} does not divide dp x cp {every}"
        raise InputError(fault_of(setting, facts.text, message))
    level = Sharding.PARAMETERS if facts.sharded_parameters else Sharding.OPTIMIZER
    return (level, shards) if shards > 1 else (Sharding.NONE, 1)


# ---- remarks


def _remarks(
    facts: LaunchFacts, model: ModelSpec, plan: Plan, given: Job | None, job: Job
) -> Iterator[str]:
    yield from facts.text.remarks
    yield from facts.remarks
    for each in facts.text.unread:
        if not each.name:
            yield (
                f"{each.file}:{each.line}: {' '.join(each.values)[:60]} may hold further flags, "
                "which only the host knows; none of them counts"
            )
    if facts.vocab_size is not None and facts.vocab_size != model.vocab_size:
        yield f"--vocab-size is {facts.vocab_size}, the model's {model.vocab_size} is priced"
    tp = math.lcm(*(mesh.tp for mesh in facts.meshes))
    padded = -(-model.vocab_size // (facts.vocab_multiple * tp)) * facts.vocab_multiple * tp
    if padded != plan.padded_vocab_size:
        yield (
            f"the launch pads the vocabulary to {padded}; a plan for {plan.target} to "
            f"{plan.padded_vocab_size}, which is priced"
        )
    for name in ("global_batch_size", "sequence_length", "precision", "optimizer", "target"):
        if given is not None and getattr(given, name) != getattr(job, name):
            yield (
                f"{name} of the job, {getattr(given, name)}, is not the launch's: "
                f"{getattr(job, name)} is priced"
            )


# ---- places


def devices_of_ranks(
    facts: LaunchFacts, cluster: Cluster, islands: tuple[str, ...] = ()
) -> tuple[int, ...]:
    """Device number of every rank; an InputError where hosts or devices are missing.

    `islands`: those whose nodes are taken where no hosts are named, in this order; empty: all.
    """
    hosts = facts.text.hosts
    if not hosts:
        return tuple(_in_order(facts, cluster, tuple(map(cluster.island, islands))))
    devices = tuple(_of_hosts(facts, cluster))
    if len(devices) != facts.world_size:
        message = (
            f"the hosts have {len(devices)} devices, the launch starts {facts.world_size} ranks"
        )
        raise InputError(Fault(file=hosts[0].file, message=message))
    return devices


def _of_hosts(facts: LaunchFacts, cluster: Cluster) -> Iterator[int]:
    nodes = _nodes_by_name(cluster)
    seen: set[int] = set()
    for host in _in_mesh_order(facts):
        if host.name not in nodes:
            raise InputError(_unknown_host(host, cluster))
        island, node = nodes[host.name]
        count = host.devices or facts.text.devices_per_node or island.devices_per_node
        devices = host.local_devices or range(count)
        if max(devices) >= island.devices_per_node:
            message = (
                f"{host.name} has {island.devices_per_node} devices in the cluster file; the "
                f"launch wants number {max(devices)}"
            )
            raise InputError(Fault(file=host.file, line=host.line, message=message))
        first = _first_device(cluster, island, node)
        for device in devices:
            if first + device in seen:
                message = f"device {device} of {host.name} is given to two ranks"
                raise InputError(Fault(file=host.file, line=host.line, message=message))
            seen.add(first + device)
            yield first + device


def _first_device(cluster: Cluster, island: Island, node: int) -> int:
    return cluster.first_device(island.name) + node * island.devices_per_node


def _in_mesh_order(facts: LaunchFacts) -> tuple[LaunchHost, ...]:
    """FlagScale's order: by the first mesh with a host's type, then as they stand.

    flagscale/train/hetero/parallel_context.py, RankMapper.
    """
    types = [mesh.device_type for mesh in facts.meshes]
    hosts = facts.text.hosts
    if not any(types) or not all(host.type for host in hosts):
        return hosts
    for host in hosts:
        if host.type not in types:
            message = f"type {shown(host.type)} is no device type of a mesh: {', '.join(types)}"
            raise InputError(Fault(file=host.file, line=host.line, message=message))
    return tuple(sorted(hosts, key=lambda host: types.index(host.type)))


def _nodes_by_name(cluster: Cluster) -> dict[str, tuple[Island, int]]:
    """Nodes by their names and by the addresses of their domain; a name goes before an address."""
    names: dict[str, tuple[Island, int]] = {}
    addresses: dict[str, tuple[Island, int]] = {}
    for island in cluster.islands:
        domain = cluster.domain_of_island(island.name)
        for number, name in enumerate(island.names_of_nodes):
            names[name] = (island, number)
            addresses.setdefault(domain.address_of(name), (island, number))
    return addresses | names


def _unknown_host(host: LaunchHost, cluster: Cluster) -> Fault:
    unnamed = [island.name for island in cluster.islands if not island.node_names]
    mend = "add it to an island's node_names"
    if unnamed:
        mend = f"island {unnamed[0]} has no node_names: give them in the cluster file"
    return Fault(
        file=host.file,
        line=host.line,
        message=f"{shown(host.name)} is no node of cluster {cluster.name}; {mend}, or give other "
        "hosts with --hosts FILE",
    )


def _in_order(facts: LaunchFacts, cluster: Cluster, islands: tuple[Island, ...]) -> Iterator[int]:
    """Usable nodes as the cluster file has them, those of a mesh's type where its name says one."""
    left = facts.world_size
    for island, nodes in _rows(facts, cluster, islands):
        count = facts.text.devices_per_node or island.devices_per_node
        if left > 0 and nodes and count > island.devices_per_node:
            message = (
                f"the launch starts {count} ranks on each node, and those of island {island.name} "
                f"have {island.devices_per_node} devices; name the hosts with --hosts FILE, or "
                "islands with --island"
            )
            raise InputError(Fault(message=message))
        for node in nodes:
            first = _first_device(cluster, island, node)
            yield from range(first, first + min(count, left))
            left -= min(count, left)
    if left > 0:
        where = ", ".join(island.name for island in islands or cluster.islands)
        message = (
            f"the launch starts {facts.world_size} ranks; the usable nodes of {where} have room "
            f"for {facts.world_size - left}"
        )
        raise InputError(Fault(message=message))


def _rows(
    facts: LaunchFacts, cluster: Cluster, chosen: tuple[Island, ...]
) -> Iterator[tuple[Island, tuple[int, ...]]]:
    """(island, its usable nodes) in the order in which ranks take them.

    The chosen islands; otherwise those of the meshes' types in the order of the meshes, where every
    type names some; otherwise all as they stand.
    """
    types = [*dict.fromkeys(mesh.device_type for mesh in facts.meshes)]
    of_type = [
        [island for island in cluster.islands if kind in (island.name, island.device.kind)]
        for kind in types
    ]
    if chosen or len(types) < 2 or not all(of_type):
        for island in chosen or cluster.islands:
            yield island, island.usable_nodes
        return
    for kind, islands in zip(types, of_type, strict=True):
        left = sum(mesh.ranks for mesh in facts.meshes if mesh.device_type == kind)
        for island in islands:
            nodes = island.usable_nodes[: -(-left // island.devices_per_node)]
            left -= len(nodes) * island.devices_per_node
            yield island, nodes


def stage_ranks(facts: LaunchFacts) -> Iterator[list[int]]:
    """Ranks of every stage in the order (dp, cp, tp).

    Megatron-LM counts tp, cp, dp, pp (megatron/core/parallel_state.py, RankGenerator), or with
    --use-tp-pp-dp-mapping tp, cp, pp, dp; torchtitan as the first, FlagScale so in each mesh.
    """
    start = 0
    for mesh in facts.meshes:
        axes = (mesh.dp, mesh.pp) if facts.data_outermost else (mesh.pp, mesh.dp)
        ranks = np.arange(start, start + mesh.ranks).reshape(*axes, mesh.tp * mesh.cp)
        by_stage = ranks.swapaxes(0, 1) if facts.data_outermost else ranks
        yield from by_stage.reshape(mesh.pp, -1).tolist()
        start += mesh.ranks
