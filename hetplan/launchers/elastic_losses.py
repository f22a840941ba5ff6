"""Are the losses of an elastic run those of a training that nothing disturbed?"""

from __future__ import annotations

from collections.abc import Sequence

from hetplan.job.spec import Job
from hetplan.launchers.local import LOSS_TOLERANCE, largest_difference
from hetplan.launchers.run_log import LossCheck
from hetplan.model.spec import ModelSpec
from hetplan.runtime.measured import StepRecord

_SAMPLES_AT_A_TIME = 8
"""A choice; the losses do not depend on it."""


def check_losses(model: ModelSpec, job: Job, steps: Sequence[StepRecord]) -> LossCheck:
    """These steps' losses against those of the same steps of the model trained in one process.

    One process trains from the beginning, also where these steps begin later.
    """
    import torch

    from hetplan.runtime.single import reference_losses

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each rank had
    try:
        reference = reference_losses(
            model,
            job,
            steps=max((step.step + 1 for step in steps), default=0),
            microbatch_size=min(_SAMPLES_AT_A_TIME, job.global_batch_size),
        )
    finally:
        torch.set_num_threads(threads)
    return LossCheck(
        reference_losses=reference,
        largest_relative_difference=largest_difference(
            [step.loss for step in steps], [reference[step.step] for step in steps]
        ),
        tolerance=LOSS_TOLERANCE,
    )
