"""Are the losses of a run those of the same model trained in one process?"""

from __future__ import annotations

from collections.abc import Sequence

from hetplan.job.spec import Job
from hetplan.launchers.run_log import LossCheck
from hetplan.model.spec import ModelSpec
from hetplan.runtime.measured import StepRecord

LOSS_TOLERANCE = 1e-4
"""float32 sums in another order differ by about 1e-7 each; over 20 steps 1e-7 was measured too."""


def check_losses(
    model: ModelSpec, job: Job, steps: Sequence[StepRecord], *, microbatch_size: int
) -> LossCheck:
    """These steps' losses against those of the same steps of the model trained in one process.

    That process trains from the beginning, also where these steps begin later, so many samples at a
    time: the losses do not depend on it.
    """
    import torch

    from hetplan.runtime.single import reference_losses

    threads = torch.get_num_threads()
    # As each rank had. For models of this size more threads gain nothing, and on cores that are
    # shared with other programs they lose a lot (35 times slower was seen).
    torch.set_num_threads(1)
    try:
        every = reference_losses(
            model,
            job,
            steps=max((step.step + 1 for step in steps), default=0),
            microbatch_size=microbatch_size,
        )
    finally:
        torch.set_num_threads(threads)
    reference = tuple(every[step.step] for step in steps)
    return LossCheck(
        reference_losses=reference,
        largest_relative_difference=largest_difference([step.loss for step in steps], reference),
        tolerance=LOSS_TOLERANCE,
    )


def largest_difference(found: Sequence[float], reference: Sequence[float]) -> float:
    """Largest |found / reference - 1|; infinite where a loss is not a number."""
    differences = [abs(one / other - 1.0) for one, other in zip(found, reference, strict=True)]
    return max((each if each == each else float("inf") for each in differences), default=0.0)
