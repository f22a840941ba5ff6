"""What measured steps change in the predictions of other steps: factors, and widths of intervals.

    calibrate(runs) -> Calibration

Factors. A step is the sum of its parts, S_j seconds predicted from cause j, so its measured time y
is taken as

    log y = log sum_j S_j exp(t_j) + e        e: Cauchy of scale s        t_j: Cauchy of scale r_j

and t is the mode of the posterior. Both have heavy tails. Errors of runs do (slow nodes, busy
fabrics), so one run far off has next to no say. And a law is either nearly right or wrong by any
amount: r_j is what the law says about itself, at most `_CAP`, so a few runs hardly move a well
measured part, yet runs that agree on a large factor are believed. (A normal prior of that width
holds on to a law that is 40 % off against eight runs; one as wide as a guess's half-width lets
eight runs of a right law move it.)

It is solved by iteratively reweighted Gauss-Newton steps: the weight of run i is 2 / (s^2 + e_i^2),
the derivative of log(1 + (e / s)^2) over e; the prior's is alike. The posterior may have several
modes (a few runs on a line, the others elsewhere), so it is solved from no factor and from the
median error, and the likelier mode is kept.

Factors must pass a gate: every cell of runs is left out once and predicted with factors from the
other cells. They are kept only where left-out runs became better in more cases than a coin would
make better (`_COIN`), in the median and in the mean; otherwise they are refused, with the numbers
in `Calibration.held_back` and in words in its notes. On vTrain's runs (150 draws of 8 runs, judged
on the other 65, predicted from unit samples) factors without the gate made 61 % of the draws worse,
with it 1 %; of predictions that are 10 % wrong it accepts 9 in 10.

Widths come from the errors of the same left-out predictions, by split conformal prediction
(Papadopoulos 2008): of n errors |log(measured / predicted)| the one of rank ceil((n + 1) * 0.9)
bounds the next one with 90 % probability if runs are exchangeable within a group, which needs
n >= 9. Groups are a device kind (or a mix) and a regime; below 9 runs they are pooled, first with
other regimes of the same devices, then with other devices, and say so; pools need twice as many.

Where predictions know which of them are worse, errors over the prediction's own half-width are more
alike than errors (normalised scores: Papadopoulos 2008, Romano and others 2019); whether they do is
decided per group by the interval score (Gneiting and Raftery 2007, eq. 43) of left-out cells.

A few runs that are far slower than all others (a slow node, a busy fabric) would make every
interval as wide as the worst cluster. They are told apart by their distance from the median and
reported as a tail with its share; the intervals are of the others. Such a group can make intervals
wider than the predictions' own, never narrower: its runs were chosen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hetplan.cluster.spec import Cluster
from hetplan.plans.plan import Plan
from hetplan.predict.calibration.values import (
    Calibration,
    CauseFactor,
    GroupInterval,
    HeldBack,
    RunError,
    SlowTail,
)
from hetplan.predict.regression import (
    COVERAGE,
    MIN_CALIBRATION_ROWS,
    NORMAL_90,
    conformal_halfwidth,
)
from hetplan.units import counted

# Scale of the errors that no factor explains: half of 57 A100 runs without slow ones are within
# 0.02 of predictions from unit samples (vTrain's runs, leave-one-out of 400 draws of 8).
SCALE = 0.02
_STEPS = 60  # far more than it takes; a start that creeps must still end
_HALVINGS = 20  # a step a millionth as long that does not lower the loss: this is the mode
# Scale of a law's own error, at most: vTrain's runs, 150 draws of 8 of its 73, predicted from unit
# samples and then made 0, 5, 10 and 15 % wrong; accepted factors made the other 65 worse in at most
# 1 % of the draws.
_CAP = 0.03
_CLOSE = 1e-10  # of the loss: below, another step changes no digit that is kept

Floats = NDArray[np.float64]
_Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Problem:
    """Runs as arrays."""

    parts: Floats
    """Seconds, [runs, causes]."""
    fixed: Floats
    """Seconds that no factor moves, [runs]."""
    measured: Floats
    """Logarithm, [runs]."""
    spread: Floats
    """Scale of the prior, [causes]."""

    def at(self, logs: Floats) -> tuple[Floats, Floats]:
        """(errors, derivative of the predicted logarithm) with these factors."""
        moved = self.parts * np.exp(logs)
        whole = moved.sum(axis=1) + self.fixed
        return self.measured - np.log(whole), moved / whole[:, None]

    def loss(self, logs: Floats) -> float:
        """Negative logarithm of the posterior, less a constant."""
        errors, _ = self.at(logs)
        own = float(np.sum(np.log1p((logs / self.spread) ** 2)))
        return float(np.sum(np.log1p((errors / SCALE) ** 2))) + own


def fit_factors(runs: Sequence[RunError]) -> tuple[CauseFactor, ...]:
    """The likeliest factor of every cause and name, sorted; none without runs."""
    keys = _keys(runs)
    if not keys:
        return ()
    problem = _problem(runs, keys)
    logs = _mode(problem)
    errors, slopes = problem.at(logs)
    weights = 2.0 / (SCALE**2 + errors**2)
    prior = np.diag(2.0 / (problem.spread**2 + logs**2))
    inverse = np.linalg.inv(slopes.T @ (weights[:, None] * slopes) + prior)
    return tuple(
        CauseFactor(
            cause=cause,
            name=name,
            factor=float(np.exp(logs[j])),
            log_halfwidth=float(NORMAL_90 * np.sqrt(inverse[j, j])),
            runs=int(np.count_nonzero(problem.parts[:, j])),
        )
        for j, (cause, name) in enumerate(keys)
    )


def corrected_run(run: RunError, factors: Sequence[CauseFactor]) -> RunError:
    """The run beside what is predicted when its parts are multiplied by these factors."""
    by = {(each.cause, each.name): each.factor for each in factors}
    more = sum(part.seconds * (by.get((part.cause, part.name), 1.0) - 1.0) for part in run.parts)
    return replace(run, predicted_seconds=run.predicted_seconds + more) if more else run


def _keys(runs: Sequence[RunError]) -> tuple[_Key, ...]:
    """What can be corrected: parts that take time and are not certain."""
    return tuple(
        sorted(
            {
                (part.cause, part.name)
                for run in runs
                for part in run.parts
                if part.log_halfwidth > 0 and part.seconds > 0
            }
        )
    )


def _problem(runs: Sequence[RunError], keys: Sequence[_Key]) -> _Problem:
    column = {key: j for j, key in enumerate(keys)}
    parts = np.zeros((len(runs), len(keys)))
    widths: list[list[float]] = [[] for _ in keys]
    for i, run in enumerate(runs):
        for part in run.parts:
            j = column.get((part.cause, part.name))
            if j is not None and part.log_halfwidth > 0 and part.seconds > 0:
                parts[i, j] += part.seconds
                widths[j].append(part.log_halfwidth)
    predicted = np.array([run.predicted_seconds for run in runs])
    return _Problem(
        parts=parts,
        fixed=np.maximum(predicted - parts.sum(axis=1), 0.0),
        measured=np.log([run.measured_seconds for run in runs]),
        spread=np.array([min(float(np.median(each)) / NORMAL_90, _CAP) for each in widths]),
    )


def _mode(problem: _Problem) -> Floats:
    """The likeliest factors' logarithms."""
    none = np.zeros(problem.parts.shape[1])
    errors, _ = problem.at(none)
    starts = (none, none + float(np.median(errors)))
    return min((_descended(problem, start) for start in starts), key=problem.loss)


def _descended(problem: _Problem, logs: Floats) -> Floats:
    """A mode near these, by steps that are halved until the loss falls."""
    loss = problem.loss(logs)
    for _ in range(_STEPS):
        errors, slopes = problem.at(logs)
        weighted = slopes.T * (2.0 / (SCALE**2 + errors**2))
        prior = 2.0 / (problem.spread**2 + logs**2)
        step = np.linalg.solve(weighted @ slopes + np.diag(prior), weighted @ errors - prior * logs)
        for _halving in range(_HALVINGS):
            new = problem.loss(logs + step)
            if new < loss:
                break
            step = step / 2.0
        else:
            return logs
        logs, gained, loss = logs + step, loss - new, new
        if gained < _CLOSE:
            return logs
    return logs


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
    accepted, judged, notes = _factors(order) if factors else ((), None, ())
    tails, kept, slow = slow_tails(left_out_runs(order) if accepted else order)
    intervals, said = group_intervals(kept, slow)
    return Calibration(
        factors=accepted,
        held_back=judged,
        intervals=intervals,
        tails=tails,
        runs=len(order),
        sources=tuple(sorted({run.source for run in order})),
        notes=(*notes, *said),
    )


def left_out_runs(runs: Sequence[RunError]) -> tuple[RunError, ...]:
    """Every run beside its prediction with factors from the runs of other cells."""
    fitted = {
        cell: fit_factors([run for run in runs if run.cell != cell])
        for cell in {run.cell for run in runs}
    }
    return tuple(corrected_run(run, fitted[run.cell]) for run in runs)


def _factors(
    runs: Sequence[RunError],
) -> tuple[tuple[CauseFactor, ...], HeldBack | None, tuple[str, ...]]:
    """(accepted factors, how left-out runs fared, what to say)."""
    cells = len({run.cell for run in runs})
    if cells < _MIN_CELLS:
        if not runs:
            return (), None, ()
        note = (
            f"no factors: {counted(len(runs), 'run')} of {counted(cells, 'layout')}; at least "
            f"{_MIN_CELLS} layouts are needed to leave one out"
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
    fitted = fit_factors(runs)
    return fitted, judged, (f"factors accepted; {text}",)


def _judged(runs: Sequence[RunError]) -> HeldBack:
    before = [abs(run.log_error) for run in runs]
    after = [abs(run.log_error) for run in left_out_runs(runs)]
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


MIN_POOLED = 2 * MIN_CALIBRATION_ROWS
"""Runs of a pool: they are of unlike groups, so one of them must not set the width alone."""
_MIN_WITH_TAIL = 20  # below, a single slow run is more than one in twenty, and no tail yet

# 95 % of 57 A100 runs without slow ones lie within 0.052 of their predictions: a tail starts beyond
# all of them.
_TAIL_LOG = 0.08
_TAIL_DEVIATIONS = 3.0  # one run in 740 of a normal law lies above
_MAD_TO_DEVIATION = 1.4826  # of a normal law: one over its 75 % quantile, 0.6745
_MAX_SLOW = 0.4  # where two runs in five are slow the others are no rule they break

_Measure = Callable[[RunError], float]


def conformal_quantile(values: Sequence[float]) -> float:
    """The size of rank ceil((n + 1) * 0.9) among n; infinite of fewer than 9."""
    halfwidth = conformal_halfwidth(values)
    return math.inf if halfwidth is None else halfwidth


def group_intervals(
    runs: Sequence[RunError], slow: Sequence[RunError] = ()
) -> tuple[tuple[GroupInterval, ...], tuple[str, ...]]:
    """(widths of every group that has enough runs, and of the pools; what to say).

    `slow` runs are in a tail and not among `runs`.
    """
    groups = sorted({(run.devices, run.regime) for run in runs})
    keys = [*groups, *((devices, "") for devices in sorted({key[0] for key in groups}))]
    keys += [((), regime) for regime in sorted({key[1] for key in groups})]
    keys.append(((), ""))
    intervals = []
    for devices, regime in keys:
        group = members(runs, devices, regime)
        pooled = not devices or not regime
        if len(group) >= (MIN_POOLED if pooled else MIN_CALIBRATION_ROWS):
            tail = len(members(slow, devices, regime))
            intervals.append(_interval(group, (devices, regime), tail, pooled))
    sizes = {key: len(members(runs, *key)) for key in groups}
    few = [
        f"{', '.join(devices)}, {regime}: {counted(size, 'run')}, fewer than the "
        f"{MIN_CALIBRATION_ROWS} that an interval of their own needs"
        for (devices, regime), size in sizes.items()
        if size < MIN_CALIBRATION_ROWS
    ]
    return tuple(intervals), tuple(few)


def members(runs: Sequence[RunError], devices: tuple[str, ...], regime: str) -> list[RunError]:
    """Runs of a group; no devices or no regime: any."""
    return [
        run
        for run in runs
        if (not devices or run.devices == devices) and (not regime or run.regime == regime)
    ]


def _interval(
    held: Sequence[RunError], group: tuple[tuple[str, ...], str], slow_runs: int, pooled: bool
) -> GroupInterval:
    plain = conformal_quantile([_plain(run) for run in held])
    scaled = all(run.log_halfwidth > 0 for run in held) and (
        _left_out_score(held, _normalised) < _left_out_score(held, _plain)
    )
    return GroupInterval(
        devices=group[0],
        regime=group[1],
        log_halfwidth=plain,
        rows=len(held),
        pooled=pooled,
        scale=conformal_quantile([_normalised(run) for run in held]) if scaled else None,
        least_log_halfwidth=statistics.median(_plain(run) for run in held),
        slow_runs=slow_runs,
    )


def _plain(run: RunError) -> float:
    return abs(run.log_error)


def _normalised(run: RunError) -> float:
    return abs(run.log_error) / run.log_halfwidth


def _left_out_score(held: Sequence[RunError], measure: _Measure) -> float:
    """Mean interval score of every run with the width that runs of other cells give; infinite
    where those are too few.
    """
    total = 0.0
    for cell in sorted({run.cell for run in held}):
        quantile = conformal_quantile([measure(each) for each in held if each.cell != cell])
        for run in held:
            if run.cell == cell:
                unit = run.log_halfwidth if measure is _normalised else 1.0
                width = quantile * unit
                missed = max(0.0, abs(run.log_error) - width)
                total += 2.0 * width + 2.0 / (1.0 - COVERAGE) * missed
    return total / len(held)


def slow_tails(
    runs: Sequence[RunError],
) -> tuple[tuple[SlowTail, ...], tuple[RunError, ...], tuple[RunError, ...]]:
    """(tails of groups that have one, the runs that are in none, the runs that are in one)."""
    tails: list[SlowTail] = []
    slow: set[RunError] = set()
    for devices, regime in sorted({(run.devices, run.regime) for run in runs}):
        group = members(runs, devices, regime)
        beyond = _beyond(group)
        if not beyond or len(beyond) > _MAX_SLOW * len(group):
            continue
        slow.update(beyond)
        errors = [math.expm1(run.log_error) for run in beyond]
        tails.append(
            SlowTail(
                devices=devices,
                regime=regime,
                runs=len(group),
                slow=len(beyond),
                least=min(errors),
                most=max(errors),
            )
        )
    return (
        tuple(tails),
        tuple(run for run in runs if run not in slow),
        tuple(run for run in runs if run in slow),
    )


def _beyond(group: Sequence[RunError]) -> list[RunError]:
    """Runs far above the median, by the spread of the runs and by what their predictions give."""
    if len(group) < _MIN_WITH_TAIL:
        return []
    middle = statistics.median(run.log_error for run in group)
    above = [run.log_error - middle for run in group]
    limit = max(_TAIL_LOG, _TAIL_DEVIATIONS * _deviation(above))
    relative, most = above, limit
    if all(run.log_halfwidth > 0 for run in group):
        relative = [each / run.log_halfwidth for each, run in zip(above, group, strict=True)]
        most = _TAIL_DEVIATIONS * _deviation(relative)
    return [
        run
        for run, plain, own in zip(group, above, relative, strict=True)
        if plain > limit and own > most
    ]


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation around 0 of a normal law with this median distance."""
    return _MAD_TO_DEVIATION * statistics.median(abs(each) for each in values)
