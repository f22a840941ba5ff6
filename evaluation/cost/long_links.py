"""The window law of long links on every measured pair of cities, which is left out in turn.

The pairs are those published with DT-FM (Yuan et al., NeurIPS 2022): ten cities, round trips of 11
to 265 ms. One sender's goodput at a round trip of T seconds is

    goodput = min(C, W / T)

C: what any endpoint can send at most; W: bytes that a stream has under way in one round trip, the
same for all pairs. It is the window law of `hetplan.cluster.links`. log(goodput) is fitted by least
squares over the pairs on each side of the minimum, which are assigned again until nothing changes,
from several first guesses. A constant goodput is the model to compare with. Intervals are of the
errors of every fitted pair left out of its side's mean.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas
from numpy.typing import NDArray

from evaluation.output import WORDS, Section
from hetplan.cost.arrays import Floats
from hetplan.errors import InputError
from hetplan.predict.link.prior import LINK_LOG_HALFWIDTH
from hetplan.predict.regression import conformal_halfwidth

PAIRS_FILE = Path("unit") / "wan_city_pairs.csv"
_FIRST_GUESSES = (0.5, 0.75, 0.9, 1.0)  # quantiles of the goodput that may be the capacity
_MAX_TURNS = 30  # the sides settle within 10 turns on all that was tried


def city_pairs(reference: Path) -> pandas.DataFrame:
    """Logarithms of round trips and goodput; an InputError for a missing file or a wrong cell."""
    path = reference / PAIRS_FILE
    if not path.is_file():
        raise InputError(f"{path} is not there; name the folder of reference data")
    table = pandas.read_csv(path)
    try:
        seconds = table["rtt_or_delay_ms_as_published"].astype(float) / 1e3
        goodput = table["bandwidth_gbit_per_s"].astype(float) * 1e9 / 8
    except (KeyError, ValueError) as fault:
        raise InputError(f"{path}: {fault} is missing or no number") from fault
    if not ((seconds > 0) & (goodput > 0)).all():
        raise InputError(f"{path}: round trips and bandwidths must be above 0")
    return pandas.DataFrame({"log_trip": np.log(seconds), "log_goodput": np.log(goodput)})


def left_out_errors(pairs: pandas.DataFrame, *, window: bool) -> dict[str, float | int | str]:
    """|predicted / measured - 1| of every pair, predicted by a fit of all others.

    `window`: by the window law; otherwise a constant goodput. `covered`: part of the pairs inside
    their 90 % interval.
    """
    trips, goodput = pairs["log_trip"].to_numpy(), pairs["log_goodput"].to_numpy()
    errors, covered = [], []
    for at in range(len(pairs)):
        others = np.arange(len(pairs)) != at
        predicted, halfwidth = predict(trips[others], goodput[others], trips[at], window=window)
        errors.append(abs(math.expm1(predicted - goodput[at])))
        covered.append(abs(predicted - goodput[at]) <= halfwidth)
    return {
        "model": "one window" if window else "constant goodput",
        "pairs": len(errors),
        "mean": float(np.mean(errors)),
        "median": float(np.median(errors)),
        "largest": max(errors),
        "covered": float(np.mean(covered)),
    }


def predict(trips: Floats, goodput: Floats, trip: float, *, window: bool) -> tuple[float, float]:
    """(log of the goodput at this log of a round trip, half-width) by a fit of the others."""
    flat = np.ones(len(trips), dtype=bool)
    found = _side_means(trips, goodput, flat)
    if window:
        fits = [
            _settled(trips, goodput, goodput >= np.quantile(goodput, guess))
            for guess in _FIRST_GUESSES
        ]
        found = min((fit for some in fits for fit in some), key=lambda fit: fit[0])
    _, capacity, level, left_out = found
    halfwidth = conformal_halfwidth(left_out.tolist())
    if halfwidth is None:  # too few pairs: the widest error, but no less than for figures
        halfwidth = max(LINK_LOG_HALFWIDTH, float(np.abs(left_out).max()))
    return min(capacity, level - trip), halfwidth


Flags = NDArray[np.bool_]
_Fit = tuple[float, float, float, Floats]
"""Sum of squares, log capacity, log window, and the error of every pair left out of its side."""


def _settled(trips: Floats, goodput: Floats, flat: Flags) -> list[_Fit]:
    """Fits on the way until the sides stay as they are."""
    found: list[_Fit] = []
    seen: set[bytes] = set()
    for _ in range(_MAX_TURNS):
        if flat.tobytes() in seen:
            break
        seen.add(flat.tobytes())
        found.append(_side_means(trips, goodput, flat))
        _, capacity, level, _ = found[-1]
        flat = level - trips >= capacity
    return found


def _side_means(trips: Floats, goodput: Floats, flat: Flags) -> _Fit:
    """Capacity and window as means over the pairs on their sides."""
    # Without a flat pair the capacity is not known to be above what was seen.
    capacity = float(goodput[flat].mean()) if flat.any() else float(goodput.max())
    windows = (goodput + trips)[~flat]
    level = float(windows.mean()) if len(windows) else math.inf
    left_out = np.empty(len(trips))
    left_out[flat] = _without_each(goodput[flat] - capacity)
    left_out[~flat] = _without_each(windows - level)
    errors = goodput - np.minimum(capacity, level - trips)
    return float(errors @ errors), capacity, level, left_out


def _without_each(errors: Floats) -> Floats:
    """Errors from a mean of the others, given those from the mean of all."""
    return errors * (len(errors) / (len(errors) - 1) if len(errors) > 1 else 1.0)


def long_link_section(reference: Path) -> Section:
    """One row per model."""
    pairs = city_pairs(reference)
    return Section(
        name="long_links",
        title="Long links, every pair of cities left out in turn",
        frame=pandas.DataFrame([left_out_errors(pairs, window=each) for each in (False, True)]),
        columns={
            "model": ("model", WORDS),
            "pairs": ("pairs", "{:d}"),
            "mean error": ("mean", "{:.1%}"),
            "median": ("median", "{:.1%}"),
            "largest": ("largest", "{:.1%}"),
            "inside the interval": ("covered", "{:.0%}"),
        },
    )
