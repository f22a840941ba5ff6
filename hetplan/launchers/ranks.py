"""How the ranks of a training are started on their hosts and watched, and what they report."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import hetplan
from hetplan.errors import InputError, LaunchError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.launchers.hosts import Hosts
from hetplan.launchers.processes import Command, run_all
from hetplan.launchers.run_folder import MEETING_VARIABLE, START_SECONDS, RunFolder
from hetplan.runtime.measured import StepRecord, TrainingReport

if TYPE_CHECKING:
    from hetplan.runtime.training import Training

OnStep = Callable[[StepRecord], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """What runs one rank."""

    module: str = "hetplan.launchers.worker"
    """Started with a run's folder, the rank and the launcher's process number."""
    variables: tuple[tuple[str, str], ...] = ()
    """What its environment has besides."""
    trainer: str = ""
    """Name and version of the trainer; empty: hetplan's own."""


OWN_PROGRAM = RankProgram()
"""hetplan's own trainer."""


def run_ranks(
    training: Training, program: RankProgram, hosts: Hosts, out: Path | None, on_step: OnStep
) -> TrainingReport:
    """Run all ranks to their end; what they measured.

    `out` is the run's folder; without it a temporary one is kept only if the run fails.
    InputError where the folder cannot be made, LaunchError where a rank fails.
    """
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot write to folder {out}: {error.strerror or error}") from error
        return _run(training, program, hosts, RunFolder(out), on_step)
    path = Path(tempfile.mkdtemp(prefix="hetplan-run-"))
    try:
        report = _run(training, program, hosts, RunFolder(path), on_step)
    except LaunchError as error:
        raise LaunchError(f"{error}\nthe logs of all ranks are in {path}") from error
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)
    return report


def _run(
    training: Training, program: RankProgram, hosts: Hosts, folder: RunFolder, on_step: OnStep
) -> TrainingReport:
    from hetplan.runtime.training import SCHEMA as TRAINING_SCHEMA

    folder.clear()
    write_atomically(folder.training, encode(training, schema=TRAINING_SCHEMA))
    path = folder.path.absolute()
    commands = [
        Command(
            rank=rank,
            arguments=(
                sys.executable,
                "-m",
                program.module,
                str(path),
                str(rank),
                str(os.getpid()),
            ),
            log=folder.log(rank),
            failure=folder.failure(rank),
        )
        for rank in range(len(training.device_kinds))
    ]
    watch = _Watch(folder, training, on_step)
    run_all(
        commands,
        environment=_environment(hosts) | dict(program.variables),
        watch=watch.look,
        hosts=hosts,
    )
    return decode(read_document(folder.report), TrainingReport, schema=RunFolder.REPORT_SCHEMA)


def _environment(hosts: Hosts) -> dict[str, str]:
    """This process's environment with one thread per rank and the hosts' network."""
    package = str(Path(hetplan.__file__).parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return os.environ | {
        "PYTHONPATH": f"{package}{os.pathsep}{inherited}" if inherited else package,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": hosts.interface,
        "NCCL_SOCKET_IFNAME": hosts.interface,
        MEETING_VARIABLE: hosts.meeting_address,
    }


# The ranks' own limit comes first where they can still raise it: it names what hangs.
_LATE_SECONDS = 10.0


class _Watch:
    """Tells finished steps, and ends a run that finishes none for too long."""

    def __init__(self, folder: RunFolder, training: Training, on_step: OnStep) -> None:
        self._folder, self._training, self._on_step = folder, training, on_step
        self._told = 0
        self._since = time.monotonic()

    def look(self) -> None:
        """Called while the workers run."""
        for record in self._folder.told(self._told):
            self._told += 1
            self._since = time.monotonic()
            self._on_step(record)
        limit = self._training.timeout_seconds + (_LATE_SECONDS if self._told else START_SECONDS)
        if time.monotonic() - self._since > limit:
            raise LaunchError(
                f"no step was finished for {limit:.0f} s after {self._told} of "
                f"{self._training.steps} steps; a rank hangs, or steps take longer than --timeout"
            )
