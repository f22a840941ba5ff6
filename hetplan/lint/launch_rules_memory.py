"""Does the fullest stage of an uneven pipeline need more memory than a look at the mean says?

Megatron-LM prints a theoretical memory footprint at its first log line
(megatron/training/theoretical_memory_usage.py): weights and optimizer of num_layers / stages layers
and, for activations, as many layers as the model has on the first stage's microbatches in flight.
A stage with more layers than the mean needs more than it prints, by the ratio of both
(NVIDIA-NeMo/Megatron-Bridge#5077 mends the same in a copy: 31.8 % too low for 1, 2, 2, 3 layers).

With model and cluster the stages are counted by `hetplan.cost.memory` instead, each against the
devices that it runs on, and next to what an even split would need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate_values import MemoryUse
from hetplan.cost.memory.device import device_memory
from hetplan.cost.memory.values import MemoryLayout
from hetplan.errors import InputError
from hetplan.importers.launches.values import LaunchFacts, LaunchMesh, Setting
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.lint.findings import Severity
from hetplan.lint.launch_rules_view import Launch, Seen, launch_rule, seen
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import LayerRange, Recompute, Sharding
from hetplan.units import format_bytes

_WORTH_SAYING = 0.05
"""Of the report: as much as its other simplifications are off for small models."""
Chunks = tuple[tuple[int, ...], ...]
"""Layers of each stage, one number per virtual stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """One stage and the mesh that it belongs to."""

    mesh: LaunchMesh
    memory_bytes: float
    """Of the smallest device that it runs on."""


def _uneven(launch: Launch) -> Iterator[Seen]:
    facts = launch.facts
    if facts is None or len(facts.layers) < 2 or facts.refusals:
        return
    stages = _stages(launch, facts)
    if launch.model is not None and stages is not None:
        yield from _misfits(launch, facts, launch.model, stages)
        return
    totals = [sum(each) for each in facts.layers]
    mean = sum(totals) / len(totals)
    # FlagScale's own copy of the report knows its meshes.
    if launch.text.trainer != "megatron" or max(totals) <= mean * (1 + _WORTH_SAYING):
        return
    fullest = totals.index(max(totals))
    yield seen(
        f"stage {fullest} has {totals[fullest]} layers, the mean is {mean:g}: Megatron-LM's "
        f"theoretical memory footprint is {1 - mean / max(totals):.1%} too low for its layers. "
        "Name --model and --cluster to have the stages counted",
        *_where(launch),
    )


def _misfits(
    launch: Launch, facts: LaunchFacts, model: ModelSpec, stages: Sequence[_Stage]
) -> Iterator[Seen]:
    layers = facts.layers
    if sum(map(sum, layers)) != model.num_layers or len(stages) != len(layers):
        return
    try:
        uses = _uses(facts, model, layers, stages)
        even = _uses(facts, model, _even(layers), stages)
    except InputError:
        return  # sizes that do not fit each other have rules of their own
    short = [at for at, use in enumerate(uses) if not use.fits]
    if not short:
        return
    at = max(short, key=lambda stage: uses[stage].total_bytes - uses[stage].available_bytes)
    most = max(use.total_bytes for use in even)
    fits = all(use.fits for use in even)
    yield seen(
        f"stage {at} with {sum(layers[at])} layers needs {format_bytes(uses[at].total_bytes)} of "
        f"the {format_bytes(uses[at].available_bytes)} that its devices have left for plans; an "
        f"even split needs {format_bytes(most)} at most and {'fits' if fits else 'does not fit'}"
        + (f"; {len(short)} stages do not fit" if len(short) > 1 else ""),
        *_where(launch),
    )


def _where(launch: Launch) -> tuple[Setting | None, ...]:
    names = (
        "pipeline-model-parallel-layout",
        "decoder-first-pipeline-num-layers",
        "decoder-last-pipeline-num-layers",
        "hetero-pipeline-layer-split",
        "module-fqns-per-model-part",
        "num-layers",
    )
    return tuple(launch.get(name) for name in names)


def _even(layers: Chunks) -> Chunks:
    """As many layers on as many chunks, as even as they go."""
    count = sum(len(each) for each in layers)
    each, more = divmod(sum(map(sum, layers)), count)
    flat = [each + (at < more) for at in range(count)]
    return tuple(tuple(flat[stage :: len(layers)]) for stage in range(len(layers)))


def _ranges(layers: Chunks, end: int) -> tuple[tuple[LayerRange, ...], ...]:
    """Layer ranges of each stage: embedding with the first chunk, head with the last."""
    stages, virtual = len(layers), len(layers[0])
    found: list[list[LayerRange]] = [[] for _ in range(stages)]
    start = 0
    for chunk in range(virtual):
        for stage in range(stages):
            first, last = not chunk and not stage, (chunk, stage) == (virtual - 1, stages - 1)
            stop = end if last else start + layers[stage][chunk] + first
            found[stage].append(LayerRange(start=start, stop=stop))
            start = stop
    return tuple(tuple(each) for each in found)


def _uses(
    facts: LaunchFacts, model: ModelSpec, layers: Chunks, stages: Sequence[_Stage]
) -> tuple[MemoryUse, ...]:
    """Memory of every stage. InputError where a chunk is empty or a size does not divide."""
    job = _job(facts, model)
    end = model.num_layers + model.num_mtp_layers + 2
    ranges = _ranges(layers, end)
    recompute = facts.stage_recompute or (Recompute(),) * len(layers)
    found = []
    for at, stage in enumerate(stages):
        mesh = stage.mesh
        copies = mesh.dp * mesh.cp
        shards = max(1, copies // facts.optimizer_instances) if facts.sharded_optimizer else 1
        multiple = facts.vocab_multiple * mesh.tp
        padded = replace(model, vocab_size=-(-model.vocab_size // multiple) * multiple)
        layout = MemoryLayout(
            chunks=ranges[at],
            tp=mesh.tp,
            cp=mesh.cp,
            ep=mesh.ep,
            etp=mesh.etp if mesh.ep > 1 or mesh.etp != 1 else mesh.tp,
            dp=mesh.dp,
            microbatch_size=mesh.microbatch_size,
            num_microbatches=max(1, facts.num_microbatches),
            schedule=facts.schedule,
            stage=at,
            num_stages=len(stages),
            sequence_parallel=facts.sequence_parallel and mesh.tp > 1,
            recompute=recompute[at],
            sharding=Sharding.OPTIMIZER if facts.sharded_optimizer else Sharding.NONE,
            shards=shards,
            offload=facts.optimizer_offload,
        )
        found.append(device_memory(padded, job, layout, stage.memory_bytes))
    return tuple(found)


def _job(facts: LaunchFacts, model: ModelSpec) -> Job:
    return Job(
        name="launch",
        global_batch_size=max(1, facts.global_batch_size),
        sequence_length=facts.sequence_length or model.max_sequence_length,
        precision=Precision(facts.precision),
        optimizer=Optimizer(facts.optimizer),
        target=facts.text.trainer,
        trainer=facts.options,
    )


def _stages(launch: Launch, facts: LaunchFacts) -> tuple[_Stage, ...] | None:
    """Every stage with the memory of its smallest device; None where that is not known."""
    memories = _memories(launch)
    if memories is None or len(memories) < facts.world_size:
        return None
    found: list[_Stage] = []
    first = 0
    for mesh in facts.meshes:
        size = mesh.tp * mesh.cp * mesh.dp
        for at in range(mesh.pp):
            if facts.data_outermost:
                row = mesh.tp * mesh.cp
                ranks = [
                    first + (copy * mesh.pp + at) * row + rank
                    for copy in range(mesh.dp)
                    for rank in range(row)
                ]
            else:
                ranks = [first + at * size + rank for rank in range(size)]
            if ranks[-1] >= len(memories):
                return None
            found.append(_Stage(mesh=mesh, memory_bytes=min(memories[rank] for rank in ranks)))
        first += size * mesh.pp
    return tuple(found)


def _memories(launch: Launch) -> tuple[float, ...] | None:
    """Memory of the device of every rank; None where hosts and cluster do not show it."""
    cluster = launch.cluster
    if cluster is None:
        return None
    sizes = {island.memory_bytes for island in cluster.islands}
    if len(sizes) == 1:
        return (sizes.pop(),) * max(cluster.num_devices, launch.world_size or 0)
    devices = launch.ranks_of_hosts
    nodes = _memory_of_nodes(cluster)
    if devices is None or any(name not in nodes for name, _ in devices):
        return None
    return tuple(nodes[name] for name, count in devices for _ in range(count))


def _memory_of_nodes(cluster: Cluster) -> dict[str, float]:
    return {
        name: island.memory_bytes for island in cluster.islands for name in island.names_of_nodes
    }


RULES = (
    launch_rule(
        id="launch-uneven-memory",
        severity=Severity.WARNING,
        title="memory of a stage with more layers than the mean",
        explanation="Weights, optimizer state and activations of a stage grow with its layers, and "
        "the first stages keep most microbatches. Megatron-LM's report counts the mean number of "
        "layers; a launch that fits by it may run out of memory on its fullest stage.",
        advice="Count the stages: hetplan check LAUNCH --model MODEL --cluster CLUSTER. Take "
        "layers from the stage, recompute there, or shard the optimizer.",
        look=_uneven,
    ),
)
