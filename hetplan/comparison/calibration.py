"""Correct predictions by factors from runs, and prove on other runs that they help.

With at least three layouts whole layouts are held back in turn: each is predicted with factors from
the others (`predict.calibration`). With fewer the second half of each run's steps is held back from
its first half; that only shows that a run is steady, not that another plan is predicted better,
and a note says so. Factors that do not make what was held back better are refused.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from hetplan.cluster.spec import Cluster
from hetplan.comparison.steps import ChosenSteps
from hetplan.cost.estimate_values import Estimate
from hetplan.errors import InputError
from hetplan.plans.plan import Plan
from hetplan.predict.calibration.factors import (
    calibrate,
    corrected_run,
    devices_of,
    fit_factors,
    left_out_runs,
    regime_of,
)
from hetplan.predict.calibration.values import (
    COMMUNICATION,
    COMPUTE,
    FIXED,
    Calibration,
    RunError,
    RunPart,
)
from hetplan.predict.fit import FittedPredictor
from hetplan.predict.predictor import calibrated_cause, is_link
from hetplan.predict.regression import NORMAL_90
from hetplan.search.result import SearchResult
from hetplan.units import format_each

SCHEMA = "hetplan.calibration-trial/1"
MIN_LAYOUTS = 3
"""As `predict.calibration` wants them: with two, the factors of one would judge the other alone."""
_NOTHING = 1e-9
_NORMAL_80 = NormalDist().inv_cdf(0.9)  # deviations from the middle of a normal law to its p90
_ROUNDING = 1e-9  # of a step: what sums of its parts may be off


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One run whose plan was priced by a predictor without calibration."""

    source: str
    """Its log."""
    result: SearchResult
    chosen: ChosenSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """One run that was held back."""

    source: str
    layout: str
    measured_seconds: float
    error_before: float
    """Predicted over measured, less 1."""
    error_after: float
    """The same with factors that did not see what it is judged on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Whether factors from these runs help, and the calibration that would be kept."""

    held_back: str
    """What the factors did not see, in words."""
    rows: tuple[TrialRow, ...]
    mean_before: float
    """Of |error| over the rows."""
    mean_after: float
    median_before: float
    median_after: float
    helped: bool
    calibration: Calibration
    """Of all runs; its factors are kept only where they helped."""
    notes: tuple[str, ...]


def try_calibration(runs: Sequence[MeasuredRun]) -> Trial:
    """Factors from these runs, judged on what they did not see; InputError without runs."""
    if not runs:
        raise InputError("calibration needs at least one run")
    errors = [_error(run, run.chosen) for run in runs]
    if len({error.cell for error in errors}) >= MIN_LAYOUTS:
        calibration = calibrate(errors)
        judged = calibration.held_back
        return _trial(
            "one layout after the other",
            errors,
            [error.log_error for error in errors],
            [run.log_error for run in left_out_runs(errors)],
            replace(calibration, factors=calibration.factors or fit_factors(errors)),
            helped=judged is not None and judged.accepted,
            notes=calibration.notes,
        )
    return _steadiness(runs, errors)


def _steadiness(runs: Sequence[MeasuredRun], errors: Sequence[RunError]) -> Trial:
    """Too few layouts to hold one back: the second half of the steps judges the first."""
    halves = [_halves(run) for run in runs]
    factors = fit_factors([first for first, _ in halves])
    judged = [second for _, second in halves]
    before = [error.log_error for error in judged]
    after = [corrected_run(error, factors).log_error for error in judged]
    layouts = len({error.cell for error in errors})
    note = (
        f"{layouts} layout{'s are' if layouts > 1 else ' is'} too few to hold one back "
        f"({MIN_LAYOUTS} are needed): this only shows that the runs are steady, not that other "
        "plans are predicted better"
    )
    calibration = calibrate(errors, factors=False)
    return _trial(
        "the second half of each run's steps",
        judged,
        before,
        after,
        replace(calibration, factors=fit_factors(errors), notes=(*calibration.notes, note)),
        helped=_mean(after) < _mean(before) - _NOTHING,
        notes=(note,),
    )


def _trial(
    held_back: str,
    errors: Sequence[RunError],
    before: Sequence[float],
    after: Sequence[float],
    calibration: Calibration,
    *,
    helped: bool,
    notes: tuple[str, ...],
) -> Trial:
    rows = tuple(
        TrialRow(
            source=error.source,
            layout=error.cell,
            measured_seconds=error.measured_seconds,
            # Log errors are of measured over predicted.
            error_before=math.expm1(-old),
            error_after=math.expm1(-new),
        )
        for error, old, new in zip(errors, before, after, strict=True)
    )
    return Trial(
        held_back=held_back,
        rows=rows,
        mean_before=_mean([row.error_before for row in rows]),
        mean_after=_mean([row.error_after for row in rows]),
        median_before=statistics.median(abs(row.error_before) for row in rows),
        median_after=statistics.median(abs(row.error_after) for row in rows),
        helped=helped,
        calibration=calibration,
        notes=notes,
    )


def _mean(errors: Sequence[float]) -> float:
    return statistics.fmean(abs(error) for error in errors)


def _halves(run: MeasuredRun) -> tuple[RunError, RunError]:
    """The run's first steps, and the rest; of a single logged step that step twice."""
    used = run.chosen.used
    half = max(1, len(used) // 2)
    first, second = used[:half], used[half:] or used
    return tuple(  # type: ignore[return-value]
        _error(run, replace(run.chosen, used=steps)) for steps in (first, second)
    )


def _error(run: MeasuredRun, steps: ChosenSteps) -> RunError:
    inputs, plan = run.result.inputs, run.result.plan
    return run_error(
        run.result.estimate,
        plan,
        inputs.cluster,
        measured_seconds=steps.spread.median_seconds,
        cell=f"{inputs.model.name} on {inputs.cluster.name}, {layout_of(plan)}",
        source=run.source,
    )


def layout_of(plan: Plan) -> str:
    """The plan's degrees, as in `tp8 pp4 dp2 mbs1`; runs of one layout are held back together."""
    return (
        f"tp{format_each(replica.tp for replica in plan.replicas)} "
        f"pp{format_each(len(pipeline.stages) for pipeline in plan.pipelines)} "
        f"dp{format_each(replica.dp for replica in plan.replicas)} "
        f"mbs{format_each(replica.microbatch_size for replica in plan.replicas)}"
    )


def with_calibration(
    predictor: FittedPredictor, calibration: Calibration | None
) -> FittedPredictor:
    """The predictor with these factors instead of its own; None: without factors."""
    return FittedPredictor(replace(predictor.laws, calibration=calibration))


def run_error(
    estimate: Estimate,
    plan: Plan,
    cluster: Cluster,
    *,
    measured_seconds: float,
    cell: str,
    source: str,
) -> RunError:
    """The run's error by cause, for `predict.calibration.calibrate`.

    The estimate must be of a predictor without calibration, or factors are corrected twice. One of
    an older hetplan, which does not say what its step is made of, has one part that nothing moves.
    """
    parts = _run_parts(estimate)
    rest = estimate.step_seconds - sum(part.seconds for part in parts)
    if rest > _ROUNDING * estimate.step_seconds:
        parts += (RunPart(cause=FIXED, name=FIXED, seconds=rest, log_halfwidth=0.0),)
    return RunError(
        cell=cell,
        devices=devices_of(plan, cluster),
        regime=regime_of(plan, cluster),
        predicted_seconds=estimate.step_seconds,
        log_halfwidth=own_halfwidth(estimate),
        measured_seconds=measured_seconds,
        parts=parts,
        source=source,
    )


def _run_parts(estimate: Estimate) -> tuple[RunPart, ...]:
    """By what runs can correct: one part per device kind, one per link or class of links.

    Sources of errors within a part are independent of each other: squares add up.
    """
    seconds: dict[tuple[str, str], float] = {}
    squares: dict[tuple[str, str], float] = {}
    for each in estimate.causes:
        name = COMMUNICATION if is_link(each.cause) else COMPUTE
        key = calibrated_cause(each.cause), name
        seconds[key] = seconds.get(key, 0.0) + each.seconds
        squares[key] = squares.get(key, 0.0) + (each.seconds * each.log_halfwidth) ** 2
    return tuple(
        RunPart(
            cause=cause,
            name=name,
            seconds=taken,
            log_halfwidth=math.sqrt(squares[cause, name]) / taken,
        )
        for (cause, name), taken in sorted(seconds.items())
    )


def own_halfwidth(estimate: Estimate) -> float:
    """Half-width of the step's 90 % interval by the predictions alone, in the logarithm."""
    if estimate.own_log_halfwidth is not None:
        return estimate.own_log_halfwidth
    # An older estimate has p10 and p90 alone, from which a normal law gives p5 and p95.
    span = estimate.interval
    deviation = 0.5 * math.log(span.p90_seconds / span.p10_seconds) / _NORMAL_80
    return NORMAL_90 * deviation
