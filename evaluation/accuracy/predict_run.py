"""What does hetplan predict for a measured run? Its own estimate, or why there is none.

Nothing is computed here: a row becomes model, cluster, job and plan, and `hetplan.cost.estimate`
prices them with the predictor that is given, as `hetplan estimate` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.accuracy.clusters import cluster_notes, cluster_of
from evaluation.accuracy.devices import kind_names
from evaluation.accuracy.mixed import find_mixed, mixed_run
from evaluation.accuracy.models import model_of
from evaluation.accuracy.plans import RunPlan, plan_of
from evaluation.accuracy.rows import RunRow
from evaluation.accuracy.scores import Judged
from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate import estimate
from hetplan.cost.estimate_values import Estimate
from hetplan.cost.run_error import own_halfwidth
from hetplan.errors import HetplanError, InputError
from hetplan.model.spec import ModelSpec
from hetplan.predict.fit import FittedPredictor

_DECIDING = ("gpus_per_node", "kv_heads", "num_experts", "tp", "pp", "cp", "ep", "dp")
"""Columns that a row may leave empty, and that make it another run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A measured run in hetplan's own values."""

    row: RunRow
    model: ModelSpec
    cluster: Cluster
    planned: RunPlan
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRun:
    """A measured run and the estimate of it."""

    run: Run
    estimate: Estimate

    @property
    def row(self) -> RunRow:
        """What was measured."""
        return self.run.row

    @property
    def measured_seconds(self) -> float:
        """Of the step."""
        return self.run.row.step_seconds or math.nan

    def judged(self, log_halfwidth: float | None = None) -> Judged:
        """As the judge sees it, with a 90 % interval of this half-width; None: the predictions'."""
        row = self.run.row
        return Judged.around(
            f"{row.place} {row.layout}",
            self.estimate.step_seconds,
            own_halfwidth(self.estimate) if log_halfwidth is None else log_halfwidth,
            self.measured_seconds,
            suspect=bool(row.suspect),
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
    deciding = (*_DECIDING, "vpp") if (row.pp or 1) > 1 else _DECIDING
    unread = [fault for fault in row.faults if fault.split()[0] in deciding]
    if unread:
        # An empty cell has a usual meaning; one that cannot be read has none.
        raise InputError("; ".join(unread))
    found = model_of(row)
    if len(kind_names(row.gpu)) > 1:
        mixed = find_mixed(row, folders)
        cluster, planned = mixed_run(row, found.model, mixed, measured_links)
    else:
        cluster = cluster_of(row, measured_links)
        planned = plan_of(row, found.model, cluster)
    return Run(
        row=row,
        model=found.model,
        cluster=cluster,
        planned=planned,
        notes=(*found.notes, *cluster_notes(row, cluster), *planned.notes),
    )


def predict_run(run: Run, predictor: FittedPredictor) -> PredictedRun:
    """The estimate of a run; an InputError where the predictor lacks what it needs."""
    plan = run.planned
    found = estimate(plan.plan, run.model, run.cluster, plan.job, predictor)
    return PredictedRun(run=run, estimate=found)


def predict_rows(
    rows: Sequence[RunRow], folders: Sequence[Path], predictor: FittedPredictor
) -> tuple[tuple[PredictedRun, ...], tuple[NotPredicted, ...]]:
    """Every row, one way or the other."""
    links = tuple(law.link for law in predictor.laws.links)
    done: list[PredictedRun] = []
    left: list[NotPredicted] = []
    for row in rows:
        try:
            done.append(predict_run(run_of(row, folders, links), predictor))
        except HetplanError as fault:
            left.append(NotPredicted(row=row, reason=str(fault).replace("\n", "; ")))
    return tuple(done), tuple(left)
