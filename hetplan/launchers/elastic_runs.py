"""How does an elastic run act on real hosts: probe them, plan for them, and train on them?

`RealWorld` is the `World` of `elastic`: hosts of an emulation, or this machine alone. A phase is
one `launch` with a folder of its own; while it runs a thread looks for hosts that come back and
makes the file that asks the ranks to save and leave.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.emulation import state
from hetplan.errors import HetplanError, InputError, LaunchError
from hetplan.launchers import local
from hetplan.launchers.elastic_growth import Progress
from hetplan.launchers.elastic_log import log_phase, unfinished_run
from hetplan.launchers.elastic_plans import CancelledError, HostPlan, Replanner, host_plan
from hetplan.launchers.elastic_probes import reachable
from hetplan.launchers.elastic_values import Ended, Ending, Phase, median_seconds
from hetplan.launchers.faults import RunFailed
from hetplan.launchers.hosts import THIS_MACHINE
from hetplan.launchers.machine import Machine, this_machine
from hetplan.launchers.run_folder import RunFolder
from hetplan.launchers.run_log import RunLog
from hetplan.runtime.checkpoints import CheckpointRequest, checkpoint_at, last_checkpoint
from hetplan.runtime.measured import StepRecord
from hetplan.search.result import SearchResult

if TYPE_CHECKING:
    from hetplan.profiling.pacing import Pace

LOOK_SECONDS = 0.5
"""From one look for hosts to the next; when they are probed the rules say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What every phase is trained with; as `hetplan.launchers.local.launch` has it."""

    steps: int
    """Of the whole training."""
    save: Path
    save_every: int
    load: Path | None = None
    """What the first phase goes on from where nothing is saved yet."""
    keep: int = 2
    warmup_steps: int = local.DEFAULT_WARMUP_STEPS
    pace: Pace | None = None
    max_ranks: int = local.DEFAULT_MAX_RANKS
    timeout_seconds: float = local.DEFAULT_TIMEOUT_SECONDS
    stall_seconds: float | None = None
    log_folder: Path | None = None
    """Gets a folder for each phase; None: a temporary one."""
    run_log: Path | None = None
    """Gets a line for each phase that finished a step."""

    def __post_init__(self) -> None:
        if self.save_every < 1:
            raise InputError(
                "--elastic needs --save-every STEPS: without checkpoints every fault would begin "
                "the run anew"
            )


class Collected:
    """The steps of one phase as they are told, for the thread that looks for hosts as well."""

    def __init__(self, on_step: Callable[[StepRecord], None]) -> None:
        self._on_step, self._began = on_step, time.monotonic()
        self.steps: tuple[StepRecord, ...] = ()
        self.start_seconds: float | None = None

    def add(self, record: StepRecord) -> None:
        """A step was finished."""
        if self.start_seconds is None:
            self.start_seconds = time.monotonic() - self._began
        self.steps = (*self.steps, record)
        self._on_step(record)

    def progress(self, first_step: int) -> Progress:
        """How far the phase has come."""
        steps = self.steps
        return Progress(
            steps_done=steps[-1].step + 1 if steps else first_step,
            start_seconds=self.start_seconds if steps else None,
            step_seconds=median_seconds(steps),
        )


class RealWorld:
    """Hosts of an emulation that is up, or this machine where `emulation` is empty."""

    def __init__(
        self,
        given: SearchResult,
        settings: RunSettings,
        *,
        emulation: str,
        replanner: Replanner | None,
        on_step: Callable[[StepRecord], None],
        tell: Callable[[str], None],
    ) -> None:
        """`replanner` is for an emulation; this machine has the plan that is given."""
        self._given, self._settings, self._emulation = given, settings, emulation
        self._replanner, self._on_step, self.tell = replanner, on_step, tell
        self._phases = 0
        self._run: RunLog | None = None
        self._over = threading.Event()
        self.logs = settings.log_folder or Path(tempfile.mkdtemp(prefix="hetplan-elastic-"))
        """Where the phases' folders are."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """As `World` says."""
        return (THIS_MACHINE,) if self._replanner is None else self._replanner.hosts

    def reach(self, hosts: Sequence[str], beside: Sequence[str]) -> tuple[str, ...]:
        """As `World` says."""
        if self._replanner is None:
            return tuple(hosts)
        return reachable(state.read_up(self._emulation), hosts, beside)

    def plan(self, hosts: Sequence[str], known: HostPlan | None) -> HostPlan:
        """As `World` says."""
        if self._replanner is None:
            return host_plan(self._given, (THIS_MACHINE,))
        return self._replanner.plan(hosts, known, self._over.is_set)

    def run(self, planned: HostPlan, first_step: int, look: Callable[[Progress], bool]) -> Ending:
        """As `World` says."""
        self._phases += 1
        folder = RunFolder(self.logs / f"phase-{self._phases}")
        collected = Collected(self._on_step)
        started, machine = datetime.now(UTC), this_machine()
        self._over.clear()
        watcher = threading.Thread(
            target=self._watch, args=(folder, collected, first_step, look), daemon=True
        )
        watcher.start()
        try:
            self._run = self._launch(planned, first_step, folder, collected)
            finished = self._run.steps[-1].step + 1 >= self._settings.steps
            ending = _ending(Ended.FINISHED if finished else Ended.GREW, collected)
        except KeyboardInterrupt:
            # What the thread does may take seconds, and nobody needs it any more.
            self._over.set()
            self._run = self._unfinished(planned, collected, started, machine)
            return _ending(Ended.INTERRUPTED, collected, "Ctrl-C")
        except LaunchError as error:
            self._run = self._unfinished(planned, collected, started, machine)
            self.tell(str(error))
            fault = error.fault if isinstance(error, RunFailed) else None
            message, blamed = (str(error), ()) if fault is None else (fault.message, fault.hosts)
            ending = _ending(Ended.FAULT, collected, message, blamed)
        finally:
            self._over.set()
        watcher.join()
        self._over.clear()
        return ending

    def _launch(
        self, planned: HostPlan, first_step: int, folder: RunFolder, collected: Collected
    ) -> RunLog:
        settings = self._settings
        start = self._last_checkpoint()
        return local.launch(
            planned.result,
            steps=settings.steps,
            warmup_steps=min(settings.warmup_steps, settings.steps - first_step - 1),
            pace=settings.pace,
            out=folder.path,
            max_ranks=settings.max_ranks,
            timeout_seconds=settings.timeout_seconds,
            stall_seconds=settings.stall_seconds,
            on_step=collected.add,
            emulation=self._emulation,
            checkpoints=CheckpointRequest(
                save=str(settings.save),
                save_every=settings.save_every,
                load="" if start is None else str(start),
                keep=settings.keep,
            ),
        )

    def _unfinished(
        self, planned: HostPlan, collected: Collected, started: datetime, machine: Machine
    ) -> RunLog | None:
        return unfinished_run(
            planned.result,
            self._settings,
            collected.steps,
            started=started,
            machine=machine,
            emulated=bool(self._emulation),
        )

    def _watch(
        self,
        folder: RunFolder,
        collected: Collected,
        first_step: int,
        look: Callable[[Progress], bool],
    ) -> None:
        """Look for hosts until the phase is over or shall be left."""
        try:
            while not self._over.wait(LOOK_SECONDS):
                if look(collected.progress(first_step)):
                    folder.stop.touch()
                    return
        except CancelledError:
            pass
        except HetplanError as error:
            # The training goes on without it; what is wrong shows when hosts are needed.
            self.tell(f"no longer looking for hosts that come back: {error}")

    def record(self, phase: Phase) -> None:
        """As `World` says."""
        if self._settings.run_log is not None and self._run is not None:
            log_phase(self._settings.run_log, self._run, phase)

    def _last_checkpoint(self) -> Path | None:
        """What a phase goes on from now."""
        settings = self._settings
        saved = last_checkpoint(settings.save) if settings.save.is_dir() else None
        if saved is None and settings.load is not None:
            return checkpoint_at(settings.load)
        return saved

    def checkpoint_steps(self) -> int:
        """As `World` says."""
        from hetplan.runtime.weights.native import read_manifest

        last = self._last_checkpoint()
        return 0 if last is None else read_manifest(last).step

    def where_to_go_on(self) -> str:
        """The last good checkpoint, and how to go on from it."""
        last = self._last_checkpoint()
        if last is None:
            return f"no checkpoint was saved in {self._settings.save} yet"
        return f"the last good checkpoint is {last}; the same command goes on from it"

    def remove_logs(self) -> None:
        """Remove the logs, unless the user has named a folder for them."""
        if self._settings.log_folder is None:
            shutil.rmtree(self.logs, ignore_errors=True)

    def clock(self) -> float:
        """As `World` says."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """As `World` says."""
        time.sleep(seconds)


def _ending(
    ended: Ended, collected: Collected, message: str = "", blamed: Sequence[str] = ()
) -> Ending:
    return Ending(
        ended=ended,
        steps=collected.steps,
        start_seconds=collected.start_seconds,
        message=message,
        blamed=tuple(blamed),
    )
