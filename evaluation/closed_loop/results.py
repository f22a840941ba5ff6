"""Errors, rank correlation, regret and validity of the closed loop; its tables and drawing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
    TrainedPlan,
    Verdict,
)
from evaluation.output import WORDS, Answer, Form, Section, frame_of, plain
from hetplan.errors import InputError


def judge(
    rows: Sequence[LoopRow],
    repeats: Sequence[TrainedPlan],
    *,
    jitter: float,
    goals: Goals,
    profile_excess: float = 0.0,
) -> LoopPass:
    """A pass with its numbers; `repeats` are all trainings of the searched plan."""
    sums = totals(rows, repeats)
    invalid = list(
        invalid_reasons(
            *(sums[name] for name in ("overrun", "repeats_spread", "load_average", "steal"))
        )
    )
    if profile_excess > MAX_PROFILE_EXCESS:
        invalid.append(
            f"a device kind was profiled {profile_excess:.1%} above its pace (at most "
            f"{MAX_PROFILE_EXCESS:.0%}): the machine was busy then; remove the folder and profile "
            "again"
        )
    verdict, reasons = verdict_of(invalid, _missed(sums, goals))
    return LoopPass(
        jitter=jitter,
        rows=tuple(sorted(rows, key=lambda row: row.trained.predicted_seconds)),
        repeats=tuple(repeats),
        profile_excess=profile_excess,
        totals=sums,
        verdict=verdict,
        reasons=reasons,
    )


def verdict_of(invalid: Iterable[str], missed: Iterable[str]) -> tuple[Verdict, tuple[str, ...]]:
    """The verdict and its reasons: a busy machine is never a missed goal."""
    if reasons := tuple(invalid):
        return Verdict.INVALID, reasons
    reasons = tuple(missed)
    return Verdict.MISSED if reasons else Verdict.REACHED, reasons


def totals(rows: Sequence[LoopRow], repeats: Sequence[TrainedPlan]) -> dict[str, float]:
    """The numbers of a pass of at least one plan, the searched one among them; fractions.

    `regret`: measured step of the searched plan over the least measured one, less 1; `range`:
    longest measured step over the shortest; `load_average`: the largest after a training.
    """
    runs = frame_of(row.trained for row in rows)
    errors = runs["predicted_seconds"] / runs["measured_seconds"] - 1.0
    everything = pandas.concat([runs, frame_of(repeats)])
    passes = everything["paced_passes"].sum()
    measured = runs["measured_seconds"]
    searched = next(row.trained for row in rows if row.searched)
    correlation = rank_correlation(runs["predicted_seconds"], measured)
    return {
        "mape": float(errors.abs().mean()),
        "worst": float(errors.abs().max()),
        "bias": float(errors.mean()),
        "spearman": 1.0 if correlation is None else correlation,
        "regret": float(searched.measured_seconds / measured.min() - 1.0),
        "repeats_spread": spread([run.measured_seconds for run in repeats]),
        "overrun": float(everything["overruns"].sum() / passes) if passes else 0.0,
        "range": float(measured.max() / measured.min()),
        "stalled_plans": sum(row.stalled >= MIN_STALLED_FRACTION for row in rows),
        "load_average": float(everything["load_average"].max()),
        "steal": float(everything["steal"].max()),
    }


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


def _missed(sums: dict[str, float], goals: Goals) -> Iterator[str]:
    if sums["mape"] > goals.mape:
        yield f"MAPE {sums['mape']:.1%}; the goal is {goals.mape:.0%}"
    if sums["spearman"] < goals.spearman:
        yield f"Spearman {sums['spearman']:.3f}; the goal is {goals.spearman:g}"
    if sums["regret"] > goals.regret:
        yield f"regret {sums['regret']:.1%}; the goal is {goals.regret:.0%}"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.2f} MB"


_TIMES: dict[str, tuple[str, Form]] = {
    "predicted": ("predicted_seconds", "{:.3f} s"),
    "measured": ("measured_seconds", "{:.3f} s"),
    "error": ("error", "{:+.1%}"),
}
_PASS_COLUMNS: dict[str, tuple[str, Form]] = {
    "plan": ("plan", WORDS),
    "form": ("form", WORDS),
    **_TIMES,
    "stalled": ("stalled", "{:.0%}"),
    "steps differ by": ("spread", "{:.1%}"),
    "overrun": ("overrun", "{:.0%}"),
    "counted": ("counted_long_bytes", _megabytes),
    "ledger": ("ledger_long_bytes", _megabytes),
    "carried": ("carried_bytes_per_step", _megabytes),
}
_TOTALS_COLUMNS: dict[str, tuple[str, Form]] = {
    "pass": ("pass", WORDS),
    "plans": ("plans", "{}"),
    "MAPE": ("mape", "{:.2%}"),
    "worst": ("worst", "{:.1%}"),
    "mean error": ("bias", "{:+.1%}"),
    "Spearman": ("spearman", "{:.3f}"),
    "regret": ("regret", "{:.2%}"),
    "repeats differ by": ("repeats_spread", "{:.1%}"),
    "overrun": ("overrun", "{:.1%}"),
    "longest / shortest": ("range", "{:.2f}"),
    "stalled >= 25 %": ("stalled_plans", "{:d}"),
    "load": ("load_average", "{:.1f}"),
    "steal": ("steal", "{:.1%}"),
}
_HETHUB_COLUMNS: dict[str, tuple[str, Form]] = {
    "devices": ("what", WORDS),
    "plan": ("name", WORDS),
    "samples": ("samples", "{:d}"),
    **_TIMES,
    "tokens/s": ("tokens_per_second", "{:,.0f}"),
    "of the kinds alone": ("ratio", "{:.2%}"),
    "of its own bound": ("bound_ratio", "{:.2%}"),
    "overrun": ("overrun", "{:.0%}"),
}


def loop_answer(loop: ClosedLoop) -> Answer:
    """The plans of every pass, the totals, HETHUB's figure, and the verdicts."""
    sections = [
        Section(
            frame=frame_of(map(_pass_row, each.rows)),
            title=f"Predicted and trained, {_title(each)}",
            columns=_PASS_COLUMNS,
        )
        for each in loop.passes
    ]
    rows = [
        {"pass": _title(each), "plans": len(each.rows), **plain(each.totals)}
        for each in loop.passes
    ]
    sections.append(
        Section(frame=frame_of(rows), title="All plans of a pass", columns=_TOTALS_COLUMNS)
    )
    if loop.hethub is not None:
        together = (*loop.hethub.alone, *loop.hethub.together)
        sections.append(
            Section(
                frame=frame_of({**plain(row), **_run_row(row["trained"])} for row in together),
                title="Each kind alone, then all together; at most 64 microbatches per pipeline "
                "and step",
                columns=_HETHUB_COLUMNS,
            )
        )
    return Answer(sections=tuple(sections), lines=tuple(_lines(loop)), values=plain(loop))


def _run_row(run: TrainedPlan) -> dict[str, Any]:
    return {
        **plain(run),
        "error": run.error,
        "overrun": run.overrun,
        "spread": spread(run.step_seconds),
        "carried_bytes_per_step": run.carried_long_bytes / run.all_steps,
    }


def _pass_row(row: LoopRow) -> dict[str, Any]:
    name = row.name + (" *" if row.searched else "")
    return {**_run_row(row.trained), "plan": name, "form": row.form, "stalled": row.stalled}


def _title(loop_pass: LoopPass) -> str:
    return f"{loop_pass.jitter:.0%} jitter" if loop_pass.jitter else "no jitter"


def _lines(loop: ClosedLoop) -> Iterator[str]:
    """Verdicts, and what the columns are."""
    for each in loop.passes:
        yield _verdict_line(_title(each), each.verdict, each.reasons)
    if loop.hethub is not None:
        yield _verdict_line("all kinds together", loop.hethub.verdict, loop.hethub.reasons)
    yield (
        f"* the plan of `hetplan plan`, trained {loop.spec.repeats} times. Plans were chosen by "
        f"predicted rank, seed {loop.spec.seed}, from {loop.pool} legal ones; {loop.left_out_slow} "
        "were left out because they would take many times the best"
    )
    yield (
        f"measured: median of {loop.spec.steps} steps after {loop.spec.warmup_steps} of warm-up. "
        "stalled: predicted fraction of the step in bubble or exposed communication. overrun: "
        "paced passes that took longer than their pace"
    )
    yield (
        "counted, ledger, carried: bytes over the link between the regions, both ways, per step: "
        "by the trainer, by the cost model, and by the relay (headers, barriers and set-up too)"
    )
    yield loop.machine
    if loop.weight:
        yield f"the loop's processes had no more weight than others: {loop.weight}"


def _verdict_line(what: str, verdict: str, reasons: tuple[str, ...]) -> str:
    return f"{what}: {verdict}" + (f" ({'; '.join(reasons)})" if reasons else "")


_MARKERS = "osD^v"
_BAND = 0.03


_SETTINGS: Any = {
    # Names of shapes in an SVG are hashes of a salt that is random unless it is given.
    "svg.hashsalt": "hetplan",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
}


def check_drawable(path: Path) -> None:
    """An InputError without matplotlib, or where nothing can be drawn into the path."""
    if path.suffix.lower() != ".svg":
        raise InputError(f"{path} must end in .svg, which is what is drawn")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is no folder; make it, or name a file in another one")
    if find_spec("matplotlib") is None:
        raise InputError("drawing needs matplotlib: pip install 'hetplan[plots]'")


def draw(loop: ClosedLoop, path: Path) -> None:
    """Write the drawing as SVG; equal figures give equal files, byte for byte."""
    check_drawable(path)
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(8.0, 7.0), layout="constrained")
        _fill(figure.add_subplot(), loop)
        # A date would make every drawing a new file.
        figure.savefig(path, format="svg", metadata={"Date": None})


def _fill(axes: Any, loop: ClosedLoop) -> None:
    runs = [row.trained for each in loop.passes for row in each.rows]
    times = [seconds for run in runs for seconds in (run.measured_seconds, run.predicted_seconds)]
    ends = [min(times) / 1.1, max(times) * 1.1]
    low, high = ([(1 + sign * _BAND) * end for end in ends] for sign in (-1, 1))
    axes.fill_between(ends, low, high, color="0.9", lw=0)
    axes.plot(ends, ends, color="0.5", lw=0.8)
    for each in loop.passes:
        _draw_pass(axes, each)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="measured step (s)", ylabel="predicted step (s)")
    axes.legend(loc="upper left", fontsize=8, frameon=False)


def _draw_pass(axes: Any, loop_pass: LoopPass) -> None:
    sums = loop_pass.totals
    note = f"{_title(loop_pass)}: MAPE {sums['mape']:.1%}, Spearman {sums['spearman']:.3f}"
    axes.scatter([], [], s=0, label=note)
    for number, form in enumerate(FORMS):
        runs = [row.trained for row in loop_pass.rows if row.form == form]
        colour = f"C{number}"
        if runs:
            _scatter(
                axes,
                runs,
                s=28,
                marker=_MARKERS[number],
                edgecolors=colour,
                facecolors="none" if loop_pass.jitter else colour,
                label=f"{form} ({len(runs)})",
            )
    searched = [row.trained for row in loop_pass.rows if row.searched]
    _scatter(axes, searched, s=160, marker="*", edgecolors="black", facecolors="none")


def _scatter(axes: Any, runs: Sequence[TrainedPlan], **style: Any) -> None:
    measured = [run.measured_seconds for run in runs]
    axes.scatter(measured, [run.predicted_seconds for run in runs], linewidths=0.9, **style)
