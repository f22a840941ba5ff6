"""The checkpoints that a run saves, keeps and resumes from, and where they lie.

    SAVE/step-00000020/          a checkpoint after 20 steps; the next step to train is 20
    SAVE/.step-00000040.partial  one that is being written, or was when its run was killed
    SAVE/.step-00000000.old      one that is being deleted

A folder gets its name when it is complete and is renamed before anything of it is deleted, so what
is called `step-N` is whole, whenever a run is killed. What a killed run left is deleted at the next
save.

A training goes on where model, data and update rule are what they were; the plan, the number of
ranks and the precision may differ. Nothing is saved where checkpoints of another run lie.
"""

from __future__ import annotations

import logging
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from hetplan.cost.step_model.end_of_step import clips_gradients
from hetplan.errors import Fault, InputError
from hetplan.files.writing import make_folder, sync_folder
from hetplan.job.spec import Job, Precision
from hetplan.model.spec import ModelSpec
from hetplan.profiling.weights import RULE_STATES
from hetplan.runtime.checkpoint_contents import (
    MANIFEST,
    WEIGHTS,
    CheckpointManifest,
    TrainedJob,
    open_checkpoint,
)
from hetplan.runtime.training import CheckpointRequest

_NAME = re.compile(r"step-(\d{8,})", re.ASCII)
_LEFT_OVER = re.compile(r"\.step-\d{8,}\.(partial|old)", re.ASCII)

_LOGGER = logging.getLogger(__name__)


def step_folder(parent: Path, step: int) -> Path:
    """Where the checkpoint after this many steps lies."""
    return parent / f"step-{step:08d}"


def steps_of(folder: Path) -> int | None:
    """Steps that the checkpoint of this name was saved after; None where it is no such name."""
    match = _NAME.fullmatch(folder.name)
    return None if match is None else int(match[1])


def checkpoints_in(parent: Path) -> tuple[Path, ...]:
    """Every folder with the name of a checkpoint, the one with the most steps first."""
    try:
        folders = [
            folder
            for folder in parent.iterdir()
            if steps_of(folder) is not None and folder.is_dir()
        ]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise InputError(
            Fault(file=str(parent), message=f"cannot be read: {error.strerror}")
        ) from error
    return tuple(
        sorted(folders, key=lambda folder: (steps_of(folder) or 0, folder.name), reverse=True)
    )


def last_checkpoint(folder: Path) -> Path | None:
    """The whole checkpoint with the most steps in this folder; None where there is none.

    Those that are damaged are passed over with a warning.
    """
    for checkpoint in checkpoints_in(folder):
        try:
            open_checkpoint(checkpoint)
        except InputError as error:
            _LOGGER.warning("%s is damaged and passed over: %s", checkpoint, error.faults[0])
        else:
            return checkpoint
    return None


def checkpoint_at(load: Path) -> Path:
    """The checkpoint that `--load` with this folder goes on from.

    The folder itself where it is one, else the last one in it; an InputError where there is none.
    """
    if (load / MANIFEST).is_file() or steps_of(load) is not None:
        return load
    last = last_checkpoint(load)
    if last is None:
        message = (
            "there is no such folder"
            if not load.is_dir()
            else "holds no whole checkpoint; --load takes the folder of an earlier --save, or one "
            "checkpoint in it"
        )
        raise InputError(Fault(file=str(load), message=message))
    return last


def clear_left_over(parent: Path) -> None:
    """Delete what killed runs left of checkpoints that were being written or deleted."""
    for entry in parent.iterdir():
        if _LEFT_OVER.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)


def delete_old(parent: Path, keep: int) -> None:
    """Delete all but the last `keep` checkpoints; 0 keeps all.

    What cannot be deleted stays, with a warning: the newer ones are whole, the run can go on.
    """
    for checkpoint in checkpoints_in(parent)[keep:] if keep else ():
        renamed = checkpoint.with_name(f".{checkpoint.name}.old")
        shutil.rmtree(renamed, ignore_errors=True)
        try:
            checkpoint.rename(renamed)
            # No power cut may bring the name back to a folder of which parts are gone.
            sync_folder(parent)
        except OSError as error:
            _LOGGER.warning("%s could not be deleted: %s", checkpoint, error.strerror or error)
            continue
        shutil.rmtree(renamed, ignore_errors=True)


# What must be the same, because the loss depends on it.
_SAME = ("optimizer", "gradient_clipping", "global_batch_size", "sequence_length", "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A checkpoint that a run goes on from."""

    folder: Path
    manifest: CheckpointManifest
    states: tuple[str, ...]
    """Those that are read: the weights, and what the update rule keeps of them."""
    trained: TrainedJob
    """What the run's own checkpoints say of the training."""
    notes: tuple[str, ...]
    """What a person should know, one sentence each."""


def trained_job(job: Job) -> TrainedJob:
    """What a checkpoint says of a training that began with this job."""
    return TrainedJob(
        optimizer=job.optimizer,
        gradient_clipping=clips_gradients(job),
        global_batch_size=job.global_batch_size,
        sequence_length=job.sequence_length,
        seed=job.seed,
        precision=job.precision,
        synchronisation=job.synchronisation,
    )


def resume_of(folder: Path, model: ModelSpec, job: Job, *, steps: int) -> Resume:
    """How the job goes on from this checkpoint up to `steps` steps.

    An InputError with every reason why it cannot: another model, other data, another update rule,
    steps that are done already, or a checkpoint that is not whole.
    """
    states = (WEIGHTS, *RULE_STATES[job.optimizer])
    manifest, _ = open_checkpoint(folder, model, (WEIGHTS,))
    place, now, before = str(folder / MANIFEST), trained_job(job), manifest.trained
    if before is None:
        message = "holds weights without a training; a run goes on from what a run saved"
        raise InputError(Fault(file=place, field="trained", message=message))
    faults = [
        Fault(
            file=place,
            field=f"trained.{name}",
            message=f"the checkpoint was trained with {getattr(before, name)}, the job has "
            f"{getattr(now, name)}: the loss would not go on; give the job the same {name}",
        )
        for name in _SAME
        if getattr(before, name) != getattr(now, name)
    ]
    if manifest.step >= steps:
        message = (
            f"{manifest.step} steps are done and the run is to have {steps} in all; ask for more "
            "(--steps counts from the first step of the training)"
        )
        faults.append(Fault(file=place, field="step", message=message))
    if faults:
        raise InputError(*faults)
    open_checkpoint(folder, model, states)
    same = before.precision is now.precision
    begun_from = before.begun_from if same else str(folder.resolve())
    notes = [f"goes on from {folder}, after {manifest.step} steps"]
    if not same:
        notes.append(
            f"trained in {before.precision} so far and in {now.precision} from here on: passes "
            "round otherwise; weights and optimizer state are kept in float32 and lose nothing"
        )
    return Resume(
        folder=folder,
        manifest=manifest,
        states=states,
        trained=replace(now, begun_from=begun_from),
        notes=tuple(notes),
    )


def check_loss_faults(resume: Resume | None) -> tuple[Fault, ...]:
    """Why the losses of this run cannot be those of one process from the seed on."""
    if resume is None or not resume.trained.begun_from:
        return ()
    return (
        Fault(
            file=str(resume.folder),
            message="--check-loss compares with one process that trains from the job's first "
            f"weights on in {Precision.FLOAT32}; this training did not begin from those "
            f"({resume.trained.begun_from}): leave --check-loss out",
        ),
    )


def settle(
    request: CheckpointRequest, model: ModelSpec, job: Job, *, steps: int
) -> tuple[CheckpointRequest, Resume | None]:
    """The request with absolute folders and one checkpoint to go on from; None: it begins anew.

    An InputError where the run cannot go on from it, or must not save to that folder.
    """
    resume = None
    if request.load:
        folder = checkpoint_at(Path(request.load).resolve())
        resume = resume_of(folder, model, job, steps=steps)
        request = replace(request, load=str(folder))
    if request.save:
        request = replace(request, save=str(Path(request.save).resolve()))
        check_save(Path(request.save), None if resume is None else resume.folder)
    return request, resume


def check_save(parent: Path, loaded: Path | None) -> None:
    """An InputError where the run must not save there: other checkpoints are in the folder.

    The folder may hold the checkpoint that the run goes on from (`loaded`) and earlier ones. Makes
    the folder; damaged ones later than `loaded` are renamed, with a warning.
    """
    make_folder(parent)
    if (parent / MANIFEST).exists():
        message = "is a checkpoint itself; checkpoints are saved to a folder that holds them"
        raise InputError(Fault(file=str(parent), message=message))
    checkpoints = checkpoints_in(parent)
    if not checkpoints:
        return
    if loaded is None or loaded.resolve().parent != parent.resolve():
        message = (
            f"has checkpoints of another run, the last is {checkpoints[0].name}; go on from it "
            f"with --load {parent}, or save to another folder"
        )
        raise InputError(Fault(file=str(parent), message=message))
    start = steps_of(loaded) or 0
    later = [checkpoint for checkpoint in checkpoints if (steps_of(checkpoint) or 0) > start]
    last = last_checkpoint(parent) if later else None
    if last is not None and last.resolve() != loaded.resolve():
        message = (
            f"has {last.name}, which is later than {loaded.name} that the run goes on from; go on "
            "from the later one, move it away, or save to another folder"
        )
        raise InputError(Fault(file=str(parent), message=message))
    for checkpoint in later:
        aside = checkpoint.with_name(f"{checkpoint.name}.damaged")
        _LOGGER.warning("%s is damaged; it is now %s", checkpoint, aside.name)
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)
