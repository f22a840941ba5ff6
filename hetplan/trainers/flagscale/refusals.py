"""What in a legal plan for target flagscale can FlagScale not be told?

Everything that pre_validate_args (flagscale/train/arguments.py) and ParallelContext
(flagscale/train/hetero/parallel_context.py) check on the hosts, checked before anything is written;
and what they do not check and then do wrongly. A legal plan of the target has one pipeline of
stages of one kind each, no context or expert parallelism, no virtual stages
(`hetplan.plans.check_target`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from hetplan.errors import Fault
from hetplan.model.spec import ModelSpec
from hetplan.plans.pieces import expert_copies, stage_copies, stage_shards
from hetplan.plans.plan import Plan, Sharding
from hetplan.schedulers.launch import EmissionOptions
from hetplan.schedulers.rank_layout import RankLayout
from hetplan.search.result import SearchResult
from hetplan.trainers.flagscale.meshes import (
    Mesh,
    Meshes,
    has_experts,
    mapped_ranks,
    meshes_of,
    partial_reduction,
    sequence_parallel,
    vocabulary_multiple,
)
from hetplan.trainers.megatron.model import missing_flags
from hetplan.trainers.megatron.write import common_faults

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
    shared = common_faults(result, options)
    later = () if shared else missing_flags(inputs.model, inputs.job, _LATER, _BASE)
    found = (*shared, *later, *_devices(ranks), *_texts(options))
    if not meshes.hetero:
        return found
    plan, model = result.plan, result.inputs.model
    return (
        *found,
        *_batch(plan, meshes),
        *_order(meshes, ranks),
        *_sequence(plan, meshes),
        *_sharding(plan),
        *_ends(plan, meshes, model),
        *_vocabulary(plan, meshes, model),
        *_experts(plan, model),
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
    samples = meshes.first_data_ranks * first.microbatch_size
    for mesh in meshes.meshes:
        if samples % mesh.dp or samples // mesh.dp != mesh.microbatch_size:
            yield Fault(
                field=f"{_STAGES}[{mesh.first_stage}]",
                message=f"dp {mesh.dp} and microbatch size {mesh.microbatch_size}; FlagScale gives "
                f"every mesh dp of the first ({first.dp}) times its microbatch size "
                f"({first.microbatch_size}) by its own dp: pin dp or microbatch_size",
            )


def _order(meshes: Meshes, ranks: RankLayout) -> Iterator[Fault]:
    """RankMapper puts every rank where the plan has it, and every mesh has its size of ranks."""
    total = sum(mesh.num_ranks for mesh in meshes.meshes)
    if total != ranks.world_size or mapped_ranks(meshes.meshes, ranks) != tuple(range(total)):
        names = ", ".join(mesh.device_type for mesh in meshes.meshes)
        yield Fault(
            field=_STAGES,
            message=f"meshes of types {names} have {total} ranks and the hosts "
            f"{ranks.world_size}; FlagScale, which deals ranks by type, would put some of them at "
            "other stages: let every host serve neighbouring stages only",
        )


def _sequence(plan: Plan, meshes: Meshes) -> Iterator[Fault]:
    stages = plan.pipelines[0].stages
    if not sequence_parallel(stages):
        for left, right in pairwise(meshes.meshes):
            if left.tp != right.tp:
                yield _slices(left, right)
        return
    for s, stage in enumerate(stages):
        for replica in stage.replicas:
            if replica.tp > 1 and not replica.sequence_parallel:
                yield Fault(
                    field=f"{_STAGES}[{s}].replicas[0].sequence_parallel",
                    message="off, and on at other stages; FlagScale has one switch, which it "
                    "turns off where tp is 1: pin sequence_parallel: true",
                )
                break


def _slices(left: Mesh, right: Mesh) -> Fault:
    """get_inter_mesh_tensor_slices takes what a rank sends for its tp-th part of the sequence."""
    return Fault(
        field=f"{_STAGES}[{right.first_stage}].replicas[0].sequence_parallel",
        message=f"off, with tp {left.tp} before and tp {right.tp} behind the boundary; FlagScale "
        "cuts what meshes of unlike tp send each other along the sequence, as if it were sequence "
        "parallel: pin sequence_parallel: true",
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
    last = plan.pipelines[0].stages[-1]
    if model.num_mtp_layers and last.chunks[-1].start > model.num_layers:
        yield Fault(
            field=f"{_STAGES}[{len(plan.pipelines[0].stages) - 1}]",
            message="begins behind the last transformer layer; FlagScale's last mesh holds the "
            "multi-token prediction layers behind a transformer layer: move the cut",
        )
    held = sum(max(0, chunk.stop - max(chunk.start, model.num_layers + 1)) for chunk in last.chunks)
    if model.num_mtp_layers and held != model.num_mtp_layers + 1:
        yield Fault(
            field=f"{_STAGES}[{len(plan.pipelines[0].stages) - 1}]",
            message="does not hold all multi-token prediction layers; FlagScale keeps them at the "
            "last stage: move the cut",
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


def _experts(plan: Plan, model: ModelSpec) -> Iterator[Fault]:
    """ProcessMesh raises where an expert's groups do not divide the mesh."""
    if not has_experts(model):
        return
    for s, stage in enumerate(plan.pipelines[0].stages):
        for replica in stage.replicas:
            if replica.ep != 1 or not expert_copies(stage):
                yield Fault(
                    field=f"{_STAGES}[{s}].replicas[0].ep",
                    message=f"{replica.ep}; FlagScale's meshes are verified without expert "
                    "parallelism only: pin ep: 1",
                )
                return
