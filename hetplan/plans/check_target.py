"""Rules about settings: batch, schedule, vocabulary, and what the plan's target cannot express."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hetplan.cluster.libraries import island_library
from hetplan.files.quantities import MAX_COUNT
from hetplan.job.kernels import CONTEXT_PARALLEL, kernel_fault
from hetplan.job.spec import SPLIT_WEIGHTS
from hetplan.job.trainer import (
    TRAINER_DEFAULTS,
    mixes_libraries,
    trainer_faults,
    trainer_settings,
)
from hetplan.model.layer_units import own_layer_fault
from hetplan.model.layers import Attention
from hetplan.model.spec import ModelSpec
from hetplan.plans.formats import named_formats, reduction_precision
from hetplan.plans.limits import used_in_part
from hetplan.plans.pieces import data_ranks, device_array, own_depth, stage_array
from hetplan.plans.plan import (
    SCHEDULES,
    SPLIT_SCHEDULES,
    OverlapSettings,
    Pipeline,
    RecomputeGranularity,
    Replica,
    Schedule,
    Sharding,
)
from hetplan.plans.rules import CheckedPlan, Found
from hetplan.plans.targets import TARGETS, Target
from hetplan.plans.v_schedules import chunks_fault, is_v, microbatch_multiple

MAX_PASSES = 4_000_000
"""Forward passes of all stages in one step; a batch of 16,384 sequences on 64 stages has a quarter
of them. An estimate follows every one, many times."""
MAX_WARMUP = 10**9
"""Deeper than any batch; what is deeper than a pipeline's microbatches changes nothing."""


def job_settings(checked: CheckedPlan) -> Found:
    """Target, precision and optimizer are the job's."""
    plan, job = checked.plan, checked.job
    if checked.trainer is None:
        known = ", ".join(sorted(TARGETS))
        yield "target", f"unknown target {plan.target!r}; known targets: {known}"
    elif plan.target != job.target:
        yield "target", f"{plan.target} is not the job's target {job.target}"
    if plan.precision != job.precision.value:
        yield "precision", f"{plan.precision} is not the job's precision {job.precision.value}"
    if plan.optimizer != job.optimizer.value:
        yield "optimizer", f"{plan.optimizer} is not the job's optimizer {job.optimizer.value}"


def kernels(checked: CheckedPlan) -> Found:
    """Every device has the kernels of the precision, the products' format and its degrees."""
    plan, narrow = checked.plan, checked.job.trainer.product_format
    formats = (plan.precision, *(() if narrow is None else (narrow.value,)))
    for field, replica in checked.replicas():
        at = int(checked.places.islands(device_array(replica.devices))[0])
        device = checked.cluster.islands[at].device
        features = (*formats, *((CONTEXT_PARALLEL,) if replica.cp > 1 else ()))
        for fault in filter(None, (kernel_fault(device, f, plan.target) for f in features)):
            yield field, fault


def offload(checked: CheckedPlan) -> Found:
    """The offloaded part is a part."""
    if not 0 <= checked.plan.optimizer_offload <= 1:  # also false for NaN
        yield "optimizer_offload", f"{checked.plan.optimizer_offload}; it is a part, from 0 to 1"


def overlap(checked: CheckedPlan) -> Found:
    """Gathering is overlapped where there is gathering."""
    if checked.plan.overlap.gathering and checked.plan.sharding is Sharding.NONE:
        yield "overlap.gathering", "nothing is gathered without sharding"


def sequence(checked: CheckedPlan) -> Found:
    """Ranks that share a sequence hold equal parts of it."""
    length = checked.job.sequence_length
    for field, replica in checked.replicas():
        tp, cp = replica.tp, replica.cp
        # Causal attention is balanced by giving each rank a part from either end: 2 cp parts.
        if cp > 1 and length % (2 * cp):
            yield f"{field}.cp", f"sequence_length {length} is not a multiple of 2 x cp {cp}"
        elif replica.sequence_parallel and length // cp % tp:
            message = f"tp {tp} does not divide the {length // cp} tokens of a rank"
            yield f"{field}.sequence_parallel", message


def sequence_parallel(checked: CheckedPlan) -> Found:
    """Sequence parallelism is among tensor-parallel ranks."""
    for field, replica in checked.replicas():
        if replica.sequence_parallel and replica.tp == 1:
            yield f"{field}.sequence_parallel", "tp is 1: there is nothing to be parallel with"


def batch(checked: CheckedPlan) -> Found:
    """Sequences of all microbatches of all pipelines are the job's batch."""
    total = 0
    for p, pipeline in enumerate(checked.plan.pipelines):
        if pipeline.num_microbatches < 1:
            message = f"{pipeline.num_microbatches}; at least 1"
            yield f"pipelines[{p}].num_microbatches", message
            return
        passes = pipeline.forward_passes
        if passes > MAX_PASSES:
            yield (
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
            yield f"pipelines[{p}]", message
            return
        total += max(sizes) * pipeline.num_microbatches
    if total != checked.job.global_batch_size:
        yield (
            "pipelines",
            f"dp x microbatch size x microbatches is {total} sequences, the job's "
            f"global_batch_size is {checked.job.global_batch_size}",
        )


def schedule(checked: CheckedPlan) -> Found:
    """The order of passes is known, and only an interleaved one has several chunks."""
    for p, pipeline in enumerate(checked.plan.pipelines):
        yield from _schedule_faults(f"pipelines[{p}].schedule", pipeline.schedule)
        count, least = pipeline.num_microbatches, 2 * len(pipeline.stages)
        if pipeline.schedule.name == "dualpipev" and count < least:
            message = f"{count}; dualpipev needs two per stage, {least}: use zbv, or smaller ones"
            yield f"pipelines[{p}].num_microbatches", message


def _schedule_faults(field: str, schedule: Schedule) -> Found:
    name, virtual = schedule.name, schedule.virtual_stages
    if name not in SCHEDULES:
        yield f"{field}.name", f"{name!r} is not known; use one of {', '.join(SCHEDULES)}"
    elif chunks_fault(name, virtual):
        yield f"{field}.virtual_stages", f"{virtual} {chunks_fault(name, virtual)}"


def own_depths(pipeline: Pipeline) -> list[int]:
    """The warm-up depth of each stage that the schedule has of its own."""
    count = len(pipeline.stages)
    name, virtual = pipeline.schedule.name, pipeline.schedule.virtual_stages
    return [own_depth(name, s, count, pipeline.num_microbatches, virtual) for s in range(count)]


def warmup(checked: CheckedPlan) -> Found:
    """Depths are the schedule's own; those of 1F1B may be others that do not grow downstream."""
    for p, pipeline in enumerate(checked.plan.pipelines):
        name = pipeline.schedule.name
        if any(_schedule_faults("", pipeline.schedule)) or pipeline.num_microbatches < 1:
            continue  # `schedule` and `batch` say it
        depths = [stage.warmup_depth for stage in pipeline.stages]
        own = depths if name == "1f1b" else own_depths(pipeline)
        if depths != own:
            yield f"pipelines[{p}]", f"warm-up depths {depths}; {name} has {own}"
        elif min(depths) < 1:
            yield f"pipelines[{p}]", f"warm-up depths {depths} must be at least 1"
        elif max(depths) > MAX_WARMUP:
            yield f"pipelines[{p}]", f"warm-up depths {depths}; at most {MAX_WARMUP:,}"
        elif name == "1f1b" and any(left < right for left, right in pairwise(depths)):
            message = f"warm-up depths {depths} grow along the pipeline: deadlock"
            yield f"pipelines[{p}]", message


def vocabulary(checked: CheckedPlan) -> Found:
    """Every stage's tp divides the padded vocabulary, which is padded as the target does it."""
    trainer, padded = checked.trainer, checked.plan.padded_vocab_size
    size = checked.model.vocab_size
    if trainer is None:
        return
    tp = math.lcm(*(replica.tp for _, replica in checked.replicas()))
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
    yield "padded_vocab_size", message


def target_limits(checked: CheckedPlan) -> Found:
    """Everything that the plan's target cannot express; nothing for unknown targets."""
    trainer = checked.trainer
    if trainer is None:
        return
    plan = checked.plan
    own = own_layer_fault(checked.model, trained=True) if trainer.own_layers_only else ""
    if own:
        yield "target", f"{trainer.name} cannot train the model: {own}"
    if len(plan.pipelines) > 1 and not trainer.several_pipelines:
        yield "pipelines", f"{len(plan.pipelines)}; target {trainer.name} runs one"
    for p, pipeline in enumerate(plan.pipelines):
        yield from _schedule(f"pipelines[{p}]", pipeline, trainer, checked)
        yield from _places(checked, f"pipelines[{p}]", pipeline, trainer)
    if not trainer.mixed_stages:
        yield from _mixed(checked, trainer)
    if not mixes_libraries(checked.job):
        yield from _libraries(checked, trainer)
    if not trainer.stages_differ:
        yield from _differences(checked, trainer)
    if trainer.equal_ends:
        yield from _ends(checked, trainer)
    if not trainer.tied_stages and checked.model.tied_embeddings:
        yield from _tied_stages(checked, trainer)
    yield from _parallelism(checked, trainer)
    yield from _recompute(checked, trainer)
    if plan.sharding not in trainer.sharding:
        yield "sharding", f"target {trainer.name} cannot shard {plan.sharding}"
    elif plan.sharding not in trainer.shardings(checked.job.optimizer):
        message = (
            f"{plan.sharding} with optimizer {checked.job.optimizer}; target {trainer.name} shards "
            "Adam's state only: pin sharded_optimizer: false"
        )
        yield "sharding", message
    if (
        plan.sharding is Sharding.NONE
        and trainer.context_shards
        and any(replica.cp > 1 for _, replica in checked.replicas())
    ):
        message = f"none; target {trainer.name} shards over context-parallel ranks"
        yield "sharding", message
    several = any(len(pipeline.stages) > 1 for pipeline in plan.pipelines)
    if several and trainer.whole_in_stages and plan.sharding in SPLIT_WEIGHTS:
        message = f"{plan.sharding}; target {trainer.name} keeps gradients and parameters whole in "
        yield "sharding", message + "a pipeline of several stages"
    if plan.optimizer_offload > 0 and not trainer.optimizer_offload:
        message = f"target {trainer.name} keeps optimizer state on the device: use 0"
        yield "optimizer_offload", message
    yield from _overlap(checked, trainer)
    yield from _options(checked, trainer)


def _options(checked: CheckedPlan, trainer: Target) -> Found:
    """Trainer options of the job that the plan's target, or its schedules, cannot run."""
    job = replace(checked.job, target=trainer.name)
    faults = tuple(trainer_faults(job))
    for name, message in faults:
        yield "target", f"the job's trainer.{name}: {message}"
    if faults:
        return
    yield from _product_format(checked)
    if not trainer.other_formats:
        yield from _reduction_formats(checked, trainer, reduction_precision(job).value)
    if not trainer_settings(job).blocking_sends:
        return
    for p, pipeline in enumerate(checked.plan.pipelines):
        depths = [stage.warmup_depth for stage in pipeline.stages]
        if pipeline.schedule.name != "1f1b" or depths != own_depths(pipeline):
            yield (
                f"pipelines[{p}].schedule",
                f"{pipeline.schedule.name} with warm-up depths {depths}; the job's trainer."
                "blocking_sends goes with 1f1b and its own depths only",
            )


def _reduction_formats(checked: CheckedPlan, trainer: Target, own: str) -> Found:
    """Sums of gradients in another format than the trainer's."""
    if "gradient_precision" in TRAINER_DEFAULTS[trainer.name].choices:
        hint = f"with this job, whose trainer.gradient_precision decides, sums in {own}"
    else:
        hint = f"always sums in {own} with {checked.job.precision} parameters"
    for field, found in named_formats(checked.plan):
        if found != own:
            yield field, f"{found}; target {trainer.name} {hint}"


def _product_format(checked: CheckedPlan) -> Found:
    """Devices of the plan without a rate of the job's products."""
    wanted = checked.job.trainer.product_format
    if wanted is None:
        return
    for field, _, stage in checked.stages():
        for at in np.unique(checked.places.islands(stage_array(stage))):
            kind = checked.cluster.islands[int(at)].device
            if wanted.rate not in kind.dtypes:
                yield (
                    field,
                    f"{kind.kind} has no {wanted.rate} rate, which the job's trainer."
                    f"product_format {wanted} needs",
                )


def _schedule(field: str, pipeline: Pipeline, trainer: Target, checked: CheckedPlan) -> Found:
    name, stages = pipeline.schedule.name, len(pipeline.stages)
    count, virtual = pipeline.num_microbatches, pipeline.schedule.virtual_stages
    if name in SCHEDULES and name not in trainer.schedules:
        known = ", ".join(trainer.schedules)
        others = " and ".join(each.name for each in TARGETS.values() if name in each.schedules)
        yield (
            f"{field}.schedule.name",
            f"target {trainer.name} runs {known}, not {name} (target {others})",
        )
    if name not in trainer.schedules:
        return
    job = replace(checked.job, target=trainer.name)
    splits = name in SPLIT_SCHEDULES and not trainer.splits_compiled_layers
    if splits and not any(trainer_faults(job)) and trainer_settings(job).fused_elementwise:
        yield (
            f"{field}.schedule.name",
            f"{name} with the job's trainer.fused_elementwise; target {trainer.name} cannot split "
            "the backward pass of compiled layers: leave one of them out",
        )
    if count < stages and not trainer.fewer_microbatches_than_stages:
        yield (
            f"{field}.num_microbatches",
            f"{count} for {stages} stages; target {trainer.name} needs at least one microbatch "
            "per stage",
        )
    group = microbatch_multiple(name, virtual, stages, count)
    if trainer.whole_microbatch_groups and count % group:
        yield (
            f"{field}.num_microbatches",
            f"{count} is not a multiple of {group}, as {name} over {stages} stages of target "
            f"{trainer.name} needs it",
        )
    if virtual > 1 and not is_v(name):
        least = trainer.least_interleaved_stages
        overlapped = " on, or from 2 with overlap.send" if least > 2 else " on"
        if stages < (min(least, 2) if checked.plan.overlap.send else least):
            yield (
                f"{field}.schedule.virtual_stages",
                f"{virtual} with {stages} stages; target {trainer.name} interleaves from {least} "
                f"stages{overlapped}",
            )
    if not trainer.other_warmup:
        depths, own = [stage.warmup_depth for stage in pipeline.stages], own_depths(pipeline)
        if depths != own:
            message = f"warm-up depths {depths}; target {trainer.name} always has {own}"
            yield field, message
    for b, boundary in enumerate(pipeline.boundaries):
        if boundary.precision != checked.plan.precision and not trainer.other_formats:
            yield (
                f"{field}.boundaries[{b}].precision",
                f"{boundary.precision}; target {trainer.name} sends what it computes, "
                f"{checked.plan.precision}",
            )


def _used_of(checked: CheckedPlan, nodes: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many devices of each of these nodes the plan uses."""
    every = device_array([part for stage in checked.plan.stages for part in stage.devices])
    used: NDArray[np.int64] = np.bincount(checked.places.nodes(every))[nodes]
    return used


def _places(checked: CheckedPlan, field: str, pipeline: Pipeline, trainer: Target) -> Found:
    rows, places = [], checked.places
    in_part = used_in_part(checked.cluster, checked.job)
    for s, stage in enumerate(pipeline.stages):
        row = []
        for r, replica in enumerate(stage.replicas):
            devices = device_array(replica.devices)
            at = int(places.islands(devices[:1])[0])
            row.append(at)
            island = checked.cluster.islands[at]
            per_node = island.devices_per_node
            nodes, mine = np.unique(places.nodes(devices), return_counts=True)
            if not trainer.whole_nodes or nodes.size == 1:
                continue
            filled = _used_of(checked, nodes) if island.name in in_part else per_node
            if (mine != filled).any() or (mine != mine[0]).any():
                whole = "what the plan uses of several, equally much of each"
                where = f".replicas[{r}]" if len(stage.replicas) > 1 else ""
                yield (
                    f"{field}.stages[{s}]{where}",
                    f"{devices.size} devices in {nodes.size} nodes of {per_node}; with target "
                    f"{trainer.name} a stage lies in one node or fills "
                    f"{whole if island.name in in_part else 'whole ones'}",
                )
        rows.append(tuple(row))
    runs = [rows[0], *(right for left, right in pairwise(rows) if left != right)]
    seen: set[int] = set()
    for run in runs:
        if trainer.island_runs and seen & {*run}:
            again = checked.cluster.islands[min(seen & {*run})].name
            yield (f"{field}.stages", f"the stages of island {again} are not next to each other")
            return
        seen |= {*run}


def _mixed(checked: CheckedPlan, trainer: Target) -> Found:
    """Stages whose entries are not data-parallel ranks of one kind and one shape."""
    for field, _, stage in checked.stages():
        if len(stage.replicas) == 1:
            continue
        at = np.unique(checked.places.islands(stage_array(stage)))
        kinds = sorted({checked.cluster.islands[int(island)].device.kind for island in at})
        if len(kinds) > 1:
            message = f"mixes {', '.join(kinds)}; a stage of target {trainer.name} has one kind"
            yield f"{field}.replicas", message
        shapes = {_rank_shape(replica) for replica in stage.replicas}
        if len(shapes) > 1:
            yield (
                f"{field}.replicas",
                "(tp, cp, ep, etp, microbatch size, sequence parallel) differ between entries: "
                f"{sorted(shapes)}; target {trainer.name} has one for a stage",
            )
        elif stage.replicas[0].ep > 1:
            message = f"ep {stage.replicas[0].ep} in {len(stage.replicas)} entries; use one entry"
            yield f"{field}.replicas", message


def _libraries(checked: CheckedPlan, trainer: Target) -> Found:
    """Devices that go through several libraries of collectives."""
    kinds: dict[str, dict[str, None]] = {}
    for _, _, stage in checked.stages():
        for at in np.unique(checked.places.islands(stage_array(stage))):
            island = checked.cluster.islands[int(at)]
            kinds.setdefault(island_library(island), {})[island.device.kind] = None
    if len(kinds) > 1:
        text = "; ".join(f"{library} on {', '.join(names)}" for library, names in kinds.items())
        yield (
            "pipelines",
            f"its devices go through {len(kinds)} libraries of collectives ({text}), and a run of "
            f"{trainer.name} has one: plan again with the islands of all but one forbidden, or for "
            "flagscale or native; if yours is patched, set trainer.mixed_libraries: true (in a "
            "plan's file: inputs.job.trainer.mixed_libraries)",
        )


def _rank_shape(replica: Replica) -> tuple[int, int, int, int, int, bool]:
    return (
        *(replica.tp, replica.cp, replica.ep, replica.etp),
        *(replica.microbatch_size, replica.sequence_parallel),
    )


def _differences(checked: CheckedPlan, trainer: Target) -> Found:
    shapes = {
        (r.tp, r.cp, r.ep, r.etp, data_ranks(stage), r.microbatch_size, r.sequence_parallel)
        for _, _, stage in checked.stages()
        for r in stage.replicas
    }
    if len(shapes) > 1:
        yield (
            "pipelines",
            "(tp, cp, ep, etp, dp, microbatch size, sequence parallel) differ between stages: "
            f"{sorted(shapes)}; target {trainer.name} has one for all",
        )


def _ends(checked: CheckedPlan, trainer: Target) -> Found:
    """First and last stage where they share a matrix (FlagScale's pre_validate_args)."""
    if not checked.model.tied_embeddings and not checked.model.num_mtp_layers:
        return
    for p, pipeline in enumerate(checked.plan.pipelines):
        first, last = pipeline.ends[0], pipeline.ends[-1]
        tps = (first.replicas[0].tp, last.replicas[0].tp)
        dps = (data_ranks(first), data_ranks(last))
        if not ends_agree(tps, dps):
            what = "a tied matrix" if checked.model.tied_embeddings else "multi-token prediction"
            yield (
                f"pipelines[{p}].stages",
                f"tp {tps[0]} and {tps[1]}, dp {dps[0]} and {dps[1]} at first and last stage; with "
                f"{what} target {trainer.name} needs one tp, and dp of the first to divide dp of "
                "the last",
            )


def _tied_stages(checked: CheckedPlan, trainer: Target) -> Found:
    """Several stages of a model whose ends share a matrix."""
    for p, pipeline in enumerate(checked.plan.pipelines):
        if len(pipeline.stages) > 1:
            yield (
                f"pipelines[{p}].stages",
                f"{len(pipeline.stages)}; {checked.model.name} ties embedding and head, which "
                f"target {trainer.name} trains in one stage only: pin pp: 1",
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


def _parallelism(checked: CheckedPlan, trainer: Target) -> Found:
    experts = bool(checked.experts)
    for tp in sorted({replica.tp for _, replica in checked.replicas()}):
        fault = "" if trainer.copied_heads else copied_heads_fault(checked.model, tp)
        if fault:
            message = f"{fault} of {checked.model.name}, which target {trainer.name} does not copy"
            yield "pipelines", message
    for field, replica in checked.replicas():
        for name, used, can in (
            ("cp", replica.cp > 1, trainer.context_parallel),
            ("ep", replica.ep > 1, trainer.expert_parallel),
            ("sequence_parallel", replica.sequence_parallel, trainer.sequence_parallel),
        ):
            if used and not can:
                yield f"{field}.{name}", f"target {trainer.name} does not have it"
        if experts and not trainer.sequence_parallel and replica.etp != replica.tp:
            yield (
                f"{field}.etp",
                f"etp {replica.etp} with tp {replica.tp}; target {trainer.name} cuts experts like "
                "the other weights",
            )
        if (
            experts
            and trainer.experts_need_sequence_parallel
            and replica.tp > 1
            and not replica.sequence_parallel
        ):
            yield (
                f"{field}.sequence_parallel",
                f"target {trainer.name} trains experts with tp {replica.tp} only with sequence "
                "parallelism",
            )


def _recompute(checked: CheckedPlan, trainer: Target) -> Found:
    asks = {stage.recompute: field for field, _, stage in reversed([*checked.stages()])}
    if len(asks) > 1 and not trainer.recompute_per_stage:
        message = f"target {trainer.name} recomputes the same on all stages"
        yield f"{next(iter(asks.values()))}.recompute", message
    for recompute, field in asks.items():
        if recompute.granularity is RecomputeGranularity.FULL and not trainer.full_recompute:
            message = f"target {trainer.name} cannot recompute whole layers"
            yield f"{field}.recompute", message
        cannot = [each for each in recompute.modules if each not in trainer.recompute_modules]
        if cannot:
            message = f"target {trainer.name} cannot recompute {', '.join(cannot)} alone"
            yield f"{field}.recompute.modules", message
        if recompute.layers is not None and not trainer.recompute_layers:
            message = f"target {trainer.name} recomputes all layers of a stage or none"
            yield f"{field}.recompute.layers", message


def _overlap(checked: CheckedPlan, trainer: Target) -> Found:
    plan = checked.plan
    overlap = plan.overlap
    context_parallel = any(replica.cp > 1 for _, replica in checked.replicas())
    for field in fields(OverlapSettings):
        wanted, can = getattr(overlap, field.name), getattr(trainer.overlap, field.name)
        # On by default: without context parallelism it says nothing.
        if field.name == "context_parallel" and not context_parallel:
            continue
        if wanted and not can:
            message = f"target {trainer.name} does not overlap it"
            yield f"overlap.{field.name}", message
    if not trainer.overlap_needs:
        return
    if overlap.gathering and plan.sharding is not Sharding.NONE and not overlap.reduction:
        message = f"target {trainer.name} overlaps it only together with overlap.reduction"
        yield "overlap.gathering", message
    if overlap.tensor_parallel and not all(r.sequence_parallel for _, r in checked.replicas()):
        message = f"target {trainer.name} overlaps it only with sequence parallelism"
        yield "overlap.tensor_parallel", message
    if overlap.send and all(each.schedule.virtual_stages == 1 for each in plan.pipelines):
        message = f"target {trainer.name} overlaps sends only with virtual stages"
        yield "overlap.send", message
    if overlap.expert_parallel:
        yield from (("overlap.expert_parallel", each) for each in _no_expert_overlap(checked))


def _no_expert_overlap(checked: CheckedPlan) -> Iterator[str]:
    """Megatron-core's transformer_config.py, --overlap-moe-expert-parallel-comm."""
    plan = checked.plan
    if all(replica.ep == 1 for _, replica in checked.replicas()):
        yield "nothing is sent to experts with ep 1"
    if any(len(each.stages) > 1 and each.schedule.virtual_stages == 1 for each in plan.pipelines):
        yield f"target {plan.target} overlaps it over several stages only with virtual stages"
    if trainer_settings(checked.job).shared_expert_overlap:
        yield f"target {plan.target} overlaps it or shared experts (shared_expert_overlap)"
    stages = [stage for each in plan.pipelines for stage in each.stages]
    if any(each.recompute.granularity is RecomputeGranularity.FULL for each in stages):
        yield f"target {plan.target} does not overlap it where layers are recomputed whole"
