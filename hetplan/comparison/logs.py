"""The logs of the runs to compare: a trainer's, hetplan's own run log, or a list of several runs.

hetplan's run log (schema `hetplan.run/3`) is read as a training log. Its ranks' figures are medians
over the steps that its launch counted, so every step carries the same timers, and the same steps
count here. Of several runs in one file the last valid one of the plan counts.

A list of runs to compare or to calibrate with is a YAML file; paths are relative to it:

    runs:
      - log: a100-64/train.log
        plan: plans/a100-64.json
      - log: [rank0.log, rank7.log]
        plan: plans/b.json
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import realpath
from pathlib import Path

from hetplan.errors import Fault, InputError
from hetplan.files.reading import Document, decode, read_document
from hetplan.launchers.run_log import SCHEMA, RunLog, read_runs
from hetplan.plans.plan import expand
from hetplan.runtime.measured import RankMeasure
from hetplan.search.files import result_text
from hetplan.search.result import SearchResult
from hetplan.trainers.training_log import (
    LoggedStep,
    LoggedTimer,
    Mark,
    MemoryKind,
    Trainer,
    TrainingLog,
)
from hetplan.units import counted

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
    """The last run of this plan in the file as a training log; InputError where it has none."""
    run, notes = last_run(path, result)
    return log_of(run, path, notes)


def last_run(path: Path, result: SearchResult) -> tuple[RunLog, tuple[str, ...]]:
    """The last valid run of this plan in the file, and notes; InputError where it has none.

    Runs whose plan file was another one count where inputs and layout are the plan's: the same
    plan with an estimate of another day.
    """
    runs = read_runs(path)
    digest = hashlib.sha256(result_text(result).encode()).hexdigest()
    inputs = result.inputs
    names = (inputs.model.name, inputs.cluster.name, inputs.job.name)
    mine = [run for run in runs if run.plan_sha256 == digest]
    notes = []
    if not mine:
        alike = [run for run in runs if (run.model, run.cluster, run.job) == names]
        mine = [run for run in alike if _same_layout(run, result)]
        if not mine:
            message = f"has {counted(len(runs), 'run')}, none of them of this plan"
            if alike:
                message += f"; {len(alike)} have its inputs and another layout: name their plan"
            raise InputError(Fault(file=str(path), message=message))
        why = "layout (estimated at another time)"
        if mine[-1].plan is None:
            why = (
                "degrees (estimated at another time, or of another microbatch size, which this "
                "older line of the run log does not say)"
            )
        notes.append(f"the run's plan file was another one with the same inputs and {why}")
    valid = [run for run in mine if run.valid]
    if not valid:
        message = (
            f"{counted(len(mine), 'run')} of this plan, whose passes overran their pace: what was "
            "measured is the load of the machine; run again when it is idle"
        )
        raise InputError(Fault(file=str(path), message=message))
    if len(mine) > 1:
        notes.append(f"{len(mine)} runs of this plan in the file: the last valid one counts")
    return valid[-1], tuple(notes)


def _same_layout(run: RunLog, result: SearchResult) -> bool:
    """Whether the run's plan is this one; of an older line, which does not hold it, whether its
    ranks stand where the plan's do: stage, tp index and device of each.
    """
    if run.plan is not None:
        return run.plan == result.plan
    planned = {
        (number, at % replica.tp, device)
        for pipeline in result.plan.pipelines
        for number, stage in enumerate(pipeline.stages)
        for replica in stage.replicas
        for at, device in enumerate(expand(replica.devices))
    }
    return planned == {(rank.stage, rank.tp_index, rank.device) for rank in run.ranks}


def log_of(run: RunLog, path: Path, notes: Sequence[str] = ()) -> TrainingLog:
    """One run's steps and its ranks' medians; InputError where they are no times."""
    _check_times(run, path)
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
        warmup_steps=run.warmup_steps if timers else None,
        notes=(*notes, *_load_notes(run, accelerated=accelerated)),
    )


def _check_times(run: RunLog, path: Path) -> None:
    """An InputError where the run has no step, or a figure that no launch writes."""
    faults = [
        f"step {step.step} took {step.seconds} s"
        for step in run.steps
        if not 0.0 < step.seconds < math.inf
    ]
    faults += [
        f"rank {rank.rank} has {name} {value} s"
        for rank in run.ranks
        for name, value in _figures(rank)
        if not 0.0 <= value < math.inf
    ]
    if not run.steps:
        faults = ["it has no step"]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        message = (
            f"the run of {run.started} is damaged: {'; '.join(faults[:3])}{more}; take its line "
            "out, or run again"
        )
        raise InputError(Fault(file=str(path), message=message))


def _load_notes(run: RunLog, *, accelerated: bool) -> list[str]:
    """A doubt where the ranks had to share cores with what ran before them."""
    machine = run.machine
    if accelerated or machine.load_before + len(run.ranks) <= machine.cores + 0.5:
        return []
    return [
        f"{machine.load_before:.1f} processes kept this machine's {machine.cores} cores busy "
        f"before {counted(len(run.ranks), 'rank')} started, which may be why parts are slow: run "
        "again when it is idle"
    ]


def _figures(rank: RankMeasure) -> tuple[tuple[str, float], ...]:
    """A rank's medians, by the timer names of hetplan's own trainer."""
    return (
        ("busy", rank.busy_seconds),
        ("wait", rank.wait_seconds),
        ("reduction", rank.reduction_seconds),
        ("optimizer_seconds", rank.optimizer_seconds),
        ("tensor_parallel", rank.tensor_parallel_seconds),
    )


def _timers(run: RunLog) -> tuple[LoggedTimer, ...]:
    of_ranks = [_figures(rank) for rank in run.ranks]
    return tuple(
        LoggedTimer(name=same[0][0], least_seconds=min(values), most_seconds=max(values))
        for same in zip(*of_ranks, strict=True)
        if max(values := [value for _, value in same]) > 0
    )


RUNS_SCHEMA = "hetplan.runs/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The files of one run."""

    logs: tuple[Path, ...]
    plan: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    log: str | tuple[str, ...]
    plan: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    runs: tuple[_Entry, ...]
    schema: str = RUNS_SCHEMA


def load_runs(path: Path) -> tuple[RunFiles, ...]:
    """The runs of the list; an InputError with what is wrong in it."""
    document: Document = read_document(path)
    listed = decode(document, _Runs, schema=RUNS_SCHEMA)
    if not listed.runs:
        raise InputError(document.fault(("runs",), "the list is empty; name at least one run"))
    faults: list[Fault] = []
    first_at: dict[tuple[str, ...], int] = {}
    runs: list[RunFiles] = []
    for number, entry in enumerate(listed.runs):
        logs = (entry.log,) if isinstance(entry.log, str) else entry.log
        for name, values in (("log", logs), ("plan", (entry.plan,))):
            if not values or not all(value.strip() for value in values):
                faults.append(document.fault(("runs", number, name), "empty; name a file"))
        run = RunFiles(logs=tuple(path.parent / e for e in logs), plan=path.parent / entry.plan)
        # One log may hold several runs of hetplan, each with a plan of its own.
        first = first_at.setdefault(_real_files(run), number)
        if first != number:
            message = (
                f"the same log and plan as runs[{first}]: a run counts once; take this entry out"
            )
            faults.append(document.fault(("runs", number), message))
        runs.append(run)
    if faults:
        raise InputError(*faults)
    return tuple(runs)


def _real_files(run: RunFiles) -> tuple[str, ...]:
    """The files whatever they are called; logs in any order."""
    return (realpath(run.plan), *sorted(realpath(log) for log in run.logs))
