"""The training loop of one rank: train step after step, and gather what every rank measured.

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
from dataclasses import astuple, dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from hetplan.cost.network.segments import TrafficClass
from hetplan.profiling.backends import Backend
from hetplan.profiling.pacing import Pacer
from hetplan.runtime.activity import Activity, ActivityKind
from hetplan.runtime.communicator.channels import Groups, open_groups
from hetplan.runtime.gradient_groups import reduction_of
from hetplan.runtime.measured import RankMeasure, SentBytes, StepRecord, TrainingReport
from hetplan.runtime.placement import RankPlace, place_ranks
from hetplan.runtime.trainer import Batch, Trainer
from hetplan.runtime.training import Training
from hetplan.runtime.training_state import RunCheckpoints

OnStep = Callable[[StepRecord], None]
Stop = Callable[[int], bool]
"""Called on the first rank after each step with the number of steps done; True ends the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One rank's figures of one step; numbers only, so that ranks exchange them as one row."""

    seconds: float
    busy_seconds: float
    tensor_parallel_seconds: float
    wait_seconds: float
    reduction_seconds: float
    optimizer_seconds: float
    loss_share: float
    paced_passes: float
    overruns: float
    peak_memory_bytes: float
    stops: float
    """1 where the run ends after this step; the first rank decides."""


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
    after each step. Where the first rank's `stop` returns True, all ranks leave after that step,
    with a checkpoint where the training saves any and a report of the steps so far. `activity`
    records what this rank does.
    """
    places = place_ranks(training.plan)
    activity = activity or Activity()
    others = tuple(place.rank for place in places if place.rank != rank)
    activity.begin("opening of connections", others, kind=ActivityKind.CONNECTING)
    groups = open_groups(
        places,
        rank,
        collectives=backend.collectives,
        timeout=timedelta(seconds=training.timeout_seconds),
        transports=[
            tuple(boundary.transport for boundary in pipeline.boundaries)
            for pipeline in training.plan.pipelines
        ],
        reduction_groups=reduction_of(training.plan, places).groups(),
        sums=training.sums,
    )
    if groups is None:
        return None
    activity.begin("building of its layers", kind=ActivityKind.STARTING)
    pacer = _pacer(training, rank)
    memory = Memory(backend)
    trainer = Trainer(training, places, rank, groups, backend, pacer=pacer, activity=activity)
    checkpoints = RunCheckpoints(training, trainer.state, groups.control, activity)
    loop = _Loop(
        training=training,
        trainer=trainer,
        places=places,
        rank=rank,
        control=groups.control,
        memory=memory,
        pacer=pacer,
        activity=activity,
    )
    report = loop.run(checkpoints, on_step=on_step, stop=stop)
    activity.begin("exchange of sent bytes", others)
    return replace(report, sent=_sent_bytes(groups, len(places), len(report.steps)))


def _pacer(training: Training, rank: int) -> Pacer | None:
    pace, kind = training.pace, training.device_kinds[rank]
    if pace is None or all(paced.device != kind for paced in pace.kinds):
        return None
    return Pacer(pace.kind(kind), stream=rank)


def _sent_bytes(groups: Groups, num_ranks: int, steps: int) -> tuple[SentBytes, ...]:
    """What all ranks have sent, per step."""
    classes = tuple(TrafficClass)
    row = [groups.sent[traffic, to] for traffic in classes for to in range(num_ranks)]
    return tuple(
        SentBytes(
            source=source,
            target=at % num_ranks,
            traffic=classes[at // num_ranks].value,
            bytes_per_step=size / steps,
        )
        for source, sizes in enumerate(_all_gather(row, groups.control, num_ranks))
        for at, size in enumerate(sizes)
        if size
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loop:
    """The steps of one rank."""

    training: Training
    trainer: Trainer
    places: Sequence[RankPlace]
    rank: int
    control: dist.ProcessGroup
    memory: Memory
    pacer: Pacer | None
    activity: Activity

    @property
    def _others(self) -> tuple[int, ...]:
        return tuple(place.rank for place in self.places if place.rank != self.rank)

    def run(
        self, checkpoints: RunCheckpoints, *, on_step: OnStep | None, stop: Stop | None
    ) -> TrainingReport:
        """Train the steps that are left; every rank gets the same report."""
        table: list[list[RankStep]] = []
        steps: list[StepRecord] = []
        training = self.training
        first_step = checkpoints.resume()
        gc.collect()
        gc.freeze()  # what is there now stays, so later collections need not look at it
        gc.disable()
        try:
            for step in range(first_step, training.steps):
                table.append(self._step(step, stop))
                steps.append(_record(step, table[-1], self.places))
                self.activity.end()
                if on_step is not None:
                    on_step(steps[-1])
                stopped = bool(table[-1][0].stops)
                checkpoints.after_step(step + 1, last=stopped or step + 1 == training.steps)
                if stopped:
                    break
                gc.collect()
            if self.trainer.averaging is not None:
                self.trainer.averaging.arrive()
        finally:
            gc.enable()
            gc.unfreeze()
        # A run that goes on for the last steps, or was stopped, may have none beyond its warm-up.
        counted = table[training.warmup_steps :] or table
        return TrainingReport(
            steps=tuple(steps),
            ranks=tuple(
                _rank_measure(
                    place, training.device_kinds[place.rank], [rows[place.rank] for rows in counted]
                )
                for place in self.places
            ),
        )

    def _step(self, step: int, stop: Stop | None) -> list[RankStep]:
        """Train one step; the figures of all ranks."""
        self.activity.begin(f"drawing of the samples of step {step + 1}")
        batch = self.trainer.batch(step)
        self.activity.begin(f"barrier before step {step + 1}", self._others)
        own = self._timed_step(batch)
        self.activity.begin(f"exchange of the figures of step {step + 1}", self._others)
        if stop is not None and self.rank == 0 and stop(step + 1):
            own = replace(own, stops=1.0)
        rows = _all_gather(list(astuple(own)), self.control, len(self.places))
        names = RankStep.__dataclass_fields__
        return [RankStep(**dict(zip(names, row, strict=True))) for row in rows]

    def _timed_step(self, batch: Batch) -> RankStep:
        pacer = self.pacer
        if pacer is not None:
            pacer.reset()
        dist.barrier(group=self.control)
        started = time.perf_counter()
        times = self.trainer.step(batch)
        return RankStep(
            seconds=time.perf_counter() - started,
            busy_seconds=times.busy_seconds,
            tensor_parallel_seconds=times.tensor_parallel_seconds,
            wait_seconds=max(0.0, times.pipeline_seconds - times.busy_seconds),
            reduction_seconds=times.reduction_seconds,
            optimizer_seconds=times.optimizer_seconds,
            loss_share=times.loss_share,
            paced_passes=pacer.passes if pacer else 0,
            overruns=pacer.overruns if pacer else 0,
            peak_memory_bytes=self.memory.peak_bytes(),
            stops=0.0,
        )


def _all_gather(row: list[float], control: dist.ProcessGroup, num_ranks: int) -> list[list[float]]:
    mine = torch.tensor(row, dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(num_ranks)]
    dist.all_gather(rows, mine, group=control)
    return [gathered.tolist() for gathered in rows]


def _record(step: int, rows: Sequence[RankStep], places: Sequence[RankPlace]) -> StepRecord:
    # Tensor-parallel ranks of the last stage hold the same loss: one of them counts.
    loss = sum(
        row.loss_share for row, place in zip(rows, places, strict=True) if place.tp_index == 0
    )
    return StepRecord(step=step, seconds=max(row.seconds for row in rows), loss=loss)


def _rank_measure(place: RankPlace, kind: str, rows: Sequence[RankStep]) -> RankMeasure:
    return RankMeasure(
        rank=place.rank,
        device=place.device,
        device_kind=kind,
        stage=place.stage,
        dp_index=place.dp_index,
        tp_index=place.tp_index,
        step_seconds=statistics.median(row.seconds for row in rows),
        busy_seconds=statistics.median(row.busy_seconds for row in rows),
        tensor_parallel_seconds=statistics.median(row.tensor_parallel_seconds for row in rows),
        wait_seconds=statistics.median(row.wait_seconds for row in rows),
        reduction_seconds=statistics.median(row.reduction_seconds for row in rows),
        optimizer_seconds=statistics.median(row.optimizer_seconds for row in rows),
        paced_passes=round(sum(row.paced_passes for row in rows)),
        overruns=round(sum(row.overruns for row in rows)),
        peak_memory_bytes=max(row.peak_memory_bytes for row in rows),
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
