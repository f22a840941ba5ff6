"""Act on real hosts for an elastic run: probe them, plan for them, train on them, log the phases.

`HostBackend` is the `ElasticBackend` of the hosts of an emulation, or of this machine alone. A
phase is one `launch` with a folder of its own; while it runs a thread looks for hosts that come
back and makes the file that asks the ranks to save and leave.

`Replanner` plans for the hosts that are left: the same model and job, by the same predictor and
for the same aim, with a time limit of its own; what it costs to go on with a plan counts
(`hetplan.whatif.replan`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.cluster.hosts import host_names, host_of_device, part_left
from hetplan.emulation import state
from hetplan.emulation.running import reached_from
from hetplan.emulation.values import Emulation
from hetplan.errors import HetplanError, InfeasibleError, InputError, LaunchError, LimitError
from hetplan.files.encoding import to_plain
from hetplan.files.writing import ScratchFolder
from hetplan.launchers.elastic import SCHEMA as ELASTIC_SCHEMA
from hetplan.launchers.elastic import (
    Ended,
    Ending,
    History,
    HostPlan,
    Phase,
    Progress,
    median_seconds,
    mutually_reachable,
)
from hetplan.launchers.hosts import THIS_MACHINE
from hetplan.launchers.local import (
    LaunchSettings,
    launch_phase,
    played_kinds,
    precision_faults,
    torch_backend,
)
from hetplan.launchers.run_folder import RunFolder
from hetplan.launchers.run_log import LossCheck, Machine, RunLog, append_run, run_of, this_machine
from hetplan.launchers.watching import RunFailed
from hetplan.predict.predictor import Predictor
from hetplan.runtime.checkpoint_contents import read_manifest
from hetplan.runtime.checkpoints import check_loss_faults, checkpoint_at, last_checkpoint, settle
from hetplan.runtime.measured import StepRecord
from hetplan.runtime.placement import place_ranks
from hetplan.search.result import SearchResult
from hetplan.search.solver import Progress as SearchProgress
from hetplan.version import __version__

if TYPE_CHECKING:
    from hetplan.whatif.replan import Terms

LOOK_SECONDS = 0.5
"""From one look for hosts to the next; when they are probed the rules say."""


def elastic_settings(
    given: SearchResult, settings: LaunchSettings
) -> tuple[LaunchSettings, tuple[str, ...]]:
    """The settings of an elastic run of this plan, and what a person should know of its start.

    A run that saved checkpoints resumes from the last of them. InputError where it cannot, or
    where its losses shall be checked and are not those of one process from the seed on.
    """
    request = settings.checkpoints
    if not request.save or request.save_every < 1:
        raise InputError(
            "an elastic run needs --save DIR and --save-every STEPS: without checkpoints every "
            "fault would begin it anew"
        )
    if last_checkpoint(Path(request.save)) is not None:
        request = replace(request, load=request.save)
    inputs = given.inputs
    request, resume = settle(request, inputs.model, inputs.job, steps=settings.steps)
    if settings.check_loss:
        faults = (
            *precision_faults(inputs.job.precision, "cpu", check_loss=True),
            *check_loss_faults(resume),
        )
        if faults:
            raise InputError(*faults)
    return replace(settings, checkpoints=request), () if resume is None else resume.notes


class Collected:
    """The finished steps of one phase; the thread that looks for hosts reads them too."""

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


class HostBackend:
    """Hosts of an emulation that is up, or this machine where `emulation` is empty."""

    def __init__(
        self,
        given: SearchResult,
        settings: LaunchSettings,
        *,
        run_log: Path | None,
        replanner: Replanner | None,
        on_step: Callable[[StepRecord], None],
        tell: Callable[[str], None],
    ) -> None:
        """`settings` are `elastic_settings`; `replanner` is for an emulation, this machine has the
        plan that is given. `run_log` gets a line for each phase that finished a step.
        """
        self._given, self._settings, self._run_log = given, settings, run_log
        self._replanner, self._on_step, self.tell = replanner, on_step, tell
        self._phases = 0
        self._run: RunLog | None = None
        self._start_seconds: float | None = None
        self._over = threading.Event()
        self._scratch: ScratchFolder | None = None
        if settings.log_folder is None:
            self._scratch = ScratchFolder("elastic")
        self.logs = self._scratch.path if self._scratch else Path(settings.log_folder or "")
        """Where the phases' folders are."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """See `ElasticBackend`."""
        return (THIS_MACHINE,) if self._replanner is None else self._replanner.hosts

    def reach(self, hosts: Sequence[str], beside: Sequence[str]) -> tuple[str, ...]:
        """See `ElasticBackend`."""
        if self._replanner is None:
            return tuple(hosts)
        return reachable(state.read_up(self._settings.emulation), hosts, beside)

    def plan(self, hosts: Sequence[str], known: HostPlan | None) -> HostPlan:
        """See `ElasticBackend`."""
        if self._replanner is None:
            return host_plan(self._given, (THIS_MACHINE,))
        return self._replanner.plan(
            hosts,
            known,
            self._over.is_set,
            steps_left=self._settings.steps - self.checkpoint_steps(),
            start_seconds=self._start_seconds,
        )

    def run(self, planned: HostPlan, first_step: int, look: Callable[[Progress], bool]) -> Ending:
        """See `ElasticBackend`."""
        self._phases += 1
        folder = RunFolder(self.logs / f"phase-{self._phases}")
        collected = Collected(self._on_step)
        started, machine = datetime.now(UTC), this_machine()
        self._over.clear()

        def unfinished() -> RunLog | None:
            return unfinished_run(
                planned.result, self._settings, collected.steps, started=started, machine=machine
            )

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
            self._run = unfinished()
            return _ending(Ended.INTERRUPTED, collected, "Ctrl-C")
        except LaunchError as error:
            self._run = unfinished()
            self.tell(str(error))
            fault = error.fault if isinstance(error, RunFailed) else None
            message, blamed = (str(error), ()) if fault is None else (fault.message, fault.hosts)
            ending = _ending(Ended.FAULT, collected, message, blamed)
        finally:
            self._over.set()
        watcher.join()
        self._over.clear()
        self._start_seconds = collected.start_seconds or self._start_seconds
        return ending

    def _launch(
        self, planned: HostPlan, first_step: int, folder: RunFolder, collected: Collected
    ) -> RunLog:
        settings = self._settings
        start = self._last_checkpoint()
        settings = replace(
            settings,
            warmup_steps=min(settings.warmup_steps, settings.steps - first_step - 1),
            log_folder=folder.path,
            check_loss=False,
            checkpoints=replace(settings.checkpoints, load="" if start is None else str(start)),
        )
        return launch_phase(planned.result, settings, collected.add, lambda line: None)

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
        """See `ElasticBackend`."""
        if self._run_log is not None and self._run is not None:
            append_run(self._run_log, replace(self._run, phase=phase))

    def _last_checkpoint(self) -> Path | None:
        """What a phase resumes from now."""
        request = self._settings.checkpoints
        saved = last_checkpoint(Path(request.save)) if Path(request.save).is_dir() else None
        if saved is None and request.load:
            return checkpoint_at(Path(request.load))
        return saved

    def checkpoint_steps(self) -> int:
        """See `ElasticBackend`."""
        last = self._last_checkpoint()
        return 0 if last is None else read_manifest(last).step

    def where_to_resume(self) -> str:
        """The last good checkpoint, and how to go on from it."""
        last = self._last_checkpoint()
        if last is None:
            return f"no checkpoint was saved in {self._settings.checkpoints.save} yet"
        return f"the last good checkpoint is {last}; the same command goes on from it"

    def end_logs(self, *, kept: bool) -> None:
        """Keep the logs or remove them, unless the user has named a folder for them."""
        if self._scratch is not None:
            (self._scratch.keep if kept else self._scratch.remove)()

    def clock(self) -> float:
        """See `ElasticBackend`."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """See `ElasticBackend`."""
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


def host_plan(result: SearchResult, hosts: Sequence[str] | None = None) -> HostPlan:
    """The plan of this result; its hosts are the cluster's unless they are given."""
    if hosts is None:
        cluster = result.inputs.cluster
        used = {host_of_device(cluster, place.device) for place in place_ranks(result.plan)}
        hosts = [name for name in host_names(cluster) if name in used]
    return HostPlan(
        used_hosts=tuple(hosts), step_seconds=result.estimate.step_seconds, result=result
    )


class CancelledError(Exception):
    """A search was told to end, as nobody needs its answer any more."""


class Replanner:
    """Plans for parts of one plan's cluster; answers are kept."""

    def __init__(self, given: SearchResult, predictor: Predictor, *, limit_seconds: float) -> None:
        if not limit_seconds > 0:
            raise InputError(f"replan-seconds is {limit_seconds}; it must be more than 0")
        self._given, self._predictor = host_plan(given), predictor
        self._latest, self._limit_seconds = self._given, limit_seconds
        self._known: dict[frozenset[str], HostPlan] = {frozenset(self.hosts): self._given}
        self._none: dict[frozenset[str], InfeasibleError | LimitError] = {}

    @property
    def hosts(self) -> tuple[str, ...]:
        """Every host that the given plan's cluster lets be used."""
        return host_names(self._given.result.inputs.cluster)

    def plan(
        self,
        hosts: Sequence[str],
        known: HostPlan | None,
        cancelled: Callable[[], bool] = lambda: False,
        *,
        steps_left: int | None = None,
        start_seconds: float | None = None,
    ) -> HostPlan:
        """A plan for these hosts, not slower than `known`, which uses some of them.

        Of the steps that are left, all that the start of the last phase and the move cost less is
        worth a slower step (`hetplan.whatif.replan`). InfeasibleError or LimitError where none was
        found; CancelledError soon after `cancelled` says so.
        """
        key = frozenset(hosts)
        if key in self._none:
            raise self._none[key]
        if key not in self._known:
            terms = self._terms(steps_left, start_seconds)
            try:
                self._known[key] = host_plan(self._searched(key, known, terms, cancelled))
            except (InfeasibleError, LimitError) as error:
                self._none[key] = error
                raise
        plan = self._known[key]
        if known is not None and known.step_seconds <= plan.step_seconds:
            return known
        self._latest = plan
        return plan

    def _terms(self, steps_left: int | None, start_seconds: float | None) -> Terms:
        from hetplan.whatif.replan import Terms

        job = self._given.result.inputs.job
        tokens = job.global_batch_size * job.sequence_length
        return Terms(
            horizon_tokens=None if steps_left is None else float(max(1, steps_left) * tokens),
            start_seconds=start_seconds,
            search_seconds=self._limit_seconds,
            may_stay=False,  # whether a phase is left is another question (`growth_refusal`)
        )

    def _searched(
        self,
        hosts: frozenset[str],
        known: HostPlan | None,
        terms: Terms,
        cancelled: Callable[[], bool],
    ) -> SearchResult:
        # They take a second to import, which a run without faults need not wait for.
        from hetplan.whatif.replan import replan

        def look(progress: SearchProgress) -> None:
            if cancelled():
                raise CancelledError

        inputs = self._given.result.inputs
        gone = [name for name in self.hosts if name not in hosts]
        before, left = (known or self._latest).result, part_left(inputs.cluster, gone)
        return replan(before, left, self._predictor, terms, progress=look).result


def replanner_for(
    given: SearchResult, predictor: Predictor, digest: str, *, limit_seconds: float
) -> Replanner:
    """The planner for the hosts that are left of this plan's cluster.

    An InputError where the plan was made with another predictor than the one of sha256 `digest`:
    predicted steps of one plan and of another could not be compared.
    """
    made = dict(given.inputs.sha256).get("predictor", "")
    if made and made != digest:
        raise InputError(
            f"the plan was made with another predictor (sha256 {made[:12]}) than the one that "
            f"would plan again ({digest[:12]}); name that one with --predictor FILE, or with "
            "--store DIR the samples that it was fitted to, or plan anew"
        )
    return Replanner(given, predictor, limit_seconds=limit_seconds)


CONNECT_SECONDS = 2.0
"""For connections: the first one that is lost is repeated after a second (RFC 6298)."""
LIMIT_SECONDS = 4.0
"""For the whole of a probe; the rest is for the start of its program on a busy machine."""


def reachable(
    emulation: Emulation, hosts: Sequence[str], beside: Sequence[str] = ()
) -> tuple[str, ...]:
    """Those of `hosts` that answer, and reach each other and all of `beside`, on both networks.

    Each probes all others at the same time, over the shaped network, where tensors go, and the
    control network, where ranks meet.
    """
    if not hosts:
        return ()
    addresses = {
        name: {emulation.host(name).data_address, emulation.host(name).control_address}
        for name in dict.fromkeys((*hosts, *beside))
    }
    every = [address for pair in addresses.values() for address in pair]

    def reached_by(name: str) -> set[str] | None:
        """None: the host does not answer."""
        try:
            answered = reached_from(
                emulation, name, every, seconds=CONNECT_SECONDS, limit_seconds=LIMIT_SECONDS
            )
        except HetplanError:
            return None
        return {other for other, pair in addresses.items() if pair <= set(answered)}

    with ThreadPoolExecutor(len(hosts)) as pool:
        reached = dict(zip(hosts, pool.map(reached_by, hosts), strict=True))
    fit = {
        name: others
        for name, others in reached.items()
        # A host alone reaches itself.
        if others is not None and set(beside) <= others | {name}
    }
    return mutually_reachable(list(fit), fit)


def unfinished_run(
    result: SearchResult,
    settings: LaunchSettings,
    steps: Sequence[StepRecord],
    *,
    started: datetime,
    machine: Machine,
) -> RunLog | None:
    """The run that a fault or a person ended after these steps; None where it finished none."""
    if not steps:
        return None
    cluster = result.inputs.cluster
    kinds = [
        cluster.island_of_device(place.device).device.kind for place in place_ranks(result.plan)
    ]
    paced = played_kinds(settings.pace, kinds)
    return run_of(
        result,
        started=started,
        machine=machine,
        # An emulated device is a core of this machine, paced or not.
        device_type=torch_backend(kinds, kinds if settings.emulation else paced),
        paced=paced,
        steps=steps,
        warmup_steps=settings.warmup_steps,
    )


def report_text(history: History, loss_check: LossCheck | None) -> str:
    """An elastic run as JSON, schema `hetplan.elastic/1`: phases, steps by number, loss check."""
    data = {
        "schema": ELASTIC_SCHEMA,
        "hetplan_version": __version__,
        "phases": to_plain(history.phases),
        "steps": to_plain(history.steps),
        "loss_check": None if loss_check is None else to_plain(loss_check),
    }
    return json.dumps(data, sort_keys=True, ensure_ascii=False, allow_nan=False)
