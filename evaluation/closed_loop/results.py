"""Errors, rank correlation, regret and validity of the closed loop, and its tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import pandas

from evaluation.closed_loop.values import (
    MAX_OVERRUN,
    MAX_PROFILE_EXCESS,
    MAX_SPREAD,
    ClosedLoop,
    Goals,
    LoopPlan,
    LoopTotals,
    TrainedPlan,
    Verdict,
)
from evaluation.output import WORDS, Answer, Section


def totals(
    plans: Sequence[LoopPlan], trained: Sequence[TrainedPlan], repeats: Sequence[TrainedPlan]
) -> LoopTotals:
    """The numbers of at least one plan; `repeats` are all trainings of the searched one."""
    rows = trained_frame(plans, trained)
    measured = rows["measured_seconds"]
    searched = float(measured[rows["searched"]].iloc[0])
    everything = (*trained, *repeats)
    passes = sum(each.paced_passes for each in everything)
    correlation = float(rows["predicted_seconds"].rank().corr(measured.rank()))
    return LoopTotals(
        mape=float(rows["error"].abs().mean()),
        worst=float(rows["error"].abs().max()),
        bias=float(rows["error"].mean()),
        spearman=1.0 if pandas.isna(correlation) else correlation,
        regret=searched / float(measured.min()) - 1.0,
        repeats_spread=_spread([each.measured_seconds for each in repeats]),
        overrun=sum(each.overruns for each in everything) / passes if passes else 0.0,
        range=float(measured.max() / measured.min()),
        load_average=max(each.load_average for each in everything),
    )


def trained_frame(plans: Sequence[LoopPlan], trained: Sequence[TrainedPlan]) -> pandas.DataFrame:
    """A row per plan, predicted and measured, by predicted step."""
    rows = [
        {
            **asdict(one),
            "form": plan.form,
            "searched": plan.searched,
            "error": one.error,
            "spread": _spread(one.step_seconds),
            "overrun": one.overrun,
        }
        for plan, one in zip(plans, trained, strict=True)
    ]
    return pandas.DataFrame(rows).sort_values("predicted_seconds", ignore_index=True)


def _spread(seconds: Sequence[float]) -> float:
    """(longest - shortest) / shortest; 0 of a single one."""
    return max(seconds) / min(seconds) - 1.0


def verdict_of(
    found: LoopTotals, goals: Goals, profile_excess: float = 0.0
) -> tuple[Verdict, tuple[str, ...]]:
    """What the numbers say, and why."""
    reasons = tuple(_invalid(found, profile_excess))
    if reasons:
        return Verdict.INVALID, reasons
    reasons = tuple(_missed(found, goals))
    return (Verdict.MISSED if reasons else Verdict.REACHED), reasons


def _invalid(found: LoopTotals, profile_excess: float) -> Iterator[str]:
    """Why measurements say nothing of predictions; none where they do."""
    busy = f"load average up to {found.load_average:.1f}"
    if found.overrun > MAX_OVERRUN:
        yield (
            f"{found.overrun:.0%} of the paced passes took longer than their pace (at most "
            f"{MAX_OVERRUN:.0%}): the cores were too busy ({busy})"
        )
    if found.repeats_spread > MAX_SPREAD:
        yield (
            f"trainings of one plan differ by {found.repeats_spread:.1%} (at most "
            f"{MAX_SPREAD:.0%}): the machine was not the same all the time ({busy})"
        )
    if profile_excess > MAX_PROFILE_EXCESS:
        yield (
            f"a device kind was profiled {profile_excess:.1%} above its pace (at most "
            f"{MAX_PROFILE_EXCESS:.0%}): the machine was busy then; remove the folder and profile "
            "again"
        )


def _missed(found: LoopTotals, goals: Goals) -> Iterator[str]:
    if found.mape > goals.mape:
        yield f"MAPE {found.mape:.1%}; the goal is {goals.mape:.0%}"
    if found.spearman < goals.spearman:
        yield f"Spearman {found.spearman:.3f}; the goal is {goals.spearman:g}"
    if found.regret > goals.regret:
        yield f"regret {found.regret:.1%}; the goal is {goals.regret:.0%}"


def loop_answer(found: ClosedLoop) -> Answer:
    """The plans, the totals with their verdict, and what the columns are."""
    rows = trained_frame(found.plans.plans, found.trained)
    rows["plan"] = rows["name"].where(~rows["searched"], rows["name"] + " *")
    rows["carried_long_bytes_per_step"] = rows["carried_long_bytes"] / rows["all_steps"]
    whole = pandas.DataFrame(
        [
            {
                "plans": len(rows),
                **asdict(found.totals),
                "verdict": found.verdict.value,
                "reasons": "; ".join(found.reasons),
            }
        ]
    )
    spec, percent, seconds = found.spec, "{:.1%}", "{:.3f} s"
    return Answer(
        sections=(
            Section(
                name="rows",
                title="Predicted and trained",
                frame=rows,
                columns={
                    "plan": ("plan", WORDS),
                    "form": ("form", WORDS),
                    "predicted": ("predicted_seconds", seconds),
                    "measured": ("measured_seconds", seconds),
                    "error": ("error", "{:+.1%}"),
                    "steps differ by": ("spread", percent),
                    "overrun": ("overrun", "{:.0%}"),
                    "counted": ("counted_long_bytes", _megabytes),
                    "ledger": ("ledger_long_bytes", _megabytes),
                    "carried": ("carried_long_bytes_per_step", _megabytes),
                },
            ),
            Section(
                name="totals",
                title="All plans",
                frame=whole,
                columns={
                    "plans": ("plans", "{:d}"),
                    "MAPE": ("mape", "{:.2%}"),
                    "worst": ("worst", percent),
                    "mean error": ("bias", "{:+.1%}"),
                    "Spearman": ("spearman", "{:.3f}"),
                    "regret": ("regret", "{:.2%}"),
                    "repeats differ by": ("repeats_spread", percent),
                    "overrun": ("overrun", percent),
                    "longest / shortest": ("range", "{:.2f}"),
                    "load": ("load_average", "{:.1f}"),
                    "verdict": ("verdict", WORDS),
                    "why": ("reasons", WORDS),
                },
            ),
        ),
        lines=(
            f"* the plan that `hetplan plan` found, trained {spec.repeats} times. Plans were "
            f"chosen by predicted rank, seed {spec.seed}, from {found.plans.pool} legal ones, of "
            f"which {found.plans.left_out_slow} were left out because they would take many times "
            "the best",
            f"measured: median of {spec.steps} steps after {spec.warmup_steps} of warm-up. "
            "overrun: paced passes that took longer than their pace",
            "counted, ledger, carried: over the link between the regions, both ways, in a step: as "
            "the trainer counts, as the cost model has it, and as the relay carried (headers, "
            "barriers and set-up too)",
            found.machine,
        ),
        values={
            "machine": found.machine,
            "spec": found.spec,
            "repeats": found.repeats,
            "profile_excess": found.profile_excess,
            "pool": found.plans.pool,
            "left_out_slow": found.plans.left_out_slow,
        },
    )


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.2f} MB"
