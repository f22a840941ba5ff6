"""How fast long links are that nobody measured, from samples of some others.

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

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from hetplan.cluster.spec import Link
from hetplan.errors import Fault, InputError
from hetplan.predict.datasheet import LINK_LOG_HALFWIDTH
from hetplan.predict.regression import conformal_halfwidth

MIN_PAIRS = 3
"""Fewest pairs that a window and a capacity can be told from, with one to spare."""


class LongLinkModel(StrEnum):
    """What is fitted."""

    CONSTANT = "constant goodput"
    ONE_WINDOW = "one window"
    PER_ENDPOINT = "window per endpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What was measured between two endpoints, as iperf and ping show it."""

    left: str
    right: str
    round_trip_seconds: float
    goodput_bytes_per_second: float
    """Of all streams together."""
    streams: int = 1
    """Connections that were measured at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointWindow:
    """What the samples say of one endpoint."""

    name: str
    window_bytes: float
    """Of a pair whose both ends are like it."""
    pairs: int
    """Samples that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongLinkPrediction:
    """Goodput of one sender between two endpoints."""

    goodput_bytes_per_second: float
    low_bytes_per_second: float
    """About nine in ten pairs like this one are between `low` and `high`."""
    high_bytes_per_second: float
    window_bytes: float
    """Most bytes of one stream under way; infinite where no sample was limited by a window."""
    capacity_bytes_per_second: float
    notes: tuple[str, ...] = ()
    """What the prediction could not be based on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongLinkLaw:
    """A fit."""

    model: LongLinkModel
    capacity_bytes_per_second: float
    window_bytes: float
    """Of the typical pair; infinite where no sample was limited by a window."""
    endpoints: tuple[EndpointWindow, ...]
    """In order of their names; all alike unless the model has a window per endpoint."""
    log_halfwidth: float
    """Of the interval around a prediction between endpoints that have samples."""
    log_halfwidth_unknown: float
    """The same for an endpoint without samples."""
    longest_round_trip_seconds: float
    """Of the samples."""

    def predict(
        self, left: str, right: str, round_trip_seconds: float, streams: int = 1
    ) -> LongLinkPrediction:
        """One sender between two endpoints; those without samples count as typical."""
        if streams < 1:
            raise InputError(f"streams is {streams}; it must be at least 1")
        if not 0 < round_trip_seconds < math.inf:
            raise InputError(
                f"round_trip_seconds is {round_trip_seconds}; it must be above 0 and finite"
            )
        known = {each.name: each.window_bytes for each in self.endpoints}
        unknown = [name for name in dict.fromkeys((left, right)) if name not in known]
        notes = [f"no sample of {name}: taken as typical" for name in unknown]
        if round_trip_seconds > self.longest_round_trip_seconds * (1 + 1e-9):
            notes.append("longer than every sample")
        windows = [known.get(name, self.window_bytes) for name in (left, right)]
        window = math.sqrt(windows[0]) * math.sqrt(windows[1])
        goodput = min(self.capacity_bytes_per_second, streams * window / round_trip_seconds)
        wide = math.exp(self.log_halfwidth_unknown if unknown else self.log_halfwidth)
        return LongLinkPrediction(
            goodput_bytes_per_second=goodput,
            low_bytes_per_second=goodput / wide,
            high_bytes_per_second=goodput * wide,
            window_bytes=window,
            capacity_bytes_per_second=self.capacity_bytes_per_second,
            notes=tuple(notes),
        )

    def link(self, link: Link, left: str, right: str) -> Link:
        """A link of a cluster with the window and capacity of these endpoints.

        Capacity is what one sender reaches; the link's shared bandwidth and streams stay.
        """
        # Window and capacity do not depend on the round trip; `predict` refuses one of 0.
        found = self.predict(left, right, max(link.round_trip_seconds, 1e-9))
        return replace(
            link,
            bandwidth_bytes_per_second=min(
                link.bandwidth_bytes_per_second, found.capacity_bytes_per_second
            ),
            window_bytes=None if math.isinf(found.window_bytes) else found.window_bytes,
        )


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


def fit_long_links(
    pairs: Sequence[Pair],
    model: LongLinkModel = LongLinkModel.PER_ENDPOINT,
    *,
    unknown_endpoints: bool = True,
) -> LongLinkLaw:
    """The law of these samples; several of one pair are fitted as they are.

    `unknown_endpoints`: whether ends that no sample has may be asked for, which takes longer. An
    InputError names every sample that cannot be used, and fewer than three.
    """
    _check(pairs)
    from evaluation.cost.long_links_fit import Samples, fit

    names = sorted({name for pair in pairs for name in (pair.left, pair.right)})
    samples = Samples.of(pairs, names)
    found = fit(
        samples,
        per_endpoint=model is LongLinkModel.PER_ENDPOINT,
        constant=model is LongLinkModel.CONSTANT,
        unknown_endpoints=unknown_endpoints,
    )
    typical = math.exp(found.log_window)
    endpoints = tuple(
        EndpointWindow(
            name=name,
            window_bytes=typical * math.exp(factor),
            pairs=sum(name in (pair.left, pair.right) for pair in pairs),
        )
        for name, factor in zip(names, found.log_factors, strict=True)
    )
    halfwidth = _halfwidth(found.left_out)
    return LongLinkLaw(
        model=model,
        capacity_bytes_per_second=math.exp(found.log_capacity),
        window_bytes=typical,
        endpoints=endpoints,
        log_halfwidth=halfwidth,
        log_halfwidth_unknown=max(halfwidth, _halfwidth(found.left_out_endpoints)),
        longest_round_trip_seconds=max(pair.round_trip_seconds for pair in pairs),
    )


def left_out_errors(pairs: Sequence[Pair], model: LongLinkModel) -> LeftOutErrors:
    """Errors of every pair, predicted by a fit of all others.

    Everything about the fit, its shrinkage included, is chosen without the pair that is left out.
    """
    _check(pairs)
    if len(pairs) <= MIN_PAIRS:
        raise InputError(
            f"{len(pairs)} pairs were measured; leaving one out needs at least {MIN_PAIRS + 1}"
        )
    errors, covered = [], 0
    for number, pair in enumerate(pairs):
        others = [*pairs[:number], *pairs[number + 1 :]]
        seen = {name for other in others for name in (other.left, other.right)}
        law = fit_long_links(others, model, unknown_endpoints=not seen >= {pair.left, pair.right})
        found = law.predict(pair.left, pair.right, pair.round_trip_seconds, pair.streams)
        measured = pair.goodput_bytes_per_second
        errors.append(abs(found.goodput_bytes_per_second / measured - 1))
        covered += found.low_bytes_per_second <= measured <= found.high_bytes_per_second
    ordered = sorted(errors)
    middle = len(ordered) // 2
    return LeftOutErrors(
        model=model,
        pairs=len(pairs),
        mean=math.fsum(errors) / len(errors),
        median=(ordered[middle] + ordered[-middle - 1]) / 2,
        largest=ordered[-1],
        covered=covered / len(pairs),
    )


def _halfwidth(errors: Sequence[float]) -> float:
    """Of nine in ten errors; with too few of them the widest, but no less than for figures."""
    found = conformal_halfwidth(errors)
    if found is not None:
        return found
    return max([LINK_LOG_HALFWIDTH, *map(abs, errors)])


def _check(pairs: Sequence[Pair]) -> None:
    faults = []
    for number, pair in enumerate(pairs, start=1):
        where = f"sample {number}"
        for field in ("round_trip_seconds", "goodput_bytes_per_second"):
            figure = getattr(pair, field)
            if not 0 < figure < math.inf:
                message = f"{field} is {figure}; it must be above 0 and finite"
                faults.append(Fault(message=message, field=where))
        if pair.streams < 1:
            message = f"streams is {pair.streams}; it must be at least 1"
            faults.append(Fault(message=message, field=where))
        if pair.left == pair.right:
            message = f"both ends are {pair.left}; a long link has two"
            faults.append(Fault(message=message, field=where))
    if len(pairs) < MIN_PAIRS:
        message = f"{len(pairs)} pairs were measured; at least {MIN_PAIRS} are needed for a fit"
        faults.append(Fault(message=message))
    if faults:
        raise InputError(*faults)
