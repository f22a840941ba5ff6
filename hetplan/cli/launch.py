"""`hetplan launch`: train a plan on this machine and compare its step with the prediction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import AsJson, emit, say

if TYPE_CHECKING:
    from rich.table import Table

    from hetplan.launchers.run_log import LossCheck, RunLog
    from hetplan.runtime.measured import StepRecord


def launch(
    plan: Annotated[Path, typer.Argument(help="Plan file that `hetplan plan` wrote.")],
    steps: Annotated[int, typer.Option(help="Steps to train.")] = 20,
    warmup: Annotated[
        int, typer.Option(help="First steps that are left out of the measured median.")
    ] = 1,
    pace: Annotated[
        Path | None,
        typer.Option(help="Pace file: play slower device kinds on this machine's cores."),
    ] = None,
    run_log: Annotated[
        Path | None, typer.Option(help="File to which the run is added, one line of JSON per run.")
    ] = None,
    log_folder: Annotated[
        Path | None, typer.Option(help="Folder for the logs of all ranks.")
    ] = None,
    check_loss: Annotated[
        bool,
        typer.Option("--check-loss", help="Also train in one process and compare the losses."),
    ] = False,
    max_ranks: Annotated[int, typer.Option(help="Most processes to start.")] = 16,
    timeout: Annotated[
        float, typer.Option(help="Seconds without a finished step after which the run is ended.")
    ] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Train a plan on this machine, one process per rank, and compare measured with predicted."""
    from hetplan.errors import LaunchError
    from hetplan.files.writing import check_writable
    from hetplan.launchers.local import launch as launch_plan
    from hetplan.launchers.run_log import append_run, run_line
    from hetplan.profiling.pacing import load_pace
    from hetplan.search.files import load_legal_plan
    from hetplan.units import format_seconds

    result = load_legal_plan(plan)
    if run_log is not None:
        check_writable(run_log)

    def tell(record: StepRecord) -> None:
        say(
            f"step {record.step + 1}/{steps}: loss {record.loss:.4f}, "
            f"{format_seconds(record.seconds)}"
        )

    run = launch_plan(
        result,
        steps=steps,
        warmup_steps=warmup,
        pace=load_pace(pace) if pace is not None else None,
        out=log_folder,
        max_ranks=max_ranks,
        timeout_seconds=timeout,
        check_loss=check_loss,
        on_step=tell,
    )
    if run_log is not None:
        append_run(run_log, run)
    if as_json:
        emit(run_line(run))
    else:
        _show(run)
    if run.loss_check is not None and not run.loss_check.equal:
        raise LaunchError(_loss_line(run.loss_check))


def _show(run: RunLog) -> None:
    """Where the time of each rank went, and measured beside predicted."""
    from hetplan.reports.terminal import print_table

    print_table(_rank_table(run))
    for line in _run_lines(run):
        emit(line)


def _rank_table(run: RunLog) -> Table:
    from rich.markup import escape
    from rich.table import Table

    from hetplan.units import format_bytes, format_seconds

    counted = len(run.steps) - run.warmup_steps
    table = Table(
        title=f"Medians of {counted} steps; {run.warmup_steps} before them left out",
        title_justify="left",
    )
    for name in ("rank", "stage", "dp", "tp", "device"):
        table.add_column(name)
    for name in ("busy", "waits", "reduce", "optimizer", "memory"):
        table.add_column(name, justify="right")
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
    from hetplan.units import format_seconds

    interval = run.predicted_interval
    place = "inside" if run.inside_interval else "outside"
    yield (
        f"measured {format_seconds(run.median_step_seconds)} per step (median); predicted "
        f"{format_seconds(run.predicted_step_seconds)}, error {run.relative_error:+.1%} of the "
        f"measured; {place} the predicted p10 {format_seconds(interval.p10_seconds)} to p90 "
        f"{format_seconds(interval.p90_seconds)}"
    )
    first, last = run.steps[0].loss, run.steps[-1].loss
    yield f"loss {first:.4f} at the first step, {last:.4f} at step {len(run.steps)}"
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
        yield _loss_line(run.loss_check)


def _loss_line(check: LossCheck) -> str:
    verdict = "agree with" if check.equal else "DIFFER from"
    return (
        f"the losses {verdict} those of one process: largest relative difference "
        f"{check.largest_relative_difference:.1e}, allowed {check.tolerance:.0e}"
    )
