"""Do batch, schedule, vocabulary and the plan's other settings fit its job and its degrees?"""

from __future__ import annotations

import math
from itertools import pairwise

from hetplan.model.layers import MAX_PER_SIZE
from hetplan.plans.depths import own_depth
from hetplan.plans.plan import SCHEDULES, Pipeline, Sharding
from hetplan.plans.rules import Asked, Found, Rule
from hetplan.plans.targets import TARGETS

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
    elif padded > MAX_PER_SIZE:
        message = f"{padded} is more than {MAX_PER_SIZE:,}; use {wanted}"
    elif padded != wanted and not trainer.other_padding:
        message = f"{padded}; with tp {tp} target {trainer.name} pads {size} to {wanted}"
    else:
        return
    yield Rule.VOCABULARY, "padded_vocab_size", message
