"""What a person sees of a run beside its plan: the verdict, the parts, the timers, what to do."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence

from rich.markup import escape
from rich.table import Table

from hetplan.comparison.calibration import Trial
from hetplan.comparison.compare import SCHEMA, Comparison
from hetplan.comparison.parts import Culprit
from hetplan.cost.estimate_values import Interval
from hetplan.files.encoding import to_plain
from hetplan.launchers.run_log import RunLog
from hetplan.reports.terminal import (
    folded,
    new_table,
    print_small,
    print_table,
    small_table,
    text_width,
)
from hetplan.units import counted, format_brief, format_bytes, format_range, format_seconds


def print_comparisons(comparisons: Sequence[Comparison], *, verbose: bool) -> None:
    """The verdict on one run, or a row for each of several; verbose: timers and parts too."""
    if len(comparisons) == 1 or verbose:
        for comparison in comparisons:
            if len(comparisons) > 1:
                print(f"\n{', '.join(comparison.files)}", flush=True)
            _print_comparison(comparison, verbose)
    if len(comparisons) > 1:
        print_small(run_table(comparisons))


def _print_comparison(comparison: Comparison, verbose: bool) -> None:
    if verbose and comparison.timers:
        print_table(timer_table(comparison))
    if verbose and comparison.parts:
        print_table(part_table(comparison))
    for line in folded(comparison_lines(comparison, verbose=verbose), text_width()):
        print(line, flush=True)


def comparison_text(comparisons: Sequence[Comparison]) -> str:
    """JSON of one comparison, or of several under `runs`, derived figures included."""

    def data(comparison: Comparison) -> dict[str, object]:
        plain = to_plain(comparison)
        if not isinstance(plain, dict):
            raise TypeError("a comparison is a mapping")
        return plain | {
            "relative_error": comparison.relative_error,
            "inside_interval": comparison.inside_interval,
        }

    rows = [data(comparison) for comparison in comparisons]
    whole = rows[0] if len(rows) == 1 else {"runs": rows}
    return json.dumps(
        whole | {"schema": SCHEMA}, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False
    )


def print_trial(trial: Trial) -> None:
    """Whether the factors helped, and the factors."""
    if trial.calibration.factors:
        print_small(factor_table(trial))
    for line in folded(trial_lines(trial), text_width()):
        print(line, flush=True)


def part_table(comparison: Comparison) -> Table:
    """The step in parts that add up to it on both sides."""
    table = new_table(
        "part | >measured | >predicted | >difference | >ratio | ",
        title="Parts of the step, which add up to it",
    )
    for row in comparison.parts:
        table.add_row(
            row.part,
            format_seconds(row.measured_seconds),
            format_seconds(row.predicted_seconds),
            _signed(row.difference_seconds),
            "" if row.ratio is None or row.ratio < 0 else f"{row.ratio:.2f}",
            escape(row.note),
        )
    return table


def timer_table(comparison: Comparison) -> Table:
    """The trainer's timers, least and most over ranks, beside the plan's stages."""
    table = new_table(
        "timer | counts | >measured | >predicted | ranks | ",
        title="Timers: least and most over ranks, medians",
    )
    for row in comparison.timers:
        table.add_row(
            escape(row.timer),
            row.quantity or "-",
            _span(row.measured_least_seconds, row.measured_most_seconds),
            _span(row.predicted_least_seconds, row.predicted_most_seconds),
            row.ranks,
            escape(row.note),
        )
    return table


def run_table(comparisons: Sequence[Comparison]) -> Table:
    """One row per run."""
    table = small_table("run | >measured | >predicted | >error | off most")
    for comparison in comparisons:
        table.add_row(
            escape(", ".join(comparison.files)),
            format_brief(comparison.measured.median_seconds),
            format_brief(comparison.predicted_step_seconds),
            f"{comparison.relative_error:+.1%}"
            + ("" if comparison.inside_interval else " OUTSIDE"),
            comparison.culprit.part if comparison.culprit is not None else "",
        )
    return table


def comparison_lines(comparison: Comparison, *, verbose: bool = False) -> Iterator[str]:
    """The verdict, what is off and what to do, what was left out, and what to doubt."""
    measured = comparison.measured
    spread = (measured.median_seconds, measured.p10_seconds, measured.p90_seconds, "80 %")
    yield f"measured {format_range(*spread)}, median of {counted(measured.count, 'step')}"
    yield verdict(
        comparison.predicted_step_seconds, comparison.predicted_interval, measured.median_seconds
    )
    if comparison.culprit is not None:
        yield from _culprit_lines(comparison.culprit)
    elif comparison.parts:
        half = (measured.p90_seconds - measured.p10_seconds) / 2
        yield (
            f"no part is off by more than 1 % of the step and the run's own spread, "
            f"{format_brief(half)} to either side"
        )
    memory = comparison.memory
    if memory is not None:
        error = memory.predicted_bytes / memory.measured_bytes - 1
        yield (
            f"memory {memory.kind} at its peak: {format_bytes(memory.measured_bytes)} measured, "
            f"{format_bytes(memory.predicted_bytes)} predicted ({error:+.1%})"
        )
    if verbose:
        yield f"steps that count: {measured.iterations}"
        for left in comparison.left_out:
            yield f"left out {left.count}: {left.reason} ({left.iterations})"
    elif comparison.left_out:
        words = (f"{left.count} ({left.reason})" for left in comparison.left_out)
        yield f"steps left out: {', '.join(words)}"
    shown = comparison.notes if verbose else comparison.notes[:_NOTES]
    for note in shown:
        yield f"note: {note}"
    more = len(comparison.notes) - len(shown)
    if more:
        yield f"{more} more note{'s' * (more > 1)}: --verbose"


_NOTES = 2
"""That are shown without --verbose."""


def verdict(predicted: float, interval: Interval, measured: float) -> str:
    """`predicted 44.0 s a step (80 %: 38.8 to 77.8 s): 2.1% more than measured, inside`."""
    error = predicted / measured - 1.0
    low, high = interval.p10_seconds, interval.p90_seconds
    place = "inside" if low <= measured <= high else "OUTSIDE"
    return (
        f"predicted {format_range(predicted, low, high, '80 %')}: {abs(error):.1%} "
        f"{'more' if error > 0 else 'less'} than measured, which is {place} this interval"
    )


def factor_table(trial: Trial) -> Table:
    """What the runs say that predictions must be multiplied by."""
    table = small_table("factor on | part | >factor | >90 % | >runs")
    for factor in trial.calibration.factors:
        width = math.exp(factor.log_halfwidth)
        table.add_row(
            escape(factor.cause),
            factor.name,
            f"{factor.factor:.3f}",
            f"{factor.factor / width:.3f} to {factor.factor * width:.3f}",
            str(factor.runs),
        )
    return table


def trial_lines(trial: Trial) -> Iterator[str]:
    """Whether it helped, in numbers, and what that shows."""
    verdict = "better" if trial.helped else "NOT better"
    yield (
        f"{verdict} on what was held back ({trial.held_back}): mean error "
        f"{trial.mean_before:.1%} -> {trial.mean_after:.1%}, median {trial.median_before:.1%} -> "
        f"{trial.median_after:.1%}"
    )
    if not trial.helped:
        yield "the factors above are not used unless --force writes them"
    for note in dict.fromkeys((*trial.notes, *trial.calibration.notes)):
        yield f"note: {note}"


def _culprit_lines(culprit: Culprit) -> Iterator[str]:
    slower = culprit.difference_seconds > 0
    yield (
        f"off most: {culprit.part}, {format_brief(abs(culprit.difference_seconds))} of the step "
        f"{'slower' if slower else 'faster'} than predicted"
    )
    yield f"  usually: {culprit.meaning}"
    yield f"  measure again: {culprit.measure}"


def _signed(seconds: float) -> str:
    return f"{'+' if seconds > 0 else ''}{format_seconds(seconds)}"


def _span(least: float | None, most: float | None) -> str:
    """`12 ms .. 15 ms`, or one of them where they are equal."""
    if least is None or most is None:
        return ""
    if least == most:
        return format_seconds(most)
    return f"{format_seconds(least)} .. {format_seconds(most)}"


def loop_lines(runs: Sequence[tuple[str, RunLog]]) -> Iterator[str]:
    """A row for each run, predicted and measured step, and the loss curve of the first below."""
    width = max(len(name) for name, _ in runs)
    head = f"{'predicted':>10}  {'measured':>10}  {'error':>7}  {'80 % predicted':>18}"
    yield f"  {'':<{width}}  {head}"
    for name, run in runs:
        interval, step = run.predicted_interval, run.predicted_step_seconds
        span = format_range(step, interval.p10_seconds, interval.p90_seconds, "").split("(: ")[1]
        row = (
            f"{format_brief(step):>10}  {format_brief(run.median_step_seconds):>10}  "
            f"{run.relative_error:>+7.1%}  {span.rstrip(')'):>18}"
        )
        yield f"  {name:<{width}}  {row}"
    losses = [step.loss for step in runs[0][1].steps]
    yield f"  loss {losses[0]:.4f} {sparkline(losses)} {losses[-1]:.4f}"
    for name, run in runs:
        if not run.valid:
            yield (
                f"  {name}: NOT COMPARABLE, {run.overrun_fraction:.0%} of its passes overran on a "
                "busy machine"
            )


def loop_headline(uneven: RunLog, even: RunLog) -> str:
    """Which plan was faster, and by how much, as measured."""
    ratio = even.median_step_seconds / uneven.median_step_seconds
    if ratio > 1:
        return f"  measured: hetplan's plan is {ratio:.2f} times as fast as the even split"
    return f"  measured: hetplan's plan is NOT faster than the even split, {ratio:.2f} times"


_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float]) -> str:
    """One bar per value, from the lowest (▁) to the highest (█)."""
    low, high = min(values), max(values)
    span = high - low
    if span <= 0:
        return _BARS[0] * len(values)
    top = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / span * top)] for value in values)
