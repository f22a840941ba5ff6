"""What to buy: what each candidate would bring, and how few of them meet a deadline.

Each candidate is a change of the cluster whose worth has two ends (`hetplan.whatif.shadow_prices`):
a plan that was found makes at least so many more tokens per second, and no plan of the changed
cluster makes more than the other end. Worths of two candidates do not add up.

`fewest` asks for 1, 2, 4, ... of a candidate until a plan meets the deadline, then halves between;
what a run loses to saves and failures counts. Fewer nodes are taken to be no faster than more, so
one count whose steps alone miss the deadline, by their lower bound, rules out all below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetplan.cluster.spec import Cluster
from hetplan.cost.goodput.run import goodput
from hetplan.deadline import check_time
from hetplan.errors import InputError
from hetplan.predict.predictor import Predictor
from hetplan.search.result import SearchResult, ShadowPrice
from hetplan.whatif.ask import NO_ANSWER, Change, ask, gap_beside
from hetplan.whatif.shadow_prices import shadow_prices

MOST_TIMES = 64
"""Of one candidate: a cluster that needs more of it is another cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Something that could be had."""

    words: str
    cluster: Cluster
    """With it."""
    usd_per_hour: float | None
    """None: not said."""
    more: Callable[[int], Cluster] | None = None
    """The cluster with it so many times; None where that makes no sense, as of a link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advised:
    """A candidate and what it brings."""

    worth: ShadowPrice
    usd_per_hour: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fewest:
    """How many of a candidate meet a deadline."""

    words: str
    times: int | None
    """None: `MOST_TIMES` do not, by the plans that were found."""
    seconds: float | None
    """The run with so many, by the plan that was found."""
    none_with: int
    """With so many, or fewer, no plan meets it; -1 where nothing was ruled out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """All that was found."""

    candidates: tuple[Advised, ...]
    """Best first."""
    fewest: tuple[Fewest, ...]
    """Of candidates that are nodes, where there is a deadline."""


def advise(
    result: SearchResult,
    predictor: Predictor,
    candidates: Sequence[Candidate],
    *,
    usd_per_hour: float | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> tuple[Advised, ...]:
    """What each candidate within the budget brings, best first; of fewer where time is over
    (`hetplan.deadline`).

    InputError where a budget is given and no candidate within it has a price.
    """
    prices = {each.words: each.usd_per_hour for each in candidates}
    asked = [
        Change(words=each.words, question=result.inputs.changed(cluster=each.cluster))
        for each in affordable(candidates, usd_per_hour)
    ]
    found = shadow_prices(result, predictor, asked=asked, progress=progress)
    return tuple(Advised(worth=each, usd_per_hour=prices[each.words]) for each in found)


def affordable(candidates: Sequence[Candidate], usd_per_hour: float | None) -> list[Candidate]:
    """Those within the budget; InputError where there is none."""
    within = [
        each
        for each in candidates
        if usd_per_hour is None
        or (each.usd_per_hour is not None and each.usd_per_hour <= usd_per_hour)
    ]
    if not within:
        raise InputError(
            f"no candidate has a price of at most {usd_per_hour:g} USD/h; give prices, or more"
        )
    return within


def fewest(
    result: SearchResult,
    predictor: Predictor,
    candidate: Candidate,
    *,
    deadline_seconds: float,
) -> Fewest:
    """The least number of a candidate with which a plan that is found meets the deadline.

    InputError where the job does not say its tokens; OutOfTimeError where time is over.
    """
    words, cluster_with = candidate.words, candidate.more
    job = result.inputs.job
    if job.total_tokens is None:
        raise InputError("the job has no total_tokens: a deadline needs them")
    steps = job.total_tokens / (job.global_batch_size * job.sequence_length)
    run_seconds: dict[int, float] = {0: _run_seconds(result)}
    ruled_out = -1
    if result.certificate is not None:
        bound = steps * result.certificate.lower_bound_seconds
        ruled_out = 0 if bound > deadline_seconds else -1

    def meets(times: int) -> bool:
        nonlocal ruled_out
        if times not in run_seconds and cluster_with is not None:
            question = result.inputs.changed(cluster=cluster_with(times))
            looser = question.looser(gap_beside(result, question))
            try:
                check_time()
                found = ask(looser, predictor)
            except NO_ANSWER:
                check_time()
                return False
            check_time()
            run_seconds[times] = _run_seconds(found)
            certificate = found.certificate
            if certificate and steps * certificate.lower_bound_seconds > deadline_seconds:
                ruled_out = max(ruled_out, times)
        return run_seconds.get(times, math.inf) <= deadline_seconds

    low, high = -1, 0
    while not meets(high):
        low, high = high, max(1, 2 * high)
        if high > MOST_TIMES:
            return Fewest(words=words, times=None, seconds=None, none_with=ruled_out)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return Fewest(words=words, times=high, seconds=run_seconds[high], none_with=ruled_out)


def _run_seconds(found: SearchResult) -> float:
    """The days of a plan, with all that the run loses."""
    inputs = found.inputs
    return goodput(found.plan, found.estimate, inputs.model, inputs.cluster, inputs.job).seconds
