"""In which number formats does a plan sum gradients, and how do plan and job agree on them?

A plan names the format of every sum of gradients: `ReductionGroup.precision` over the copies,
`Plan.tied_embedding_precision` between first and last stage. The job's trainer has a format of its
own (`TrainerSettings.gradient_precision`); plans that are made for the job name that one, and only
targets with `Target.other_formats` take another.

Which checkpoints can be loaded under another plan than the one that saved them?

A run whose devices change (elasticity) needs a format that keeps tensors whole, or with their
place; one that keeps each rank's memory as it was can only be loaded by the same ranks again. This
is data about trainers: what was read in their code, with where, unless a line says it was run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetplan.errors import InputError
from hetplan.job.spec import Job, Precision
from hetplan.job.trainer import TRAINER_DEFAULTS, trainer_settings
from hetplan.plans.plan import Plan, Sharding, Stage
from hetplan.plans.targets import TARGETS


def reduction_precision(job: Job) -> Precision:
    """The format in which the job's trainer sums gradients; InputErrors as `trainer_settings`."""
    return trainer_settings(job).gradient_precision


def reduction_formats(plan: Plan) -> tuple[str, ...]:
    """The different formats of the plan's reduction groups, in the order of the groups."""
    return tuple(dict.fromkeys(group.precision for group in plan.reduction_groups))


def summed_formats(plan: Plan) -> tuple[str, ...]:
    """The same with that of a tied matrix."""
    return tuple(dict.fromkeys(found for _, found in named_formats(plan)))


def named_formats(plan: Plan) -> Iterator[tuple[str, str]]:
    """Every field of the plan that names the format of a sum, and what it names."""
    for at, group in enumerate(plan.reduction_groups):
        yield f"reduction_groups[{at}].precision", group.precision
    if plan.tied_embedding_precision is not None:
        yield "tied_embedding_precision", plan.tied_embedding_precision


def one_format(plan: Plan, job: Job) -> Precision:
    """The format of all reduction groups; the job's own where they have several, or there is none.

    The formats must be known (`hetplan.plans.check`).
    """
    found = reduction_formats(plan)
    return Precision(found[0]) if len(found) == 1 else reduction_precision(job)


def tied_format(plan: Plan, job: Job) -> Precision:
    """The format in which a tied matrix is summed; the job's own where the plan ties none."""
    found = plan.tied_embedding_precision
    return reduction_precision(job) if found is None else Precision(found)


def summed_as(plan: Plan, job: Job) -> Plan:
    """The plan with the formats of the job's trainer."""
    own = reduction_precision(job).value
    return replace(
        plan,
        reduction_groups=tuple(replace(each, precision=own) for each in plan.reduction_groups),
        tied_embedding_precision=None if plan.tied_embedding_precision is None else own,
    )


def job_summing_as(plan: Plan, job: Job) -> Job:
    """The job with the trainer option that sums as the plan does, where it leaves that open.

    The job as it is where it says something, where its target has no such option, and where the
    plan has several formats: then the two may not agree, which `hetplan.plans.check` says.
    """
    found = summed_formats(plan)
    if job.trainer.gradient_precision is not None:
        return job
    defaults = dict(TRAINER_DEFAULTS).get(job.target)
    if len(found) != 1 or defaults is None or found[0] not in [each.value for each in Precision]:
        return job
    if "gradient_precision" not in defaults.choices:
        return job
    asked = replace(job, trainer=replace(job.trainer, gradient_precision=Precision(found[0])))
    try:
        same = reduction_precision(job) == found[0]
        reduction_precision(asked)
    except InputError:
        return job
    return job if same else asked


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFormat:
    """One format of one trainer."""

    trainer: str
    name: str
    setting: str
    """How the trainer is told to use it."""
    reshardable: bool
    """Whether weights and optimizer state can be loaded under another plan."""
    reason: str
    """Why, or under which condition, in one line."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resharding:
    """Whether a run of one plan can be continued under another one."""

    possible: bool
    format: CheckpointFormat
    reason: str
    """Why, and what to do where it is not."""


NATIVE_DCP = CheckpointFormat(
    trainer="native",
    name="torch distributed checkpoint",
    setting="hetplan.runtime.training_state",
    reshardable=True,
    reason="full weights by layer and name, in chunks with their place",
    source="hetplan/runtime/training_state.py; tests save under one plan and load under others",
)
MEGATRON_DIST = CheckpointFormat(
    trainer="megatron",
    name="torch_dist",
    setting="--ckpt-format torch_dist (the default)",
    reshardable=True,
    reason="tensors are whole, in chunks with their place: weights load under any tp, pp and dp; "
    "the distributed optimizer's state does where it was saved with "
    "--dist-ckpt-optim-fully-reshardable",
    source="megatron/core/dist_checkpointing; megatron/training/checkpointing.py, load_checkpoint: "
    "'(TP, PP) mismatch after resume' is an error for other optimizer states; the weights' part "
    "was run with megatron-core 0.16.1",
)
MEGATRON_TORCH = CheckpointFormat(
    trainer="megatron",
    name="torch",
    setting="--ckpt-format torch",
    reshardable=False,
    reason="one file per (tp, pp) rank with that rank's tensors as they lie in its memory",
    source="megatron/training/checkpointing.py, get_checkpoint_name: mp_rank_TT_PPP",
)
MEGATRON_DCP = CheckpointFormat(
    trainer="megatron",
    name="torch_dcp",
    setting="--ckpt-format torch_dcp",
    reshardable=False,
    reason="for FSDP2 alone: with tensor or pipeline parallelism it is refused, so only dp can "
    "change",
    source="megatron/training/arguments.py: '--ckpt-format torch_dcp is not tested with megatron "
    "tensor parallelism', and pipeline parallelism",
)
MEGATRON_FSDP = CheckpointFormat(
    trainer="megatron",
    name="fsdp_dtensor",
    setting="--ckpt-format fsdp_dtensor, with --use-megatron-fsdp",
    reshardable=False,
    reason="tensors are DTensors over the shards of Megatron-FSDP, which no plan here uses",
    source="megatron/training/arguments.py: 'Megatron-FSDP requires the `fsdp_dtensor` "
    "checkpointing format'",
)
FLAGSCALE_TORCH = CheckpointFormat(
    trainer="flagscale",
    name="torch",
    setting="system.checkpoint.ckpt_format: torch",
    reshardable=False,
    reason="one file per rank, cut as its mesh was cut; torch_dist fails where the meshes' tp "
    "differ",
    source="FlagScale issue 319: the maintainers' answer is ckpt_format torch",
)
FLAGSCALE_DIST = CheckpointFormat(
    trainer="flagscale",
    name="torch_dist",
    setting="system.checkpoint.ckpt_format: torch_dist",
    reshardable=True,
    reason="without --enable-hetero it is Megatron-LM's: weights load under any plan that needs no "
    "--enable-hetero either",
    source="flagscale/train/train.py calls Megatron-LM's save_checkpoint; megatron/training/"
    "checkpointing.py",
)
TORCHTITAN_DCP = CheckpointFormat(
    trainer="torchtitan",
    name="torch distributed checkpoint",
    setting="checkpoint.interval",
    reshardable=True,
    reason="DTensors under the names of the whole model: loaded under any degrees by DCP",
    source="torchtitan docs/checkpoint.md: a seed checkpoint of one device is loaded 'on an "
    "arbitrary number of GPUs via DCP resharding'",
)
DEEPSPEED_ZERO = CheckpointFormat(
    trainer="deepspeed",
    name="ZeRO checkpoint",
    setting="engine.save_checkpoint",
    reshardable=False,
    reason="one file per rank with its part of the flattened optimizer state",
    source="deepspeed/runtime/engine.py, save_checkpoint",
)
DEEPSPEED_UNIVERSAL = CheckpointFormat(
    trainer="deepspeed",
    name="universal checkpoint",
    setting="ds_to_universal.py over a ZeRO checkpoint, then load_universal_checkpoint",
    reshardable=True,
    reason="one file per parameter, made from a ZeRO checkpoint between two runs",
    source="deepspeed/checkpoint/ds_to_universal.py; Megatron-DeepSpeed, examples_deepspeed/"
    "universal_checkpointing/README.md: other TP, PP, SP and DP degrees; arXiv 2406.18820",
)

FORMATS = (
    NATIVE_DCP,
    MEGATRON_DIST,
    MEGATRON_TORCH,
    MEGATRON_DCP,
    MEGATRON_FSDP,
    FLAGSCALE_TORCH,
    FLAGSCALE_DIST,
    TORCHTITAN_DCP,
    DEEPSPEED_ZERO,
    DEEPSPEED_UNIVERSAL,
)
"""Every format, the one that is emitted for a trainer before its others."""

# Megatron-Bridge and MindSpeed run Megatron-core's dist_checkpointing; what `any` can run is
# priced as megatron (hetplan.job.trainer).
_TRAINERS = {"any": "megatron", "megatron-bridge": "megatron", "mindspeed": "megatron"}


def formats_of(trainer: str) -> tuple[CheckpointFormat, ...]:
    """The trainer's formats, the emitted one first; an InputError for an unknown trainer."""
    name = _TRAINERS.get(trainer, trainer)
    found = tuple(each for each in FORMATS if each.trainer == name)
    if not found:
        known = sorted({each.trainer for each in FORMATS} | set(_TRAINERS) | set(TARGETS))
        raise InputError(f"unknown trainer {trainer[:60]!a}; known: {', '.join(known)}")
    return found


def needs_meshes(plan: Plan, *, several_libraries: bool = False) -> bool:
    """Whether FlagScale runs the plan with --enable-hetero, as `hetplan emit` writes it.

    That is where stages differ in degrees, microbatch size or recomputation, or devices of several
    vendors (`several_libraries`, which a plan does not say) take part.
    """
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    return several_libraries or len({(_degrees(each), each.recompute) for each in stages}) > 1


def _degrees(stage: Stage) -> tuple[int, ...]:
    """tp, dp, etp and microbatch size."""
    first = stage.replicas[0]
    return first.tp, sum(each.dp for each in stage.replicas), first.etp, first.microbatch_size


def format_of_plan(
    trainer: str, plan: Plan, *, several_libraries: bool = False
) -> CheckpointFormat:
    """The format that a run of this plan is told to use."""
    found = formats_of(trainer)[0]
    if found is FLAGSCALE_TORCH and not needs_meshes(plan, several_libraries=several_libraries):
        return FLAGSCALE_DIST
    return found


def reshardable(trainer: str, plan: Plan, *, several_libraries: bool = False) -> Resharding:
    """Whether a run of this plan can be continued under another plan from its checkpoints.

    `several_libraries`: the plan's devices have more than one collective library.
    """
    kept = format_of_plan(trainer, plan, several_libraries=several_libraries)
    if not kept.reshardable:
        # FlagScale's torch_dist is for plans without meshes, which this one is not.
        others = [
            each for each in formats_of(trainer) if each.reshardable and each is not FLAGSCALE_DIST
        ]
        mend = (
            f"; {others[0].name} can be ({others[0].setting})"
            if others
            else "; continue under the same plan, or plan for target megatron or native"
        )
        return Resharding(
            possible=False,
            format=kept,
            reason=f"checkpoints are {kept.name}, {kept.reason}: they load under the same plan "
            f"only{mend}",
        )
    needs = ""
    if kept in (MEGATRON_DIST, FLAGSCALE_DIST) and plan.sharding is not Sharding.NONE:
        needs = "; the plan shards the optimizer: add --dist-ckpt-optim-fully-reshardable"
    return Resharding(possible=True, format=kept, reason=f"{kept.name}: {kept.reason}{needs}")
