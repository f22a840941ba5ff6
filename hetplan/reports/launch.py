"""What `hetplan launch` prints of a run: ranks, measured beside predicted, phases, numerics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from hetplan.reports.comparison import verdict
from hetplan.reports.terminal import (
    folded,
    new_table,
    print_small,
    print_table,
    small_table,
    text_width,
)
from hetplan.units import counted, format_brief, format_bytes, format_seconds

if TYPE_CHECKING:
    from hetplan.launchers.elastic import History, Phase
    from hetplan.launchers.numerics import Numerics
    from hetplan.launchers.run_log import LossCheck, RunLog
    from hetplan.runtime.measured import StepRecord


def show_run(run: RunLog, *, verbose: bool) -> None:
    """Measured beside predicted, and the losses; verbose: where the time of each rank went too."""
    if verbose:
        print_table(_rank_table(run))
    for line in folded(_run_lines(run, verbose), text_width()):
        print(line, flush=True)


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


def _run_lines(run: RunLog, verbose: bool) -> Iterator[str]:
    measured = format_brief(run.median_step_seconds)
    steps = counted(len(run.steps) - run.warmup_steps, "step")
    yield f"measured {measured} a step, median of {steps}"
    yield verdict(run.predicted_step_seconds, run.predicted_interval, run.median_step_seconds)
    yield _loss_words(run.steps)
    if run.paced and verbose:
        yield (
            f"paced: {', '.join(run.paced)} played on this machine's cores; "
            f"{run.overrun_fraction:.1%} of the passes overran"
        )
    if not run.valid:
        yield (
            f"NOT COMPARABLE: {run.overrun_fraction:.1%} of the passes took longer than their "
            "pace, so this measures the load of the machine; run again when it is idle"
        )
    if run.loss_check is not None:
        yield loss_line(run.loss_check)


def _loss_words(steps: Sequence[StepRecord]) -> str:
    first, last = steps[0], steps[-1]
    return (
        f"loss {first.loss:.4f} at step {first.step + 1}, {last.loss:.4f} at step {last.step + 1}"
    )


def loss_line(check: LossCheck) -> str:
    """Whether the losses are those of one process, and how far they are from them."""
    words = "agree with" if check.equal else "DIFFER from"
    return (
        f"the losses {words} those of one process: largest relative difference "
        f"{check.largest_relative_difference:.1e}, allowed {check.tolerance:.0e}"
    )


def show_history(history: History, loss_check: LossCheck | None) -> None:
    """Every phase of an elastic run, the steps that were lost, and the losses."""
    if not history.phases:
        return
    print_small(_phase_table(history))
    for line in folded(_history_lines(history), text_width()):
        print(line, flush=True)
    if loss_check is not None:
        print(loss_line(loss_check), flush=True)


def _phase_table(history: History) -> Table:
    table = small_table(">phase | steps | >hosts | >predicted | >measured | ended")
    for number, phase in enumerate(history.phases, start=1):
        measured = phase.median_step_seconds
        table.add_row(
            str(number),
            _trained(phase),
            str(len(phase.hosts)),
            format_brief(phase.predicted_step_seconds),
            "" if measured is None else format_brief(measured),
            phase.ended,
        )
    return table


def _trained(phase: Phase) -> str:
    begins, ends = phase.first_step + 1, phase.steps_done
    return f"{begins} to {ends}" if ends >= begins else "none"


def _history_lines(history: History) -> Iterator[str]:
    for number, phase in enumerate(history.phases, start=1):
        if phase.reason:
            yield f"phase {number}: {phase.reason.splitlines()[0]}"
    lost = sum(phase.lost_steps for phase in history.phases)
    if lost:
        steps = "steps were" if lost > 1 else "step was"
        yield f"{lost} {steps} trained again, or will be: no checkpoint had them"
    if history.steps:
        yield _loss_words(history.steps)


# ---- check-numerics


def show_numerics(numerics: Numerics, *, passed: bool) -> None:
    """The results of all kinds; `passed`: nothing is wrong and none is missing."""
    setup = numerics.setup
    degrees = ", ".join(str(tp) for tp in setup.tensor_parallel)
    print(
        f"{setup.model}: {setup.microbatch_size} x {setup.sequence_length} tokens in "
        f"{setup.precision.value}, tp {degrees}, seed {setup.seed}"
    )
    for kind in numerics.kinds:
        for worst in sorted(kind.results, key=lambda result: -result.share)[:1]:
            print(
                f"{kind.kind}: {len(kind.results)} results; the worst has {worst.share:.0%} of "
                f"the deviation allowed ({worst.operator}, {worst.tensor})"
            )
    if passed:
        kinds = " and ".join(kind.kind for kind in numerics.kinds)
        print(f"{kinds}: every result is as exact as its number format allows")
