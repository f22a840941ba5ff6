"""Which factors on predictions would have made measured steps right, when a few runs are wild?

A step is the sum of its parts, S_j seconds predicted from cause j, so its measured time y is taken
as

    log y = log sum_j S_j exp(t_j) + e        e: Cauchy of scale s        t_j: Cauchy of scale r_j

and t is the mode of the posterior. Both have heavy tails. Errors of runs do (slow nodes, busy
fabrics), so one run far off has next to no say. And a law is either nearly right or wrong by any
amount: r_j is what the law says about itself, at most `_CAP`, so a few runs hardly move a well
measured part, yet runs that agree on a large factor are believed. (A normal prior of that width
holds on to a law that is 40 % off against eight runs; one as wide as a guess's half-width lets
eight runs of a right law move it.) Symbols: S parts, t factors' logarithms, e errors.

Solved by iteratively reweighted Gauss-Newton steps: the weight of run i is 2 / (s^2 + e_i^2), which
is the derivative of log(1 + (e / s)^2) over e; the prior's is alike. The posterior may have several
modes (a few runs on a line, the others elsewhere), so it is solved from no factor and from the
median error, and the likelier mode is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetplan.predict.calibration_values import CauseFactor, RunError
from hetplan.predict.regression import NORMAL_90

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


def corrected_log_error(run: RunError, factors: Sequence[CauseFactor]) -> float:
    """log(measured / predicted) of a run when its parts are multiplied by these factors."""
    by = {(each.cause, each.name): each.factor for each in factors}
    more = sum(part.seconds * (by.get((part.cause, part.name), 1.0) - 1.0) for part in run.parts)
    return run.log_error - float(np.log1p(more / run.predicted_seconds))


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
