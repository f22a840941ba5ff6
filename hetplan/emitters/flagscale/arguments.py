"""What of a plan do FlagScale's arguments say?

FlagScale (da4935ec) patches Megatron-LM (8479eb35) and takes its arguments; those of meshes are in
flagscale/backends/Megatron-LM/megatron/training/arguments.py.patch and are checked in
flagscale/train/arguments.py (pre_validate_args, post_validate_args). Its parser takes every
argument that is emitted here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby

from hetplan.emitters.flagscale.meshes import Meshes
from hetplan.emitters.megatron.arguments import (
    data_arguments,
    extra_arguments,
    plan_arguments,
    run_arguments,
    transport_arguments,
)
from hetplan.emitters.megatron.model import VOCAB_MULTIPLE
from hetplan.emitters.megatron.optimizer import optimizer_arguments
from hetplan.emitters.megatron.timeouts import timeout_arguments
from hetplan.emitters.sheet import LaunchSheet
from hetplan.emitters.trainer_launch import EmitOptions
from hetplan.model.layers import Experts
from hetplan.model.spec import ModelSpec
from hetplan.plans.pieces import transformer_layers_of
from hetplan.plans.plan import Plan, Recompute, RecomputeGranularity, Sharding, Stage
from hetplan.search.result import SearchResult

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


def flagscale_arguments(
    result: SearchResult, sheet: LaunchSheet, meshes: Meshes, options: EmitOptions
) -> tuple[Argument, ...]:
    """Every argument of flagscale/train/train_gpt.py."""
    if not meshes.hetero:
        return (
            *plan_arguments(result, sheet),
            *optimizer_arguments(result, options),
            *transport_arguments(result, sheet),
            *data_arguments(result, options),
            *_run(result, options, "torch_dist"),
            *extra_arguments(options),
        )
    common = (
        *plan_arguments(result, sheet),
        *optimizer_arguments(result, options),
        *timeout_arguments(result, sheet),
        *data_arguments(result, options),
        # Checkpoints of meshes with unlike tp cannot be written as torch_dist (FlagScale #319).
        *_run(result, options, "torch"),
    )
    return (
        *(each for each in common if each[0] not in _OF_ONE_MESH),
        *mesh_arguments(result.plan, meshes, result.inputs.model),
        *stage_recompute_arguments(result.plan),
        *vocabulary_arguments(result.plan, meshes, result.inputs.model),
        *extra_arguments(options),
    )


def _run(result: SearchResult, options: EmitOptions, checkpoints: str) -> Iterator[Argument]:
    """Length, log, checkpoints. FlagScale's runner always gives --save, and then validate_args
    wants an interval: it is said with or without a folder.
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


def vocabulary_arguments(plan: Plan, meshes: Meshes, model: ModelSpec) -> Iterator[Argument]:
    """How the vocabulary is padded."""
    multiple = vocabulary_multiple(plan, meshes, model)
    if multiple is not None:
        yield "--make-vocab-size-divisible-by", str(multiple)


def agent_device_types(types: tuple[str, ...]) -> tuple[tuple[Argument, ...], ...]:
    """What every agent says of its devices."""
    return tuple(((DEVICE_TYPE, name),) for name in types)
