"""What `hetplan launch` prints of a run: each rank's time, measured beside predicted, phases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from hetplan.reports.terminal import new_table, print_table
from hetplan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from hetplan.launchers.elastic import History
    from hetplan.launchers.run_log import LossCheck, RunLog


def show_run(run: RunLog) -> None:
    """Where the time of each rank went, and measured beside predicted."""
    print_table(_rank_table(run))
    for line in _run_lines(run):
        print(line)


def _rank_table(run: RunLog) -> Table:
    counted = len(run.steps) - run.warmup_steps
    table = new_table(
        "rank | stage | dp | tp | device | >busy | >waits | >reduce | >optimizer | >memory",
        title=f"Medians of {counted} steps; {run.warmup_steps} before them left out",
    )
    for rank in run.ranks:
        table.add_row(
            str(rank.rank),
            str(rank.stage),
            str(rank.dp_index),
            str(rank.tp_index),
            escape(rank.device_kind) + (" (paced)" if rank.device_kind in run.paced else ""),
            format_seconds(rank.busy_seconds),
            format_seconds(rank.wait_seconds),
            format_seconds(rank.reduction_seconds),
            format_seconds(rank.optimizer_seconds),
            format_bytes(rank.peak_memory_bytes),
        )
    return table


def _run_lines(run: RunLog) -> Iterator[str]:
    interval = run.predicted_interval
    place = "inside" if run.inside_interval else "outside"
    yield (
        f"measured {format_seconds(run.median_step_seconds)} per step (median); predicted "
        f"{format_seconds(run.predicted_step_seconds)}, error {run.relative_error:+.1%} of the "
        f"measured; {place} the predicted p10 {format_seconds(interval.p10_seconds)} to p90 "
        f"{format_seconds(interval.p90_seconds)}"
    )
    first, last = run.steps[0], run.steps[-1]
    start = f"step {first.step + 1}" if first.step else "the first step"
    yield f"loss {first.loss:.4f} at {start}, {last.loss:.4f} at step {last.step + 1}"
    if run.paced:
        yield (
            f"paced: {', '.join(run.paced)} played on this machine's cores; "
            f"{run.overrun_fraction:.1%} of the passes overran"
        )
    if not run.valid:
        yield (
            "NOT COMPARABLE: so many passes took longer than the pace that this measures the load "
            "of the machine; run again when it is idle"
        )
    if run.loss_check is not None:
        yield loss_line(run.loss_check)


def loss_line(check: LossCheck) -> str:
    """Whether the losses are those of one process, and how far they are from them."""
    verdict = "agree with" if check.equal else "DIFFER from"
    return (
        f"the losses {verdict} those of one process: largest relative difference "
        f"{check.largest_relative_difference:.1e}, allowed {check.tolerance:.0e}"
    )


def show_history(history: History, loss_check: LossCheck | None) -> None:
    """Every phase of an elastic run, the steps that were lost, and the losses."""
    if not history.phases:
        return
    print_table(_phase_table(history))
    for line in _history_lines(history):
        print(line)
    if loss_check is not None:
        print(loss_line(loss_check))


def _phase_table(history: History) -> Table:
    columns = ">phase | hosts | >steps | >checkpoint | >predicted | >measured | >first step after"
    table = new_table(f"{columns} | ended", title="Phases of the run")
    for number, phase in enumerate(history.phases, start=1):
        begins, ends = phase.first_step + 1, phase.steps_done
        table.add_row(
            str(number),
            escape(", ".join(phase.hosts)),
            f"{begins} to {ends}" if ends >= begins else "none",
            str(phase.checkpoint_step) if phase.checkpoint_step else "none",
            format_seconds(phase.predicted_step_seconds),
            "" if phase.median_step_seconds is None else format_seconds(phase.median_step_seconds),
            "" if phase.start_seconds is None else format_seconds(phase.start_seconds),
            phase.ended,
        )
    return table


def _history_lines(history: History) -> Iterator[str]:
    for number, phase in enumerate(history.phases, start=1):
        if phase.reason:
            yield f"phase {number}: {phase.reason.splitlines()[0]}"
    lost = sum(phase.lost_steps for phase in history.phases)
    if lost:
        yield f"{lost} steps were trained again, or will be: no checkpoint had them"
    if history.steps:
        first, last = history.steps[0], history.steps[-1]
        yield (
            f"loss {first.loss:.4f} at step {first.step + 1}, {last.loss:.4f} at step "
            f"{last.step + 1}"
        )
