"""Whether a plan is legal: every rule a plan must obey, checked in one place.

Used on plans that were searched, built from a layout or read from a file; each broken rule is one
fault that names the rule, the place and what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TypeAlias

from hetplan.cluster.spec import Cluster, Transport
from hetplan.errors import Fault
from hetplan.job.spec import Job, Precision
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import stage_devices
from hetplan.plans.plan import Boundary, Pipeline, Plan, Replica, expand
from hetplan.plans.targets import TARGETS


def check_plan(plan: Plan, model: ModelSpec, cluster: Cluster, job: Job) -> tuple[Fault, ...]:
    """Every rule that the plan breaks; empty when it is legal."""
    # The other rules list ranges device by device: one zero too many would fill the memory.
    rules: tuple[_Rule, ...] = (_ranges,)
    if not any(True for _ in _ranges(plan, model, cluster, job)):
        rules = (
            _settings,
            _layers,
            _devices,
            _degrees,
            _batch,
            _schedule,
            _reductions,
            _shares,
            _tied,
        )
    return tuple(
        Fault(field=field, message=message)
        for rule in rules
        for field, message in rule(plan, model, cluster, job)
    )


_Found: TypeAlias = Iterator[tuple[str, str]]
_Rule: TypeAlias = Callable[[Plan, ModelSpec, Cluster, Job], _Found]


def _stages(plan: Plan) -> Iterator[tuple[str, Pipeline, int]]:
    for p, pipeline in enumerate(plan.pipelines):
        for s in range(len(pipeline.stages)):
            yield f"pipelines[{p}].stages[{s}]", pipeline, s


def _ranges(plan: Plan, model: ModelSpec, cluster: Cluster, job: Job) -> _Found:
    """No range of devices leaves the cluster, and no list of them is longer than it."""
    lists = [
        (f"{field}.replicas[{r}].devices", replica.devices)
        for field, pipeline, s in _stages(plan)
        for r, replica in enumerate(pipeline.stages[s].replicas)
    ]
    lists += [
        (f"reduction_groups[{g}].members", group.members)
        for g, group in enumerate(plan.reduction_groups)
    ]
    lists += [
        ("tied_embedding_devices", plan.tied_embedding_devices),
        ("unused_devices", plan.unused_devices),
    ]
    for field, parts in lists:
        beyond = [part.last for part in parts if part.last >= cluster.num_devices]
        count = sum(part.count for part in parts)
        if beyond:
            yield (
                field,
                f"devices {_some(beyond)} do not exist; the cluster has {cluster.num_devices}",
            )
        elif count > cluster.num_devices:
            yield field, f"lists {count} devices; the cluster has {cluster.num_devices}"


def _settings(plan: Plan, model: ModelSpec, cluster: Cluster, job: Job) -> _Found:
    if plan.target not in TARGETS:
        known = ", ".join(sorted(TARGETS))
        yield "target", f"unknown target {plan.target!r}; known targets: {known}"
    elif plan.target != job.target:
        yield "target", f"{plan.target} is not the job's target {job.target}"
    if plan.precision != job.precision.value:
        yield "precision", f"{plan.precision} is not the job's precision {job.precision.value}"
    if plan.optimizer != job.optimizer.value:
        yield "optimizer", f"{plan.optimizer} is not the job's optimizer {job.optimizer.value}"
    if plan.padded_vocab_size < model.vocab_size:
        yield (
            "padded_vocab_size",
            f"{plan.padded_vocab_size} is below the vocabulary of {model.vocab_size}",
        )
    if not plan.pipelines:
        yield "pipelines", "a plan needs at least one pipeline"


def _layers(plan: Plan, model: ModelSpec, cluster: Cluster, job: Job) -> _Found:
    total = len(model.layers)
    for p, pipeline in enumerate(plan.pipelines):
        if not pipeline.stages:
            yield f"pipelines[{p}].stages", "a pipeline needs at least one stage"
            continue
        held = [0] * total
        at = 0
        virtual = max(len(stage.chunks) for stage in pipeline.stages)
        for chunk_index in range(virtual):
            for s, stage in enumerate(pipeline.stages):
                field = f"pipelines[{p}].stages[{s}].chunks[{chunk_index}]"
                if chunk_index >= len(stage.chunks):
                    yield field, f"missing: other stages have {virtual} chunks"
                    continue
                chunk = stage.chunks[chunk_index]
                if not 0 <= chunk.start < chunk.stop <= total:
                    yield (
                        field,
                        f"layers {chunk.start} to {chunk.stop} are not in 0 to {total} of "
                        f"{model.name}, or the range is empty",
                    )
                    continue
                if chunk.start != at:
                    yield field, f"starts at layer {chunk.start}; the one before it ends at {at}"
                at = chunk.stop
                for layer in range(chunk.start, chunk.stop):
                    held[layer] += 1
        missing = [layer for layer, count in enumerate(held) if count == 0]
        twice = [layer for layer, count in enumerate(held) if count > 1]
        if missing:
            yield f"pipelines[{p}]", f"no stage holds layers {_some(missing)}"
        if twice:
            yield f"pipelines[{p}]", f"more than one stage holds layers {_some(twice)}"


def _devices(plan: Plan, model: ModelSpec, cluster: Cluster, job: Job) -> _Found:
    owner: dict[int, str] = {}
    for field, pipeline, s in _stages(plan):
        devices = stage_devices(pipeline.stages[s])
        for device in devices:
            if device in owner:
                yield field, f"device {device} is already used by {owner[device]}"
                break
            owner[device] = field
        kinds = {cluster.island_of_device(d).name for d in devices}
        if len(kinds) > 1:
            yield field, f"mixes islands {', '.join(sorted(kinds))}; a stage lies in one island"
        out = [d for d in devices if not cluster.is_usable(d)]
        if out:
            yield field, f"devices {_some(out)} are in nodes that are out"
    for device in expand(plan.unused_devices):
        if device in owner:
            yield "unused_devices", f"device {device} is used by {owner[device]}"
            break
    used_and_unused = len(owner) + len(set(expand(plan.unused_devices)) - set(owner))
    if used_and_unused != cluster.num_devices:
        yield (
            "unused_devices",
            f"{used_and_unused} devices are used or listed as unused, the cluster has "
            f"{cluster.num_devices}",
        )


def _degrees(plan: Plan, model: ModelSpec, cluster: Cluster, job: Job) -> _Found:
    for field, pipeline, s in _stages(plan):
        for r, replica in enumerate(pipeline.stages[s].replicas):
            where = f"{field}.replicas[{r}]"
            if min(replica.tp, replica.cp, replica.ep, replica.etp) < 1:
                yield where, "tp, cp, ep and etp must all be at least 1"
                continue
            yield from _replica(where, replica, model, cluster)


def _replica(where: str, replica: Replica, model: ModelSpec, cluster: Cluster) -> _Found:
    tp, count = replica.tp, replica.num_devices
    if count == 0 or count % (tp * replica.cp):
        yield where, f"{count} devices are not a multiple of tp {tp} x cp {replica.cp}"
        return
    for fault in model.slicing_faults(tp):
        yield where, fault
    devices = expand(replica.devices)
    for start in range(0, count, tp):
        group = devices[start : start + tp]
        nodes = {(cluster.island_of_device(d).name, cluster.node_of_device(d)) for d in group}
        if len(nodes) > 1:
            yield where, f"tensor-parallel group {_some(list(group))} spans {len(nodes)} nodes"
            break


def _batch(plan: Plan, model: ModelSpec, cluster: Cluster, job: Job) -> _Found:
    total = 0
    for p, pipeline in enumerate(plan.pipelines):
        if pipeline.num_microbatches < 1:
            yield f"pipelines[{p}].num_microbatches", f"{pipeline.num_microbatches}; at least 1"
            continue
        sizes = {
            sum(replica.dp * replica.microbatch_size for replica in stage.replicas)
            for stage in pipeline.stages
            if all(replica.tp * replica.cp > 0 for replica in stage.replicas)
        }
        if len(sizes) > 1:
            yield f"pipelines[{p}]", f"stages take {sorted(sizes)} sequences per microbatch"
        total += max(sizes, default=0) * pipeline.num_microbatches
    if total != job.global_batch_size:
        yield (
            "pipelines",
            f"dp x microbatch size x microbatches is {total} sequences, the job's "
            f"global_batch_size is {job.global_batch_size}",
        )


def _schedule(plan: Plan, model: ModelSpec, cluster: Cluster, job: Job) -> _Found:
    for p, pipeline in enumerate(plan.pipelines):
        if pipeline.schedule.name != "1f1b":
            yield f"pipelines[{p}].schedule", f"{pipeline.schedule.name!r} is not known; use 1f1b"
        if len(pipeline.boundaries) != max(0, len(pipeline.stages) - 1):
            yield (
                f"pipelines[{p}].boundaries",
                f"{len(pipeline.boundaries)} for {len(pipeline.stages)} stages",
            )
        for b, boundary in enumerate(pipeline.boundaries):
            yield from _boundary(f"pipelines[{p}].boundaries[{b}]", b, boundary)
        trainer = TARGETS.get(plan.target)
        if (
            trainer is not None
            and not trainer.fewer_microbatches_than_stages
            and pipeline.num_microbatches < len(pipeline.stages)
        ):
            yield (
                f"pipelines[{p}].num_microbatches",
                f"{pipeline.num_microbatches} for {len(pipeline.stages)} stages; target "
                f"{plan.target} needs at least one microbatch per stage",
            )
        depths = [stage.warmup_depth for stage in pipeline.stages]
        if any(left < right for left, right in pairwise(depths)):
            yield f"pipelines[{p}]", f"warm-up depths {depths} grow along the pipeline: deadlock"
        if depths and min(depths) < 1:
            yield f"pipelines[{p}]", f"warm-up depths {depths} must be at least 1"


def _boundary(where: str, position: int, boundary: Boundary) -> _Found:
    if boundary.index != position:
        yield f"{where}.index", f"{boundary.index}; boundaries stand in order, this is {position}"
    for field, value, known in (
        ("transport", boundary.transport, Transport),
        ("precision", boundary.precision, Precision),
    ):
        if value not in [each.value for each in known]:
            yield f"{where}.{field}", f"{value!a}; it is one of {', '.join(known)}"


def _tied(plan: Plan, model: ModelSpec, cluster: Cluster, job: Job) -> _Found:
    """Which devices keep their copies of a tied matrix equal."""
    pipelines = [pipeline.stages for pipeline in plan.pipelines if pipeline.stages]
    tied = model.tied_embeddings and any(len(stages) > 1 for stages in pipelines)
    wanted = {
        device
        for stages in pipelines
        for stage in (stages[0], stages[-1])
        for device in stage_devices(stage)
        if tied
    }
    if set(expand(plan.tied_embedding_devices)) != wanted:
        yield (
            "tied_embedding_devices",
            "must be the devices of the first and the last stage, whose copies of the tied matrix "
            "would drift apart otherwise"
            if tied
            else "must be empty: no two stages share a tied matrix",
        )


def _reductions(plan: Plan, model: ModelSpec, cluster: Cluster, job: Job) -> _Found:
    for field, pipeline, s in _stages(plan):
        stage = pipeline.stages[s]
        if not stage.replicas or any(r.tp * r.cp < 1 for r in stage.replicas):
            continue
        dp = sum(replica.dp for replica in stage.replicas)
        if dp == 1 and len(plan.pipelines) == 1:
            continue
        devices = set(stage_devices(stage))
        for chunk in stage.chunks:
            covering = [
                group
                for group in plan.reduction_groups
                if group.layers.start <= chunk.start
                and chunk.stop <= group.layers.stop
                and devices <= set(expand(group.members))
            ]
            if not covering:
                yield (
                    field,
                    f"no reduction group covers layers {chunk.start} to {chunk.stop} of its "
                    f"{dp} replicas: their weights would drift apart",
                )


def _shares(plan: Plan, model: ModelSpec, cluster: Cluster, job: Job) -> _Found:
    """What the ranks of every stage split evenly: the vocabulary and the optimizer state."""
    replicas = [
        replica
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for replica in stage.replicas
        if replica.tp * replica.cp > 0
    ]
    for tp in sorted({replica.tp for replica in replicas}):
        if plan.padded_vocab_size % tp:
            yield "padded_vocab_size", f"tp {tp} does not divide {plan.padded_vocab_size}"
    shards = plan.optimizer_shards
    trainer = TARGETS.get(plan.target)
    if shards != 1 and trainer is not None and not trainer.optimizer_sharding:
        yield "optimizer_shards", f"{shards}; target {plan.target} does not shard it: use 1"
        return
    for dp in sorted({replica.dp for replica in replicas}):
        if shards < 1 or dp % shards:
            yield "optimizer_shards", f"{shards} does not divide dp {dp}; use a divisor of it"


def _some(numbers: list[int], most: int = 6) -> str:
    shown = ", ".join(str(number) for number in numbers[:most])
    return shown + (f" and {len(numbers) - most} more" if len(numbers) > most else "")
