"""Start the ranks of a run on their hosts, watch them, and end them all, whatever happens.

Every process leads a session of its own, so that a Ctrl-C at the terminal reaches the launcher
alone, which then ends the processes and everything that they may have started.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hetplan
from hetplan.emulation.running import end
from hetplan.errors import LaunchError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import ScratchFolder, make_folder, write_atomically
from hetplan.launchers.hosts import Hosts
from hetplan.launchers.run_folder import MEETING_VARIABLE, START_SECONDS, RunFolder
from hetplan.launchers.watching import Patience, RunFailed, RunFault, Seen, WatchedRank, Watcher
from hetplan.runtime.activity import read_beat
from hetplan.runtime.checkpoints import last_checkpoint
from hetplan.runtime.measured import StepRecord, TrainingReport
from hetplan.runtime.placement import place_ranks
from hetplan.runtime.training import SCHEMA as TRAINING_SCHEMA
from hetplan.runtime.training import Training

OnStep = Callable[[StepRecord], None]
WORKER = "hetplan.launchers.worker"
"""The program of a rank; its arguments: the run's folder, the rank, the launcher's process."""
POLL_SECONDS = 0.1
"""From one look at exits and progress to the next: costs a busy core nothing."""
GRACE_SECONDS = 3.0
"""Between asking ranks to end and forcing them: they hold nothing that must be saved."""
LATE_SECONDS = 10.0
"""Added to the ranks' own limit, which comes first where they can still raise it: it names what
hangs."""
LOG_LINES = 15


def run_ranks(
    training: Training, hosts: Hosts, patience: Patience, out: Path | None, on_step: OnStep
) -> TrainingReport:
    """Run all ranks to their end and return what they measured.

    `out` is the run's folder; without it a temporary one is kept only if the run fails.
    InputError where the folder cannot be made, RunFailed where a rank, a host or a link fails.
    """
    if out is not None:
        make_folder(out)
        return _Run(training, hosts, patience, RunFolder(out), on_step).to_its_end()
    scratch = ScratchFolder("run")
    try:
        report = _Run(training, hosts, patience, RunFolder(scratch.path), on_step).to_its_end()
    except LaunchError as error:
        scratch.keep()
        text = f"{error}\nthe logs of all ranks are in {scratch.path}"
        if isinstance(error, RunFailed):
            raise RunFailed(error.fault, text) from error
        raise LaunchError(text) from error
    except BaseException:
        scratch.remove()
        raise
    scratch.remove()
    return report


class _Run:
    """The processes of a run."""

    def __init__(
        self,
        training: Training,
        hosts: Hosts,
        patience: Patience,
        folder: RunFolder,
        on_step: OnStep,
    ) -> None:
        self._training, self._hosts, self._folder = training, hosts, folder
        self._on_step, self._processes = on_step, list[subprocess.Popen[bytes]]()
        self._steps, self._last_step_at = 0, time.monotonic()
        ranks = zip(place_ranks(training.plan), hosts.of_rank, training.device_kinds, strict=True)
        self._watcher = Watcher(
            [
                WatchedRank(rank=place.rank, host=host, device_kind=kind, stage=place.stage)
                for place, host, kind in ranks
            ],
            patience,
            time.monotonic(),
            host_of_address=hosts.host_of_address,
        )

    def to_its_end(self) -> TrainingReport:
        """Start the ranks and wait for them; nothing is left running, also after an exception."""
        folder = self._folder
        folder.clear()
        write_atomically(folder.training, encode(self._training, schema=TRAINING_SCHEMA))
        try:
            for rank in range(len(self._training.device_kinds)):
                self._start(rank)
            while self._running():
                self._tell_steps()
                time.sleep(POLL_SECONDS)
            self._tell_steps()
        finally:
            end(self._processes, grace_seconds=GRACE_SECONDS)
        return decode(read_document(folder.report), TrainingReport, schema=RunFolder.REPORT_SCHEMA)

    def _start(self, rank: int) -> None:
        package = str(Path(hetplan.__file__).parent.parent)
        inherited = os.environ.get("PYTHONPATH")
        environment = os.environ | {
            "PYTHONPATH": f"{package}{os.pathsep}{inherited}" if inherited else package,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": self._hosts.interface,
            "NCCL_SOCKET_IFNAME": self._hosts.interface,
            MEETING_VARIABLE: self._hosts.meeting_address,
        }
        folder = str(self._folder.path.absolute())
        command = (sys.executable, "-m", WORKER, folder, str(rank), str(os.getpid()))
        with self._folder.log(rank).open("wb") as log:
            process = self._hosts.start(rank, command, environment=environment, log=log)
        self._processes.append(process)

    def _running(self) -> bool:
        """Whether a rank runs; RunFailed where something is wrong."""
        folder = self._folder
        codes = [process.poll() for process in self._processes]
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
            raise RunFailed(fault, "\n".join(self._fault_lines(fault)))
        return any(code != 0 for code in codes)

    def _tell_steps(self) -> None:
        """Tell finished steps; a LaunchError where none was finished for too long."""
        for record in self._folder.told(self._steps):
            self._steps += 1
            self._last_step_at = time.monotonic()
            self._on_step(record)
        late = LATE_SECONDS if self._steps else START_SECONDS
        limit = self._training.timeout_seconds + late
        if time.monotonic() - self._last_step_at > limit:
            raise LaunchError(
                f"no step was finished for {limit:.0f} s after {self._steps} of "
                f"{self._training.steps} steps; a rank hangs, or steps take longer than --timeout"
            )

    def _fault_lines(self, fault: RunFault) -> Iterator[str]:
        """The fault, the log of the first rank that it names, and how to resume."""
        first, save = fault.ranks[0], self._training.checkpoints.save
        yield fault.message
        log = self._folder.log(first)
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        for line in [line for line in lines if line.strip()][-LOG_LINES:]:
            yield f"  rank {first} | {line}"
        if save:
            last = last_checkpoint(Path(save)) if Path(save).is_dir() else None
            if last is None:
                yield f"no checkpoint was complete in {save}"
            else:
                yield f"the last good checkpoint is {last}; go on from it with --load {last}"
