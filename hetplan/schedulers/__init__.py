"""Schedulers: what starts a plan's ranks on its hosts, one file per scheduler.

All of them write `launch.sh`, which starts the ranks of one host; Slurm and Kubernetes add a job
that runs it once on every host. A new scheduler is one file and one row of `SCHEDULERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetplan.schedulers import kubernetes, slurm, torchrun
from hetplan.schedulers.launch import EmissionOptions, EmittedFile, TrainerLaunch
from hetplan.schedulers.rank_layout import RankLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """How one scheduler starts a launch."""

    files: Callable[[RankLayout, TrainerLaunch, EmissionOptions], tuple[EmittedFile, ...]]
    """The files that start it; an InputError where this scheduler cannot."""
    start: Callable[[RankLayout, TrainerLaunch], list[str]]
    """Lines of Markdown: how a person starts, watches and ends the job."""


SCHEDULERS = {
    "torchrun": Launcher(files=torchrun.launch_files, start=torchrun.start_lines),
    "slurm": Launcher(files=slurm.launch_files, start=slurm.start_lines),
    "kubernetes": Launcher(files=kubernetes.launch_files, start=kubernetes.start_lines),
}
"""By the names of `hetplan emit --scheduler`."""
