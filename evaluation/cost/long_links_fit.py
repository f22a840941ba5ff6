"""The least-squares fit behind `long_links`: capacity, window and factors of endpoints.

With y = log goodput and x = log (round trip / streams) of a pair between i and j, a pair is on the
flat side where c <= w + (f_i + f_j) / 2 - x. Given the sides, c is the mean of y over the flat
pairs, and (w, f) minimise sum (y + x - w - (f_i + f_j) / 2)^2 + shrinkage * sum f^2 over the
others. The sides are found by turns; the turn with the least sum of squares counts, so a cycle
does no harm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

_SHRINKAGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 1e3)  # 1e3: endpoints as good as alike
_FIRST_GUESSES = (0.5, 0.75, 0.9, 1.0)  # quantiles of the goodput that may be the capacity
_MAX_TURNS = 30  # the sides settle within 10 turns on all that was tried
_NOTHING = 1e-12  # keeps the factors of endpoints determined that no sloping pair has


class _Pair(Protocol):
    @property
    def left(self) -> str: ...
    @property
    def right(self) -> str: ...
    @property
    def round_trip_seconds(self) -> float: ...
    @property
    def goodput_bytes_per_second(self) -> float: ...
    @property
    def streams(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Pairs as arrays."""

    ends: Floats
    """[pair, endpoint]: one half at both of its ends."""
    log_round_trip: Floats
    """Of one stream's part: round trip over streams."""
    log_goodput: Floats

    @staticmethod
    def of(pairs: Sequence[_Pair], names: Sequence[str]) -> Samples:
        """Arrays with the endpoints in this order."""
        place = {name: number for number, name in enumerate(names)}
        ends = np.zeros((len(pairs), len(names)))
        for number, pair in enumerate(pairs):
            ends[number, place[pair.left]] += 0.5
            ends[number, place[pair.right]] += 0.5
        return Samples(
            ends=ends,
            log_round_trip=np.log([pair.round_trip_seconds / pair.streams for pair in pairs]),
            log_goodput=np.log([pair.goodput_bytes_per_second for pair in pairs]),
        )

    def only(self, kept: Flags) -> Samples:
        """Some of them."""
        return Samples(
            ends=self.ends[kept],
            log_round_trip=self.log_round_trip[kept],
            log_goodput=self.log_goodput[kept],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Logarithms of what was fitted."""

    log_capacity: float
    log_window: float
    """Infinite where no pair is limited by a window."""
    log_factors: tuple[float, ...]
    left_out: tuple[float, ...]
    """log(measured / predicted) of every pair, by the fit of all others on the same sides."""
    left_out_endpoints: tuple[float, ...]
    """The same with one endpoint's pairs left out, by a fit of the rest; () with too few pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    capacity: float
    window: float
    factors: Floats
    squares: float
    left_out: Floats

    def predict(self, samples: Samples) -> Floats:
        sloping = self.window + samples.ends @ self.factors - samples.log_round_trip
        return np.minimum(self.capacity, sloping)


def fit(samples: Samples, *, per_endpoint: bool, constant: bool, unknown_endpoints: bool) -> Fit:
    """The fit of these samples, its shrinkage chosen by the errors of pairs left out.

    `unknown_endpoints`: whether to leave out endpoints too.
    """
    best = _best(samples, per_endpoint, constant)
    unknown: list[float] = []
    for endpoint in range(samples.ends.shape[1] if unknown_endpoints else 0):
        has = samples.ends[:, endpoint] > 0
        if has.any() and (~has).sum() >= 3:
            rest = _best(samples.only(~has), per_endpoint, constant)
            unknown += (samples.log_goodput[has] - rest.predict(samples.only(has))).tolist()
    return Fit(
        log_capacity=best.capacity,
        log_window=best.window,
        log_factors=tuple(best.factors.tolist()),
        left_out=tuple(best.left_out.tolist()),
        left_out_endpoints=tuple(unknown),
    )


def _best(samples: Samples, per_endpoint: bool, constant: bool) -> _Turn:
    if constant:
        return _turn(samples, np.ones(len(samples.log_goodput), dtype=bool), math.inf)
    shrinkages = _SHRINKAGES if per_endpoint else (math.inf,)
    fits = [_settled(samples, shrinkage) for shrinkage in shrinkages]
    return min(fits, key=lambda each: float(np.abs(each.left_out).mean()))


def _settled(samples: Samples, shrinkage: float) -> _Turn:
    """The turn with the least sum of squares from any first guess."""
    seen: set[bytes] = set()
    best: _Turn | None = None
    for guess in _FIRST_GUESSES:
        flat = samples.log_goodput >= np.quantile(samples.log_goodput, guess)
        for _ in range(_MAX_TURNS):
            if flat.tobytes() in seen:
                break  # every turn is a function of the sides
            seen.add(flat.tobytes())
            turn = _turn(samples, flat, shrinkage)
            if best is None or turn.squares < best.squares:
                best = turn
            flat = turn.predict(samples) >= turn.capacity
    assert best is not None  # the first guess is always new
    return best


def _turn(samples: Samples, flat: Flags, shrinkage: float) -> _Turn:
    """The fit on given sides."""
    logs, slope = samples.log_goodput, ~flat
    left_out = np.zeros(len(logs))
    # Without a flat pair the capacity is not known to be above what was seen.
    capacity = float(logs[flat].mean()) if flat.any() else float(logs.max())
    count = int(flat.sum())
    if count:
        left_out[flat] = (logs[flat] - capacity) * (count / (count - 1) if count > 1 else 1.0)
    window, factors = math.inf, np.zeros(samples.ends.shape[1])
    if slope.any():
        targets = logs[slope] + samples.log_round_trip[slope]
        ends = samples.ends[slope] if math.isfinite(shrinkage) else samples.ends[slope] * 0.0
        matrix = np.hstack([np.ones((len(targets), 1)), ends])
        weight = shrinkage if math.isfinite(shrinkage) else 1.0
        ridge = np.diag([_NOTHING, *[weight] * ends.shape[1]])
        inverse = np.linalg.inv(matrix.T @ matrix + ridge)
        solved = inverse @ matrix.T @ targets
        window, factors = float(solved[0]), solved[1:]
        leverage = np.einsum("ij,jk,ik->i", matrix, inverse, matrix)
        residuals = targets - matrix @ solved
        left_out[slope] = residuals / np.maximum(1.0 - leverage, _NOTHING)
    turn = _Turn(capacity=capacity, window=window, factors=factors, squares=0.0, left_out=left_out)
    errors = logs - turn.predict(samples)
    penalty = shrinkage * float(factors @ factors) if math.isfinite(shrinkage) else 0.0
    return _Turn(
        capacity=capacity,
        window=window,
        factors=factors,
        squares=float(errors @ errors) + penalty,
        left_out=left_out,
    )
