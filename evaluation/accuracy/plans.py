"""The job and plan of a measured run, and its trainer's habits that no row says.

Devices of a run of one kind are in Megatron-LM's order: tensor-parallel ranks next to each other,
then context-parallel, then data-parallel ones, stages outermost. Layers are as the row says
(`layers_per_stage`, embedding and head counted) or even. A plan that breaks a rule of
`hetplan.plans.check` is priced with a note where the rule is one that the run itself broke
(tensor parallelism over nodes), and otherwise not predicted.

A row on several kinds of devices names the kinds but not which kind ran what. That is in the plans
that its authors published (`sailor/validation/.../plan_config_*.json`, named by `source_ref`): per
stage its layers and, per data-parallel replica, a kind, a number of devices and tp. Replicas of one
position form a pipeline, so two kinds in one stage are two pipelines.

What is written of trainers is how a publication says that it trained, or what its trainer's code
does. It was written by people who had seen how far off the runs are, so it is no blind choice, as
docs/accuracy.md says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from evaluation.accuracy.clusters import NodesOf, cluster_of_nodes, device_kind_of
from evaluation.accuracy.rows import RunRow
from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.spec import Cluster
from hetplan.errors import Fault, InputError
from hetplan.job.spec import Job, Optimizer, Precision, ProductFormat, TrainerOptions
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Habits of one source's runs."""

    sources: tuple[str, ...]
    """Beginnings of `RunRow.source`."""
    options: TrainerOptions
    gradient_clipping: bool | None
    """None: as the target does."""
    precision: Precision | None = None
    """Where the rows' own `dtype` is known to be wrong."""
    notes: tuple[str, ...] = ()
    overlap: OverlapSettings | None = None
    """What it overlaps where there is something to overlap; None: nothing but ring attention."""
    sequence_parallel: bool | None = None
    """Where rows do not say; None: they do."""


_MEGATRON_2021 = TrainerOptions(
    fused_attention=False,
    attention_dropout=True,
    hidden_dropout=True,
    fused_loss=False,
    scattered_sends=True,
    fused_accumulation=False,
    gradient_precision=Precision.FLOAT16,
)
"""Megatron-LM of April 2021 and the trainers that grew out of it; each below says what differs."""

TRAINERS = (
    Trainer(
        sources=("vtrain",),
        # Megatron-DeepSpeed of 2023, megatron/model/transformer.py: baddbmm, fused scale, mask and
        # softmax, dropout of probabilities and of both outputs (--attention-dropout 0.1 and
        # --hidden-dropout 0.1 by default); vocab-parallel cross-entropy on a float32 copy; p2p
        # communication scatters and gathers; fp16 gradients are added up and reduced as fp16.
        options=_MEGATRON_2021,
        gradient_clipping=True,
    ),
    Trainer(
        sources=("megatron-sc21",),
        # Megatron-LM of April 2021 (arXiv 2104.04473, section 4): the same kernels, scatter and
        # gather of sends (section 4.1), fp16 gradients that autograd adds up.
        options=_MEGATRON_2021,
        gradient_clipping=True,
    ),
    Trainer(
        sources=("korthikanti",),
        # arXiv 2205.05198, section 4: unfused attention with dropout masks of probabilities and
        # hidden states. 18 bytes of parameters, gradients and state per parameter (its figure 1):
        # gradients are kept in float32, to which the products of 2022's Megatron-LM add theirs
        # (--no-gradient-accumulation-fusion switches that off).
        options=replace(
            _MEGATRON_2021, fused_accumulation=True, gradient_precision=Precision.FLOAT32
        ),
        gradient_clipping=True,
    ),
    Trainer(
        sources=("simumax",),
        # SimuMax v1.2, docs/b200: Megatron-core with Transformer Engine (fused attention, no
        # dropout), cross-entropy fusion, gradients accumulated and reduced in float32; context
        # parallelism by all-to-all (--cp-comm-type a2a; its unit table has whole sequences and
        # heads / (tp cp)).
        options=TrainerOptions(
            fused_attention=True,
            attention_dropout=False,
            hidden_dropout=False,
            fused_loss=True,
            fused_accumulation=True,
            context_exchange=True,
            gradient_precision=Precision.FLOAT32,
        ),
        gradient_clipping=True,
    ),
    Trainer(
        sources=("sailor",),
        # Sailor's fork of Megatron-DeepSpeed, float32 without autocast: unfused attention; pipeline
        # engine with blocking sends and receives, each rank its part of the tensor, which the
        # receivers put together (deepspeed/pipe_engine.py: PartitionedTensor); float32 gradients.
        options=replace(_MEGATRON_2021, blocking_sends=True, gradient_precision=Precision.FLOAT32),
        gradient_clipping=True,
        precision=Precision.FLOAT32,
        notes=("rows say fp16; float32 by their profiles and 4-byte transfers",),
    ),
    Trainer(
        sources=("flagperf",),
        # Megatron-core 0.6 and FlagScale of the same time: fused attention, no dropout in the
        # scripts, vocab-parallel cross-entropy on a float32 copy, float32 gradients with fused
        # accumulation. Assumed: scripts not read. Rows of PaddleNLP: `_as_the_row`.
        options=TrainerOptions(
            fused_attention=True,
            attention_dropout=False,
            hidden_dropout=False,
            fused_loss=False,
            fused_accumulation=True,
            gradient_precision=Precision.FLOAT32,
        ),
        gradient_clipping=True,
    ),
    Trainer(
        sources=("mindspeed",),
        # MindSpeed-LLM's scripts: use-flash-attn, use-fused-rmsnorm, attention and hidden dropout
        # 0, no-gradient-accumulation-fusion; Megatron's cross-entropy on a float32 copy, float32
        # gradients. Overlap as each row lists its flags (`_as_the_row`).
        options=TrainerOptions(
            fused_attention=True,
            attention_dropout=False,
            hidden_dropout=False,
            fused_loss=False,
            fused_accumulation=False,
            gradient_precision=Precision.FLOAT32,
        ),
        gradient_clipping=True,
        overlap=OverlapSettings(),
    ),
    Trainer(
        sources=("primus", "amd-rocm"),
        # Primus with the Megatron backend: Transformer Engine's fused attention, no dropout,
        # float32 gradients with fused accumulation (assumed); its pages: overlap_grad_reduce=false.
        options=TrainerOptions(
            fused_attention=True,
            attention_dropout=False,
            hidden_dropout=False,
            fused_loss=True,
            fused_accumulation=True,
            gradient_precision=Precision.FLOAT32,
        ),
        gradient_clipping=True,
    ),
    Trainer(
        sources=("nemo",),
        # NVIDIA-NeMo/Megatron-Bridge: Transformer Engine, no dropout, fused cross-entropy
        # (scripts/performance/utils/overrides.py), gradients added up and reduced as bfloat16
        # (grad_reduce_in_fp32 = False in configs/llama, configs/qwen and perf_recipes/_common.py),
        # sequence parallelism wherever tp > 1 (overrides.py), reduction and gathering overlapped
        # wherever optimizer state is sharded, sends with virtual stages, tensor parallelism by
        # userbuffers (src/megatron/bridge/training/comm_overlap.py, configs/llama, configs/qwen).
        options=TrainerOptions(
            fused_attention=True,
            attention_dropout=False,
            hidden_dropout=False,
            fused_loss=True,
            fused_accumulation=True,
            gradient_precision=Precision.BFLOAT16,
        ),
        gradient_clipping=True,
        notes=(
            "recompute is not published: none is assumed, as most public recipes have it",
            "overlap is not published: as the public recipes have it, but for experts' all-to-all",
        ),
        overlap=OverlapSettings(reduction=True, gathering=True, tensor_parallel=True, send=True),
        sequence_parallel=True,
    ),
)

_PADDLE = TrainerOptions(
    fused_attention=True,
    attention_dropout=False,
    hidden_dropout=False,
    fused_loss=False,
    fused_accumulation=False,
    gradient_precision=Precision.FLOAT16,
)
"""FlagPerf's configs of PaddleNLP: use_flash_attention, fp16 at O2; amp_master_grad (so gradients
stay 16 bit) and enable_linear_fused_grad_add are not set and off by default. Assumed, not read in
its code: the loss takes a float32 copy of the logits."""


UNKNOWN_TRAINER = Trainer(sources=(), options=TrainerOptions(), gradient_clipping=None)


def trainer_of(row: RunRow) -> Trainer:
    """The habits of a row's source; a target's defaults where nothing is known of it."""
    name = row.source.lower()
    for trainer in TRAINERS:
        if name.startswith(trainer.sources):
            return _as_the_row(row, trainer)
    return UNKNOWN_TRAINER


def _as_the_row(row: RunRow, trainer: Trainer) -> Trainer:
    """What rows of one source differ in: PaddleNLP among FlagPerf's, flags of MindSpeed's.

    NeMo's recipes switch off tensor-parallel overlap for NVFP4 and for Qwen3 on H100:

    `tp_comm_overlap` of llama3_70b_pretrain_config_gb200 and qwen3_235b_a22b_pretrain_config_h100.
    """
    if "-paddle" in row.source_ref:
        # Assumed: PaddleNLP's GPT drops out .1 by default (no config sets it), Llama nothing.
        drops = row.model.lower().startswith("gpt")
        options = replace(_PADDLE, attention_dropout=drops, hidden_dropout=drops)
        return replace(trainer, options=options)
    overlap = trainer.overlap
    if "mindspeed" in trainer.sources:
        said = OverlapSettings(
            reduction="overlap-grad-reduce" in row.other,
            gathering="overlap-param-gather" in row.other,
        )
        return replace(trainer, overlap=said)
    if overlap is None:
        return trainer
    off = row.product_format is ProductFormat.NVFP4 or (row.num_experts and "H100" in row.gpu)
    return replace(trainer, overlap=replace(overlap, tensor_parallel=False)) if off else trainer


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


def job_of(row: RunRow, *, target: str = "megatron") -> Job:
    """The job of a row; an InputError says what is missing or cannot be priced."""
    trainer = trainer_of(row)
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
    shards = degrees.dp * degrees.cp if row.dist_opt else 1
    plan = assemble_plan(
        model,
        cluster,
        job,
        (pipeline,),
        sharding=_sharding(row) if shards > 1 else Sharding.NONE,
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


def _sharding(row: RunRow) -> Sharding:
    """Parameters where the row names ranks of FSDP (`64 (0)` is two variants: the first)."""
    said = row.settings.get("FSDP", "").split("(")[0].strip()
    return Sharding.OPTIMIZER if said in ("", "0") else Sharding.PARAMETERS


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
    which goes with --recompute-granularity full); all of them are taken to be.
    """
    said = row.recompute.lower()
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
