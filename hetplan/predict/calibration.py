"""What do measured steps change in the predictions of other steps, and do they make them better?

    calibrate(runs) -> Calibration     factors per device kind and link, and widths of intervals

Factors (`calibration_fit`) must pass a gate: every cell of runs is left out once and predicted with
factors from the other cells. They are kept only where left-out runs became better in more cases
than a coin would make better (`_COIN`), in the median and in the mean; otherwise they are refused,
with the numbers in `Calibration.held_back` and in words in its notes. On vTrain's runs (150 draws
of 8 runs, judged on the other 65, predicted from unit samples) factors without the gate made 61 %
of the draws worse, with it 1 %; of predictions that are 10 % wrong it accepts 9 in 10.

Widths (`calibration_intervals`) come from the errors of the same left-out predictions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from hetplan.cluster.spec import Cluster
from hetplan.plans.plan import Plan
from hetplan.predict.calibration_fit import corrected_log_error, fit_factors
from hetplan.predict.calibration_intervals import Score, group_intervals, slow_tails
from hetplan.predict.calibration_values import Calibration, CauseFactor, HeldBack, RunError

REGIMES = ("one node", "several nodes", "several islands", "several regions")
"""How far apart the devices of a run are."""

# A coin makes as many runs better in fewer than 5 % of all throws: 7 of 8 runs, 5 of 5.
_COIN = 0.05
# Luck seldom halves median and mean, so then 15 % are enough: 6 of 8 runs, 3 of 3.
_COIN_OF_HALF = 0.15
_MIN_CELLS = 3  # with two, the factors of one would judge the other alone
_NOTHING = 1e-9  # changes of a log error below it are rounding


def regime_of(plan: Plan, cluster: Cluster) -> str:
    """Which of `REGIMES` a plan's devices make."""
    ends = _ends(plan)
    islands = {cluster.island_of_device(device).name for device in ends}
    nodes = {cluster.node_of_device(device) for device in ends}
    if len({cluster.island(name).region for name in islands}) > 1:
        return REGIMES[3]
    if len(islands) > 1:
        return REGIMES[2]
    return REGIMES[1] if len(nodes) > 1 else REGIMES[0]


def devices_of(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Device kinds that a plan uses, sorted."""
    return tuple(sorted({cluster.island_of_device(each).device.kind for each in _ends(plan)}))


def _ends(plan: Plan) -> tuple[int, ...]:
    """First and last of every range of devices: islands and nodes have consecutive numbers."""
    return tuple(
        device
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for replica in stage.replicas
        for devices in replica.devices
        for device in (devices.start, devices.last)
    )


def calibrate(runs: Sequence[RunError], *, factors: bool = True) -> Calibration:
    """What these runs say about predictions of others; nothing of no runs.

    `factors=False` leaves predictions as they are, and gives widths only.
    """
    order = sorted(
        runs, key=lambda run: (run.source, run.cell, run.predicted_seconds, run.measured_seconds)
    )
    found, judged, notes = _factors(order) if factors else ((), None, ())
    errors = tuple(run.log_error for run in order)
    if found:
        errors = left_out_errors(order)
    scores = tuple(
        Score(
            cell=run.cell,
            devices=run.devices,
            regime=run.regime,
            log_error=error,
            own=run.log_halfwidth,
        )
        for run, error in zip(order, errors, strict=True)
    )
    tails, kept, slow = slow_tails(scores)
    intervals, said = group_intervals(kept, slow)
    return Calibration(
        factors=found,
        held_back=judged,
        intervals=intervals,
        tails=tails,
        runs=len(order),
        sources=tuple(sorted({run.source for run in order})),
        notes=(*notes, *said),
    )


def left_out_errors(runs: Sequence[RunError]) -> tuple[float, ...]:
    """log(measured / predicted) of every run with factors from the runs of other cells."""
    fitted = {
        cell: fit_factors([run for run in runs if run.cell != cell])
        for cell in {run.cell for run in runs}
    }
    return tuple(corrected_log_error(run, fitted[run.cell]) for run in runs)


def _factors(
    runs: Sequence[RunError],
) -> tuple[tuple[CauseFactor, ...], HeldBack | None, tuple[str, ...]]:
    """(accepted factors, how left-out runs fared, what to say)."""
    cells = len({run.cell for run in runs})
    if cells < _MIN_CELLS:
        if not runs:
            return (), None, ()
        note = (
            f"no factors: {len(runs)} runs of {cells} layouts; at least {_MIN_CELLS} layouts "
            "are needed to leave one out"
        )
        return (), None, (note,)
    judged = _judged(runs)
    text = (
        f"left-out runs: {judged.better} of {judged.runs} better, off by "
        f"{_times(judged.median_before)} -> {_times(judged.median_after)} in the median, "
        f"{_times(judged.mean_before)} -> {_times(judged.mean_after)} in the mean of logarithms"
    )
    if not judged.accepted:
        fell = judged.median_after < judged.median_before and judged.mean_after < judged.mean_before
        text += ", which luck may do as well" if fell else ", not both less than before"
        return (), judged, (f"factors refused, predictions stay as they are; {text}",)
    found = fit_factors(runs)
    return found, judged, (f"factors accepted; {text}",)


def _judged(runs: Sequence[RunError]) -> HeldBack:
    before = [abs(run.log_error) for run in runs]
    after = [abs(error) for error in left_out_errors(runs)]
    pairs = tuple(zip(before, after, strict=True))
    better = sum(new < old - _NOTHING for old, new in pairs)
    changed = sum(abs(new - old) > _NOTHING for old, new in pairs)
    medians = statistics.median(before), statistics.median(after)
    means = statistics.fmean(before), statistics.fmean(after)
    return HeldBack(
        runs=len(runs),
        better=better,
        median_before=medians[0],
        median_after=medians[1],
        mean_before=means[0],
        mean_after=means[1],
        accepted=_passes(_by_chance(better, changed), medians, means),
    )


def _passes(chance: float, medians: tuple[float, float], means: tuple[float, float]) -> bool:
    """Whether errors (before, after) fell by more than luck."""
    if chance < _COIN:
        return medians[1] < medians[0] and means[1] < means[0]
    halved = medians[1] < medians[0] / 2.0 and means[1] < means[0] / 2.0
    return chance < _COIN_OF_HALF and halved


def _by_chance(better: int, changed: int) -> float:
    """Probability that a coin makes at least so many of the changed runs better."""
    return sum(math.comb(changed, each) for each in range(better, changed + 1)) / 2.0**changed


def _times(log_error: float) -> str:
    """As a factor, because too high and too low count alike."""
    return f"x {math.exp(log_error):.3f}"
