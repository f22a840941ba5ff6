"""The measured and predicted figures of a run, as one line of a run log.

A run log is a text file with one JSON object per line (schema `hetplan.run/3`), appended to by
every run; `hetplan compare` and `hetplan compare calibrate` read it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from hetplan.cost.estimate_values import Interval
from hetplan.errors import InputError
from hetplan.files.encoding import to_plain
from hetplan.files.nodes import read_json
from hetplan.files.reading import Document, decode, read_bytes
from hetplan.files.writing import append_line
from hetplan.launchers.elastic import Phase
from hetplan.plans.plan import Plan
from hetplan.runtime.measured import RankMeasure, StepRecord
from hetplan.search.files import result_text
from hetplan.search.result import SearchResult
from hetplan.version import __version__

SCHEMA = "hetplan.run/3"

_LOGGER = logging.getLogger(__name__)

# Above this part of overrun passes a paced run measured the machine's load, not the plan: measured
# on two cores, plans with 33 to 49 % took up to 80 % longer than predicted.
OVERRUN_LIMIT = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where a run took place; nothing that names the machine itself."""

    cores: int
    """Cores that this process may use."""
    processor: str
    system: str
    python_version: str
    torch_version: str
    load_before: float
    """Average number of runnable processes over the minute before the run."""


def this_machine() -> Machine:
    """This machine at this moment."""
    return Machine(
        cores=usable_cores(),
        processor=_processor(),
        system=f"{platform.system()} {platform.release()}",
        python_version=platform.python_version(),
        torch_version=version("torch"),
        load_before=os.getloadavg()[0],
    )


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", path.read_text(), re.M) if path.exists() else None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCheck:
    """The run's losses against those of the same model trained in one process."""

    reference_losses: tuple[float, ...]
    largest_relative_difference: float
    tolerance: float

    @property
    def equal(self) -> bool:
        """Whether every loss agrees within the tolerance."""
        return self.largest_relative_difference <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """One run of a plan on this machine."""

    schema: str
    hetplan_version: str
    plan_sha256: str
    """Of the plan file's bytes as `save_result` writes them."""
    started: str
    """UTC, ISO 8601."""
    model: str
    cluster: str
    job: str
    target: str
    backend: str
    """torch.distributed backend of the ranks' groups."""
    ranks: tuple[RankMeasure, ...]
    steps: tuple[StepRecord, ...]
    warmup_steps: int
    """First steps, which are left out of every median."""
    median_step_seconds: float
    predicted_step_seconds: float
    predicted_interval: Interval
    paced: tuple[str, ...]
    """Device kinds that were played by a pace; empty where every rank ran at its own speed."""
    machine: Machine
    loss_check: LossCheck | None = None
    plan: Plan | None = None
    """What ran where: stages, degrees, microbatch size. None in lines of before it was written."""
    trainer: str = ""
    """Name and version of the trainer; empty: hetplan's own."""
    phase: Phase | None = None
    """Which part of an elastic run it was; None: it was a run by itself. A phase that a fault ended
    has no ranks here."""

    @property
    def relative_error(self) -> float:
        """Prediction over measurement, less 1: positive where the run was faster than predicted."""
        return self.predicted_step_seconds / self.median_step_seconds - 1.0

    @property
    def inside_interval(self) -> bool:
        """Whether the measured step lies between the predicted p10 and p90."""
        interval = self.predicted_interval
        return interval.p10_seconds <= self.median_step_seconds <= interval.p90_seconds

    @property
    def paced_passes(self) -> tuple[int, ...]:
        """Passes of each rank that were slowed down on purpose, over all counted steps."""
        return tuple(rank.paced_passes for rank in self.ranks)

    @property
    def overruns(self) -> tuple[int, ...]:
        """Those of them whose real work took longer than the pace."""
        return tuple(rank.overruns for rank in self.ranks)

    @property
    def overrun_fraction(self) -> float:
        """Part of the paced passes that took longer than the pace; 0 without a pace."""
        passes = sum(self.paced_passes)
        return sum(self.overruns) / passes if passes else 0.0

    @property
    def valid(self) -> bool:
        """Whether the measured time is the plan's and not the load of this machine."""
        return self.overrun_fraction <= OVERRUN_LIMIT


def run_of(
    result: SearchResult,
    *,
    started: datetime,
    machine: Machine,
    device_type: str,
    paced: tuple[str, ...],
    steps: Sequence[StepRecord],
    warmup_steps: int,
    ranks: tuple[RankMeasure, ...] = (),
    loss_check: LossCheck | None = None,
) -> RunLog:
    """The run of this plan that gave these steps, at least one, on torch devices of this type.

    A run that goes on for its last steps, or was ended, may have none beyond its warm-up: then all
    count.
    """
    left_out = warmup_steps if warmup_steps < len(steps) else 0
    return RunLog(
        schema=SCHEMA,
        hetplan_version=__version__,
        plan_sha256=hashlib.sha256(result_text(result).encode()).hexdigest(),
        started=started.isoformat(timespec="seconds"),
        model=result.inputs.model.name,
        cluster=result.inputs.cluster.name,
        job=result.inputs.job.name,
        target=result.plan.target,
        backend="nccl" if device_type == "cuda" else "gloo",
        ranks=ranks,
        steps=tuple(steps),
        warmup_steps=left_out,
        median_step_seconds=statistics.median(step.seconds for step in steps[left_out:]),
        predicted_step_seconds=result.estimate.step_seconds,
        predicted_interval=result.estimate.interval,
        paced=paced,
        machine=machine,
        loss_check=loss_check,
        plan=result.plan,
    )


def run_line(run: RunLog) -> str:
    """The run as one line of JSON, derived figures included so that no reader computes them."""
    data = to_plain(run)
    if not isinstance(data, dict):
        raise TypeError("a run log is a mapping")
    derived = {
        "relative_error": run.relative_error,
        "inside_interval": run.inside_interval,
        "overrun_fraction": run.overrun_fraction,
        "valid": run.valid,
    }
    return json.dumps(data | derived, sort_keys=True, ensure_ascii=False, allow_nan=False)


def append_run(path: Path, run: RunLog) -> None:
    """Add the run to the log, whole or not at all."""
    append_line(path, run_line(run))


def read_runs(path: Path) -> tuple[RunLog, ...]:
    """Every run of the log, in order.

    A line that is not JSON was cut off by a crash: it is skipped with a warning. A line that is
    something else than a run is an InputError.
    """
    lines = read_bytes(path).decode("utf-8", errors="replace").split("\n")
    runs = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            run = _read_line(path, number, line)
            runs += [run] if run is not None else []
    return tuple(runs)


_DERIVED = ("relative_error", "inside_interval", "overrun_fraction", "valid")


def _read_line(path: Path, number: int, line: str) -> RunLog | None:
    try:
        root = read_json(str(path), line)
    except InputError as error:
        if not isinstance(error.__cause__, json.JSONDecodeError):
            raise InputError(*(replace(fault, line=number) for fault in error.faults)) from error
        _LOGGER.warning("%s:%d: half a line, left by a crash: skipped", path, number)
        return None
    if isinstance(root, dict):
        root = {key: value for key, value in root.items() if key not in _DERIVED}
    document = Document(file=str(path), text=line, root=root, sha256="")
    try:
        return decode(document, RunLog, schema=SCHEMA)
    except InputError as error:
        faults = (replace(fault, line=number) for fault in error.faults)
        raise InputError(*faults) from error
