"""hetplan's own run log (schema `hetplan.run/1`) as a training log to compare.

Its ranks' figures are medians over the steps that its launch counted, so every step carries the
same timers. Of several runs in one file the last valid one of the plan counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from hetplan.errors import Fault, InputError
from hetplan.importers.training_log import (
    LoggedStep,
    LoggedTimer,
    Mark,
    MemoryKind,
    Trainer,
    TrainingLog,
)
from hetplan.launchers.run_log import SCHEMA, RunLog, read_runs
from hetplan.search.files import result_text
from hetplan.search.result import SearchResult

_LOOKED_AT = 1 << 16


def is_run_log(path: Path) -> bool:
    """Whether the file begins with a line of a run log; False for what cannot be read."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as stream:
            head = stream.read(_LOOKED_AT)
    except (OSError, ValueError):
        return False
    begin = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    return begin.startswith(b"{") and SCHEMA.rpartition("/")[0].encode() in begin


def run_of_plan(path: Path, result: SearchResult) -> TrainingLog:
    """The last run of this plan in the file; InputError where it has none."""
    runs = read_runs(path)
    digest = hashlib.sha256(result_text(result).encode()).hexdigest()
    inputs = result.inputs
    names = (inputs.model.name, inputs.cluster.name, inputs.job.name)
    mine = [run for run in runs if run.plan_sha256 == digest]
    notes = []
    if not mine:
        mine = [run for run in runs if (run.model, run.cluster, run.job) == names]
        notes.append("the run's plan file was another one with the same inputs, or an older form")
    if not mine:
        raise InputError(
            Fault(file=str(path), message=f"has {len(runs)} runs, none of them of this plan")
        )
    valid = [run for run in mine if run.valid]
    if not valid:
        message = (
            f"{len(mine)} runs of this plan, but their passes overran their pace: they measured "
            "the load of the machine; run again when it is idle"
        )
        raise InputError(Fault(file=str(path), message=message))
    if len(mine) > 1:
        notes.append(f"{len(mine)} runs of this plan in the file: the last valid one counts")
    return log_of(valid[-1], path, notes)


def log_of(run: RunLog, path: Path, notes: Sequence[str] = ()) -> TrainingLog:
    """One run's steps and its ranks' medians."""
    timers = _timers(run)
    steps = tuple(
        LoggedStep(
            iteration=step.step + 1,
            seconds=step.seconds,
            marks=(Mark.FIRST,) if at < run.warmup_steps else (),
            timers=timers,
        )
        for at, step in enumerate(run.steps)
    )
    memory = max((rank.peak_memory_bytes for rank in run.ranks), default=0.0)
    accelerated = run.backend == "nccl"
    return TrainingLog(
        trainer=Trainer.NATIVE,
        files=(str(path),),
        steps=steps,
        peak_memory_bytes=memory or None,
        memory_kind=MemoryKind.ALLOCATED if accelerated else MemoryKind.PROCESS,
        notes=tuple(notes),
    )


def _timers(run: RunLog) -> tuple[LoggedTimer, ...]:
    if not run.ranks:
        return ()
    figures = (
        ("busy", [rank.busy_seconds for rank in run.ranks]),
        ("wait", [rank.wait_seconds for rank in run.ranks]),
        ("reduction", [rank.reduction_seconds for rank in run.ranks]),
        ("optimizer_seconds", [rank.optimizer_seconds for rank in run.ranks]),
        ("tensor_parallel", [rank.tensor_parallel_seconds for rank in run.ranks]),
    )
    return tuple(
        LoggedTimer(name=name, least_seconds=min(values), most_seconds=max(values))
        for name, values in figures
        if max(values) > 0
    )
