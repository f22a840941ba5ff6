"""A run beside its plan: what the steps took, what was predicted, and which part is off.

The median of the logged steps that count (`steps`) is compared with the plan's estimate; where the
trainer printed timers, `parts` names the part of the step that is off most. This is the verb behind
`hetplan compare`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetplan.cluster.spec import Cluster
from hetplan.comparison.logs import RunFiles, is_run_log, run_of_plan
from hetplan.comparison.parts import (
    MEANING,
    Culprit,
    PartRow,
    Seconds,
    TimerRow,
    counted_side,
    culprit_of,
    parts_of,
    predicted,
)
from hetplan.comparison.steps import ChosenSteps, LeftOut, StepSpread, choose_steps
from hetplan.cost.estimate import estimate
from hetplan.cost.estimate_values import CauseSeconds, Estimate, Interval
from hetplan.errors import Fault, InputError
from hetplan.files.settings import given_path
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.check import check_plan
from hetplan.plans.check_job import check_job_against
from hetplan.predict.predictor import Predictor
from hetplan.search.descriptions import devices_in_use
from hetplan.search.files import load_legal_plan
from hetplan.search.result import SearchResult
from hetplan.trainers.read_log import read_training_log
from hetplan.trainers.training_log import LoggedTimer, MemoryKind, Quantity, TimerRanks, TrainingLog
from hetplan.units import format_seconds

SCHEMA = "hetplan.comparison/1"
LONGER_THAN_THE_STEP = 1.2
"""A choice: timers of one step end before it; clocks and medians of several ranks allow some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """The fullest device's memory."""

    kind: str
    """Which figure, a `MemoryKind` value."""
    measured_bytes: float
    predicted_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run beside its plan."""

    trainer: str
    files: tuple[str, ...]
    model: str
    cluster: str
    measured: StepSpread
    left_out: tuple[LeftOut, ...]
    predicted_step_seconds: float
    predicted_interval: Interval
    timers: tuple[TimerRow, ...]
    parts: tuple[PartRow, ...]
    """Empty where the log has no timers."""
    culprit: Culprit | None
    """None without timers, and where nothing is off beyond the run's own spread."""
    memory: MemoryRow | None
    notes: tuple[str, ...]

    @property
    def relative_error(self) -> float:
        """Prediction over measurement, less 1: positive where the run was faster than predicted."""
        return self.predicted_step_seconds / self.measured.median_seconds - 1.0

    @property
    def inside_interval(self) -> bool:
        """Whether the measured median lies between the predicted p10 and p90."""
        interval = self.predicted_interval
        return interval.p10_seconds <= self.measured.median_seconds <= interval.p90_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One run: its files, its plan, the steps that count, and the comparison."""

    files: RunFiles
    result: SearchResult
    chosen: ChosenSteps
    comparison: Comparison
    doubts: tuple[str, ...]
    """What makes this run's step mean less: notes on its log and on its steps."""
    repriced_from_seconds: float | None
    """The plan file's own prediction, where the plan was priced again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repricing:
    """Prices plans again: by a predictor, on inputs that replace the plan's own."""

    predictor: Predictor
    model: ModelSpec | None = None
    cluster: Cluster | None = None
    job: Job | None = None

    def of(self, result: SearchResult) -> SearchResult:
        """The plan with a new estimate; InputError where it breaks a rule of the new inputs."""
        inputs = replace(
            result.inputs,
            model=self.model or result.inputs.model,
            cluster=self.cluster or result.inputs.cluster,
            job=self.job or result.inputs.job,
        )
        three = (inputs.model, inputs.cluster, inputs.job)
        faults = [
            *check_job_against(inputs.job, inputs.model, inputs.cluster, searched=False),
            *check_plan(result.plan, *three),
        ]
        if faults:
            raise InputError(*faults)
        return replace(
            result, inputs=inputs, estimate=estimate(result.plan, *three, self.predictor)
        )


def compare(
    logs: str | Path | Sequence[str | Path],
    plan: str | Path | SearchResult,
    *,
    trainer: str | None = None,
    warmup_steps: int | None = None,
) -> Comparison:
    """A run's log files beside the plan that it ran.

    `logs` are the files of one run: a trainer's text log (also gzip), one per rank or restart, or
    hetplan's own run log. `trainer` names the trainer where it should not be guessed.
    `warmup_steps` of each start are left out; the default is 3, or what the launch of hetplan's own
    run left out. InputError where the files hold no step, or are of another run.
    """
    several = logs if isinstance(logs, Sequence) and not isinstance(logs, str) else [logs]
    paths = [given_path(log, "logs", ", or several") for log in several]
    if not isinstance(plan, SearchResult):
        plan = load_legal_plan(given_path(plan, "plan", ", or a result"))
    log = read_log(paths, plan, trainer)
    return compare_steps(log, plan, chosen_steps(log, plan, warmup_steps))


def compare_runs(
    runs: Sequence[RunFiles],
    repricing: Repricing | None = None,
    *,
    trainer: str | None = None,
    warmup_steps: int | None = None,
) -> list[ComparedRun]:
    """Every run beside its plan, priced again or as its file has it.

    An InputError with the faults of all runs.
    """
    compared: list[ComparedRun] = []
    faults: dict[Fault, None] = {}
    for files in runs:
        try:
            compared.append(_compare_run(files, repricing, trainer, warmup_steps))
        except InputError as error:
            faults |= dict.fromkeys(error.faults)
    if faults:
        raise InputError(*faults)
    return compared


def _compare_run(
    files: RunFiles, repricing: Repricing | None, trainer: str | None, warmup_steps: int | None
) -> ComparedRun:
    result = load_legal_plan(files.plan)
    # A run log names the plan file that it ran: it is looked up before the estimate changes.
    log = read_log(files.logs, result, trainer)
    before = None if repricing is None else result.estimate.step_seconds
    if repricing is not None:
        result = repricing.of(result)
    chosen = chosen_steps(log, result, warmup_steps)
    return ComparedRun(
        files=files,
        result=result,
        chosen=chosen,
        comparison=compare_steps(log, result, chosen),
        doubts=(*log.notes, *chosen.notes),
        repriced_from_seconds=before,
    )


def read_log(
    paths: Sequence[Path], result: SearchResult, trainer: str | None = None
) -> TrainingLog:
    """The run's log: hetplan's own, or a trainer's."""
    own = [path for path in paths if is_run_log(path)]
    if own:
        if trainer is not None:
            raise InputError(f"{own[0]} is a run log of hetplan; leave --trainer out")
        if len(paths) > 1:
            raise InputError(f"{own[0]} is a run log of hetplan, which holds whole runs; name one")
        return run_of_plan(own[0], result)
    return read_training_log(paths, trainer)


def chosen_steps(
    log: TrainingLog, result: SearchResult, warmup_steps: int | None = None
) -> ChosenSteps:
    """The log's steps that count; InputError where it is of another run than the plan's."""
    check_facts(log, result)
    return choose_steps(log, result, warmup_steps)


def compare_steps(log: TrainingLog, result: SearchResult, chosen: ChosenSteps) -> Comparison:
    """The steps that count beside the plan."""
    prediction, spread = result.estimate, chosen.spread
    timers = _timer_rows(chosen, prediction)
    longest = LONGER_THAN_THE_STEP * spread.p90_seconds
    usable = [row for row in timers if row.measured_most_seconds <= longest]
    parts = parts_of(
        usable,
        _predicted_counted(usable, prediction),
        spread.median_seconds,
        prediction.step_seconds,
    )
    return Comparison(
        trainer=log.trainer.value,
        files=log.files,
        model=result.inputs.model.name,
        cluster=result.inputs.cluster.name,
        measured=spread,
        left_out=chosen.left_out,
        predicted_step_seconds=prediction.step_seconds,
        predicted_interval=prediction.interval,
        timers=timers,
        parts=parts,
        culprit=culprit_of(parts, spread, result),
        memory=_memory(log, prediction),
        notes=(
            *log.notes,
            *chosen.notes,
            *_notes(timers, prediction, log),
            *_too_long(timers, usable),
        ),
    )


def _too_long(timers: Sequence[TimerRow], usable: Sequence[TimerRow]) -> list[str]:
    """A note on timers that cannot be of one step."""
    return [
        f"{row.timer} took {format_seconds(row.measured_most_seconds)}, longer than the step: it "
        "is a sum of several steps or of passes that run at once, or damaged; no part counts it"
        for row in timers
        if row not in usable
    ]


def _timer_rows(chosen: ChosenSteps, prediction: Estimate) -> tuple[TimerRow, ...]:
    """Medians of every timer over the steps that count, in the order of the log."""
    timers: dict[str, list[LoggedTimer]] = {}
    for chosen_step in chosen.used:
        for timer in chosen_step.step.timers:
            timers.setdefault(timer.name, []).append(timer)
    meant = [MEANING[name].quantity for name in timers if name in MEANING]
    return tuple(_timer_row(name, values, prediction, meant) for name, values in timers.items())


def _timer_row(
    name: str, values: Sequence[LoggedTimer], prediction: Estimate, meant: Sequence[Quantity | None]
) -> TimerRow:
    meaning = MEANING.get(name)
    quantity = meaning.quantity if meaning is not None else None
    ranks = values[0].ranks
    span = None
    # Where several timers share a quantity, its prediction is none of theirs alone.
    if quantity is not None and meant.count(quantity) == 1:
        span = predicted(prediction, quantity, ranks)
    return TimerRow(
        timer=name,
        quantity=quantity.value if quantity is not None else "",
        ranks=ranks.value,
        measured_least_seconds=statistics.median(timer.least_seconds for timer in values),
        measured_most_seconds=statistics.median(timer.most_seconds for timer in values),
        predicted_least_seconds=None if span is None else span[0],
        predicted_most_seconds=None if span is None else span[1],
        note="not known to hetplan" if meaning is None else meaning.note,
    )


def _predicted_counted(timers: Sequence[TimerRow], prediction: Estimate) -> Seconds:
    counted: dict[Quantity, float] = {}
    for row in timers:
        if row.quantity:
            quantity = Quantity(row.quantity)
            span = predicted(prediction, quantity, TimerRanks(row.ranks))
            if span is not None:
                counted[quantity] = counted_side(*span, quantity)
    one_rank = [row for row in timers if row.quantity == Quantity.EMBEDDING.value]
    if one_rank and one_rank[0].ranks == TimerRanks.LAST.value:
        span = predicted(prediction, Quantity.WAITS_TO_THE_END, TimerRanks.LAST)
        if span is not None:
            counted[Quantity.WAITS_TO_THE_END] = span[1]
    return counted


def _memory(log: TrainingLog, prediction: Estimate) -> MemoryRow | None:
    """The logged peak beside the same figure of the fullest stage; None where nothing was logged,
    or only a process's growth.
    """
    if log.peak_memory_bytes is None or log.memory_kind is MemoryKind.PROCESS:
        return None
    reserved = max(stage.memory.reserved_bytes for stage in prediction.stages)
    allocated = log.memory_kind is MemoryKind.ALLOCATED
    return MemoryRow(
        kind=log.memory_kind.value,
        measured_bytes=log.peak_memory_bytes,
        predicted_bytes=prediction.peak_memory_bytes if allocated else reserved,
    )


def _doubt(part: CauseSeconds) -> float:
    """Seconds by which the part can be off, roughly."""
    return part.seconds * part.log_halfwidth


def _notes(timers: Sequence[TimerRow], prediction: Estimate, log: TrainingLog) -> list[str]:
    notes = []
    if not timers:
        notes.append(
            "the log has no timers, so no part of the step can be named: Megatron-LM prints them "
            "with --timing-log-level 2, torchtitan does not"
        )
        widest = max(prediction.causes, key=_doubt, default=None)
        if widest is not None and _doubt(widest) > 0:
            notes.append(
                f"least known of the prediction: {f'{widest.cause} {widest.part}'.strip()}, "
                f"{format_seconds(widest.seconds)} of the step, which may be "
                f"{math.exp(widest.log_halfwidth):.2f} times as long or as short (90 %); measure "
                "that first"
            )
    elif not all(stage.components for stage in prediction.stages):
        notes.append(
            "the plan file has no components (an older hetplan wrote it): price it again with "
            "--predictor or --store to compare parts"
        )
    if any(step.seconds is None for step in log.steps):
        notes.append("the log has rates, no times: seconds follow from the plan's batch")
    return notes


_NAMES = {
    "world_size": "devices",
    "tp": "tp",
    "pp": "pp",
    "cp": "cp",
    "ep": "ep",
    "microbatch_size": "microbatch size",
    "global_batch_size": "global batch size",
    "sequence_length": "sequence length",
    "num_layers": "layers",
    "hidden_size": "hidden size",
}


def check_facts(log: TrainingLog, result: SearchResult) -> None:
    """An InputError with every setting in which the log is of another run than the plan's."""
    planned = dict(planned_facts(result))
    faults = [
        Fault(
            file=log.files[0],
            message=f"the log has {_NAMES[fact.name]} {fact.value}, the plan {planned[fact.name]}: "
            "this is another run; price its layout with `hetplan estimate ... --out` and compare "
            "with that",
        )
        for fact in log.facts
        if fact.name in planned and planned[fact.name] != fact.value
    ]
    if faults:
        raise InputError(*faults)


def planned_facts(result: SearchResult) -> Iterator[tuple[str, int]]:
    """The plan's settings; those that differ from stage to stage are left out."""
    plan, inputs = result.plan, result.inputs
    yield "world_size", devices_in_use(plan)
    yield "global_batch_size", inputs.job.global_batch_size
    yield "sequence_length", inputs.job.sequence_length
    yield "num_layers", inputs.model.num_layers
    yield "hidden_size", inputs.model.hidden_size
    if len(plan.pipelines) == 1:
        yield "pp", len(plan.pipelines[0].stages)
    for name in ("tp", "cp", "ep", "microbatch_size"):
        values: set[int] = {getattr(replica, name) for replica in plan.replicas}
        if len(values) == 1:
            yield name, values.pop()
