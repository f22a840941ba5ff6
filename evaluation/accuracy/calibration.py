"""Predict measured runs, calibrate on some of them, and read their clusters otherwise.

A row becomes model, cluster, job and plan, and `hetplan.cost.estimate` prices them with the given
predictor, as `hetplan estimate` does.

Intervals: the width of a run's 90 % interval comes from the errors of runs of other cells (a cell:
one model, tp and pp), by `hetplan.predict.calibration.factors` and without any factor, so
predictions stay those of unit measurements alone. A run's own cell never counts in its interval;
where another folder is judged, none of its runs counts.

Eight rows: the first eight of a data set by the hash of their configuration calibrate the
predictor, factors included; the rest of the data set is predicted with and without.

Readings: a cluster's description has lines that nothing but its runs says, or that are left out
although something is known of them. Each reading changes one such line wherever it applies:

    rings by default    groups with several devices in a node use the NICs that the library uses
    rings by own NICs   every device of such a group uses its own NIC
    a NIC each          as many NICs as devices, where all ranks are taken to use one
    speed spread        no two devices are equally fast, in every cluster alike
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evaluation.accuracy.clusters import ONE_NIC, cluster_notes, cluster_of, kind_names, network_of
from evaluation.accuracy.plans import RunPlan, find_mixed, mixed_run, plan_of
from evaluation.accuracy.rows import RunRow, model_of
from evaluation.accuracy.scores import Errors, Judged, errors_of
from hetplan.cluster.node import Nics, RingNics
from hetplan.cluster.spec import Cluster, Island
from hetplan.cost.estimate import estimate, own_halfwidth, run_error
from hetplan.cost.estimate_values import Estimate
from hetplan.errors import HetplanError, InputError
from hetplan.model.spec import ModelSpec
from hetplan.predict.calibration.factors import calibrate, devices_of, regime_of
from hetplan.predict.calibration.values import Calibration, GroupInterval, RunError
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


CALIBRATING_ROWS = 8
"""What somebody has who ran a handful of configurations before a search: a step of each takes
seconds, and a calibration judges itself from 8 runs on (`hetplan.predict.calibration.factors`)."""
_MIN_LEFT = CALIBRATING_ROWS
"""Rows that must be left to judge: no fewer than those that calibrate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInterval:
    """Half-widths of a run's 90 % interval, in the logarithm."""

    own: float
    """By the predictions alone."""
    group: GroupInterval | None
    """Measured runs of other cells that say how wide it must be; None where too few do."""
    asked: tuple[str, ...]
    """The run's device kinds, and what it spans."""

    @property
    def by_runs(self) -> float | None:
        """By measured runs of other cells."""
        return None if self.group is None else self.group.halfwidth(self.own)

    @property
    def stands_on(self) -> str:
        """In words, without how many runs there are: leaving out another cell leaves another
        number and nothing else.
        """
        if self.group is None:
            return "by the predictions alone"
        kinds = ", ".join(self.group.devices) or "any device kind"
        found = f"interval by measured runs of {kinds}, {self.group.regime or 'any size'}"
        if not self.group.pooled:
            return found
        return f"{found}: pooled, too few are of {', '.join(self.asked)}"

    @property
    def log_halfwidth(self) -> float:
        """By runs where they say anything, else by the predictions alone."""
        return self.own if self.by_runs is None else self.by_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedOn:
    """A data set's rows without the eight that calibrated, before and after."""

    data_set: str
    calibrated_on: tuple[str, ...]
    """Places of the eight."""
    accepted: bool
    """Whether the product kept the factors: they must help left-out rows among the eight."""
    before: Errors
    after: Errors
    notes: tuple[str, ...]


def cell_of(run: PredictedRun) -> str:
    """Runs that are left out together."""
    row = run.row
    return f"{row.model} tp{row.tp or 1} pp{row.pp or 1}"


def error_of(run: PredictedRun) -> RunError:
    """The run as calibration wants it."""
    return run_error(
        run.estimate,
        run.run.planned.plan,
        run.run.cluster,
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

    `known`: runs whose measured times may be used, which are those of the fitted folder.
    """
    errors = [(error_of(run), _is_narrow(run)) for run in known]
    kept: dict[tuple[str, bool], Calibration] = {}
    found = []
    for run in runs:
        key = cell, narrow = cell_of(run), _is_narrow(run)
        if key not in kept:
            others = [e for e, of_narrow in errors if e.cell != cell and of_narrow == narrow]
            kept[key] = calibrate(others, factors=False)
        plan, cluster = run.run.planned.plan, run.run.cluster
        devices, regime = devices_of(plan, cluster), regime_of(plan, cluster)
        found.append(
            RunInterval(
                own=own_halfwidth(run.estimate),
                group=kept[key].group(devices, regime),
                asked=(*devices, regime),
            )
        )
    return tuple(found)


def tails_of(known: Sequence[PredictedRun]) -> tuple[str, ...]:
    """Slow tails among these runs, in words: intervals are of the others."""
    calibration = calibrate([error_of(run) for run in known], factors=False)
    return tuple(
        f"{', '.join(tail.devices) or 'any device'}: {tail.note}" for tail in calibration.tails
    )


def eight_rows(
    runs: Sequence[PredictedRun], predictor: FittedPredictor
) -> tuple[CalibratedOn, ...]:
    """Every data set with rows enough, calibrated on its first eight by hash."""
    found = []
    for name in dict.fromkeys(run.row.data_set for run in runs):
        order = sorted(
            (run for run in runs if run.row.data_set == name),
            key=lambda run: run.row.configuration_hash,
        )
        first, rest = order[:CALIBRATING_ROWS], order[CALIBRATING_ROWS:]
        if len(rest) < _MIN_LEFT:
            continue
        calibration = calibrate([error_of(run) for run in first])
        after = _again(rest, calibration, predictor)
        one, two = errors_of([run.judged() for run in rest]), errors_of(after)
        if one is None or two is None:
            continue
        found.append(
            CalibratedOn(
                data_set=name,
                calibrated_on=tuple(run.row.place for run in first),
                accepted=bool(calibration.factors),
                before=one,
                after=two,
                notes=calibration.notes,
            )
        )
    return tuple(found)


def _again(
    runs: Sequence[PredictedRun], calibration: Calibration, predictor: FittedPredictor
) -> list[Judged]:
    """The same runs by the predictor with this calibration."""
    calibrated = FittedPredictor(replace(predictor.laws, calibration=calibration))
    found = []
    for run in runs:
        try:
            found.append(predict_run(run.run, calibrated).judged())
        except InputError:
            # A factor cannot make a prediction impossible; if it does the row is judged as it was.
            found.append(run.judged())
    return found


SPEED_SPREAD = 0.0148  # a reading of Sinha and others, Not All GPUs Are Created Equal (SC'22)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingErrors:
    """Figures of a data set as published here, and under another reading of its clusters."""

    reading: str
    data_set: str
    changed_rows: int
    """Rows whose cluster the reading changes."""
    as_published: Errors
    errors: Errors
    """Of all rows of the data set, intervals by the predictions alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    name: str
    of: Callable[[PredictedRun], Cluster]
    """The run's cluster; the same where the reading changes nothing."""


def other_readings(
    runs: Sequence[PredictedRun], predictor: FittedPredictor
) -> tuple[ReadingErrors, ...]:
    """Every reading on every data set of which it changes a row."""
    found = []
    for reading in _READINGS:
        for name in dict.fromkeys(run.row.data_set for run in runs):
            mine = [run for run in runs if run.row.data_set == name]
            clusters = [reading.of(run) for run in mine]
            changed = [new != run.run.cluster for run, new in zip(mine, clusters, strict=True)]
            if not any(changed):
                continue
            again = [
                predict_run(replace(run.run, cluster=new), predictor) if other else run
                for run, new, other in zip(mine, clusters, changed, strict=True)
            ]
            before, after = (errors_of([each.judged() for each in one]) for one in (mine, again))
            if before is not None and after is not None:
                found.append(
                    ReadingErrors(
                        reading=reading.name,
                        data_set=name,
                        changed_rows=sum(changed),
                        as_published=before,
                        errors=after,
                    )
                )
    return tuple(found)


def _with_rings(rings: RingNics | None) -> Callable[[PredictedRun], Cluster]:
    """Where the cluster says which NICs rings of strided groups use: these."""

    def changed(island: Island) -> Island:
        if island.nics is None or island.nics.rings is None:
            return island
        return replace(island, nics=replace(island.nics, rings=rings))

    return lambda run: _each_island(run.run.cluster, changed)


def _a_nic_each(run: PredictedRun) -> Cluster:
    network = network_of(run.row, needed=False)
    if network is None or network.inferred != ONE_NIC:
        return run.run.cluster
    return _each_island(run.run.cluster, _with_own_nics)


def _with_own_nics(island: Island) -> Island:
    if island.nics is None:
        return island
    nics = Nics(
        per_node=island.devices_per_node,
        bandwidth_bytes_per_second=island.nics.bandwidth_bytes_per_second,
        rings=island.nics.rings,
    )
    share = nics.share_bytes_per_second(island.devices_per_node)
    between = replace(island.inter_node, bandwidth_bytes_per_second=share)
    return replace(island, nics=nics, inter_node=between)


def _uneven(run: PredictedRun) -> Cluster:
    return _each_island(run.run.cluster, lambda island: replace(island, speed_spread=SPEED_SPREAD))


def _each_island(cluster: Cluster, changed: Callable[[Island], Island]) -> Cluster:
    return replace(cluster, islands=tuple(map(changed, cluster.islands)))


_READINGS = (
    _Reading(name="rings by the library's usual choice", of=_with_rings(None)),
    _Reading(name="rings by every device's own NIC", of=_with_rings(RingNics.OWN)),
    _Reading(name="a NIC for each device of a node", of=_a_nic_each),
    _Reading(name=f"speed_spread {SPEED_SPREAD} in every cluster", of=_uneven),
)
