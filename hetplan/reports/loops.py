"""What a person sees of training runs next to their plans: measured against predicted."""

from __future__ import annotations

from collections.abc import Sequence

from hetplan.launchers.run_log import RunLog
from hetplan.reports.curves import sparkline
from hetplan.units import format_seconds


def comparison(runs: Sequence[tuple[str, RunLog]]) -> str:
    """A table of runs: predicted and measured step time, error, and the loss curve below."""
    width = max(len(name) for name, _ in runs)
    head = f"{'predicted':>10}  {'measured':>10}  {'error':>7}  {'p10..p90 predicted':>24}"
    lines = [f"{'':<{width}}  {head}"]
    for name, run in runs:
        interval = run.predicted_interval
        span = f"{format_seconds(interval.p10_seconds)} .. {format_seconds(interval.p90_seconds)}"
        predicted = format_seconds(run.predicted_step_seconds)
        measured = format_seconds(run.median_step_seconds)
        row = f"{predicted:>10}  {measured:>10}  {run.relative_error:>+7.1%}  {span:>24}"
        lines.append(f"{name:<{width}}  {row}")
    for name, run in runs:
        losses = [step.loss for step in run.steps]
        lines.append(f"{name}: loss {losses[0]:.4f} {sparkline(losses)} {losses[-1]:.4f}")
    for name, run in runs:
        if run.overruns and sum(run.overruns):
            verdict = "" if run.valid else ": too busy a machine, do not trust this run"
            share = f"{run.overrun_fraction:.1%} of the paced passes overran"
            lines.append(f"{name}: {share}{verdict}")
    return "\n".join(lines)


def headline(uneven: RunLog, even: RunLog) -> str:
    """Which plan was faster, and by how much, as measured."""
    ratio = even.median_step_seconds / uneven.median_step_seconds
    if ratio > 1:
        return f"hetplan's plan was {ratio:.2f} x as fast as the even split (measured)."
    return f"hetplan's plan was NOT faster than the even split: {ratio:.2f} x (measured)."
