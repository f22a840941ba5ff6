"""The job and plan of a measured run.

Devices of a run of one kind are in Megatron-LM's order: tensor-parallel ranks next to each other,
then context-parallel, then data-parallel ones, stages outermost. Layers are as the row says
(`layers_per_stage`, embedding and head counted) or even. A plan that breaks a rule of
`hetplan.plans.check` is priced with a note where the rule is one that the run itself broke
(tensor parallelism over nodes), and otherwise not predicted.

A row on several kinds of devices names the kinds but not which kind ran what. That is in the plans
that its authors published (`sailor/validation/.../plan_config_*.json`, named by `source_ref`): per
stage its layers and, per data-parallel replica, a kind, a number of devices and tp. Replicas of one
position form a pipeline, so two kinds in one stage are two pipelines.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from evaluation.accuracy.clusters import NodesOf, cluster_of_nodes, device_kind_of
from evaluation.accuracy.rows import RunRow
from evaluation.accuracy.trainers import trainer_of
from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.spec import Cluster
from hetplan.errors import Fault, InputError
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.spec import ModelSpec
from hetplan.plans.assemble import assemble_pipeline, assemble_plan
from hetplan.plans.check import check_plan
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import (
    DeviceRange,
    LayerRange,
    OverlapSettings,
    Plan,
    Recompute,
    RecomputeGranularity,
    RecomputeModule,
    Replica,
    Schedule,
    Sharding,
    Stage,
)
from hetplan.plans.rules import experts_of

_PRECISIONS = {
    "fp16": Precision.FLOAT16,
    "float16": Precision.FLOAT16,
    "bf16": Precision.BFLOAT16,
    "bfloat16": Precision.BFLOAT16,
    "fp32": Precision.FLOAT32,
    "float32": Precision.FLOAT32,
    "tf32": Precision.FLOAT32,
}

_FROZEN = "lora"
"""In the name of a source or a model of runs that train adapters only."""
_TOLERATED = "spans"
"""Of the faults of a plan, the word of the one that a run may have and a plan may not: a
tensor-parallel group in several nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A measured run as hetplan's own values."""

    job: Job
    plan: Plan
    notes: tuple[str, ...]


def job_of(row: RunRow, *, target: str = "") -> Job:
    """The job of a row; an InputError says what is missing or cannot be priced."""
    trainer = trainer_of(row)
    # Only a target of any trainer has kernels that are not Megatron-LM's.
    target = target or ("any" if trainer.options.tuned_attention is False else "megatron")
    name = row.dtype.lower()
    narrow = row.product_format
    # Products are narrowed, everything else stays 16 bits wide (Transformer Engine).
    precision = trainer.precision or (Precision.BFLOAT16 if narrow else _PRECISIONS.get(name))
    if precision is None:
        raise InputError(
            f"dtype is {row.dtype!a}: hetplan has no rates of it, and predicting it as another "
            "would be no prediction of this run"
            if name
            else "the row does not say dtype"
        )
    if _FROZEN in f"{row.source} {row.model}".lower():
        raise InputError("LoRA: most weights are frozen, which no job says; not predicted")
    if not row.global_batch or not row.seq:
        missing = [name for name in ("global_batch", "seq") if not getattr(row, name)]
        raise InputError(f"the row does not say {', '.join(missing)}")
    return Job(
        name="measured",
        global_batch_size=row.global_batch,
        sequence_length=row.seq,
        precision=precision,
        optimizer=Optimizer.ADAMW,
        target=target,
        gradient_clipping=trainer.gradient_clipping,
        trainer=replace(trainer.options, product_format=narrow),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Degrees:
    tp: int
    pp: int
    virtual: int
    cp: int
    ep: int
    dp: int
    microbatch_size: int
    num_microbatches: int

    @property
    def stage_devices(self) -> int:
        return self.tp * self.cp * self.dp


def plan_of(row: RunRow, model: ModelSpec, cluster: Cluster) -> RunPlan:
    """The plan of a row whose devices are of one kind."""
    job = job_of(row)
    degrees = _degrees(row, job)
    if degrees.stage_devices * degrees.pp != cluster.num_devices:
        raise InputError(
            f"tp {degrees.tp} x cp {degrees.cp} x dp {degrees.dp} x pp {degrees.pp} are "
            f"{degrees.stage_devices * degrees.pp} devices, the row has {cluster.num_devices}"
        )
    chunks = _chunks(row, model, degrees)
    name = "interleaved-1f1b" if degrees.virtual > 1 else "1f1b"
    experts = bool(experts_of(model, 0, len(model.layers)))
    stages = []
    for at in range(degrees.pp):
        replica = Replica(
            devices=(DeviceRange(start=at * degrees.stage_devices, count=degrees.stage_devices),),
            tp=degrees.tp,
            cp=degrees.cp,
            ep=degrees.ep if experts else 1,
            # Cut like the other weights unless they are dealt out.
            etp=degrees.tp if experts and degrees.ep == 1 else 1,
            microbatch_size=degrees.microbatch_size,
            sequence_parallel=_sequence_parallel(row) and degrees.tp > 1,
        )
        stages.append(
            Stage(
                chunks=tuple(chunks[at + k * degrees.pp] for k in range(degrees.virtual)),
                replicas=(replica,),
                recompute=recompute_of(row),
                warmup_depth=own_depth(
                    name, at, degrees.pp, degrees.num_microbatches, degrees.virtual
                ),
            )
        )
    pipeline = assemble_pipeline(
        cluster,
        job,
        stages,
        num_microbatches=degrees.num_microbatches,
        schedule=Schedule(name=name, virtual_stages=degrees.virtual),
    )
    sharding = sharding_of(row)
    copies = degrees.dp * degrees.cp
    if row.within_node:
        copies = math.gcd(copies, max(1, (row.gpus_per_node or copies) // (row.tp or 1)))
    shards = copies if sharding is not Sharding.NONE else 1
    plan = assemble_plan(
        model,
        cluster,
        job,
        (pipeline,),
        sharding=sharding if shards > 1 else Sharding.NONE,
        optimizer_shards=shards,
        overlap=_overlap(row, degrees, shards),
    )
    notes = (*trainer_of(row).notes, *_uneven_note(row, model, chunks))
    if "(" in row.dtype:
        notes += (f"dtype is {row.dtype!a}, two variants: the first",)
    return checked(RunPlan(job=job, plan=plan, notes=notes), model, cluster)


def _sequence_parallel(row: RunRow) -> bool:
    said = trainer_of(row).sequence_parallel if row.seq_parallel is None else row.seq_parallel
    return bool(said)


def sharding_of(row: RunRow) -> Sharding:
    """What the row shards; parameters too where it names ranks of FSDP (`64 (0)`: the first)."""
    said = row.settings.get("FSDP", "").split("(")[0].strip()
    return (row.dist_opt or Sharding.NONE) if said in ("", "0") else Sharding.PARAMETERS


def _overlap(row: RunRow, degrees: _Degrees, shards: int) -> OverlapSettings | None:
    """What the trainer overlaps of what this plan has."""
    said = trainer_of(row).overlap
    if said is None:
        return None
    return OverlapSettings(
        reduction=said.reduction and shards > 1,
        gathering=said.gathering and shards > 1,
        tensor_parallel=said.tensor_parallel and degrees.tp > 1 and _sequence_parallel(row),
        send=said.send and degrees.virtual > 1,
        expert_parallel=said.expert_parallel
        and degrees.ep > 1
        and (degrees.pp == 1 or degrees.virtual > 1),
    )


def checked(run: RunPlan, model: ModelSpec, cluster: Cluster) -> RunPlan:
    """The same with a note for what the run itself did against the rules; else an InputError.

    What only the target cannot express is asked again of the target `any`.
    """
    faults = check_plan(run.plan, model, cluster, run.job)
    if faults and run.job.target != "any":
        job, plan = replace(run.job, target="any"), replace(run.plan, target="any")
        loose = check_plan(plan, model, cluster, job)
        if len(loose) < len(faults):
            note = f"not a plan of target {run.job.target}: {faults[0].message}"
            freer = replace(run, job=job, plan=plan, notes=(*run.notes, note))
            return checked(freer, model, cluster)
    hard = [fault for fault in faults if _TOLERATED not in fault.message]
    if hard:
        raise InputError(*hard[:3])
    notes = tuple(dict.fromkeys(_short(fault) for fault in faults))[:1]
    return replace(run, notes=(*run.notes, *notes))


def _short(fault: Fault) -> str:
    return f"no legal plan of hetplan's, priced all the same: {fault.message}"


def recompute_of(row: RunRow) -> Recompute:
    """What the row recomputes; nothing where it does not say.

    Megatron-LM's `uniform` and `block` are ways of recomputing whole layers (--recompute-method,
    which goes with --recompute-granularity full); all of them are taken to be. MindSpeed's `block`
    with --swap-attention recomputes MLPs or experts, and moves what attention keeps to the host
    beside compute, which is taken to cost nothing (MindSpeed, docs/features/swap_attention.md, c).
    """
    said = row.recompute.lower()
    if "swap-attention" in row.other and "recompute-method=block" in row.other:
        module = RecomputeModule.EXPERTS if row.num_experts else RecomputeModule.MLP
        return Recompute(granularity=RecomputeGranularity.SELECTIVE, modules=(module,))
    if said == "selective" and row.source.lower().startswith("torchtitan"):
        return _every_second_product(row)
    if said in ("full", "uniform", "block"):
        return Recompute(granularity=RecomputeGranularity.FULL)
    if said == "selective":
        # Scores, softmax, dropout and context (arXiv 2205.05198, section 5).
        return Recompute(
            granularity=RecomputeGranularity.SELECTIVE, modules=(RecomputeModule.CORE_ATTENTION,)
        )
    if said in ("", "none"):
        return Recompute()
    raise InputError(
        f"recompute is {row.recompute!a}; known: full, uniform, block, selective, none"
    )


def _every_second_product(row: RunRow) -> Recompute:
    """Torchtitan's selective recomputation, as whole layers with as many operations.

    Of a layer's products (queries, keys, values, output, gate, up, down) it keeps every other one
    and the attention (`selective_ac_option = op`): keys, output and up run again.
    """
    hidden, ffn = float(row.hidden or 0), float(row.ffn_hidden or 0)
    kv = hidden * (row.kv_heads or row.heads or 1) / (row.heads or 1)
    again, whole = kv + hidden + ffn, 2.0 * kv + 2.0 * hidden + 3.0 * ffn
    layers = round((row.layers or 0) * again / whole) if whole else 0
    if not layers:
        return Recompute()
    return Recompute(granularity=RecomputeGranularity.FULL, layers=layers)


def _degrees(row: RunRow, job: Job) -> _Degrees:
    if not row.micro_batch:
        raise InputError("the row does not say micro_batch")
    tp, pp, cp = row.tp or 1, row.pp or 1, row.cp or 1
    dp = row.dp or max(1, (row.gpus or 0) // (tp * pp * cp))
    samples = dp * row.micro_batch
    if job.global_batch_size % samples:
        raise InputError(
            f"global_batch {job.global_batch_size} is not a multiple of dp {dp} x micro_batch "
            f"{row.micro_batch}"
        )
    return _Degrees(
        tp=tp,
        pp=pp,
        virtual=row.vpp or 1 if pp > 1 else 1,
        cp=cp,
        ep=row.ep or 1,
        dp=dp,
        microbatch_size=row.micro_batch,
        num_microbatches=job.global_batch_size // samples,
    )


def _chunks(row: RunRow, model: ModelSpec, degrees: _Degrees) -> list[LayerRange]:
    """Layers of every virtual stage in the model's order."""
    counts = list(_said_layers(row)) or _even(model, degrees)
    if sum(counts) == model.num_layers < len(model.layers):
        # Transformer layers alone; embedding and head stand with the first and the last.
        counts[0] += 1
        counts[-1] += len(model.layers) - model.num_layers - 1
    if sum(counts) != len(model.layers) or min(counts) < 1:
        raise InputError(
            f"layers_per_stage {'/'.join(map(str, counts))} are not the {len(model.layers)} layers "
            "of the model, embedding and head counted"
        )
    if len(counts) != degrees.pp * degrees.virtual:
        raise InputError(f"layers_per_stage has {len(counts)} entries for pp {degrees.pp}")
    return ranges_of(counts)


def _uneven_note(row: RunRow, model: ModelSpec, chunks: Sequence[LayerRange]) -> tuple[str, ...]:
    """That layers do not divide and the row does not say which stage has how many."""
    counts = [each.stop - each.start for each in chunks]
    if any(_said_layers(row)) or not model.num_layers % len(counts) or len(set(counts)) == 1:
        return ()
    return (f"layers do not divide; as even as they can be: {'/'.join(map(str, counts))}",)


def ranges_of(counts: Sequence[int]) -> list[LayerRange]:
    """One after the other."""
    at, found = 0, []
    for count in counts:
        found.append(LayerRange(start=at, stop=at + count))
        at += count
    return found


def _said_layers(row: RunRow) -> Iterator[int]:
    for part in filter(None, re.split(r"[/,\s+-]+", row.settings.get("layers_per_stage", ""))):
        if not part.isdecimal():
            raise InputError(f"layers_per_stage has {part!a}; whole numbers with / between them")
        yield int(part)


def _even(model: ModelSpec, degrees: _Degrees) -> list[int]:
    """Even layers per virtual stage; embedding with the first, head with the last.

    Where only all layers together divide, embedding and head count as layers (Megatron-LM's
    account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split). Where nothing
    divides they are as even as they can be, which `_uneven_note` says.
    """
    count, whole = degrees.pp * degrees.virtual, len(model.layers)
    if model.num_layers % count and not whole % count and whole // count > 1:
        return [whole // count] * count
    if model.num_layers % count:
        if whole < count:
            raise InputError(f"{whole} layers are too few for {count} virtual stages")
        # The last ones, one of which has the head, get no more than the others.
        return [whole // count + (at < whole % count) for at in range(count)]
    counts = [model.num_layers // count] * count
    counts[0] += 1
    counts[-1] += len(model.layers) - model.num_layers - 1
    return counts


_VALIDATION = "validation"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    kind: str
    devices: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedRun:
    """A run on several kinds as its authors planned it."""

    layers_per_stage: tuple[int, ...]
    replicas: tuple[tuple[_Part, ...], ...]
    """Per stage, one part per data-parallel replica."""


def find_mixed(row: RunRow, folders: Sequence[Path]) -> MixedRun:
    """The published plan of a row, from the first folder that has it; else an InputError."""
    words = PurePosixPath(row.source_ref.split(" ")[-1]).parts
    if _VALIDATION in words:
        inside = Path("sailor", *words[words.index(_VALIDATION) :])
        for folder in folders:
            if (folder / inside).is_file():
                return _read_mixed(folder / inside)
    raise InputError(
        f"gpu is {row.gpu!a}; which kind ran what is said by a plan that is not in the folder "
        f"(source_ref {row.source_ref!a})"
    )


def _read_mixed(path: Path) -> MixedRun:
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        (pipeline,) = data["pipeline_list"]
        return MixedRun(
            layers_per_stage=tuple(len(layers) for layers in pipeline["layers_per_stage"]),
            replicas=tuple(
                tuple(
                    _Part(kind=str(kind), devices=int(count), tp=int(tp))
                    for ((kind, count, *_),), tp in stage
                )
                for stage in pipeline["tmp_per_stage"]
            ),
        )
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise InputError(f"{path.name} is no plan of Sailor's: {fault!r}") from fault


def mixed_run(
    row: RunRow, model: ModelSpec, run: MixedRun, measured_links: Sequence[str]
) -> tuple[Cluster, RunPlan]:
    """The cluster and the plan; an InputError where they do not fit the row."""
    job, trainer = job_of(row, target="any"), trainer_of(row)
    cluster, starts = _placed(row, run, measured_links)
    if not row.micro_batch:
        raise InputError("the row does not say micro_batch")
    dp = len(run.replicas[0])
    if any(len(stage) != dp for stage in run.replicas):
        raise InputError("stages with unequal numbers of replicas")
    samples = dp * row.micro_batch
    if job.global_batch_size % samples:
        raise InputError(f"global_batch {job.global_batch_size} is not a multiple of {samples}")
    count, ranges = job.global_batch_size // samples, ranges_of(run.layers_per_stage)
    stages = len(ranges)
    pipelines = [
        assemble_pipeline(
            cluster,
            job,
            [
                Stage(
                    chunks=(ranges[at],),
                    replicas=(
                        Replica(
                            devices=(DeviceRange(start=starts[at][copy], count=part.devices),),
                            tp=part.tp,
                            microbatch_size=row.micro_batch,
                        ),
                    ),
                    recompute=recompute_of(row),
                    warmup_depth=own_depth("1f1b", at, stages, count),
                )
                for at, part in enumerate(stage[copy] for stage in run.replicas)
            ],
            num_microbatches=count,
            schedule=Schedule(name="1f1b"),
        )
        for copy in range(dp)
    ]
    plan = assemble_plan(model, cluster, job, pipelines)
    return cluster, checked(RunPlan(job=job, plan=plan, notes=trainer.notes), model, cluster)


def _placed(
    row: RunRow, run: MixedRun, measured_links: Sequence[str]
) -> tuple[Cluster, list[list[int]]]:
    """An island per kind with as many nodes as its parts need, and every part's first device."""
    catalogue, most = load_catalogue(), row.gpus_per_node or 8
    names = dict.fromkeys(part.kind for stage in run.replicas for part in stage)
    sizes = {
        name: [part.devices for stage in run.replicas for part in stage if part.kind == name]
        for name in names
    }
    parts, firsts, at = [], {}, 0
    for name in names:
        per_node = max(sizes[name])
        if per_node > most or any(size != per_node for size in sizes[name]):
            raise InputError(f"parts of {sizes[name]} devices of {name} do not fill nodes")
        # Parts of one kind stand in nodes of their own: the authors' nodes are of one kind.
        nodes = len(sizes[name])
        kind = device_kind_of(name, catalogue)
        parts.append(NodesOf(kind=kind, nodes=nodes, devices_per_node=per_node))
        firsts[name] = at
        at += nodes * per_node
    starts: list[list[int]] = []
    for stage in run.replicas:
        starts.append([])
        for part in stage:
            starts[-1].append(firsts[part.kind])
            firsts[part.kind] += part.devices
    return cluster_of_nodes(row, parts, measured_links), starts
