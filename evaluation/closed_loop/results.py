"""Errors, rank correlation, regret and validity of the closed loop, and its tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas

from evaluation.accuracy.scores import rank_correlation
from evaluation.closed_loop.plans import FORMS
from evaluation.closed_loop.values import (
    MAX_OVERRUN,
    MAX_PROFILE_EXCESS,
    MAX_SPREAD,
    MIN_STALLED_FRACTION,
    ClosedLoop,
    Goals,
    LoopPass,
    LoopRow,
    LoopTotals,
    TrainedPlan,
    Verdict,
)
from evaluation.drawing import save_drawing, table_of

if TYPE_CHECKING:
    from rich.table import Table

    from evaluation.closed_loop.values import ClosedLoop, HethubMeasured, LoopPass, TrainedPlan


def judge(
    rows: Sequence[LoopRow],
    repeats: Sequence[TrainedPlan],
    *,
    jitter: float,
    goals: Goals,
    profile_excess: float = 0.0,
) -> LoopPass:
    """A pass with its numbers; `repeats` are all trainings of the searched plan."""
    found = totals(rows, repeats)
    reasons = tuple(
        invalid_reasons(found.overrun, found.repeats_spread, found.load_average, found.steal)
    )
    if profile_excess > MAX_PROFILE_EXCESS:
        reasons += (
            f"a device kind was profiled {profile_excess:.1%} above its pace (at most "
            f"{MAX_PROFILE_EXCESS:.0%}): the machine was busy then; remove the folder and profile "
            "again",
        )
    verdict = Verdict.INVALID
    if not reasons:
        reasons = tuple(_missed(found, goals))
        verdict = Verdict.MISSED if reasons else Verdict.REACHED
    return LoopPass(
        jitter=jitter,
        rows=tuple(sorted(rows, key=lambda row: row.trained.predicted_seconds)),
        repeats=tuple(repeats),
        profile_excess=profile_excess,
        totals=found,
        verdict=verdict,
        reasons=reasons,
    )


def totals(rows: Sequence[LoopRow], repeats: Sequence[TrainedPlan]) -> LoopTotals:
    """The numbers of a pass of at least one plan, the searched one among them."""
    trained = [row.trained for row in rows]
    measured = [each.measured_seconds for each in trained]
    errors = [each.error for each in trained]
    searched = next(row.trained for row in rows if row.searched)
    everything = (*trained, *repeats)
    passes = sum(each.paced_passes for each in everything)
    predicted = pandas.Series([each.predicted_seconds for each in trained])
    correlation = rank_correlation(predicted, pandas.Series(measured))
    return LoopTotals(
        mape=sum(map(abs, errors)) / len(errors),
        worst=max(map(abs, errors)),
        bias=sum(errors) / len(errors),
        spearman=1.0 if correlation is None else correlation,
        regret=searched.measured_seconds / min(measured) - 1.0,
        repeats_spread=spread([each.measured_seconds for each in repeats]),
        overrun=sum(each.overruns for each in everything) / passes if passes else 0.0,
        range=max(measured) / min(measured),
        stalled_plans=sum(row.stalled >= MIN_STALLED_FRACTION for row in rows),
        load_average=max(each.load_average for each in everything),
        steal=max(each.steal for each in everything),
    )


def spread(seconds: Sequence[float]) -> float:
    """(longest - shortest) / shortest; 0 of a single one."""
    return max(seconds) / min(seconds) - 1.0


def invalid_reasons(
    overrun: float, repeats_spread: float, load: float, steal: float
) -> Iterator[str]:
    """Why measurements say nothing of predictions; none where they do."""
    busy = f"load average up to {load:.1f}, steal up to {steal:.1%}"
    if overrun > MAX_OVERRUN:
        yield (
            f"{overrun:.0%} of the paced passes took longer than their pace (at most "
            f"{MAX_OVERRUN:.0%}): the cores were too busy ({busy})"
        )
    if repeats_spread > MAX_SPREAD:
        yield (
            f"trainings of one plan differ by {repeats_spread:.1%} (at most {MAX_SPREAD:.0%}): "
            f"the machine was not the same all the time ({busy})"
        )


def _missed(found: LoopTotals, goals: Goals) -> Iterator[str]:
    if found.mape > goals.mape:
        yield f"MAPE {found.mape:.1%}; the goal is {goals.mape:.0%}"
    if found.spearman < goals.spearman:
        yield f"Spearman {found.spearman:.3f}; the goal is {goals.spearman:g}"
    if found.regret > goals.regret:
        yield f"regret {found.regret:.1%}; the goal is {goals.regret:.0%}"


def loop_tables(found: ClosedLoop) -> Iterator[Table]:
    """The plans of every pass, the totals, and HETHUB's figure."""
    for each in found.passes:
        yield _pass_table(each)
    yield _totals_table(found)
    if found.hethub is not None:
        yield _hethub_table(found.hethub)


def _title(each: LoopPass) -> str:
    return f"{each.jitter:.0%} jitter" if each.jitter else "no jitter"


def _pass_table(found: LoopPass) -> Table:
    return table_of(
        f"Predicted and trained, {_title(found)}",
        ("plan", "form"),
        (
            "predicted", "measured", "error", "stalled", "steps differ by", "overrun",
            "counted", "ledger", "carried",
        ),
        (
            (
                row.name + (" *" if row.searched else ""), row.form, *_times(row.trained),
                f"{row.stalled:.0%}", f"{row.trained.spread:.1%}", f"{row.trained.overrun:.0%}",
                *_bytes(row.trained),
            )
            for row in found.rows
        ),
    )  # fmt: skip


def _times(trained: TrainedPlan) -> tuple[str, str, str]:
    return (
        f"{trained.predicted_seconds:.3f} s",
        f"{trained.measured_seconds:.3f} s",
        f"{trained.error:+.1%}",
    )


def _bytes(trained: TrainedPlan) -> tuple[str, str, str]:
    return (
        f"{trained.counted_long_bytes / 1e6:.2f} MB",
        f"{trained.ledger_long_bytes / 1e6:.2f} MB",
        f"{trained.carried_long_bytes / trained.all_steps / 1e6:.2f} MB",
    )


def _totals_table(found: ClosedLoop) -> Table:
    return table_of(
        "All plans of a pass",
        ("pass",),
        (
            "plans", "MAPE", "worst", "mean error", "Spearman", "regret", "repeats differ by",
            "overrun", "longest / shortest", "stalled >= 25 %", "load", "steal",
        ),
        (
            (
                _title(each), len(each.rows), f"{each.totals.mape:.2%}",
                f"{each.totals.worst:.1%}", f"{each.totals.bias:+.1%}",
                f"{each.totals.spearman:.3f}", f"{each.totals.regret:.2%}",
                f"{each.totals.repeats_spread:.1%}", f"{each.totals.overrun:.1%}",
                f"{each.totals.range:.2f}", each.totals.stalled_plans,
                f"{each.totals.load_average:.1f}", f"{each.totals.steal:.1%}",
            )
            for each in found.passes
        ),
        names_after=(),
    )  # fmt: skip


def _hethub_table(found: HethubMeasured) -> Table:
    return table_of(
        "Each kind alone, then all together; at most 64 microbatches per pipeline and step",
        ("devices", "plan"),
        (
            "samples", "predicted", "measured", "error", "tokens/s", "of the kinds alone",
            "of its own bound", "overrun",
        ),
        (
            (
                row.what, row.name, row.samples, *_times(row.trained),
                f"{row.tokens_per_second:,.0f}",
                "" if row.ratio is None else f"{row.ratio:.2%}",
                "" if row.bound_ratio is None else f"{row.bound_ratio:.2%}",
                f"{row.trained.overrun:.0%}",
            )
            for row in (*found.alone, *found.together)
        ),
    )  # fmt: skip


def loop_lines(found: ClosedLoop) -> Iterator[str]:
    """Verdicts, and what the columns are."""
    for each in found.passes:
        yield _verdict(_title(each), each.verdict, each.reasons)
    if found.hethub is not None:
        yield _verdict("all kinds together", found.hethub.verdict, found.hethub.reasons)
    yield (
        f"* the plan that `hetplan plan` found, trained {found.spec.repeats} times. Plans were "
        f"chosen by predicted rank, seed {found.spec.seed}, from {found.pool} legal ones, of which "
        f"{found.left_out_slow} were left out because they would take many times the best"
    )
    yield (
        f"measured: median of {found.spec.steps} steps after {found.spec.warmup_steps} of warm-up. "
        "stalled: predicted part of the step in bubble or exposed communication. overrun: paced "
        "passes that took longer than their pace"
    )
    yield (
        "counted, ledger, carried: over the link between the regions, both ways, in a step: as the "
        "trainer counts, as the cost model has it, and as the relay carried (headers, barriers and "
        "set-up too)"
    )
    yield found.machine
    if found.weight:
        yield f"the loop's processes had no more weight than others: {found.weight}"


def _verdict(what: str, verdict: str, reasons: tuple[str, ...]) -> str:
    return f"{what}: {verdict}" + (f" ({'; '.join(reasons)})" if reasons else "")


_MARKERS = "osD^v"
_BAND = 0.03


def draw(found: ClosedLoop, path: Path) -> None:
    """Write the drawing as SVG; an InputError without matplotlib or a folder to write to."""
    save_drawing(path, lambda figure: _fill(figure.add_subplot(), found))


def _fill(axes: Any, found: ClosedLoop) -> None:
    trained = [row.trained for each in found.passes for row in each.rows]
    times = [each.measured_seconds for each in trained]
    times += [each.predicted_seconds for each in trained]
    ends = [min(times) / 1.1, max(times) * 1.1]
    low, high = ([(1 + sign * _BAND) * end for end in ends] for sign in (-1, 1))
    axes.fill_between(ends, low, high, color="0.9", lw=0)
    axes.plot(ends, ends, color="0.5", lw=0.8)
    for each in found.passes:
        _draw_pass(axes, each)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=ends,
        ylim=ends,
        xlabel="measured step (s)",
        ylabel="predicted step (s)",
    )
    axes.legend(loc="upper left", fontsize=8, frameon=False)


def _draw_pass(axes: Any, found: LoopPass) -> None:
    what = f"{found.jitter:.0%} jitter" if found.jitter else "no jitter"
    note = f"{what}: MAPE {found.totals.mape:.1%}, Spearman {found.totals.spearman:.3f}"
    axes.scatter([], [], s=0, label=note)
    for form in FORMS:
        rows = [row for row in found.rows if row.form == form]
        colour = f"C{FORMS.index(form)}"
        if rows:
            axes.scatter(
                [row.trained.measured_seconds for row in rows],
                [row.trained.predicted_seconds for row in rows],
                s=28,
                marker=_MARKERS[FORMS.index(form)],
                linewidths=0.9,
                edgecolors=colour,
                facecolors="none" if found.jitter else colour,
                label=f"{form} ({len(rows)})",
            )
    searched = [row.trained for row in found.rows if row.searched]
    axes.scatter(
        [each.measured_seconds for each in searched],
        [each.predicted_seconds for each in searched],
        s=160,
        marker="*",
        linewidths=0.9,
        edgecolors="black",
        facecolors="none",
    )
