"""Does a run take what its plan said, and which part is off? The verb behind `hetplan compare`.

The median of the logged steps that count (`compare_steps`) stands beside the plan's estimate; where
the trainer printed timers, each stands beside the components that it counts (`compare_timers`), and
parts that add up to the step on both sides (`compare_parts`) name the one that is off most
(`compare_causes`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from hetplan.cost.estimate_values import CauseSeconds, Estimate
from hetplan.errors import InputError
from hetplan.launchers.compare_causes import culprit_of
from hetplan.launchers.compare_facts import check_facts
from hetplan.launchers.compare_parts import Seconds, counted_side, parts_of
from hetplan.launchers.compare_run_log import is_run_log, run_of_plan
from hetplan.launchers.compare_steps import ChosenSteps, choose_steps
from hetplan.launchers.compare_timers import MEANING, predicted
from hetplan.launchers.compare_values import Comparison, MemoryRow, TimerRow
from hetplan.search.files import load_legal_plan
from hetplan.search.result import SearchResult
from hetplan.trainers.read_log import read_training_log
from hetplan.trainers.training_log import LoggedTimer, MemoryKind, Quantity, TimerRanks, TrainingLog
from hetplan.units import format_seconds

LONGER_THAN_THE_STEP = 1.2
"""A choice: timers of one step end before it; clocks and medians of several ranks allow some."""


def compare(
    logs: str | Path | Sequence[str | Path],
    plan: str | Path | SearchResult,
    *,
    trainer: str | None = None,
    warmup_steps: int | None = None,
) -> Comparison:
    """A run's log files beside the plan that it ran.

    `logs` are the files of one run: a trainer's text log (also gzip), one per rank or restart, or
    hetplan's own run log. `trainer` says whose, where it should not be guessed. `warmup_steps` of
    each start are left out, without it 3, or what the launch of hetplan's own run left out.
    InputError where the files hold no step, or are of another run.
    """
    paths = [Path(logs)] if isinstance(logs, str | Path) else [Path(each) for each in logs]
    result = plan if isinstance(plan, SearchResult) else load_legal_plan(plan)
    return compare_log(read_log(paths, result, trainer), result, warmup_steps)


def read_log(
    paths: Sequence[Path], result: SearchResult, trainer: str | None = None
) -> TrainingLog:
    """The run's log, whichever kind it is."""
    own = [path for path in paths if is_run_log(path)]
    if own:
        if trainer is not None:
            raise InputError(f"{own[0]} is a run log of hetplan; leave --trainer out")
        if len(paths) > 1:
            raise InputError(f"{own[0]} is a run log of hetplan, which holds whole runs; name one")
        return run_of_plan(own[0], result)
    return read_training_log(paths, trainer)


def compare_log(
    log: TrainingLog, result: SearchResult, warmup_steps: int | None = None
) -> Comparison:
    """The same of a log that was read."""
    return compare_steps(log, result, chosen_steps(log, result, warmup_steps))


def chosen_steps(
    log: TrainingLog, result: SearchResult, warmup_steps: int | None = None
) -> ChosenSteps:
    """The log's steps that count; InputError where it is of another run than the plan's."""
    check_facts(log, result)
    return choose_steps(log, result, warmup_steps)


def compare_steps(log: TrainingLog, result: SearchResult, chosen: ChosenSteps) -> Comparison:
    """The same of a log whose steps were chosen."""
    estimate, spread = result.estimate, chosen.spread
    timers = _timer_rows(chosen, estimate)
    longest = LONGER_THAN_THE_STEP * spread.p90_seconds
    usable = [row for row in timers if row.measured_most_seconds <= longest]
    parts = parts_of(
        usable, _predicted_counted(usable, estimate), spread.median_seconds, estimate.step_seconds
    )
    return Comparison(
        trainer=log.trainer.value,
        files=log.files,
        model=result.inputs.model.name,
        cluster=result.inputs.cluster.name,
        measured=spread,
        left_out=chosen.left_out,
        predicted_step_seconds=estimate.step_seconds,
        predicted_interval=estimate.interval,
        timers=timers,
        parts=parts,
        culprit=culprit_of(parts, spread, result),
        memory=_memory(log, estimate),
        notes=(
            *log.notes,
            *chosen.notes,
            *_notes(timers, estimate, log),
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


def _timer_rows(chosen: ChosenSteps, estimate: Estimate) -> tuple[TimerRow, ...]:
    """Medians of every timer over the steps that count, in the order of the log."""
    found: dict[str, list[LoggedTimer]] = {}
    for each in chosen.used:
        for timer in each.step.timers:
            found.setdefault(timer.name, []).append(timer)
    meant = [MEANING[name].quantity for name in found if name in MEANING]
    return tuple(_timer_row(name, values, estimate, meant) for name, values in found.items())


def _timer_row(
    name: str, values: Sequence[LoggedTimer], estimate: Estimate, meant: Sequence[Quantity | None]
) -> TimerRow:
    meaning = MEANING.get(name)
    quantity = meaning.quantity if meaning is not None else None
    ranks = values[0].ranks
    span = None
    # Where several timers share a quantity, its prediction is none of theirs alone.
    if quantity is not None and meant.count(quantity) == 1:
        span = predicted(estimate, quantity, ranks)
    return TimerRow(
        timer=name,
        quantity=quantity.value if quantity is not None else "",
        ranks=ranks.value,
        measured_least_seconds=statistics.median(each.least_seconds for each in values),
        measured_most_seconds=statistics.median(each.most_seconds for each in values),
        predicted_least_seconds=None if span is None else span[0],
        predicted_most_seconds=None if span is None else span[1],
        note="not known to hetplan" if meaning is None else meaning.note,
    )


def _predicted_counted(timers: Sequence[TimerRow], estimate: Estimate) -> Seconds:
    found: dict[Quantity, float] = {}
    for row in timers:
        if row.quantity:
            quantity = Quantity(row.quantity)
            span = predicted(estimate, quantity, TimerRanks(row.ranks))
            if span is not None:
                found[quantity] = counted_side(*span, quantity)
    one_rank = [row for row in timers if row.quantity == Quantity.EMBEDDING.value]
    if one_rank and one_rank[0].ranks == TimerRanks.LAST.value:
        span = predicted(estimate, Quantity.WAITS_TO_THE_END, TimerRanks.LAST)
        if span is not None:
            found[Quantity.WAITS_TO_THE_END] = span[1]
    return found


def _memory(log: TrainingLog, estimate: Estimate) -> MemoryRow | None:
    """The logged peak beside the same figure of the fullest stage; None where nothing was logged,
    or only a process's growth.
    """
    if log.peak_memory_bytes is None or log.memory_kind is MemoryKind.PROCESS:
        return None
    reserved = max(stage.memory.reserved_bytes for stage in estimate.stages)
    allocated = log.memory_kind is MemoryKind.ALLOCATED
    return MemoryRow(
        kind=log.memory_kind.value,
        measured_bytes=log.peak_memory_bytes,
        predicted_bytes=estimate.peak_memory_bytes if allocated else reserved,
    )


def _doubt(part: CauseSeconds) -> float:
    """Seconds by which the part can be off, roughly."""
    return part.seconds * part.log_halfwidth


def _notes(timers: Sequence[TimerRow], estimate: Estimate, log: TrainingLog) -> list[str]:
    notes = []
    if not timers:
        notes.append(
            "the log has no timers, so no part of the step can be named: Megatron-LM prints them "
            "with --timing-log-level 2, DeepSpeed with wall_clock_breakdown, torchtitan does not"
        )
        widest = max(estimate.causes, key=_doubt, default=None)
        if widest is not None and _doubt(widest) > 0:
            notes.append(
                f"least known of the prediction: {f'{widest.cause} {widest.part}'.strip()}, "
                f"{format_seconds(widest.seconds)} of the step and x or / "
                f"{math.exp(widest.log_halfwidth):.2f} (90 %); measure that first"
            )
    elif not all(stage.components for stage in estimate.stages):
        notes.append(
            "the plan file has no components (an older hetplan wrote it): price it again with "
            "--predictor or --store to compare parts"
        )
    if any(step.seconds is None for step in log.steps):
        notes.append("the log has rates, no times: seconds follow from the plan's batch")
    return notes
