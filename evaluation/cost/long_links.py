"""Predict long links that nobody measured, and leave out every measured pair of cities in turn.

The pairs are those published with DT-FM (Yuan et al., NeurIPS 2022): ten cities, round trips of 11
to 265 ms.

One sender's goodput between the endpoints i and j (cities, sites) at a round trip of T seconds is

    goodput = min(C, n * W_ij / T),    W_ij = W * sqrt(a_i * a_j)

C: what any endpoint can send at most; n: streams (connections) of the sender; W: bytes that a
stream of the typical pair has under way in one round trip;
a_i: how many times as large an endpoint's window is as the typical one (its buffers, its kernel,
its provider).
It is the window law of `cluster.goodput`: a window belongs to the two ends, not to the line.

    log(goodput) = min(c, w + (log a_i + log a_j) / 2 - log (T / n))

is fitted by least squares over the pairs on each side of the minimum, which are assigned again
until nothing changes, from several first guesses. The log a_i are shrunk to 0 (ridge) so that an
endpoint with few pairs stays close to the typical one; how much is chosen by the errors of every
pair left out of the fit, which ridge regression gives in closed form (Allen's PRESS statistic,
Technometrics 16, 1974). Two simpler models are kept to compare with: one window for all
(every a_i = 1), and a constant goodput.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hetplan.cost.arrays import Floats
from hetplan.errors import InputError
from hetplan.predict.datasheet import LINK_LOG_HALFWIDTH
from hetplan.predict.regression import conformal_halfwidth

Flags = NDArray[np.bool_]

PAIRS_FILE = Path("unit") / "wan_city_pairs.csv"
MIN_PAIRS = 3
"""Fewest pairs that a window and a capacity can be told from, with one to spare."""
_SHRINKAGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 1e3)  # 1e3: endpoints as good as alike
_FIRST_GUESSES = (0.5, 0.75, 0.9, 1.0)  # quantiles of the goodput that may be the capacity
_MAX_TURNS = 30  # the sides settle within 10 turns on all that was tried
_NOTHING = 1e-12  # keeps the factors of endpoints determined that no sloping pair has


class LongLinkModel(StrEnum):
    """What is fitted."""

    CONSTANT = "constant goodput"
    ONE_WINDOW = "one window"
    PER_ENDPOINT = "window per endpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A measurement between two endpoints, as iperf and ping show it."""

    left: str
    right: str
    round_trip_seconds: float
    goodput_bytes_per_second: float
    """Of all streams together."""
    streams: int = 1
    """Connections that were measured at the same time."""

    def __post_init__(self) -> None:
        for name in ("round_trip_seconds", "goodput_bytes_per_second"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(
                    f"{self.left} to {self.right}: {name} is {getattr(self, name)}; it must be "
                    "above 0 and finite"
                )
        if self.streams < 1 or self.left == self.right:
            raise InputError(
                f"{self.left} to {self.right}, {self.streams} streams: a link has two ends and at "
                "least one stream"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LongLinkLaw:
    """A fit."""

    capacity_bytes_per_second: float
    window_bytes: float
    """Of the typical pair; infinite where no sample was limited by a window."""
    windows: dict[str, float]
    """Window of a pair whose both ends are like this endpoint, by name."""
    log_halfwidth: float
    """Of the interval around a prediction between endpoints that have samples."""
    log_halfwidth_unknown: float
    """The same for an endpoint without samples."""

    def predict(
        self, left: str, right: str, round_trip_seconds: float, streams: int = 1
    ) -> tuple[float, float]:
        """(goodput of one sender, half-width of its interval in the logarithm).

        Endpoints without samples count as typical.
        """
        one, two = (self.windows.get(name, self.window_bytes) for name in (left, right))
        window = math.sqrt(one) * math.sqrt(two)
        goodput = min(self.capacity_bytes_per_second, streams * window / round_trip_seconds)
        known = self.windows.keys() >= {left, right}
        return goodput, self.log_halfwidth if known else self.log_halfwidth_unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutErrors:
    """|predicted / measured - 1| of pairs that the fit did not see."""

    model: LongLinkModel
    pairs: int
    mean: float
    median: float
    largest: float
    covered: float
    """Part of the pairs whose measurement is inside its interval."""


def long_link_errors(reference: Path) -> tuple[LeftOutErrors, ...]:
    """One row per model."""
    pairs = city_pairs(reference)
    return tuple(left_out_errors(pairs, model) for model in LongLinkModel)


def city_pairs(reference: Path) -> tuple[Pair, ...]:
    """The measured pairs; an InputError where the file is not there or a row is wrong."""
    path = reference / PAIRS_FILE
    if not path.is_file():
        raise InputError(f"{path} is not there; name the folder of reference data")
    with path.open(newline="") as file:
        try:
            return tuple(
                Pair(
                    left=row["from"],
                    right=row["to"],
                    round_trip_seconds=float(row["rtt_or_delay_ms_as_published"]) / 1e3,
                    goodput_bytes_per_second=float(row["bandwidth_gbit_per_s"]) * 1e9 / 8,
                )
                for row in csv.DictReader(file)
            )
        except (KeyError, ValueError) as fault:
            raise InputError(f"{path}: {fault} is missing or no number") from fault


def left_out_errors(pairs: Sequence[Pair], model: LongLinkModel) -> LeftOutErrors:
    """Errors of every pair, predicted by a fit of all others.

    Everything about the fit, its shrinkage included, is chosen without the pair that is left out.
    """
    errors, covered = [], 0
    for number, pair in enumerate(pairs):
        others = [*pairs[:number], *pairs[number + 1 :]]
        seen = {name for other in others for name in (other.left, other.right)}
        law = fit_long_links(others, model, unknown_endpoints=not seen >= {pair.left, pair.right})
        goodput, halfwidth = law.predict(
            pair.left, pair.right, pair.round_trip_seconds, pair.streams
        )
        measured, wide = pair.goodput_bytes_per_second, math.exp(halfwidth)
        errors.append(abs(goodput / measured - 1))
        covered += goodput / wide <= measured <= goodput * wide
    return LeftOutErrors(
        model=model,
        pairs=len(pairs),
        mean=math.fsum(errors) / len(errors),
        median=statistics.median(errors),
        largest=max(errors),
        covered=covered / len(pairs),
    )


def fit_long_links(
    pairs: Sequence[Pair],
    model: LongLinkModel = LongLinkModel.PER_ENDPOINT,
    *,
    unknown_endpoints: bool = True,
) -> LongLinkLaw:
    """The law of these pairs, its shrinkage chosen by the errors of pairs left out.

    `unknown_endpoints`: whether to leave out whole endpoints too, which takes longer, for the
    interval of endpoints that have no sample.
    """
    if len(pairs) < MIN_PAIRS:
        raise InputError(f"{len(pairs)} pairs were measured; a fit needs at least {MIN_PAIRS}")
    names = sorted({name for pair in pairs for name in (pair.left, pair.right)})
    samples = _Samples.of(pairs, names)
    best = _best(samples, model)
    unknown: list[float] = []
    for endpoint in range(len(names) if unknown_endpoints else 0):
        has = samples.ends[:, endpoint] > 0
        if has.any() and (~has).sum() >= MIN_PAIRS:
            rest = _best(samples.only(~has), model)
            unknown += (samples.log_goodput[has] - rest.predict(samples.only(has))).tolist()
    typical = math.exp(best.window)
    halfwidth = _halfwidth(best.left_out.tolist())
    return LongLinkLaw(
        capacity_bytes_per_second=math.exp(best.capacity),
        window_bytes=typical,
        windows={
            name: typical * math.exp(factor)
            for name, factor in zip(names, best.factors.tolist(), strict=True)
        },
        log_halfwidth=halfwidth,
        log_halfwidth_unknown=max(halfwidth, _halfwidth(unknown)),
    )


def _halfwidth(errors: Sequence[float]) -> float:
    """Of nine in ten errors; with too few of them the widest, but no less than for figures."""
    found = conformal_halfwidth(errors)
    return max([LINK_LOG_HALFWIDTH, *map(abs, errors)]) if found is None else found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Samples:
    """Pairs as arrays."""

    ends: Floats
    """[pair, endpoint]: one half at both of its ends."""
    log_round_trip: Floats
    """Of one stream's part: round trip over streams."""
    log_goodput: Floats

    @staticmethod
    def of(pairs: Sequence[Pair], names: Sequence[str]) -> _Samples:
        ends = np.zeros((len(pairs), len(names)))
        for number, pair in enumerate(pairs):
            ends[number, names.index(pair.left)] += 0.5
            ends[number, names.index(pair.right)] += 0.5
        return _Samples(
            ends=ends,
            log_round_trip=np.log([pair.round_trip_seconds / pair.streams for pair in pairs]),
            log_goodput=np.log([pair.goodput_bytes_per_second for pair in pairs]),
        )

    def only(self, kept: Flags) -> _Samples:
        return _Samples(
            ends=self.ends[kept],
            log_round_trip=self.log_round_trip[kept],
            log_goodput=self.log_goodput[kept],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    capacity: float
    window: float
    factors: Floats
    squares: float
    left_out: Floats

    def predict(self, samples: _Samples) -> Floats:
        sloping = self.window + samples.ends @ self.factors - samples.log_round_trip
        return np.minimum(self.capacity, sloping)


def _best(samples: _Samples, model: LongLinkModel) -> _Turn:
    if model is LongLinkModel.CONSTANT:
        return _turn(samples, np.ones(len(samples.log_goodput), dtype=bool), math.inf)
    shrinkages = _SHRINKAGES if model is LongLinkModel.PER_ENDPOINT else (math.inf,)
    fits = [_settled(samples, shrinkage) for shrinkage in shrinkages]
    return min(fits, key=lambda each: float(np.abs(each.left_out).mean()))


def _settled(samples: _Samples, shrinkage: float) -> _Turn:
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


def _turn(samples: _Samples, flat: Flags, shrinkage: float) -> _Turn:
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
    return replace(turn, squares=float(errors @ errors) + penalty)
