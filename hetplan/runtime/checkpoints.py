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

from hetplan.errors import Fault, InputError
from hetplan.files.writing import sync_folder

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
    """A folder of checkpoints, of which the last one is taken, or one checkpoint (in a `Training`
    always this: `checkpoints_checks.settle`); empty: the run begins anew."""
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


NO_CHECKPOINTS = CheckpointRequest()
"""Nothing is saved, and the run begins anew."""


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


def clear_left_over(parent: Path) -> None:
    """Delete what killed runs left of checkpoints that were being written or deleted."""
    for each in parent.iterdir():
        if _LEFT_OVER.fullmatch(each.name):
            shutil.rmtree(each, ignore_errors=True)


def delete_old(parent: Path, keep: int) -> None:
    """Delete all but the last `keep` checkpoints; 0 keeps all.

    What cannot be deleted stays, with a warning: the newer ones are whole, the run can go on.
    """
    for each in checkpoints_in(parent)[keep:] if keep else ():
        going = each.with_name(f".{each.name}.old")
        shutil.rmtree(going, ignore_errors=True)
        try:
            each.rename(going)
            # No power cut may bring the name back to a folder of which parts are gone.
            sync_folder(parent)
        except OSError as error:
            _LOGGER.warning("%s could not be deleted: %s", each, error.strerror or error)
            continue
        shutil.rmtree(going, ignore_errors=True)
