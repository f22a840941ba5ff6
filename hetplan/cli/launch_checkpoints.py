"""`hetplan launch --save, --load`: what is saved, and what does the run go on from?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.cli.options import say

if TYPE_CHECKING:
    from hetplan.runtime.checkpoints import CheckpointRequest
    from hetplan.search.result import SearchResult


def asked_checkpoints(
    result: SearchResult,
    *,
    target: str,
    steps: int,
    save: Path | None,
    save_every: int,
    load: Path | None,
    keep: int | None,
) -> CheckpointRequest:
    """What the options ask for, one checkpoint to go on from; says which one, and what is odd.

    An InputError where the run cannot go on from it, or must not save where it is told to.
    """
    from hetplan.errors import InputError
    from hetplan.runtime.checkpoints import DEFAULT_KEEP, NO_CHECKPOINTS, CheckpointRequest

    if save is None and load is None:
        if save_every or keep is not None:
            raise InputError("--save-every and --keep are of the checkpoints of --save; add it")
        return NO_CHECKPOINTS
    if target != "native":
        raise InputError(
            f"--save and --load are of hetplan's own trainer; leave them out with --target {target}"
        )
    from hetplan.runtime.checkpoints_checks import settle

    request, resume = settle(
        CheckpointRequest(
            save="" if save is None else str(save),
            save_every=save_every,
            load="" if load is None else str(load),
            keep=DEFAULT_KEEP if keep is None else keep,
        ),
        result.inputs.model,
        result.inputs.job,
        steps=steps,
    )
    for note in () if resume is None else resume.notes:
        say(note)
    return request
