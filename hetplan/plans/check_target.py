"""Rules about settings: batch, schedule, vocabulary, and what the plan's target cannot express."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np

from hetplan.files.quantities import MAX_COUNT
from hetplan.job.trainer import TRAINER_DEFAULTS, trainer_faults, trainer_settings
from hetplan.model.layer_units import own_layer_fault
from hetplan.model.layers import Attention
from hetplan.model.spec import ModelSpec
from hetplan.plans.formats import named_formats, reduction_precision
from hetplan.plans.pieces import data_ranks, device_array, own_depth, stage_array
from hetplan.plans.plan import (
    SCHEDULES,
    OverlapSettings,
    Pipeline,
    RecomputeGranularity,
    Replica,
    Sharding,
)
from hetplan.plans.rules import Asked, Found, Rule
from hetplan.plans.targets import TARGETS, Target

MAX_PASSES = 4_000_000
"""Forward passes of all stages in one step; a batch of 16,384 sequences on 64 stages has a quarter
of them. An estimate follows every one, many times."""
MAX_WARMUP = 10**9
"""Deeper than any batch; what is deeper than a pipeline's microbatches changes nothing."""


def settings(asked: Asked) -> Found:
    """What the job decides, and numbers that need nothing else to be wrong."""
    plan, job = asked.plan, asked.job
    if asked.trainer is None:
        known = ", ".join(sorted(TARGETS))
        yield Rule.JOB, "target", f"unknown target {plan.target!r}; known targets: {known}"
    elif plan.target != job.target:
        yield Rule.JOB, "target", f"{plan.target} is not the job's target {job.target}"
    if plan.precision != job.precision.value:
        message = f"{plan.precision} is not the job's precision {job.precision.value}"
        yield Rule.JOB, "precision", message
    if plan.optimizer != job.optimizer.value:
        message = f"{plan.optimizer} is not the job's optimizer {job.optimizer.value}"
        yield Rule.JOB, "optimizer", message
    if not plan.pipelines:
        yield Rule.LAYERS_ONCE, "pipelines", "a plan needs at least one pipeline"
    if not 0 <= plan.optimizer_offload <= 1:  # also false for NaN
        message = f"{plan.optimizer_offload}; it is a part, from 0 to 1"
        yield Rule.OFFLOAD, "optimizer_offload", message
    if plan.overlap.gathering and plan.sharding is Sharding.NONE:
        yield Rule.OVERLAP, "overlap.gathering", "nothing is gathered without sharding"


def sequence(asked: Asked) -> Found:
    """Ranks that share a sequence hold equal parts of it."""
    length = asked.job.sequence_length
    for field, replica in asked.replicas():
        if replica.sequence_parallel and replica.tp == 1:
            message = "tp is 1: there is nothing to be parallel with"
            yield Rule.SEQUENCE_PARALLEL, f"{field}.sequence_parallel", message
        # Causal attention is balanced by giving each rank a part from either end: 2 cp parts.
        if replica.cp > 1 and length % (2 * replica.cp):
            message = f"sequence_length {length} is not a multiple of 2 x cp {replica.cp}"
            yield Rule.SEQUENCE, f"{field}.cp", message
        elif replica.sequence_parallel and length // replica.cp % replica.tp:
            yield (
                Rule.SEQUENCE,
                f"{field}.sequence_parallel",
                f"tp {replica.tp} does not divide the {length // replica.cp} tokens of a rank",
            )


def batch(asked: Asked) -> Found:
    """Sequences of all microbatches of all pipelines are the job's batch."""
    total = 0
    for p, pipeline in enumerate(asked.plan.pipelines):
        if pipeline.num_microbatches < 1:
            message = f"{pipeline.num_microbatches}; at least 1"
            yield Rule.BATCH, f"pipelines[{p}].num_microbatches", message
            return
        passes = pipeline.num_microbatches * sum(len(stage.chunks) for stage in pipeline.stages)
        if passes > MAX_PASSES:
            yield (
                Rule.BATCH,
                f"pipelines[{p}].num_microbatches",
                f"{pipeline.num_microbatches} are {passes:,} forward passes of all stages, a step "
                f"has at most {MAX_PASSES:,}; make microbatches larger, or dp",
            )
            return
        sizes = {
            sum(replica.dp * replica.microbatch_size for replica in stage.replicas)
            for stage in pipeline.stages
        }
        if len(sizes) > 1:
            message = f"stages take {sorted(sizes)} sequences per microbatch"
            yield Rule.BATCH, f"pipelines[{p}]", message
            return
        total += max(sizes) * pipeline.num_microbatches
    if total != asked.job.global_batch_size:
        yield (
            Rule.BATCH,
            "pipelines",
            f"dp x microbatch size x microbatches is {total} sequences, the job's "
            f"global_batch_size is {asked.job.global_batch_size}",
        )


def schedule(asked: Asked) -> Found:
    """A known order of passes, whose chunks and warm-up depths it can run."""
    for p, pipeline in enumerate(asked.plan.pipelines):
        name, virtual = pipeline.schedule.name, pipeline.schedule.virtual_stages
        where = f"pipelines[{p}].schedule"
        if name not in SCHEDULES:
            message = f"{name!r} is not known; use one of {', '.join(SCHEDULES)}"
            yield Rule.SCHEDULE, f"{where}.name", message
        elif virtual < 1 or (virtual > 1 and name != "interleaved-1f1b"):
            yield (
                Rule.SCHEDULE,
                f"{where}.virtual_stages",
                f"{virtual} with {name}; at least 1, and more only with interleaved-1f1b",
            )
        elif pipeline.num_microbatches >= 1:
            yield from _warmup(f"pipelines[{p}]", pipeline)


def own_depths(pipeline: Pipeline) -> list[int]:
    """The warm-up depth of each stage that the schedule has of its own."""
    count = len(pipeline.stages)
    name, virtual = pipeline.schedule.name, pipeline.schedule.virtual_stages
    return [own_depth(name, s, count, pipeline.num_microbatches, virtual) for s in range(count)]


def _warmup(field: str, pipeline: Pipeline) -> Found:
    depths = [stage.warmup_depth for stage in pipeline.stages]
    if pipeline.schedule.name != "1f1b":
        own = own_depths(pipeline)
        if depths != own:
            yield (
                Rule.WARMUP,
                field,
                f"warm-up depths {depths}; {pipeline.schedule.name} has {own}",
            )
    elif min(depths) < 1:
        yield Rule.WARMUP, field, f"warm-up depths {depths} must be at least 1"
    elif max(depths) > MAX_WARMUP:
        yield Rule.WARMUP, field, f"warm-up depths {depths}; at most {MAX_WARMUP:,}"
    elif any(left < right for left, right in pairwise(depths)):
        message = f"warm-up depths {depths} grow along the pipeline: deadlock"
        yield Rule.WARMUP, field, message


def vocabulary(asked: Asked) -> Found:
    """Every stage's tp divides the padded vocabulary, which is padded as the target does it."""
    trainer, padded = asked.trainer, asked.plan.padded_vocab_size
    size = asked.model.vocab_size
    if trainer is None:
        return
    tp = math.lcm(*(replica.tp for _, replica in asked.replicas()))
    wanted = trainer.padded_vocab_size(size, tp)
    if padded < size:
        message = f"{padded} is below the vocabulary of {size}; use {wanted}"
    elif padded % tp:
        message = f"tp {tp} does not divide {padded}; use {wanted}"
    elif padded > MAX_COUNT:
        message = f"{padded} is more than {MAX_COUNT:,}; use {wanted}"
    elif padded != wanted and not trainer.other_padding:
        message = f"{padded}; with tp {tp} target {trainer.name} pads {size} to {wanted}"
    else:
        return
    yield Rule.VOCABULARY, "padded_vocab_size", message


def target_limits(asked: Asked) -> Found:
    """Everything that the plan's target cannot express; nothing for unknown targets."""
    trainer = asked.trainer
    if trainer is None:
        return
    plan, rule = asked.plan, Rule.TARGET
    own = own_layer_fault(asked.model) if trainer.own_layers_only else ""
    if own:
        yield rule, "target", f"{trainer.name} cannot train the model: {own}"
    if len(plan.pipelines) > 1 and not trainer.several_pipelines:
        yield rule, "pipelines", f"{len(plan.pipelines)}; target {trainer.name} runs one"
    for p, pipeline in enumerate(plan.pipelines):
        yield from _schedule(f"pipelines[{p}]", pipeline, trainer, asked)
        yield from _places(asked, f"pipelines[{p}]", pipeline, trainer)
    if not trainer.mixed_stages:
        yield from _mixed(asked, trainer)
    if not trainer.stages_differ:
        yield from _differences(asked, trainer)
    if trainer.equal_ends:
        yield from _ends(asked, trainer)
    if not trainer.tied_stages and asked.model.tied_embeddings:
        yield from _tied_stages(asked, trainer)
    yield from _parallelism(asked, trainer)
    yield from _recompute(asked, trainer)
    if plan.sharding not in trainer.sharding:
        yield rule, "sharding", f"target {trainer.name} cannot shard {plan.sharding}"
    elif plan.sharding not in trainer.shardings(asked.job.optimizer):
        message = (
            f"{plan.sharding} with optimizer {asked.job.optimizer}; target {trainer.name} shards "
            "Adam's state only: pin sharded_optimizer: false"
        )
        yield rule, "sharding", message
    if (
        plan.sharding is Sharding.NONE
        and trainer.context_shards
        and any(replica.cp > 1 for _, replica in asked.replicas())
    ):
        message = f"none; target {trainer.name} shards over context-parallel ranks"
        yield rule, "sharding", message
    if plan.optimizer_offload > 0 and not trainer.optimizer_offload:
        message = f"target {trainer.name} keeps optimizer state on the device: use 0"
        yield rule, "optimizer_offload", message
    yield from _overlap(asked, trainer)
    yield from _options(asked, trainer)


def _options(asked: Asked, trainer: Target) -> Found:
    """Trainer options of the job that the plan's target, or its schedules, cannot run."""
    job = replace(asked.job, target=trainer.name)
    faults = tuple(trainer_faults(job))
    for name, message in faults:
        yield Rule.TARGET, "target", f"the job's trainer.{name}: {message}"
    if faults:
        return
    yield from _product_format(asked)
    if not trainer.other_formats:
        yield from _reduction_formats(asked, trainer, reduction_precision(job).value)
    if not trainer_settings(job).blocking_sends:
        return
    for p, pipeline in enumerate(asked.plan.pipelines):
        depths = [stage.warmup_depth for stage in pipeline.stages]
        if pipeline.schedule.name != "1f1b" or depths != own_depths(pipeline):
            yield (
                Rule.TARGET,
                f"pipelines[{p}].schedule",
                f"{pipeline.schedule.name} with warm-up depths {depths}; the job's trainer."
                "blocking_sends goes with 1f1b and its own depths only",
            )


def _reduction_formats(asked: Asked, trainer: Target, own: str) -> Found:
    """Sums of gradients in another format than the trainer's."""
    if "gradient_precision" in TRAINER_DEFAULTS[trainer.name].choices:
        hint = f"with this job, whose trainer.gradient_precision decides, sums in {own}"
    else:
        hint = f"always sums in {own} with {asked.job.precision} parameters"
    for field, found in named_formats(asked.plan):
        if found != own:
            yield Rule.TARGET, field, f"{found}; target {trainer.name} {hint}"


def _product_format(asked: Asked) -> Found:
    """Devices of the plan without a rate of the job's products."""
    wanted = asked.job.trainer.product_format
    if wanted is None:
        return
    for field, _, stage in asked.stages():
        for at in np.unique(asked.places.islands(stage_array(stage))):
            kind = asked.cluster.islands[int(at)].device
            if wanted.rate not in kind.dtypes:
                yield (
                    Rule.TARGET,
                    field,
                    f"{kind.kind} has no {wanted.rate} rate, which the job's trainer."
                    f"product_format {wanted} needs",
                )


def _schedule(field: str, pipeline: Pipeline, trainer: Target, asked: Asked) -> Found:
    name, stages = pipeline.schedule.name, len(pipeline.stages)
    count, virtual = pipeline.num_microbatches, pipeline.schedule.virtual_stages
    if name in SCHEDULES and name not in trainer.schedules:
        known = ", ".join(trainer.schedules)
        message = f"target {trainer.name} runs {known}, not {name}"
        yield Rule.TARGET, f"{field}.schedule.name", message
    if name not in trainer.schedules:
        return
    if count < stages and not trainer.fewer_microbatches_than_stages:
        yield (
            Rule.TARGET,
            f"{field}.num_microbatches",
            f"{count} for {stages} stages; target {trainer.name} needs at least one microbatch "
            "per stage",
        )
    if virtual > 1 and trainer.whole_microbatch_groups and count % stages:
        yield (
            Rule.TARGET,
            f"{field}.num_microbatches",
            f"{count} is not a multiple of {stages} stages, as interleaving of target "
            f"{trainer.name} needs it",
        )
    if virtual > 1:
        least = trainer.least_interleaved_stages
        overlapped = " on, or from 2 with overlap.send" if least > 2 else " on"
        if stages < (min(least, 2) if asked.plan.overlap.send else least):
            yield (
                Rule.TARGET,
                f"{field}.schedule.virtual_stages",
                f"{virtual} with {stages} stages; target {trainer.name} interleaves from {least} "
                f"stages{overlapped}",
            )
    if not trainer.other_warmup:
        depths, own = [stage.warmup_depth for stage in pipeline.stages], own_depths(pipeline)
        if depths != own:
            message = f"warm-up depths {depths}; target {trainer.name} always has {own}"
            yield Rule.TARGET, field, message
    for b, boundary in enumerate(pipeline.boundaries):
        if boundary.precision != asked.plan.precision and not trainer.other_formats:
            yield (
                Rule.TARGET,
                f"{field}.boundaries[{b}].precision",
                f"{boundary.precision}; target {trainer.name} sends what it computes, "
                f"{asked.plan.precision}",
            )


def _places(asked: Asked, field: str, pipeline: Pipeline, trainer: Target) -> Found:
    rows = []
    for s, stage in enumerate(pipeline.stages):
        row = []
        for r, replica in enumerate(stage.replicas):
            devices = device_array(replica.devices)
            at = int(asked.places.islands(devices[:1])[0])
            row.append(at)
            per_node = asked.cluster.islands[at].devices_per_node
            used = np.unique(asked.places.nodes(devices)).size
            if trainer.whole_nodes and used > 1 and used * per_node != devices.size:
                where = f".replicas[{r}]" if len(stage.replicas) > 1 else ""
                yield (
                    Rule.TARGET,
                    f"{field}.stages[{s}]{where}",
                    f"{devices.size} devices in {used} nodes of {per_node}; with target "
                    f"{trainer.name} a stage lies in one node or fills whole ones",
                )
        rows.append(tuple(row))
    runs = [rows[0], *(right for left, right in pairwise(rows) if left != right)]
    seen: set[int] = set()
    for run in runs:
        if trainer.island_runs and seen & {*run}:
            again = asked.cluster.islands[min(seen & {*run})].name
            yield (
                Rule.TARGET,
                f"{field}.stages",
                f"the stages of island {again} are not next to each other",
            )
            return
        seen |= {*run}


def _mixed(asked: Asked, trainer: Target) -> Found:
    """Stages whose entries are not data-parallel ranks of one kind and one shape."""
    for field, _, stage in asked.stages():
        if len(stage.replicas) == 1:
            continue
        at = np.unique(asked.places.islands(stage_array(stage)))
        kinds = sorted({asked.cluster.islands[int(island)].device.kind for island in at})
        if len(kinds) > 1:
            message = f"mixes {', '.join(kinds)}; a stage of target {trainer.name} has one kind"
            yield Rule.TARGET, f"{field}.replicas", message
        shapes = {_rank_shape(replica) for replica in stage.replicas}
        if len(shapes) > 1:
            yield (
                Rule.TARGET,
                f"{field}.replicas",
                "(tp, cp, ep, etp, microbatch size, sequence parallel) differ between entries: "
                f"{sorted(shapes)}; target {trainer.name} has one for a stage",
            )
        elif stage.replicas[0].ep > 1:
            message = f"ep {stage.replicas[0].ep} in {len(stage.replicas)} entries; use one entry"
            yield Rule.TARGET, f"{field}.replicas", message


def _rank_shape(replica: Replica) -> tuple[int, int, int, int, int, bool]:
    return (
        *(replica.tp, replica.cp, replica.ep, replica.etp),
        *(replica.microbatch_size, replica.sequence_parallel),
    )


def _differences(asked: Asked, trainer: Target) -> Found:
    shapes = {
        (r.tp, r.cp, r.ep, r.etp, data_ranks(stage), r.microbatch_size, r.sequence_parallel)
        for _, _, stage in asked.stages()
        for r in stage.replicas
    }
    if len(shapes) > 1:
        yield (
            Rule.TARGET,
            "pipelines",
            "(tp, cp, ep, etp, dp, microbatch size, sequence parallel) differ between stages: "
            f"{sorted(shapes)}; target {trainer.name} has one for all",
        )


def _ends(asked: Asked, trainer: Target) -> Found:
    """First and last stage where they share a matrix (FlagScale's pre_validate_args)."""
    if not asked.model.tied_embeddings and not asked.model.num_mtp_layers:
        return
    for p, pipeline in enumerate(asked.plan.pipelines):
        first, last = pipeline.stages[0], pipeline.stages[-1]
        tps = (first.replicas[0].tp, last.replicas[0].tp)
        dps = (data_ranks(first), data_ranks(last))
        if not ends_agree(tps, dps):
            what = "a tied matrix" if asked.model.tied_embeddings else "multi-token prediction"
            yield (
                Rule.TARGET,
                f"pipelines[{p}].stages",
                f"tp {tps[0]} and {tps[1]}, dp {dps[0]} and {dps[1]} at first and last stage; with "
                f"{what} target {trainer.name} needs one tp, and dp of the first to divide dp of "
                "the last",
            )


def _tied_stages(asked: Asked, trainer: Target) -> Found:
    """Several stages of a model whose ends share a matrix."""
    for p, pipeline in enumerate(asked.plan.pipelines):
        if len(pipeline.stages) > 1:
            yield (
                Rule.TARGET,
                f"pipelines[{p}].stages",
                f"{len(pipeline.stages)}; {asked.model.name} ties embedding and head, which target "
                f"{trainer.name} trains in one stage only: pin pp: 1",
            )


def ends_agree(tps: tuple[int, int], dps: tuple[int, int]) -> bool:
    """What `Target.equal_ends` asks of (first, last) stage's tp and dp."""
    return tps[0] == tps[1] and dps[1] % dps[0] == 0


def copied_heads_fault(model: ModelSpec, tp: int) -> str:
    """Why a target without `Target.copied_heads` cannot cut the model so; empty where it can."""
    for run in model.layer_runs:
        attention = run.layer.attention
        if isinstance(attention, Attention) and attention.num_kv_heads % tp:
            return f"tp {tp} does not divide the {attention.num_kv_heads} key-value heads"
    return ""


def _parallelism(asked: Asked, trainer: Target) -> Found:
    experts = bool(asked.experts_at(0, len(asked.model.layers)))
    for tp in sorted({replica.tp for _, replica in asked.replicas()}):
        fault = "" if trainer.copied_heads else copied_heads_fault(asked.model, tp)
        if fault:
            message = f"{fault} of {asked.model.name}, which target {trainer.name} does not copy"
            yield Rule.TARGET, "pipelines", message
    for field, replica in asked.replicas():
        for name, used, can in (
            ("cp", replica.cp > 1, trainer.context_parallel),
            ("ep", replica.ep > 1, trainer.expert_parallel),
            ("sequence_parallel", replica.sequence_parallel, trainer.sequence_parallel),
        ):
            if used and not can:
                yield Rule.TARGET, f"{field}.{name}", f"target {trainer.name} does not have it"
        if (
            experts
            and trainer.experts_need_sequence_parallel
            and replica.tp > 1
            and not replica.sequence_parallel
        ):
            yield (
                Rule.TARGET,
                f"{field}.sequence_parallel",
                f"target {trainer.name} trains experts with tp {replica.tp} only with sequence "
                "parallelism",
            )


def _recompute(asked: Asked, trainer: Target) -> Found:
    asks = {stage.recompute: field for field, _, stage in reversed([*asked.stages()])}
    if len(asks) > 1 and not trainer.recompute_per_stage:
        message = f"target {trainer.name} recomputes the same on all stages"
        yield Rule.TARGET, f"{next(iter(asks.values()))}.recompute", message
    for recompute, field in asks.items():
        if recompute.granularity is RecomputeGranularity.FULL and not trainer.full_recompute:
            message = f"target {trainer.name} cannot recompute whole layers"
            yield Rule.TARGET, f"{field}.recompute", message
        cannot = [each for each in recompute.modules if each not in trainer.recompute_modules]
        if cannot:
            message = f"target {trainer.name} cannot recompute {', '.join(cannot)} alone"
            yield Rule.TARGET, f"{field}.recompute.modules", message
        if recompute.layers is not None and not trainer.recompute_layers:
            message = f"target {trainer.name} recomputes all layers of a stage or none"
            yield Rule.TARGET, f"{field}.recompute.layers", message


def _overlap(asked: Asked, trainer: Target) -> Found:
    plan, rule = asked.plan, Rule.TARGET
    overlap = plan.overlap
    context_parallel = any(replica.cp > 1 for _, replica in asked.replicas())
    for field in fields(OverlapSettings):
        wanted, can = getattr(overlap, field.name), getattr(trainer.overlap, field.name)
        # On by default: without context parallelism it says nothing.
        if field.name == "context_parallel" and not context_parallel:
            continue
        if wanted and not can:
            message = f"target {trainer.name} does not overlap it"
            yield rule, f"overlap.{field.name}", message
    if not trainer.overlap_needs:
        return
    if overlap.gathering and plan.sharding is not Sharding.NONE and not overlap.reduction:
        message = f"target {trainer.name} overlaps it only together with overlap.reduction"
        yield rule, "overlap.gathering", message
    if overlap.tensor_parallel and not all(r.sequence_parallel for _, r in asked.replicas()):
        message = f"target {trainer.name} overlaps it only with sequence parallelism"
        yield rule, "overlap.tensor_parallel", message
    if overlap.send and all(each.schedule.virtual_stages == 1 for each in plan.pipelines):
        message = f"target {trainer.name} overlaps sends only with virtual stages"
        yield rule, "overlap.send", message
