"""Meshes of a plan for FlagScale, the arguments that say them, and what FlagScale cannot be told.

A mesh is a run of stages of one device kind with one tp, dp and microbatch size. FlagScale is told
[tp, cp, ep, dp, pp] of each and a device type for each. It orders ranks by the *first* place of
their type in the list of types, then by rank (flagscale/train/hetero/parallel_context.py,
RankMapper), and deals them to the meshes in that order. Two meshes whose types have one name are
therefore filled as one: of A, B, A the second A would take what is meant for B. Every mesh gets a
name of its own, but for meshes that share a host, which is of one type: those, and the meshes
between them, get one name, and the order of ranks alone decides, which is that of the stages.

FlagScale (da4935ec) patches Megatron-LM (8479eb35) and takes its arguments; those of meshes are in
flagscale/backends/Megatron-LM/megatron/training/arguments.py.patch and are checked in
flagscale/train/arguments.py (pre_validate_args, post_validate_args). Its parser takes every
argument that is emitted here.

Refused is everything that pre_validate_args and ParallelContext check on the hosts, before anything
is written, and what they do not check and then do wrongly. A legal plan of the target has one
pipeline of stages of one kind each, no context or expert parallelism, no virtual stages
(`hetplan.plans.check_target`).
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise

from hetplan.cluster.links import Transport
from hetplan.errors import Fault
from hetplan.model.layers import Experts
from hetplan.model.spec import ModelSpec
from hetplan.plans.pieces import (
    data_ranks,
    stage_copies,
    stage_shards,
    transformer_layers_of,
)
from hetplan.plans.plan import Plan, Recompute, RecomputeGranularity, Sharding, Stage
from hetplan.schedulers.launch import EmissionOptions
from hetplan.schedulers.quoting import file_name
from hetplan.schedulers.rank_layout import Agent, RankLayout, libraries
from hetplan.search.result import SearchResult
from hetplan.trainers.megatron.model import VOCAB_MULTIPLE, missing_flags
from hetplan.trainers.megatron.write import (
    common_faults,
    data_arguments,
    extra_arguments,
    optimizer_arguments,
    plan_arguments,
    run_arguments,
    timeout_arguments,
    transport_arguments,
)

Argument = tuple[str, ...]
DEVICE_TYPE = "--hetero-current-device-type"

_OF_ONE_MESH = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--sequence-parallel",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--pipeline-model-parallel-layout",
    "--micro-batch-size",
    "--recompute-granularity",
    "--recompute-method",
    "--recompute-num-layers",
    "--make-vocab-size-divisible-by",
)
"""Of Megatron-LM's arguments those that a plan of several meshes says in other words."""


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


def meshes_of(plan: Plan, ranks: RankLayout) -> Meshes:
    """The meshes of a plan of one pipeline that is legal for target flagscale.

    Without --enable-hetero where one tp, dp and microbatch size, one collective library and one
    recomputation hold for all stages. FlagScale reads what stages recompute for themselves only
    with meshes (megatron/training/initialize.py, patched: post_validate_args), of which one will
    do.
    """
    stages = plan.pipelines[0].stages
    sizes = [sum(replica.num_devices for replica in stage.replicas) for stage in stages]
    starts = [*accumulate(sizes, initial=0)][:-1]
    kinds = [agent_at(ranks, start).host.device_kind for start in starts]
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
    several = len(libraries(ranks.agents)) > 1
    hetero = (
        several
        or len({_shape(stage) for stage in stages}) > 1
        or len({stage.recompute for stage in stages}) > 1
    )
    meshes = _named(found, ranks) if hetero else tuple(found)
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


def agent_at(ranks: RankLayout, rank: int) -> Agent:
    """The agent that starts this rank."""
    return ranks.agents[bisect_right(ranks.agents, rank, key=lambda each: each.first_rank) - 1]


def agent_types(meshes: Sequence[Mesh], ranks: RankLayout) -> tuple[str, ...]:
    """FlagScale's device type of every agent, in the order of node ranks.

    An agent with ranks of several meshes has the one name of all of them.
    """
    starts = [mesh.first_rank for mesh in meshes]
    return tuple(
        meshes[bisect_right(starts, agent.first_rank) - 1].device_type for agent in ranks.agents
    )


def _named(meshes: Sequence[Mesh], ranks: RankLayout) -> tuple[Mesh, ...]:
    """The meshes with their device types: kinds of devices, numbered where one comes twice."""
    groups = _sharing_hosts(meshes, ranks)
    kinds: dict[int, str] = {}
    for mesh, group in zip(meshes, groups, strict=True):
        kinds.setdefault(group, file_name(mesh.device_kind))
    numbered = len(set(kinds.values())) < len(kinds)
    names = {group: f"mesh{group}-{kind}" if numbered else kind for group, kind in kinds.items()}
    return tuple(
        replace(mesh, device_type=names[group]) for mesh, group in zip(meshes, groups, strict=True)
    )


def _sharing_hosts(meshes: Sequence[Mesh], ranks: RankLayout) -> list[int]:
    """A number for each mesh, the same for meshes that share a host and those between them."""
    starts = [mesh.first_rank for mesh in meshes]
    last_of_host: dict[str, int] = {}
    first_of_host: dict[str, int] = {}
    for agent in ranks.agents:
        last_rank = agent.first_rank + agent.num_ranks - 1
        first_of_host.setdefault(agent.host.name, bisect_right(starts, agent.first_rank) - 1)
        last_of_host[agent.host.name] = bisect_right(starts, last_rank) - 1
    joined = [0] * len(meshes)  # whether the mesh belongs to the group of the one before it
    for name, first in first_of_host.items():
        for mesh in range(first + 1, last_of_host[name] + 1):
            joined[mesh] = 1
    return [*accumulate((1 - each for each in joined[1:]), initial=0)]


# ---- arguments


def flagscale_arguments(
    result: SearchResult, ranks: RankLayout, meshes: Meshes, options: EmissionOptions
) -> tuple[Argument, ...]:
    """Every argument of flagscale/train/train_gpt.py."""
    transport = timeout_arguments if meshes.hetero else transport_arguments
    common = (
        *plan_arguments(result, ranks),
        *optimizer_arguments(result, options),
        *transport(result, ranks),
        *data_arguments(result, options),
        # Checkpoints of meshes with unlike tp cannot be written as torch_dist (FlagScale #319).
        *_run(result, options, "torch" if meshes.hetero else "torch_dist"),
    )
    if not meshes.hetero:
        return (*common, *extra_arguments(options))
    multiple = vocabulary_multiple(result.plan, meshes, result.inputs.model)
    return (
        *(each for each in common if each[0] not in _OF_ONE_MESH),
        *mesh_arguments(result.plan, meshes, result.inputs.model),
        *stage_recompute_arguments(result.plan),
        *(() if multiple is None else (("--make-vocab-size-divisible-by", str(multiple)),)),
        *extra_arguments(options),
    )


def _run(result: SearchResult, options: EmissionOptions, checkpoints: str) -> Iterator[Argument]:
    """Length, log, checkpoints. FlagScale's runner always gives --save, and then validate_args
    requires an interval: it is given with or without a folder.
    """
    for each in run_arguments(result, options):
        if each[0] not in ("--ckpt-format", "--save-interval"):
            yield each
    yield "--save-interval", str(result.inputs.job.checkpoint_interval_steps or options.steps)
    yield "--ckpt-format", checkpoints


def mesh_arguments(plan: Plan, meshes: Meshes, model: ModelSpec) -> Iterator[Argument]:
    """Meshes, layers, batch. Of scalar degrees FlagScale reads pp alone; tp is that of mesh 0."""
    pipeline = plan.pipelines[0]
    first = meshes.meshes[0]
    yield "--tensor-model-parallel-size", str(first.tp)
    yield "--pipeline-model-parallel-size", str(len(pipeline.stages))
    yield "--context-parallel-size", "1"
    if sequence_parallel(pipeline.stages):
        # Switched off by FlagScale in meshes of tp 1.
        yield ("--sequence-parallel",)
    yield ("--enable-hetero",)
    sizes = (str(size) for mesh in meshes.meshes for size in mesh.sizes)
    yield "--hetero-process-meshes", *sizes
    layers = (str(transformer_layers_of(each, model.num_layers)) for each in pipeline.stages)
    yield "--hetero-pipeline-layer-split", *layers
    yield "--hetero-device-types", *(mesh.device_type for mesh in meshes.meshes)
    yield DEVICE_TYPE, first.device_type
    if meshes.cpu_communication:
        yield ("--hetero-use-cpu-communication",)
    if any(mesh.etp != mesh.tp for mesh in meshes.meshes) and has_experts(model):
        degrees = (str(mesh.etp) for mesh in meshes.meshes)
        yield "--expert-tensor-parallel-size-per-process-mesh", *degrees
    if partial_reduction(plan, meshes, model):
        yield ("--use-partial-reduce-for-shared-embedding",)
    # Of mesh 0: mesh i takes this times dp of mesh 0 by its own dp (pre_validate_args).
    yield "--micro-batch-size", str(first.microbatch_size)


def sequence_parallel(stages: tuple[Stage, ...]) -> bool:
    """Whether any stage has it."""
    return any(replica.sequence_parallel for stage in stages for replica in stage.replicas)


def has_experts(model: ModelSpec) -> bool:
    """Whether any layer has routed experts."""
    return any(isinstance(run.layer.mlp, Experts) for run in model.layer_runs)


def partial_reduction(plan: Plan, meshes: Meshes, model: ModelSpec) -> bool:
    """Whether the copies of a tied matrix are reduced in parts.

    pre_validate_args wants it with the distributed optimizer where dp of the first and last mesh
    differ, with a tied matrix or further predictions.
    """
    shares = model.tied_embeddings or bool(model.num_mtp_layers)
    ends = meshes.meshes[0].dp, meshes.meshes[-1].dp
    return shares and ends[0] != ends[1] and plan.sharding is not Sharding.NONE


def stage_recompute_arguments(plan: Plan) -> Iterator[Argument]:
    """Full recomputation, the same on all stages or a list entry for each run of equal stages.

    An entry is [stages, microbatches, value]: value 1 turns it on (granularity), is 0 for uniform
    and 1 for block (method), or the number of layers (transformer_block.py, patched).
    """
    pipeline = plan.pipelines[0]
    asks = [stage.recompute for stage in pipeline.stages]
    if all(each.granularity is RecomputeGranularity.NONE for each in asks):
        return
    yield "--recompute-granularity", "full"
    first = next(each for each in asks if each.granularity is RecomputeGranularity.FULL)
    method, layers = _method(first)
    yield "--recompute-method", "block" if method else "uniform"
    yield "--recompute-num-layers", str(layers)
    if len(set(asks)) == 1:
        return
    runs = [(recompute, len([*run])) for recompute, run in groupby(asks)]
    full = RecomputeGranularity.FULL
    rows = (
        ("granularity", [int(each.granularity is full) for each, _ in runs]),
        ("method", [_method(each)[0] for each, _ in runs]),
        ("num-layers", [_method(each)[1] for each, _ in runs]),
    )
    for name, values in rows:
        entries = (
            f"[{count}, {pipeline.num_microbatches}, {value}]"
            for (_, count), value in zip(runs, values, strict=True)
        )
        yield f"--recompute-{name}-per-stage-micro-batch", *entries


def _method(recompute: Recompute) -> tuple[int, int]:
    """(0 for uniform or 1 for block, layers): uniform 1 keeps every layer's input alone.

    Of a stage that does not recompute, which granularity 0 says, the same as of one that does: 0
    layers would turn it off as well.
    """
    return (0, 1) if recompute.layers is None else (1, recompute.layers)


def vocabulary_multiple(plan: Plan, meshes: Meshes, model: ModelSpec) -> int | None:
    """The --make-vocab-size-divisible-by under which both ends pad as the plan does; None: none.

    A rank pads to a multiple of it times its own tp, so that meshes of unlike tp could pad
    differently; the plan pads to what all tp divide.
    """
    tps = {mesh.tp for mesh in meshes.meshes}
    common = math.lcm(*tps)
    ends = {meshes.meshes[0].tp, meshes.meshes[-1].tp}
    for multiple in (VOCAB_MULTIPLE, plan.padded_vocab_size // common):
        padded = {
            -(-model.vocab_size // (multiple * tp)) * multiple * tp for tp in ends if multiple
        }
        if padded == {plan.padded_vocab_size}:
            return multiple
    return None


# ---- what is refused

_BASE = "the Megatron-LM of FlagScale (8479eb35)"
_LATER = ("--moe-shared-expert-gate", "--rotary-seq-len-interpolation-factor")
"""Flags of models that it does not know (megatron/training/arguments.py, and its configuration has
no such field), or passes over (gpt_builders.py)."""
_STAGES = "plan.pipelines[0].stages"
OWN_DEVICES = ("nvidia", "amd")
"""Vendors whose devices torch calls cuda; FlagScale says nothing about AMD's."""
PORTED_VENDORS = ("cambricon", "huawei", "hygon", "iluvatar", "metax", "moore-threads")
"""Those of hetplan's vendors for which FlagScale has patches (hardware/, commit da4935ec)."""
_PASTED = re.compile(r"[^\"'$`\\\x00-\x1f\x7f]*")
"""Texts that survive being pasted between double quotes of a script."""
_PATH = re.compile(r"[\w@%+=:,./-]*", re.ASCII)
"""Folders that the runner's script makes are not quoted at all (_generate_run_script_train)."""


def flagscale_faults(
    result: SearchResult, ranks: RankLayout, options: EmissionOptions
) -> tuple[Fault, ...]:
    """Everything that keeps the plan from FlagScale."""
    meshes = meshes_of(result.plan, ranks)
    inputs = result.inputs
    shared = common_faults(result)
    later = () if shared else missing_flags(inputs.model, inputs.job, _LATER, _BASE)
    found = (*shared, *later, *_devices(ranks), *_texts(options))
    if not meshes.hetero:
        return found
    plan, model = result.plan, result.inputs.model
    return (
        *found,
        *_batch(plan, meshes),
        *_sequence(plan, meshes),
        *_sharding(plan),
        *_ends(plan, meshes, model),
        *_vocabulary(plan, meshes, model),
    )


def _devices(ranks: RankLayout) -> Iterator[Fault]:
    for host in ranks.hosts:
        if host.vendor not in (*OWN_DEVICES, *PORTED_VENDORS):
            yield Fault(
                field=_STAGES,
                message=f"devices of kind {host.device_kind}, for which FlagScale has no port (its "
                f"folder hardware/ has {', '.join(PORTED_VENDORS)}): forbid these islands, or use "
                "target native",
            )
            return


def _texts(options: EmissionOptions) -> Iterator[Fault]:
    extra = ("--extra", options.extra_arguments)
    texts = (("--data", options.data), ("--tokenizer", (options.tokenizer,)), extra)
    for field, those in texts:
        for text in those:
            if not _PASTED.fullmatch(text):
                yield Fault(
                    field=field,
                    message=f"{text[:60]!a}; FlagScale's runner pastes its command between double "
                    "quotes, so that \" ' $ ` \\ and control characters change it: do without them",
                )
    for field, text in (("--save", options.save), ("--load", options.load)):
        if not _PATH.fullmatch(text):
            yield Fault(
                field=field,
                message=f"{text[:60]!a}; FlagScale's runner makes this folder without quoting it: "
                "use letters, digits and @%+=:,./_- only",
            )
    words = options.extra_arguments
    if words and not words[0].startswith("--"):
        yield Fault(
            field="--extra",
            message=f"begins with {words[0][:60]!a}; FlagScale's configuration has flags only: "
            "begin with one",
        )


def _batch(plan: Plan, meshes: Meshes) -> Iterator[Fault]:
    """The microbatch sizes that pre_validate_args computes are the plan's."""
    first = meshes.meshes[0]
    samples = first.dp * first.microbatch_size
    for mesh in meshes.meshes:
        if samples % mesh.dp or samples // mesh.dp != mesh.microbatch_size:
            yield Fault(
                field=f"{_STAGES}[{mesh.first_stage}]",
                message=f"dp {mesh.dp} and microbatch size {mesh.microbatch_size}; FlagScale gives "
                f"every mesh dp of the first ({first.dp}) times its microbatch size "
                f"({first.microbatch_size}) by its own dp: pin dp or microbatch_size",
            )


def _sequence(plan: Plan, meshes: Meshes) -> Iterator[Fault]:
    stages = plan.pipelines[0].stages
    if sequence_parallel(stages):
        for s, stage in enumerate(stages):
            if any(each.tp > 1 and not each.sequence_parallel for each in stage.replicas):
                yield Fault(
                    field=f"{_STAGES}[{s}].replicas[0].sequence_parallel",
                    message="off, and on at other stages; FlagScale has one switch, which it "
                    "turns off where tp is 1: pin sequence_parallel: true",
                )
        return
    for left, right in pairwise(meshes.meshes):
        if left.tp != right.tp:
            # get_inter_mesh_tensor_slices takes what a rank sends for a part of the sequence.
            yield Fault(
                field=f"{_STAGES}[{right.first_stage}].replicas[0].sequence_parallel",
                message=f"off, with tp {left.tp} before and tp {right.tp} behind the boundary; "
                "FlagScale cuts what meshes of unlike tp send each other along the sequence, as "
                "if it were sequence parallel: pin sequence_parallel: true",
            )


def _sharding(plan: Plan) -> Iterator[Fault]:
    """ParallelContext asserts num_distributed_optimizer_instances == 1."""
    if plan.sharding is Sharding.NONE:
        return
    for s, stage in enumerate(plan.pipelines[0].stages):
        copies, shards = stage_copies(stage), stage_shards(plan.optimizer_shards, stage)
        if shards != copies:
            yield Fault(
                field="plan.optimizer_shards",
                message=f"{plan.optimizer_shards}, which shards stage {s} over {shards} of its "
                f"{copies} copies; meshes of FlagScale shard over all: plan again with "
                "sharded_optimizer: true",
            )
            return


def _ends(plan: Plan, meshes: Meshes, model: ModelSpec) -> Iterator[Fault]:
    """Multi-token prediction and head are in the last mesh, behind a transformer layer."""
    stages = plan.pipelines[0].stages
    start = stages[-1].chunks[-1].start
    if model.num_mtp_layers and start > model.num_layers:
        yield Fault(
            field=f"{_STAGES}[{len(stages) - 1}]",
            message="begins behind the last transformer layer; FlagScale's last mesh holds all "
            "multi-token prediction layers behind a transformer layer: move the cut",
        )
    if not partial_reduction(plan, meshes, model):
        return
    rows, parts = plan.padded_vocab_size // meshes.meshes[-1].tp, meshes.meshes[-1].dp
    if rows % parts:
        # finalize_model_grads.py, patched: every rank reduces its part of the rows.
        yield Fault(
            field="plan.padded_vocab_size",
            message=f"{plan.padded_vocab_size} is {rows} rows for each of tp "
            f"{meshes.meshes[-1].tp}, which dp {parts} of the last mesh does not divide; FlagScale "
            "reduces the tied matrix in such parts: pin the same dp at both ends (same_degrees)",
        )


def _vocabulary(plan: Plan, meshes: Meshes, model: ModelSpec) -> Iterator[Fault]:
    if vocabulary_multiple(plan, meshes, model) is None:
        tps = sorted({mesh.tp for mesh in meshes.meshes})
        yield Fault(
            field="plan.padded_vocab_size",
            message=f"{plan.padded_vocab_size} for {model.vocab_size} entries; with tp "
            f"{', '.join(map(str, tps))} no --make-vocab-size-divisible-by pads both ends so: pin "
            "tp, or pad the vocabulary in the model file",
        )
