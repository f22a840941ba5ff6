"""How a run goes on from a checkpoint and saves its own: the same on every rank, step by step."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist

from hetplan.errors import HetplanError, LaunchError
from hetplan.runtime.activity import Activity, Doing
from hetplan.runtime.checkpoints import clear_left_over, delete_old, step_folder
from hetplan.runtime.checkpoints_checks import check_save, resume_of, trained_job
from hetplan.runtime.checkpoints_state import TrainingState
from hetplan.runtime.training import Training
from hetplan.runtime.weights.stage import on_first_rank, partial_folder


class RunCheckpoints:
    """The checkpoints of one run, as one of its ranks makes them."""

    def __init__(
        self,
        training: Training,
        state: TrainingState,
        control: dist.ProcessGroup,
        activity: Activity,
    ) -> None:
        """Every rank of `control` makes one and calls it alike; `activity` is told each load and
        each save.
        """
        self._training, self._state, self._control = training, state, control
        self._activity = activity
        self._request = training.checkpoints
        self._trained = trained_job(training.job)

    def resume(self) -> int:
        """Take the state of the checkpoint that the run goes on from; its steps, 0 without one.

        `Training.checkpoints.load` is one checkpoint. An InputError where the run cannot go on from
        it, or must not save where it is told to.
        """
        training, request = self._training, self._request
        resume = None
        if request.load:
            self._activity.begin("load of a checkpoint", doing=Doing.FILES)
            folder = Path(request.load)
            resume = resume_of(folder, training.model, training.job, steps=training.steps)
            self._state.load(folder, resume.states)
            self._trained = resume.trained
        if request.save:
            loaded = None if resume is None else resume.folder
            on_first_rank(
                self._control,
                lambda: check_save(Path(request.save), loaded),
                f"save to {request.save}",
            )
        return 0 if resume is None else resume.manifest.step

    def after_step(self, done: int, *, last: bool) -> None:
        """Save where a checkpoint is due after this many steps; a LaunchError where it fails."""
        if not self._request.is_due(done, last=last):
            return
        self._activity.begin("save of a checkpoint", doing=Doing.FILES)
        parent = Path(self._request.save)
        folder = step_folder(parent, done)
        first = dist.get_rank(self._control) == 0
        try:
            on_first_rank(self._control, lambda: clear_left_over(parent), f"clear {parent}")
            self._state.save(folder, step=done, trained=self._trained, group=self._control)
        except (HetplanError, OSError, RuntimeError) as error:
            if first:
                shutil.rmtree(partial_folder(folder), ignore_errors=True)
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise LaunchError(
                f"the checkpoint {folder} could not be saved: {reason}; earlier checkpoints are "
                "as they were"
            ) from error
        if first:
            delete_old(parent, self._request.keep)
        self._activity.end()
