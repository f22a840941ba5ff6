"""How the ranks of a run are started on their hosts, watched and ended: all, whatever happens.

Every process leads a session of its own, so that a Ctrl-C at the terminal reaches the launcher
alone, which then ends the processes and everything that they may have started.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import hetplan
from hetplan.errors import InputError, LaunchError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.launchers.hosts import Hosts
from hetplan.launchers.run_folder import MEETING_VARIABLE, START_SECONDS, RunFolder
from hetplan.launchers.watching import Patience, RunFailed, RunFault, Seen, WatchedRank, Watcher
from hetplan.runtime.activity import read_beat
from hetplan.runtime.checkpoints import last_checkpoint
from hetplan.runtime.measured import StepRecord, TrainingReport
from hetplan.runtime.placement import place_ranks

if TYPE_CHECKING:
    from hetplan.runtime.training import Training


OnStep = Callable[[StepRecord], None]
WORKER = "hetplan.launchers.worker"
"""The program of a rank; its arguments: the run's folder, the rank, the launcher's process."""


def run_ranks(
    training: Training,
    hosts: Hosts,
    patience: Patience,
    out: Path | None,
    on_step: OnStep,
) -> TrainingReport:
    """Run all ranks to their end; what they measured.

    `out` is the run's folder; without it a temporary one is kept only if the run fails.
    InputError where the folder cannot be made, RunFailed where a rank, a host or a link fails.
    """
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot write to folder {out}: {error.strerror or error}") from error
        return _run(training, hosts, patience, RunFolder(out), on_step)
    path = Path(tempfile.mkdtemp(prefix="hetplan-run-"))
    try:
        report = _run(training, hosts, patience, RunFolder(path), on_step)
    except LaunchError as error:
        text = f"{error}\nthe logs of all ranks are in {path}"
        if isinstance(error, RunFailed):
            raise RunFailed(error.fault, text) from error
        raise LaunchError(text) from error
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)
    return report


def _run(
    training: Training,
    hosts: Hosts,
    patience: Patience,
    folder: RunFolder,
    on_step: OnStep,
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
                WORKER,
                str(path),
                str(rank),
                str(os.getpid()),
            ),
            log=folder.log(rank),
        )
        for rank in range(len(training.device_kinds))
    ]
    steps = _Steps(folder, training, on_step)
    run_all(
        commands,
        environment=_environment(hosts),
        watch=steps.look,
        hosts=hosts,
        judge=_Judge(folder, training, hosts, patience).look,
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
LATE_SECONDS = 10.0


class _Steps:
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
        limit = self._training.timeout_seconds + (LATE_SECONDS if self._told else START_SECONDS)
        if time.monotonic() - self._since > limit:
            raise LaunchError(
                f"no step was finished for {limit:.0f} s after {self._told} of "
                f"{self._training.steps} steps; a rank hangs, or steps take longer than --timeout"
            )


class _Judge:
    """Ends a run in which something is wrong."""

    def __init__(
        self, folder: RunFolder, training: Training, hosts: Hosts, patience: Patience
    ) -> None:
        self._folder, self._training = folder, training
        places = place_ranks(training.plan)
        self._watcher = Watcher(
            [
                WatchedRank(rank=place.rank, host=host, device_kind=kind, stage=place.stage)
                for place, host, kind in zip(
                    places, hosts.of_rank, training.device_kinds, strict=True
                )
            ],
            patience,
            time.monotonic(),
            host_of_address=hosts.host_of_address,
        )

    def look(self, codes: Sequence[int | None]) -> None:
        """Called while the workers run, and once they have ended."""
        folder = self._folder
        seen = [
            Seen(
                code=code,
                beat=read_beat(folder.activity(rank)),
                failure=folder.failed(rank) if code else None,
            )
            for rank, code in enumerate(codes)
        ]
        fault = self._watcher.look(time.monotonic(), seen)
        if fault is not None:
            raise RunFailed(fault, self._text(fault))

    def _text(self, fault: RunFault) -> str:
        first = fault.ranks[0]
        lines = last_lines(self._folder.log(first))
        return "\n".join(
            [
                fault.message,
                *(f"  rank {first} | {line}" for line in lines),
                *self._way_on(),
            ]
        )

    def _way_on(self) -> Iterator[str]:
        save = self._training.checkpoints.save
        if not save:
            return
        last = last_checkpoint(Path(save)) if Path(save).is_dir() else None
        if last is None:
            yield f"no checkpoint was complete in {save}"
        else:
            yield f"the last good checkpoint is {last}; go on from it with --load {last}"


# How often exits and progress are looked for; rare enough to cost a busy core nothing.
POLL_SECONDS = 0.1
# A worker holds nothing that must be saved: time for the system to end it, no more.
GRACE_SECONDS = 3.0
LOG_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One process of a run."""

    rank: int
    arguments: tuple[str, ...]
    log: Path
    """Gets its stdout and stderr."""


Judge = Callable[[Sequence[int | None]], None]
"""Gets the exit codes so far, None of processes that run. Raises once the run has failed: sooner or
later where a code is not 0."""


def run_all(
    commands: Sequence[Command],
    *,
    environment: Mapping[str, str],
    watch: Callable[[], None],
    hosts: Hosts,
    judge: Judge,
) -> None:
    """Run all processes to their end, on their hosts.

    `watch` is called while they run and may raise; `judge` raises what a run fails with. Nothing is
    left running, also after an exception.
    """
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with command.log.open("wb") as log:
                started.append(
                    hosts.start(command.rank, command.arguments, environment=environment, log=log)
                )
        while True:
            codes = [process.poll() for process in started]
            judge(codes)
            if all(code == 0 for code in codes):
                break
            watch()
            time.sleep(POLL_SECONDS)
        watch()
    finally:
        _end(started)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End every process group, unless all ended well: asked first, then forced."""
    if all(process.poll() == 0 for process in processes):
        return
    _signal(processes, signal.SIGTERM)
    limit = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < limit and any([each.poll() is None for each in processes]):
        time.sleep(POLL_SECONDS / 10)
    _signal(processes, signal.SIGKILL)
    for process in processes:
        process.wait()


def _signal(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        process.poll()
        # Its own children may outlive it: the group is there until the last of them is gone.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def last_lines(log: Path, count: int = LOG_LINES) -> list[str]:
    """The last lines of a log that are not blank."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return [line for line in text.splitlines() if line.strip()][-count:]
