"""What would a change be worth? The search is asked again.

    gain       1 - (tokens/s now / tokens/s of the best plan with the change)
    same plan  the same for today's layout under the change

Both are of the best plans found, each within its own gap: a gain is known no better than
`uncertain`, and a change that helps a plan can never hurt it by more than that. Gains of two
changes do not add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from hetplan.cost.estimate import estimate_with
from hetplan.cost.step_model.pricer import Pricer
from hetplan.errors import InfeasibleError, InputError, LimitError
from hetplan.plans.build import chosen_of, plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Predictor
from hetplan.search.explained.changes import Change, changes
from hetplan.search.families.allowed import allowed_cluster
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
    """The same where the layout stays; None where it is not legal with the change."""
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
    before, model = result.estimate.tokens_per_second, result.inputs.model
    moved = _same_layout(result, change)
    same = None
    if moved is not None:
        pricer = Pricer(model, change.cluster, change.job, predictor)
        tokens = before * result.estimate.step_seconds
        same = tokens / estimate_with(pricer, moved).step_seconds
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
    start = () if moved is None else (moved,)
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
        changed=moved is None or found.plan.pipelines != moved.pipelines,
    )


def _same_layout(result: SearchResult, change: Change) -> Plan | None:
    """Today's layout on the changed cluster; None where it is not legal there, or not the same."""
    inputs = result.inputs
    if change.job.global_batch_size != inputs.job.global_batch_size:
        return None
    try:
        chosen = chosen_of(result.plan, inputs.cluster, inputs.model)
        allowed = allowed_cluster(change.cluster, change.job)
        plan = plan_of(inputs.model, allowed, change.job, chosen)
    except InputError:
        return None
    return None if check_plan(plan, inputs.model, change.cluster, change.job) else plan
