"""Which checkpoints a run saves, keeps and goes on from, and where are they?

    SAVE/step-00000020/          a checkpoint after 20 steps; the next step to train is 20
    SAVE/.step-00000040.partial  one that is being written, or was when its run was killed
    SAVE/.step-00000000.old      one that is being deleted

A folder gets its name when it is complete and is renamed before anything of it is deleted, so what
is called `step-N` is whole, whenever a run is killed. What is left of a killed run goes at the next
save.
"""

from __future__ import annotations

import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.errors import Fault, InputError
from hetplan.files.writing import sync_folder

if TYPE_CHECKING:
    from hetplan.job.spec import Job
    from hetplan.model.spec import ModelSpec
    from hetplan.runtime.weights.native import CheckpointManifest, TrainedJob

DEFAULT_KEEP = 2
"""One to go on from while the next one is written, and one before it."""
_NAME = re.compile(r"step-(\d{8,})", re.ASCII)
_LEFT_OVER = re.compile(r"\.step-\d{8,}\.(partial|old)", re.ASCII)

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequest:
    """What a run is asked to save and to go on from; folders as text."""

    save: str = ""
    """Folder of the run's checkpoints; empty: none are saved."""
    save_every: int = 0
    """Steps from one checkpoint to the next; 0: one, at the end. The end always has one."""
    load: str = ""
    """A folder of checkpoints, of which the last one is taken, or one checkpoint; empty: the run
    begins anew."""
    keep: int = DEFAULT_KEEP
    """Checkpoints that stay; older ones are deleted when a newer one is complete. 0: all stay."""

    def __post_init__(self) -> None:
        if self.save_every < 0 or self.keep < 0:
            raise InputError(
                f"save_every is {self.save_every}, keep is {self.keep}; both must be at least 0"
            )
        if self.save_every and not self.save:
            raise InputError(
                f"a checkpoint every {self.save_every} steps is asked for and no folder to save to "
                "(--save)"
            )

    def is_due(self, done: int, *, last: bool) -> bool:
        """Whether a checkpoint is saved after this many steps."""
        every = bool(self.save_every) and done % self.save_every == 0
        return bool(self.save) and (last or every)


def step_folder(parent: Path, step: int) -> Path:
    """Where the checkpoint after this many steps lies."""
    return parent / f"step-{step:08d}"


def steps_of(folder: Path) -> int | None:
    """Steps that the checkpoint of this name was saved after; None where it is no such name."""
    found = _NAME.fullmatch(folder.name)
    return None if found is None else int(found[1])


def checkpoints_in(parent: Path) -> tuple[Path, ...]:
    """Every folder with the name of a checkpoint, the one with the most steps first."""
    try:
        found = [each for each in parent.iterdir() if steps_of(each) is not None and each.is_dir()]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise InputError(
            Fault(file=str(parent), message=f"cannot be read: {error.strerror}")
        ) from error
    return tuple(sorted(found, key=lambda each: (steps_of(each) or 0, each.name), reverse=True))


def last_checkpoint(folder: Path) -> Path | None:
    """The whole checkpoint with the most steps in this folder; None where there is none.

    Those that are damaged are passed over with a warning.
    """
    from hetplan.runtime.weights.native import open_native

    for each in checkpoints_in(folder):
        try:
            open_native(each)
        except InputError as error:
            _LOGGER.warning("%s is damaged and passed over: %s", each, error.faults[0])
        else:
            return each
    return None


def checkpoint_at(load: Path) -> Path:
    """The checkpoint that `--load` with this folder goes on from.

    The folder itself where it is one, else the last one in it; an InputError where there is none.
    """
    from hetplan.runtime.weights.native import MANIFEST

    if (load / MANIFEST).is_file() or steps_of(load) is not None:
        return load
    found = last_checkpoint(load)
    if found is None:
        message = (
            "there is no such folder"
            if not load.is_dir()
            else "holds no whole checkpoint; --load takes the folder of an earlier --save, one "
            "checkpoint in it, or what `hetplan convert weights --to native` wrote"
        )
        raise InputError(Fault(file=str(load), message=message))
    return found


def trained_job(job: Job) -> TrainedJob:
    """What of a job a checkpoint says."""
    from hetplan.cost.components.step import clips_gradients
    from hetplan.runtime.weights.native import TrainedJob

    return TrainedJob(
        optimizer=job.optimizer,
        gradient_clipping=clips_gradients(job),
        global_batch_size=job.global_batch_size,
        sequence_length=job.sequence_length,
        seed=job.seed,
        precision=job.precision,
    )


def check_resume(folder: Path, model: ModelSpec, job: Job, *, steps: int) -> CheckpointManifest:
    """What the checkpoint is; an InputError with every reason why this job cannot go on from it.

    It must be of the same model, with the job's data and update rule; the precision may differ.
    """
    from hetplan.runtime.weights.native import MANIFEST
    from hetplan.runtime.weights.stage import open_checkpoint

    now = trained_job(job)
    manifest, _ = open_checkpoint(folder, model, kept_states(folder, now))
    place = str(folder / MANIFEST)
    before, faults = manifest.trained, []
    for name in (
        *("optimizer", "gradient_clipping", "global_batch_size", "sequence_length", "seed"),
    ):
        if before is not None and getattr(before, name) != getattr(now, name):
            message = (
                f"the checkpoint was trained with {getattr(before, name)}, the job has "
                f"{getattr(now, name)}; the loss would not go on: give the job the same {name}, or "
                "convert the weights and begin anew from them"
            )
            faults.append(Fault(file=place, field=f"trained.{name}", message=message))
    if manifest.step >= steps:
        message = (
            f"{manifest.step} steps are done and the run is to have {steps} in all; ask for more "
            "(--steps counts from the first step of the training)"
        )
        faults.append(Fault(file=place, field="step", message=message))
    if faults:
        raise InputError(*faults)
    return manifest


def kept_states(folder: Path, job: TrainedJob) -> tuple[str, ...]:
    """States that a run of this job reads from the checkpoint.

    Of one that holds converted weights the weights alone: the optimizer begins anew.
    """
    from hetplan.profiling.updating import RULE_STATES
    from hetplan.runtime.weights.native import WEIGHTS, read_manifest

    manifest = read_manifest(folder)
    if manifest.trained is None or manifest.trained.optimizer is not job.optimizer:
        return (WEIGHTS,)
    return (WEIGHTS, *RULE_STATES[job.optimizer])


def check_save(request: CheckpointRequest, loaded: Path | None) -> None:
    """An InputError where the run must not save there: other checkpoints are in the folder.

    The folder may hold the checkpoint that the run goes on from (`loaded`) and earlier ones. Makes
    the folder; damaged ones later than `loaded` are renamed, with a warning.
    """
    if not request.save:
        return
    parent = Path(request.save)
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"no checkpoint can be saved there: {error.strerror or error}"
        raise InputError(Fault(file=str(parent), message=message)) from error
    found = checkpoints_in(parent)
    if not found:
        return
    if loaded is None or loaded.resolve().parent != parent.resolve():
        message = (
            f"has checkpoints of another run, {found[0].name} the last; go on from it with --load "
            f"{parent}, or save to another folder"
        )
        raise InputError(Fault(file=str(parent), message=message))
    start = steps_of(loaded) or 0
    later = [each for each in found if (steps_of(each) or 0) > start]
    last = last_checkpoint(parent) if later else None
    if last is not None and last.resolve() != loaded.resolve():
        message = (
            f"has {last.name}, which is later than {loaded.name} that the run goes on from; go on "
            "from the later one, move it away, or save to another folder"
        )
        raise InputError(Fault(file=str(parent), message=message))
    for each in later:
        aside = each.with_name(f"{each.name}.damaged")
        _LOGGER.warning("%s is damaged; it is now %s", each, aside.name)
        shutil.rmtree(aside, ignore_errors=True)
        each.rename(aside)


def clear_left_over(parent: Path) -> None:
    """Delete what killed runs left of checkpoints that were being written or deleted."""
    for each in parent.iterdir():
        if _LEFT_OVER.fullmatch(each.name):
            shutil.rmtree(each, ignore_errors=True)


def delete_old(parent: Path, keep: int) -> None:
    """Delete all but the last `keep` checkpoints; 0 keeps all."""
    for each in checkpoints_in(parent)[keep:] if keep else ():
        going = each.with_name(f".{each.name}.old")
        shutil.rmtree(going, ignore_errors=True)
        each.rename(going)
        # No power cut may bring the name back to a folder of which parts are gone.
        sync_folder(parent)
        shutil.rmtree(going, ignore_errors=True)
