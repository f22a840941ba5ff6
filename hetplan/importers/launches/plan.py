"""From what a launch asks for to the plan that it runs on a cluster, so that it can be priced."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import groupby

from hetplan.cluster.spec import Cluster
from hetplan.errors import Fault, InputError
from hetplan.importers.launches.facts import facts_of
from hetplan.importers.launches.flags import fault_of, flag, number_of
from hetplan.importers.launches.places import devices_of_ranks, stage_ranks
from hetplan.importers.launches.values import LaunchFacts, LaunchMesh, LaunchText
from hetplan.job.spec import Job, Optimizer, Precision, TrainerOptions
from hetplan.model.layers import Attention, LatentAttention
from hetplan.model.spec import ModelSpec
from hetplan.plans.assemble import assemble_pipeline, assemble_plan
from hetplan.plans.check import check_plan
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import (
    LayerRange,
    OverlapSettings,
    Plan,
    Replica,
    Schedule,
    Sharding,
    Stage,
    compress,
)
from hetplan.plans.rules import experts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedLaunch:
    """A launch as a plan for a cluster."""

    facts: LaunchFacts
    job: Job
    """What is asked of the run: batch, sequence, precision and options are the launch's."""
    plan: Plan
    remarks: tuple[str, ...]
    """What was left alone, or is priced a little otherwise, a line each."""


def launch_plan(
    text: LaunchText,
    model: ModelSpec,
    cluster: Cluster,
    job: Job | None = None,
    target: str | None = None,
    islands: tuple[str, ...] = (),
) -> ImportedLaunch:
    """The legal plan of a launch on its hosts, or on the cluster's usable nodes in their order.

    `job` gives what a launch does not say (objective, reserve of memory); `target` is whose limits
    the plan is held to, its trainer's by default; `islands` those whose nodes a launch without
    hosts takes, in this order. An InputError where the launch contradicts the
    model, has no place on the cluster, or asks for what plans cannot have.
    """
    facts = facts_of(text, model.num_layers)
    faults = (*facts.refusals, *_contradictions(facts, model), *_layer_faults(facts, model))
    if faults:
        raise InputError(*faults)
    asked = job_of(facts, job, text.trainer if target is None else target)
    devices = devices_of_ranks(facts, cluster, islands)
    plan = _plan(facts, model, cluster, asked, devices)
    illegal = check_plan(plan, model, cluster, asked)
    if illegal:
        raise InputError(*_named(facts, illegal))
    return ImportedLaunch(
        facts=facts, job=asked, plan=plan, remarks=tuple(_remarks(facts, model, plan, job, asked))
    )


# ---- the job


def job_of(facts: LaunchFacts, job: Job | None, target: str) -> Job:
    """The job of a launch; what it does not say is that of `job`, or a job's own default."""
    file = next((each.file for each in facts.text.settings), "launch")
    if facts.sequence_length is None:
        message = "says no sequence length; give --set seq-length=N"
        raise InputError(fault_of(None, facts.text, message))
    if facts.precision not in tuple(Precision):
        message = f"precision {facts.precision} is not one of {', '.join(Precision)}"
        raise InputError(fault_of(None, facts.text, message))
    stem = file.rpartition("/")[2].partition(".")[0]
    base = job or Job(
        name=stem if stem.isprintable() and stem else "launch",
        global_batch_size=facts.global_batch_size,
        sequence_length=facts.sequence_length,
        precision=Precision(facts.precision),
        optimizer=Optimizer(facts.optimizer),
        target=target,
    )
    lengths = base.sequence_lengths if base.sequence_length == facts.sequence_length else ()
    said = {
        each.name: getattr(facts.options, each.name)
        for each in fields(TrainerOptions)
        if getattr(facts.options, each.name) is not None
    }
    return replace(
        base,
        global_batch_size=facts.global_batch_size,
        sequence_length=facts.sequence_length,
        sequence_lengths=lengths,
        precision=Precision(facts.precision),
        optimizer=Optimizer(facts.optimizer),
        target=target,
        gradient_clipping=None if facts.gradient_clipping else False,
        trainer=TrainerOptions(**said),
    )


# ---- what does not agree


def _contradictions(facts: LaunchFacts, model: ModelSpec) -> Iterator[Fault]:
    """Sizes that the launch and the model file give differently."""
    attention = model.layer_runs[0].layer.attention
    heads = attention.num_heads if isinstance(attention, Attention | LatentAttention) else None
    for names, size in (
        (("num-layers",), model.num_layers),
        (("hidden-size",), model.hidden_size),
        (("num-attention-heads",), heads),
    ):
        said = number_of(facts.text, None, *names)
        if said is not None and size is not None and said != size:
            message = f"{said}, and the model {model.name} has {size}; is it another model?"
            yield fault_of(flag(facts.text, *names), facts.text, message)
    if facts.tied_embeddings is not None and facts.tied_embeddings != model.tied_embeddings:
        here = "ties" if facts.tied_embeddings else "does not tie"
        there = "ties" if model.tied_embeddings else "does not tie"
        setting = flag(facts.text, "untie-embeddings-and-output-weights")
        message = (
            f"the launch {here} embedding and head (--untie-embeddings-and-output-weights), the "
            f"model {model.name} {there} them"
        )
        yield fault_of(setting, facts.text, message)


def _layer_faults(facts: LaunchFacts, model: ModelSpec) -> Iterator[Fault]:
    """Layers that the launch loses; a plan holds every one."""
    held = sum(sum(row) for row in facts.layers)
    if held != model.num_layers:
        setting = flag(facts.text, "pipeline-model-parallel-layout", "num-layers", "n-layers")
        message = (
            f"{held} layers stand on its {facts.pp} stages, the model has {model.num_layers}; a "
            "plan holds every layer: give uneven stages their numbers (Megatron-LM: "
            "--pipeline-model-parallel-layout)"
        )
        yield fault_of(setting, facts.text, message)
    copies = facts.meshes[0].dp * facts.meshes[0].microbatch_size
    if facts.global_batch_size % copies:
        setting = flag(facts.text, "global-batch-size")
        message = (
            f"{facts.global_batch_size} is no multiple of dp {facts.meshes[0].dp} x microbatch "
            f"size {facts.meshes[0].microbatch_size}"
        )
        yield fault_of(setting, facts.text, message)


def _named(facts: LaunchFacts, faults: tuple[Fault, ...]) -> Iterator[Fault]:
    """Faults of the plan as faults of the launch, each once."""
    file = next((each.file for each in facts.text.settings), "")
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
    chunks = _chunks(facts, model)
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
        schedule=Schedule(name=facts.schedule, virtual_stages=virtual),
    )
    return assemble_plan(
        model,
        cluster,
        job,
        (pipeline,),
        sharding=sharding,
        optimizer_shards=shards,
        optimizer_offload=facts.optimizer_offload,
        overlap=_overlap(facts, sharding),
    )


def _chunks(facts: LaunchFacts, model: ModelSpec) -> list[tuple[LayerRange, ...]]:
    """Layer ranges of every stage; embedding first, what follows the layers last."""
    found: list[list[LayerRange]] = [[] for _ in facts.layers]
    at, last = 0, (facts.virtual_stages - 1, len(facts.layers) - 1)
    for chunk in range(facts.virtual_stages):
        for s, row in enumerate(facts.layers):
            stop = at + row[chunk] + (at == 0)
            stop = len(model.layers) if (chunk, s) == last else stop
            found[s].append(LayerRange(start=at, stop=stop))
            at = stop
    return [tuple(row) for row in found]


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
    return (Sharding.OPTIMIZER, shards) if shards > 1 else (Sharding.NONE, 1)


def _overlap(facts: LaunchFacts, sharding: Sharding) -> OverlapSettings:
    """What is asked for and exists: without shards nothing is gathered, whatever the flag says."""
    gathering = facts.overlap.gathering and sharding is not Sharding.NONE
    return replace(facts.overlap, gathering=gathering)


# ---- remarks


def _remarks(
    facts: LaunchFacts, model: ModelSpec, plan: Plan, given: Job | None, job: Job
) -> Iterator[str]:
    yield from facts.text.remarks
    yield from facts.remarks
    for each in facts.text.unread:
        word = " ".join(each.values).strip('${}@[]"')
        told = any(remark.endswith(f": {word}") for remark in facts.text.remarks)
        if not each.name and not told:
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
