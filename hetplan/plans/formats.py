"""In which number formats does a plan sum gradients, and how do plan and job agree on them?

A plan names the format of every sum of gradients: `ReductionGroup.precision` over the copies,
`Plan.tied_embedding_precision` between first and last stage. The job's trainer has a format of its
own (`TrainerSettings.gradient_precision`); plans that are made for the job name that one, and only
targets with `Target.other_formats` take another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetplan.errors import InputError
from hetplan.job.spec import Job, Precision
from hetplan.job.trainer import TRAINER_DEFAULTS, trainer_settings
from hetplan.plans.plan import Plan


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
