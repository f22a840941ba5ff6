"""What would a change be worth? The search is asked again.

    gain       1 - (tokens/s now / tokens/s of the best plan with the change)
    same plan  the same for today's plan under the change, where it is still the same devices

Both are of the best plans found, each within its own gap: a gain is known no better than
`uncertain`, and a change that helps a plan can never hurt it by more than that. Gains of two
changes do not add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from hetplan.cost.priced.pricer import Pricer
from hetplan.errors import InfeasibleError, InputError, LimitError
from hetplan.plans.check import check_plan
from hetplan.predict.predictor import Predictor
from hetplan.search.explained.changes import Change, changes
from hetplan.search.result import SearchResult
from hetplan.search.search import search


_LOOSE_GAP = 0.02
"""Of a search with a change: proofs cost most, and `uncertain` says what is left open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowPrice:
    """One change and what it is worth."""

    words: str
    tokens_per_second: float
    """Of the best plan found with the change; 0 where none was found in time."""
    gain: float
    """Part by which tokens/s grow; below 0 only within `uncertain`."""
    same_plan_gain: float | None
    """The same where nothing but the change happens; None where the old plan cannot be priced."""
    uncertain: float
    """Sum of the two gaps."""
    changed: bool
    """Whether another layout than today's is best."""
    note: str = ""
    """Why there is no price."""


def shadow_prices(
    result: SearchResult,
    predictor: Predictor,
    *,
    asked: Iterable[Change] | None = None,
    time_limit_seconds: float | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> tuple[ShadowPrice, ...]:
    """Every change's worth, the largest gain first; `time_limit_seconds` is for each search."""
    inputs = result.inputs
    every = tuple(changes(inputs.cluster, inputs.job) if asked is None else asked)
    found = []
    for number, change in enumerate(every):
        if progress is not None:
            progress(number, change.words)
        found.append(_price(result, change, predictor, time_limit_seconds))
    return tuple(sorted(found, key=lambda each: -each.gain))


def _price(
    result: SearchResult, change: Change, predictor: Predictor, seconds: float | None
) -> ShadowPrice:
    before = result.estimate.tokens_per_second
    same = _same_plan(result, change, predictor)
    row = ShadowPrice(
        words=change.words,
        tokens_per_second=0.0,
        gain=0.0,
        same_plan_gain=None if same is None else same / before - 1.0,
        uncertain=1.0,
        changed=False,
    )
    job = replace(change.job, gap=max(change.job.gap, _LOOSE_GAP))
    if seconds is not None:
        job = replace(job, time_limit_seconds=seconds)
    model = result.inputs.model
    start = (result.plan,) if same is not None else ()
    try:
        found = search(model, change.cluster, job, predictor, start=start, reasons=False)
    except (InfeasibleError, InputError, LimitError) as error:
        return replace(row, note=str(error).splitlines()[0])
    after = found.estimate.tokens_per_second
    gaps = [each.certificate.gap for each in (result, found) if each.certificate is not None]
    return replace(
        row,
        tokens_per_second=after,
        gain=after / before - 1.0,
        uncertain=sum(gaps) if len(gaps) == 2 else 1.0,
        changed=found.plan.pipelines != result.plan.pipelines,
    )


def _same_plan(result: SearchResult, change: Change, predictor: Predictor) -> float | None:
    """Tokens/s of today's plan under the change; None where it is not legal or not the same."""
    inputs, plan = result.inputs, result.plan
    if not change.same_devices or change.job.global_batch_size != inputs.job.global_batch_size:
        return None
    if check_plan(plan, inputs.model, change.cluster, change.job):
        return None
    step = Pricer(inputs.model, change.cluster, change.job, predictor).step(plan).step_seconds
    tokens = result.estimate.tokens_per_second * result.estimate.step_seconds
    return tokens / step


def best_first(prices: Iterable[ShadowPrice]) -> Iterator[ShadowPrice]:
    """Those that are worth more than is uncertain."""
    return (each for each in prices if each.gain > each.uncertain)
