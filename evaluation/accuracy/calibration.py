"""Predict measured runs, and find the width of their intervals.

A row becomes model, cluster, job and plan, and `hetplan.cost.estimate` prices them with the given
predictor, as `hetplan estimate` does.

Intervals: the width of a run's 90 % interval comes from the errors of runs of other cells (a cell:
one model, tp and pp), by `hetplan.predict.calibration.factors` and without any factor, so
predictions stay those of unit measurements alone. A run's own cell never counts in its interval;
where another folder is judged, none of its runs counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pandas

from evaluation.accuracy.clusters import cluster_notes, cluster_of, kind_names
from evaluation.accuracy.plans import find_mixed, mixed_run, plan_of
from evaluation.accuracy.rows import RunRow, model_of
from hetplan.cluster.spec import Cluster
from hetplan.comparison.calibration import own_halfwidth, run_error
from hetplan.cost.estimate import estimate
from hetplan.cost.estimate_values import Estimate
from hetplan.errors import HetplanError, InputError
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Plan
from hetplan.predict.calibration.factors import calibrate, devices_of, regime_of
from hetplan.predict.calibration.values import Calibration, RunError
from hetplan.predict.fit import FittedPredictor


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A measured run in hetplan's own values."""

    row: RunRow
    model: ModelSpec
    cluster: Cluster
    job: Job
    plan: Plan
    notes: tuple[str, ...]

    def predicted(self, predictor: FittedPredictor) -> PredictedRun:
        """The run with its estimate; an InputError where the predictor lacks what it needs."""
        priced = estimate(self.plan, self.model, self.cluster, self.job, predictor)
        known = {field.name: getattr(self, field.name) for field in fields(Run)}
        return PredictedRun(**known, estimate=priced)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRun(Run):
    """A measured run and the estimate of it."""

    estimate: Estimate

    @property
    def measured_seconds(self) -> float:
        """Measured seconds of the step."""
        return self.row.step_seconds or math.nan

    @property
    def memory_error(self) -> float:
        """Predicted over measured peak memory of the fullest device, less 1."""
        return (
            self.estimate.peak_memory_bytes / 2**30 / (self.row.peak_memory_gib or math.nan) - 1.0
        )


def own_frame(runs: Sequence[PredictedRun]) -> pandas.DataFrame:
    """Runs as the judge takes them, with intervals by the predictions alone."""
    return pandas.DataFrame(
        {
            "name": f"{run.row.place} {run.row.layout}",
            "predicted_seconds": run.estimate.step_seconds,
            "measured_seconds": run.measured_seconds,
            "log_halfwidth": own_halfwidth(run.estimate),
        }
        for run in runs
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NotPredicted:
    """A row for which nothing was predicted."""

    row: RunRow
    reason: str


def run_of(row: RunRow, folders: Sequence[Path], measured_links: Sequence[str]) -> Run:
    """A row as hetplan's values; an InputError says why it cannot be one.

    `folders`: where plans of mixed runs are looked for. `measured_links`: links with samples.
    """
    if row.step_seconds is None:
        raise InputError("the row has no step time")
    if row.faults:
        # An empty cell has a usual meaning; one that cannot be read has none.
        raise InputError("; ".join(row.faults))
    model, notes = model_of(row)
    if len(kind_names(row.gpu)) > 1:
        mixed = find_mixed(row, folders)
        cluster, planned = mixed_run(row, model, mixed, measured_links)
    else:
        cluster = cluster_of(row, measured_links)
        planned = plan_of(row, model, cluster)
    return Run(
        row=row,
        model=model,
        cluster=cluster,
        job=planned.job,
        plan=planned.plan,
        notes=(*notes, *cluster_notes(row, cluster), *planned.notes),
    )


def predict_rows(
    rows: Sequence[RunRow], folders: Sequence[Path], predictor: FittedPredictor
) -> tuple[tuple[PredictedRun, ...], tuple[NotPredicted, ...]]:
    """Every row, one way or the other."""
    links = tuple(law.link for law in predictor.laws.links)
    done: list[PredictedRun] = []
    left: list[NotPredicted] = []
    for row in rows:
        try:
            done.append(run_of(row, folders, links).predicted(predictor))
        except HetplanError as fault:
            left.append(NotPredicted(row=row, reason=str(fault).replace("\n", "; ")))
    return tuple(done), tuple(left)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInterval:
    """Width of a run's 90 % interval by measured runs of other cells."""

    log_halfwidth: float
    stands_on: str
    """In words, without how many runs there are: leaving out another cell leaves another number
    and nothing else."""


def cell_of(run: PredictedRun) -> str:
    """Runs that are left out together."""
    row = run.row
    return f"{row.model} tp{row.tp or 1} pp{row.pp or 1}"


def error_of(run: PredictedRun) -> RunError:
    """The run as calibration wants it."""
    return run_error(
        run.estimate,
        run.plan,
        run.cluster,
        measured_seconds=run.measured_seconds,
        cell=cell_of(run),
        source=run.row.data_set,
    )


def _is_narrow(run: PredictedRun) -> bool:
    """Whether its products' format was measured nowhere: errors of such runs say nothing of others,
    nor others' of them.
    """
    return run.row.product_format is not None


def run_intervals(
    runs: Sequence[PredictedRun], known: Sequence[PredictedRun]
) -> tuple[RunInterval, ...]:
    """The interval of every run, by those of the `known` ones that are of other cells.

    `known`: runs whose measured times may be used, which are those of the fitted folder. Where they
    say nothing the interval is that of the predictions alone.
    """
    errors = [(error_of(run), _is_narrow(run)) for run in known]
    kept: dict[tuple[str, bool], Calibration] = {}
    found = []
    for run in runs:
        key = cell, narrow = cell_of(run), _is_narrow(run)
        if key not in kept:
            others = [e for e, of_narrow in errors if e.cell != cell and of_narrow == narrow]
            kept[key] = calibrate(others, factors=False)
        devices = devices_of(run.plan, run.cluster)
        regime = regime_of(run.plan, run.cluster)
        group, own = kept[key].group(devices, regime), own_halfwidth(run.estimate)
        if group is None:
            found.append(RunInterval(log_halfwidth=own, stands_on="by the predictions alone"))
            continue
        kinds = ", ".join(group.devices) or "any device kind"
        words = f"interval by measured runs of {kinds}, {group.regime or 'any size'}"
        if group.pooled:
            words += f": pooled, too few are of {', '.join((*devices, regime))}"
        found.append(RunInterval(log_halfwidth=group.halfwidth(own), stands_on=words))
    return tuple(found)


def tails_of(known: Sequence[PredictedRun]) -> tuple[str, ...]:
    """Slow tails among these runs, in words: intervals are of the others."""
    calibration = calibrate([error_of(run) for run in known], factors=False)
    return tuple(
        f"{', '.join(tail.devices) or 'any device'}: {tail.note}" for tail in calibration.tails
    )
