"""Which plan of a pool is best for the job's aim, and which others are worth showing beside it?

    step_time        the step, or what it stays below with the job's quantile
    cost_per_token   dollars per token, by the mean step or by the same quantile of it

Alternatives are plans that no other plan of the pool beats by every aim at once (Pareto), at most
one of each layout: plans that share islands, degrees, recomputation and schedule are near-copies.
Neither comes with a certificate: the bound that stands beside them is that of the step time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetplan.cost.estimate import estimate_with
from hetplan.cost.step_model.pricer import Pricer
from hetplan.errors import Fault, InputError
from hetplan.job.spec import Job, Objective
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Predictor
from hetplan.search.objectives.pool import Candidate
from hetplan.search.objectives.worth import Worth, worth
from hetplan.search.result import Alternative, Certificate, SearchResult

USUAL_QUANTILE = 0.9
"""Shown where the job asks for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rated:
    candidate: Candidate
    worth: Worth


def choose(
    result: SearchResult, pool: Sequence[Candidate], predictor: Predictor, *, top: int = 1
) -> SearchResult:
    """The result with the pool's best plan for its job's aim, and `top` - 1 alternatives.

    InputError where money is the aim and a price is missing everywhere.
    """
    inputs = result.inputs
    job = inputs.job
    pricer = Pricer(inputs.model, inputs.cluster, job, predictor)
    quantile = quantile_of(job)
    rated = [
        _Rated(
            candidate=each,
            worth=worth(pricer, each.result.plan, each.result.estimate.step_seconds, quantile),
        )
        for each in pool
    ]
    if job.objective is Objective.COST_PER_TOKEN:
        rated = [each for each in rated if each.worth.usd_per_step is not None]
        if not rated:
            raise InputError(
                Fault(
                    field="objective",
                    message="cost_per_token needs `price` of the islands that plans use; the "
                    "cluster gives none",
                )
            )
    rated.sort(key=lambda each: (_aim(each.worth, job), each.worth.step_seconds))
    best = rated[0]
    estimate = estimate_with(pricer, best.candidate.result.plan)
    return replace(
        result,
        plan=best.candidate.result.plan,
        estimate=estimate,
        certificate=_certificate(result, estimate.step_seconds),
        objective=_words(job, best, len(rated), _tokens(result)),
        alternatives=tuple(_alternatives(rated, top, job)),
    )


def quantile_of(job: Job) -> float:
    """The job's, or the usual one."""
    return USUAL_QUANTILE if job.quantile is None else job.quantile


def _aim(found: Worth, job: Job) -> float:
    seconds = found.step_seconds if job.quantile is None else found.quantile_seconds
    if job.objective is not Objective.COST_PER_TOKEN:
        return seconds
    # Rent grows with the step; a late step is paid by the hour as well.
    return (found.usd_per_step or 0.0) * seconds / found.step_seconds


def _certificate(result: SearchResult, step_seconds: float) -> Certificate | None:
    """The step-time bound beside this plan's step."""
    known = result.certificate
    if known is None or step_seconds == result.estimate.step_seconds:
        return known
    lower = min(known.lower_bound_seconds, step_seconds)
    gap = 1.0 - lower / step_seconds
    status = known.status
    if status == "optimal" and gap > result.inputs.job.gap:
        status = "open"
    return replace(known, lower_bound_seconds=lower, gap=gap, status=status)


def _tokens(result: SearchResult) -> float:
    """Of one step, padding left out."""
    return result.estimate.tokens_per_second * result.estimate.step_seconds


def _words(job: Job, best: _Rated, count: int, tokens: float) -> str:
    """What the plan is best at, and of how many."""
    if job.objective is Objective.COST_PER_TOKEN:
        aim = f"cost per token: {(best.worth.usd_per_step or 0.0) / tokens * 1e6:.4g} USD per 1M"
        if job.quantile is not None:
            aim += f" at the mean step, chosen by the step's p{job.quantile * 100:g}"
    elif job.quantile is not None:
        aim = f"p{job.quantile * 100:g} of the step: {best.worth.quantile_seconds:.4g} s"
    else:
        return ""
    return (
        f"{aim}; best of {count} plan{'s' * (count > 1)} of nearby questions "
        f"({best.candidate.words}); no certificate goes with this aim"
    )


def _alternatives(rated: Sequence[_Rated], top: int, job: Job) -> list[Alternative]:
    """The best of every layout that is not beaten by every aim, in the order of the job's aim."""
    first, *rest = rated
    seen = {layout(first.candidate.result.plan)}
    found: list[Alternative] = []
    for each in rest:
        if len(found) >= top - 1:
            break
        key = layout(each.candidate.result.plan)
        if key in seen or any(_beats(other.worth, each.worth) for other in rated):
            continue
        seen.add(key)
        found.append(
            Alternative(
                why=each.candidate.words,
                plan=each.candidate.result.plan,
                step_seconds=each.worth.step_seconds,
                quantile_seconds=each.worth.quantile_seconds,
                quantile=quantile_of(job),
                usd_per_step=each.worth.usd_per_step,
                devices=each.worth.devices,
            )
        )
    return found


def _beats(one: Worth, two: Worth) -> bool:
    """Whether `one` is at least as good by every aim and better by some."""
    pairs = [
        (one.step_seconds, two.step_seconds),
        (one.quantile_seconds, two.quantile_seconds),
        (float(one.devices), float(two.devices)),
    ]
    if one.usd_per_step is not None and two.usd_per_step is not None:
        pairs.append((one.usd_per_step, two.usd_per_step))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def layout(plan: Plan) -> tuple[object, ...]:
    """What near-copies share: everything but layers, stages and exact devices."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    replicas = [replica for stage in stages for replica in stage.replicas]
    return (
        len(plan.pipelines),
        tuple(sorted({(r.tp, r.cp, r.ep, r.dp, r.microbatch_size) for r in replicas})),
        tuple(sorted({stage.recompute.granularity.value for stage in stages})),
        tuple(sorted({(p.schedule.name, p.schedule.virtual_stages) for p in plan.pipelines})),
        plan.sharding.value,
    )
