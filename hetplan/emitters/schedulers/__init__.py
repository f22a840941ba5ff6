"""Which scripts and manifests start a plan's ranks, whatever the schedulers of its hosts?

One job may lie in several launch domains. All of them get the same folder: `start-here.sh` runs on
every host and meets the others at the barrier before torchrun starts, whoever started it: ssh, a
step of Slurm, a pod of Kubernetes.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.cluster.launch_domains import Scheduler
from hetplan.emitters.schedulers.kubernetes import kubernetes_texts
from hetplan.emitters.schedulers.slurm import slurm_file, slurm_text
from hetplan.emitters.schedulers.start import START_HERE_FILE, body, start_here_text
from hetplan.emitters.schedulers.start_all import START_ALL_FILE, start_all_text
from hetplan.emitters.schedulers.tables import (
    AGENTS_FILE,
    ARGUMENTS_FILE,
    ENVIRONMENT_FILE,
    Tables,
    tables_of,
)
from hetplan.emitters.sheet import LaunchSheet
from hetplan.emitters.trainer_launch import EmitOptions, EmittedFile, TrainerLaunch

BARRIER_FILE = "barrier.py"


def scheduled_files(
    sheet: LaunchSheet,
    launch: TrainerLaunch,
    options: EmitOptions | None = None,
    checks: tuple[EmittedFile, ...] = (),
) -> tuple[EmittedFile, ...]:
    """Tables, scripts and manifests that start the launch on every host of the sheet.

    `checks`: the files of check.py, which pods get in a manifest of their own. An InputError where
    a domain cannot start its hosts as the sheet wants it.
    """
    options = options or EmitOptions()
    tables = tables_of(sheet, launch)
    everywhere = (
        EmittedFile(
            path=START_HERE_FILE,
            text=start_here_text(sheet, launch, tables, options),
            executable=True,
        ),
        EmittedFile(path=BARRIER_FILE, text=body("barrier_program.py"), executable=True),
        EmittedFile(path=AGENTS_FILE, text=tables.agents),
        EmittedFile(path=ENVIRONMENT_FILE, text=tables.environment),
        EmittedFile(path=ARGUMENTS_FILE, text=tables.arguments),
    )
    start_all = EmittedFile(
        path=START_ALL_FILE, text=start_all_text(sheet, launch, tables), executable=True
    )
    needed = (*everywhere, *launch.files)
    scheduled = _of_schedulers(sheet, launch, tables, needed, options, checks)
    return (*everywhere, start_all, *scheduled)


def _of_schedulers(
    sheet: LaunchSheet,
    launch: TrainerLaunch,
    tables: Tables,
    files: tuple[EmittedFile, ...],
    options: EmitOptions,
    checks: tuple[EmittedFile, ...],
) -> Iterator[EmittedFile]:
    for domain in sheet.domains:
        if domain.scheduler is Scheduler.SLURM:
            text = slurm_text(sheet, launch, domain, options)
            yield EmittedFile(path=slurm_file(domain), text=text, executable=True)
        elif domain.scheduler is Scheduler.KUBERNETES:
            yield from kubernetes_texts(sheet, domain, tables, files, options, checks)
