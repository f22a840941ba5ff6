"""Number formats in which a plan sums gradients, and checkpoint formats that other plans can load.

A plan names the format of every sum of gradients: `ReductionGroup.precision` over the copies,
`Plan.tied_embedding_precision` between first and last stage. The job's trainer has a format of its
own (`TrainerSettings.gradient_precision`); plans that are made for the job name that one, and only
targets with `Target.other_formats` take another.

A run whose devices change (elasticity) needs checkpoints that keep tensors whole, or with their
place. A format that keeps each rank's memory as it was can only be loaded by the same ranks again.
`reshardable` answers from data about trainers: what was read in their code, unless a line says that
it was run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetplan.errors import InputError
from hetplan.job.spec import Job, Precision
from hetplan.job.trainer import TRAINER_DEFAULTS, trainer_settings
from hetplan.plans.pieces import data_ranks
from hetplan.plans.plan import Plan, Sharding, Stage


def reduction_precision(job: Job) -> Precision:
    """The format in which the job's trainer sums gradients; InputErrors as `trainer_settings`."""
    return trainer_settings(job).gradient_precision


def reduction_formats(plan: Plan) -> tuple[str, ...]:
    """The different formats of the plan's reduction groups, in the order of the groups."""
    return tuple(dict.fromkeys(group.precision for group in plan.reduction_groups))


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


def job_summing_as(plan: Plan, job: Job) -> Job:
    """The job with the trainer option that sums as the plan does, where it leaves that open.

    The job as it is where it says something, where its target has no such option, and where the
    plan has several formats: then the two may not agree, which `hetplan.plans.check` says.
    """
    found = tuple({name for _, name in named_formats(plan)})
    if job.trainer.gradient_precision is not None:
        return job
    defaults = TRAINER_DEFAULTS.get(job.target)
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

    name: str
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


MEGATRON_DIST = CheckpointFormat(
    name="torch_dist",
    reshardable=True,
    reason="tensors are whole, in chunks with their place: weights load under any tp, pp and dp; "
    "the distributed optimizer's state does where it was saved with "
    "--dist-ckpt-optim-fully-reshardable",
    source="megatron/core/dist_checkpointing; megatron/training/checkpointing.py, load_checkpoint: "
    "'(TP, PP) mismatch after resume' is an error for other optimizer states; the weights' part "
    "was run with megatron-core 0.16.1",
)
FLAGSCALE_TORCH = CheckpointFormat(
    name="torch",
    reshardable=False,
    reason="one file per rank, cut as its mesh was cut; torch_dist fails where the meshes' tp "
    "differ",
    source="FlagScale issue 319: the maintainers' answer is ckpt_format torch",
)
FLAGSCALE_DIST = CheckpointFormat(
    name="torch_dist",
    reshardable=True,
    reason="without --enable-hetero it is Megatron-LM's: weights load under any plan that needs no "
    "--enable-hetero either",
    source="flagscale/train/train.py calls Megatron-LM's save_checkpoint; megatron/training/"
    "checkpointing.py",
)
TORCHTITAN_DCP = CheckpointFormat(
    name="torch distributed checkpoint",
    reshardable=True,
    reason="DTensors under the names of the whole model: loaded under any degrees by DCP",
    source="torchtitan docs/checkpoint.md: a seed checkpoint of one device is loaded 'on an "
    "arbitrary number of GPUs via DCP resharding'",
)


def needs_meshes(plan: Plan, *, several_libraries: bool = False) -> bool:
    """Whether FlagScale runs the plan with --enable-hetero, as `hetplan emit` writes it.

    That is where stages differ in degrees, microbatch size or recomputation, or devices of several
    vendors (`several_libraries`, which a plan does not say) take part.
    """
    settings = {(_degrees(stage), stage.recompute) for stage in plan.stages}
    return several_libraries or len(settings) > 1


def _degrees(stage: Stage) -> tuple[int, ...]:
    """tp, dp, etp and microbatch size."""
    first = stage.replicas[0]
    return first.tp, data_ranks(stage), first.etp, first.microbatch_size


_EMITTED = {
    # MindSpeed runs Megatron-core's dist_checkpointing.
    "megatron": MEGATRON_DIST,
    "mindspeed": MEGATRON_DIST,
    "flagscale": FLAGSCALE_TORCH,
    "torchtitan": TORCHTITAN_DCP,
}
"""The format that a run is told to use, by `hetplan emit --target`."""


def reshardable(trainer: str, plan: Plan, *, several_libraries: bool = False) -> Resharding:
    """Whether a run of this plan can be continued under another plan from its checkpoints.

    `several_libraries`: the plan's devices have more than one collective library.
    """
    kept = _EMITTED[trainer]
    if kept is FLAGSCALE_TORCH and not needs_meshes(plan, several_libraries=several_libraries):
        kept = FLAGSCALE_DIST
    if not kept.reshardable:
        return Resharding(
            possible=False,
            format=kept,
            reason=f"checkpoints are {kept.name}, {kept.reason}: they load under the same plan "
            "only; continue under the same plan, or plan for target megatron or native",
        )
    needs = ""
    if kept in (MEGATRON_DIST, FLAGSCALE_DIST) and plan.sharding is not Sharding.NONE:
        needs = "; the plan shards the optimizer: add --dist-ckpt-optim-fully-reshardable"
    return Resharding(possible=True, format=kept, reason=f"{kept.name}: {kept.reason}{needs}")
