"""How a run goes on from a checkpoint and saves its own: the same on every rank, step by step."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from hetplan.errors import HetplanError, LaunchError
from hetplan.runtime.checkpoints import (
    check_resume,
    check_save,
    checkpoint_at,
    clear_left_over,
    delete_old,
    kept_states,
    step_folder,
    steps_of,
    trained_job,
)
from hetplan.runtime.checkpoints_state import TrainingState
from hetplan.runtime.training import Training
from hetplan.runtime.weights.stage import on_first_rank, partial_folder


class RunCheckpoints:
    """The checkpoints of one run, as one of its ranks makes them."""

    def __init__(
        self, training: Training, state: TrainingState, control: dist.ProcessGroup
    ) -> None:
        """Every rank of `control` makes one and calls it alike."""
        self._training, self._state, self._control = training, state, control
        self._request = training.checkpoints

    def resume(self) -> int:
        """Take the state of the checkpoint that the run goes on from; its steps, 0 without one.

        An InputError where the run cannot go on from it, or must not save where it is told to.
        """
        training, first = self._training, dist.get_rank(self._control) == 0
        loaded: Path | None = None

        def look() -> None:
            nonlocal loaded
            if self._request.load:
                loaded = checkpoint_at(Path(self._request.load))
                check_resume(loaded, training.model, training.job, steps=training.steps)
            check_save(self._request, loaded)

        on_first_rank(self._control, look, "go on from the checkpoint")
        if not self._request.load:
            return 0
        # The first rank has chosen: another one might see a later checkpoint by now.
        named = -1 if not first or loaded is None else _number_in(Path(self._request.load), loaded)
        number = torch.tensor([named])
        dist.broadcast(number, dist.get_global_rank(self._control, 0), group=self._control)
        folder = Path(self._request.load)
        if number.item() >= 0:
            folder = step_folder(folder, int(number.item()))
        return self._state.load(folder, kept_states(folder, trained_job(training.job)))

    def after_step(self, done: int, *, last: bool) -> None:
        """Save where a checkpoint is due after this many steps; a LaunchError where it fails."""
        if not self._request.is_due(done, last=last):
            return
        parent = Path(self._request.save)
        folder = step_folder(parent, done)
        try:
            on_first_rank(self._control, lambda: clear_left_over(parent), f"clear {parent}")
            self._state.save(
                folder,
                step=done,
                trained=trained_job(self._training.job),
                group=self._control,
            )
        except (HetplanError, OSError, RuntimeError) as error:
            if dist.get_rank(self._control) == 0:
                shutil.rmtree(partial_folder(folder), ignore_errors=True)
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise LaunchError(
                f"the checkpoint {folder} could not be saved: {reason}; earlier checkpoints are "
                "as they were"
            ) from error
        if dist.get_rank(self._control) == 0:
            delete_old(parent, self._request.keep)


def _number_in(load: Path, chosen: Path) -> int:
    """Steps of the checkpoint that was chosen in the folder; -1 where it is the folder itself."""
    return -1 if chosen == load else steps_of(chosen) or 0
