"""How a run is measured: train step after step, and gather what every rank has seen.

A step's time is the longest time of a rank from a barrier to the end of its update. Everything
else happens between steps: drawing samples, gathering times and losses, saving checkpoints,
collecting garbage.
"""

from __future__ import annotations

import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from hetplan.cost.network.segments import TrafficClass
from hetplan.profiling.backends import Backend
from hetplan.profiling.pacing import Pacer
from hetplan.runtime.activity import Activity, Doing
from hetplan.runtime.checkpoints_run import RunCheckpoints
from hetplan.runtime.exchanges import reduction_of
from hetplan.runtime.groups import Groups, open_groups
from hetplan.runtime.measured import RankMeasure, SentBytes, StepRecord, TrainingReport
from hetplan.runtime.placement import place_ranks
from hetplan.runtime.trainer import StepTimes, Trainer
from hetplan.runtime.training import Training

OnStep = Callable[[StepRecord], None]
Stop = Callable[[int], bool]
"""Asked on the first rank after each step, with the number of steps that are done: end here?"""


def train(
    training: Training,
    rank: int,
    backend: Backend,
    *,
    on_step: OnStep | None = None,
    stop: Stop | None = None,
    activity: Activity | None = None,
) -> TrainingReport | None:
    """Train as this rank of the plan; every rank of it returns the same report.

    The default process group must exist, with the plan's ranks as its first ones, and all its
    ranks must call this; those without a place in the plan get None at once. `on_step` is called
    after each step. Where the first rank's `stop` says so, all ranks leave after that step, with a
    checkpoint where the training asks for any and a report of the steps so far. `activity` is told
    what this rank does.
    """
    places = place_ranks(training.plan)
    doing = activity or Activity()
    doing.begin("opening of connections", _others(rank, places), doing=Doing.CONNECTS)
    reduction = reduction_of(training.plan, places)
    groups = open_groups(
        places,
        rank,
        collectives=backend.collectives,
        timeout=timedelta(seconds=training.timeout_seconds),
        transports=[
            tuple(boundary.transport for boundary in pipeline.boundaries)
            for pipeline in training.plan.pipelines
        ],
        asked=reduction.groups(),
        sums=training.sums,
    )
    if groups is None:
        return None
    doing.begin("building of its layers", doing=Doing.STARTS)
    pacer = _pacer(training, rank)
    memory = Memory(backend)
    trainer = Trainer(
        training.model,
        training.job,
        training.plan,
        places,
        rank,
        groups,
        backend,
        reduction=reduction,
        pacer=pacer,
        activity=doing,
    )
    checkpoints = RunCheckpoints(training, trainer.state, groups.control, doing)
    report = measured_run(
        training,
        trainer,
        places,
        groups.control,
        memory,
        first_step=checkpoints.resume(),
        pacer=pacer,
        on_step=on_step,
        stop=stop,
        after_step=checkpoints.after_step,
        activity=doing,
    )
    doing.begin("exchange of what was sent", _others(rank, places))
    return replace(report, sent=_sent_bytes(groups, len(places), len(report.steps)))


def _sent_bytes(groups: Groups, num_ranks: int, steps: int) -> tuple[SentBytes, ...]:
    """What all ranks have sent, per step."""
    classes = tuple(TrafficClass)
    row = [groups.sent[traffic, to] for traffic in classes for to in range(num_ranks)]
    rows = _gathered(row, groups.control, num_ranks)
    return tuple(
        SentBytes(
            source=source,
            target=at % num_ranks,
            traffic=classes[at // num_ranks].value,
            bytes_per_step=size / steps,
        )
        for source, found in enumerate(rows)
        for at, size in enumerate(found)
        if size
    )


Drawn = TypeVar("Drawn")


class AfterStep(Protocol):
    """What every rank does between two steps."""

    def __call__(self, done: int, *, last: bool) -> None:
        """`done` steps are done, of all runs of the training; `last`: no other follows."""
        ...


class Place(Protocol):
    """Where a rank stands in the plan."""

    @property
    def rank(self) -> int: ...  # noqa: D102
    @property
    def device(self) -> int: ...  # noqa: D102
    @property
    def stage(self) -> int: ...  # noqa: D102
    @property
    def dp_index(self) -> int: ...  # noqa: D102
    @property
    def tp_index(self) -> int: ...  # noqa: D102


class Steps(Protocol[Drawn]):
    """One rank's part of a trainer, step by step."""

    def batch(self, step: int) -> Drawn:
        """This rank's samples of a step, on its device."""
        ...

    def step(self, batch: Drawn) -> StepTimes:
        """Train one step; returns when the device has finished it."""
        ...


def measured_run(
    training: Training,
    trainer: Steps[Drawn],
    places: Sequence[Place],
    control: dist.ProcessGroup,
    memory: Memory,
    *,
    first_step: int = 0,
    pacer: Pacer | None = None,
    on_step: OnStep | None = None,
    stop: Stop | None = None,
    after_step: AfterStep | None = None,
    activity: Activity | None = None,
) -> TrainingReport:
    """Train the steps with a trainer that is ready; every rank of `control` gets the same report.

    `memory` was made before the trainer, `places` has every rank's place. `first_step` steps are
    done already. `after_step` is called on every rank between steps, `activity` is told what this
    one does.
    """
    table, steps = [], []
    doing = activity or Activity()
    others = _others(dist.get_rank(control), places)
    gc.collect()
    gc.freeze()  # what is there now stays, so later collections need not look at it
    gc.disable()
    try:
        for step in range(first_step, training.steps):
            doing.begin(f"drawing of the samples of step {step + 1}")
            batch = trainer.batch(step)
            doing.begin(f"barrier before step {step + 1}", others)
            row = _measured_step(trainer, batch, control, pacer)
            doing.begin(f"exchange of the figures of step {step + 1}", others)
            ends = stop is not None and dist.get_rank(control) == 0 and stop(step + 1)
            table.append(_gathered([*row, memory.peak_bytes(), ends], control, len(places)))
            steps.append(_record(step, table[-1], places))
            doing.end()
            if on_step is not None:
                on_step(steps[-1])
            stopped = table[-1][0][_STOP] != 0
            if after_step is not None:
                after_step(step + 1, last=stopped or step + 1 == training.steps)
            if stopped:
                break
            gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    # A run that goes on for the last steps, or was stopped, may have none beyond its warm-up.
    counted = table[training.warmup_steps :] or table
    return TrainingReport(
        steps=tuple(steps),
        ranks=tuple(
            _rank_measure(each, training.device_kinds[each.rank], counted) for each in places
        ),
    )


def _others(rank: int, places: Sequence[Place]) -> tuple[int, ...]:
    return tuple(place.rank for place in places if place.rank != rank)


def _pacer(training: Training, rank: int) -> Pacer | None:
    pace, kind = training.pace, training.device_kinds[rank]
    if pace is None or all(paced.device != kind for paced in pace.kinds):
        return None
    return Pacer(pace.kind(kind), stream=rank)


def _measured_step(
    trainer: Steps[Drawn], batch: Drawn, control: dist.ProcessGroup, pacer: Pacer | None
) -> tuple[float, ...]:
    """Seconds of the step and its parts, loss share, and the pacer's counters."""
    if pacer is not None:
        pacer.reset()
    dist.barrier(group=control)
    started = time.perf_counter()
    times: StepTimes = trainer.step(batch)
    seconds = time.perf_counter() - started
    return (
        seconds,
        times.busy_seconds,
        times.tensor_parallel_seconds,
        max(0.0, times.pipeline_seconds - times.busy_seconds),
        times.reduction_seconds,
        times.optimizer_seconds,
        times.loss_share,
        pacer.passes if pacer else 0,
        pacer.overruns if pacer else 0,
    )


_Row = list[float]
"""One rank's figures of one step: those of `_measured_step` in their order, its peak memory, and
whether the run ends here, which the first rank's says."""
_STOP = 10


def _gathered(row: _Row, control: dist.ProcessGroup, num_ranks: int) -> list[_Row]:
    """The rows of all ranks."""
    mine = torch.tensor(row, dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(num_ranks)]
    dist.all_gather(rows, mine, group=control)
    return [each.tolist() for each in rows]


def _record(step: int, rows: list[_Row], places: Sequence[Place]) -> StepRecord:
    # Tensor-parallel ranks of the last stage hold the same loss: one of them counts.
    loss = sum(row[6] for row, place in zip(rows, places, strict=True) if place.tp_index == 0)
    return StepRecord(step=step, seconds=max(row[0] for row in rows), loss=loss)


def _rank_measure(place: Place, kind: str, table: list[list[_Row]]) -> RankMeasure:
    columns = list(zip(*(rows[place.rank] for rows in table), strict=True))
    middle = [statistics.median(column) for column in columns]
    return RankMeasure(
        rank=place.rank,
        device=place.device,
        device_kind=kind,
        stage=place.stage,
        dp_index=place.dp_index,
        tp_index=place.tp_index,
        step_seconds=middle[0],
        busy_seconds=middle[1],
        tensor_parallel_seconds=middle[2],
        wait_seconds=middle[3],
        reduction_seconds=middle[4],
        optimizer_seconds=middle[5],
        paced_passes=round(sum(columns[7])),
        overruns=round(sum(columns[8])),
        peak_memory_bytes=max(columns[9]),
    )


class Memory:
    """Growth of memory since this object was made."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._watched = backend.is_accelerator and backend.reset_peak_memory()
        self._before = _peak_resident_bytes()

    def peak_bytes(self) -> float:
        """Peak so far: of the allocator on an accelerator, of the process on a CPU."""
        if self._watched:
            return self._backend.peak_memory_bytes()
        return _peak_resident_bytes() - self._before


def _peak_resident_bytes() -> float:
    # ru_maxrss: KiB on Linux, bytes on macOS (getrusage(2) of each).
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
