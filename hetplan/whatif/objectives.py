"""Plans for other aims than the shortest step: robust, cheap, or a choice of several.

    step_time         the step, or what it stays below with the job's quantile
    cost_per_token    dollars per token, by the mean step or by the same quantile of it; with lost
                      time where the job says its tokens
    energy_per_token  kWh per token, likewise
    days              the whole run with all that it loses (`hetplan.cost.goodput`), likewise
    robust            the step in the worst tenth of draws of what varies (`hetplan.whatif.robust`)

What a plan costs and draws, `hetplan.cost.energy` says.

The search finds the plan of the shortest step. Plans that are more robust, cheaper or simply
different are the best ones of nearby questions (`nearby`): without one island, with one device kind
only, with fewer nodes, with other degrees, without interleaving, with and without recomputation.
The questions depend on the first plan and nothing else, so equal inputs give an equal pool.

Alternatives are plans that no other plan of the pool beats by every aim at once (Pareto), at most
one of each layout: plans that share islands, degrees, recomputation and schedule are near-copies.
The front has the pool's plans that none beats in step, cost, energy and devices, with their gaps.

What is proven: that no plan has a shorter step, of each question by its certificate, and so that no
run ends before all its steps; that none of the questions that were asked has a plan that costs or
draws less (`hetplan.search.least_price`). Not that the front is whole: a plan between two of its
points may be missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetplan.cluster.power import power_law
from hetplan.cluster.spec import Cluster, Island
from hetplan.cost.energy.energy import (
    JOULES_PER_KWH,
    SECONDS_PER_HOUR,
    energy_of,
    hourly_price,
    usd_per_step,
    whole_run,
)
from hetplan.cost.estimate import estimate, estimate_with, step_quantile
from hetplan.cost.step_model.pricer import Pricer
from hetplan.deadline import check_time, ends_by
from hetplan.errors import Fault, InputError, OutOfTimeError
from hetplan.job.spec import Job, Objective
from hetplan.plans.pieces import islands_in_use
from hetplan.plans.plan import Plan, RecomputeGranularity
from hetplan.predict.predictor import Predictor
from hetplan.search.descriptions import devices_in_use
from hetplan.search.least_price import least_prices
from hetplan.search.result import Alternative, Question, SearchResult, certificate_beside
from hetplan.search.space.allowed import allowed_cluster
from hetplan.search.table_maker import TableMaker
from hetplan.units import counted, format_brief
from hetplan.whatif.ask import NO_ANSWER, Change, ask, is_interrupted
from hetplan.whatif.robust import Worlds, check_varied, risks
from hetplan.whatif.within_limits import keeps_limits

_PARTS = (0.75, 0.5, 0.25, 0.125)
"""Parts of every island's nodes that are left for cheaper plans."""

_LOOSE_GAP = 0.05
"""Of a nearby question: about what an interval tells apart (docs/accuracy.md); proofs cost most."""

_DEGREES = (1, 2, 4, 8, 16)
"""Degrees that are pinned instead of the plan's, where they divide."""


def nearby(result: SearchResult) -> Iterator[Change]:
    """Every question whose best plan could be wanted instead of the result's."""
    plan, question = result.plan, result.inputs
    usable = [
        island
        for island in question.cluster.islands
        if island.usable_nodes and island.name not in question.job.forbid.islands
    ]
    if len(usable) > 1:
        for name in islands_in_use(plan, question.cluster):
            yield Change(words=f"without {name}", question=question.without_islands(name))
        for kind in dict.fromkeys(island.device.kind for island in usable):
            others = tuple(island.name for island in usable if island.device.kind != kind)
            if others:
                yield Change(words=f"{kind} only", question=question.without_islands(*others))
    for part in _PARTS:
        kept = {each.name: max(1, round(part * len(each.usable_nodes))) for each in usable}
        fewer = _with_node_counts(question, kept)
        if fewer.job != question.job:
            yield Change(words=f"{part:.0%} of the nodes", question=fewer)
    yield from _other_degrees(plan, question)


def _with_node_counts(question: Question, counts: Mapping[str, int]) -> Question:
    """The question with so many nodes of these islands; the last ones are forbidden, so that device
    numbers stay.
    """
    out = [
        f"{island.name}/{node}"
        for island in allowed_cluster(question.cluster, question.job).islands
        for node in island.usable_nodes[counts.get(island.name, island.nodes) :]
    ]
    forbid = question.job.forbid
    return question.with_job(forbid=replace(forbid, nodes=(*forbid.nodes, *out)))


def _other_degrees(plan: Plan, question: Question) -> Iterator[Change]:
    replicas, pin = plan.replicas, question.job.pin
    if pin.tp is None and pin.same_degrees is None and len({r.tp for r in replicas}) > 1:
        alike = question.with_pins(same_degrees=True)
        yield Change(words="the same degrees everywhere", question=alike)
    if pin.tp is None:
        now = {replica.tp for replica in replicas}
        for tp in _DEGREES:
            if now != {tp}:
                yield Change(words=f"tp {tp}", question=question.with_pins(tp=tp))
    if pin.microbatch_size is None:
        size = max(replica.microbatch_size for replica in replicas)
        for other in dict.fromkeys((size * 2, max(1, size // 2))):
            if other != size:
                changed = question.with_pins(microbatch_size=other)
                yield Change(words=f"microbatch size {other}", question=changed)
    chunks = max(pipeline.schedule.virtual_stages for pipeline in plan.pipelines)
    if pin.virtual_stages is None and chunks > 1:
        yield Change(words="without interleaving", question=question.with_pins(virtual_stages=1))
    if pin.recompute is None:
        full = RecomputeGranularity.FULL in [each.recompute.granularity for each in plan.stages]
        words = "without recomputation" if full else "with recomputation"
        yield Change(words=words, question=question.with_pins(recompute=not full))


_Pool = dict[Plan, tuple[str, SearchResult]]
_Progress = Callable[[int, int, str], None] | None
_Asked = Iterable[tuple[Change, Predictor]]


def _pool(
    result: SearchResult, predictor: Predictor, progress: _Progress, bad_days: _Asked
) -> tuple[_Pool, type[BaseException] | None]:
    """(words of its question, its answer) of the result's plan and of the best plans of nearby
    questions; and what ended them before all were asked: Ctrl-C or the time limit.

    Questions without a plan are left out. They do not start from each other's plans: a plan that
    is good enough for two questions would answer both, and the choice would be smaller.
    """
    plans = {result.plan: ("the shortest step", result)}
    if is_interrupted(result):
        return plans, KeyboardInterrupt
    asked = [*bad_days, *((change, predictor) for change in nearby(result))]
    for number, (change, there) in enumerate(asked):
        if progress is not None:
            progress(number, len(asked), change.words)
        try:
            check_time()
            other = _here(ask(change.question.looser(_LOOSE_GAP), there), result, predictor)
        except NO_ANSWER:
            continue
        except (KeyboardInterrupt, OutOfTimeError) as error:
            return plans, type(error)
        if keeps_limits(other.plan, other.estimate, result.inputs):
            plans.setdefault(other.plan, (change.words, other))
    return plans, None


def _here(other: SearchResult, result: SearchResult, predictor: Predictor) -> SearchResult:
    """A plan of another cluster on the result's, without what was proven there."""
    inputs = result.inputs
    if other.inputs.cluster == inputs.cluster:
        return other
    priced = estimate(other.plan, inputs.model, inputs.cluster, inputs.job, predictor)
    return replace(other, inputs=inputs, estimate=priced, certificate=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """What no plan of the questions asked costs or draws less than; None: not known."""

    usd_per_step: float | None
    kwh_per_step: float | None


def least_of(questions: Sequence[Question], predictor: Predictor) -> Least:
    """Of all these questions together; the first has the islands of all."""
    cluster = allowed_cluster(questions[0].cluster, questions[0].job)
    prices: dict[str, dict[str, float | None]] = {"usd": {}, "joules": {}}
    for island in cluster.islands:
        usd, watts = _per_second(cluster, island) if island.usable_nodes else (0.0, 0.0)
        prices["usd"][island.name], prices["joules"][island.name] = usd, watts
    known = {
        name: {island: each for island, each in found.items() if each is not None}
        for name, found in prices.items()
        if None not in found.values()
    }
    bounds = [least_prices(TableMaker.of(each, predictor), known) for each in questions]

    def least(name: str, unit: float) -> float | None:
        return min(each[name] for each in bounds) / unit if name in known else None

    return Least(usd_per_step=least("usd", 1.0), kwh_per_step=least("joules", JOULES_PER_KWH))


def _per_second(cluster: Cluster, island: Island) -> tuple[float | None, float | None]:
    """(dollars, joules) that a device takes each second that it is in passes; None: not known."""
    law, hourly = power_law(cluster, island), hourly_price(cluster, island)
    site = cluster.site_of(island.region)
    watts = None if law is None else law.meter_watts(1)
    paid = 0.0 if site is None else site.price_usd_per_joule or 0.0
    if hourly is None or (watts is None and paid):
        return None, watts
    return hourly / SECONDS_PER_HOUR + paid * (watts or 0.0), watts


def interrupted(result: SearchResult) -> SearchResult:
    """The result, whose certificate says that more was wanted."""
    if result.certificate is None:
        return result
    return replace(result, certificate=replace(result.certificate, status="interrupted"))


USUAL_QUANTILE = 0.9
"""Shown where the job asks for none."""


def _ranked(
    pricer: Pricer, plans: _Pool, least: Least | None, worlds: Worlds | None
) -> list[Alternative]:
    """The plans by every aim, best first by the job's own.

    InputError where money or energy is the aim and its figure is missing everywhere.
    """
    job = pricer.job
    ranked = [_priced(pricer, words, found, least) for words, found in plans.values()]
    if worlds is not None:
        known = risks(worlds, {each.plan: each.step_seconds for each in ranked})
        for at, each in enumerate(ranked):
            if each.plan in known:
                worst, median, _ = known[each.plan]
                ranked[at] = replace(each, worst_seconds=worst, median_seconds=median)
    if job.objective in _MISSING:
        ranked = [plan for plan in ranked if _amount(plan, job) is not None]
        if not ranked:
            ends = ", and a run that ends; no plan has both" if job.total_tokens else ""
            message = f"needs {_MISSING[job.objective]}{ends}"
            raise InputError(Fault(field="objective", message=message))
    return sorted(ranked, key=lambda plan: (_aim(plan, job), plan.step_seconds))


_MISSING = {
    Objective.COST_PER_TOKEN: "`price` of the islands that plans use",
    Objective.ENERGY_PER_TOKEN: "`power` of the islands that plans use",
}


def _priced(pricer: Pricer, words: str, found: SearchResult, least: Least | None) -> Alternative:
    """One plan by every aim; with its gaps where the least of each aim is known."""
    plan, estimate, job = found.plan, found.estimate, pricer.job
    quantile = USUAL_QUANTILE if job.quantile is None else job.quantile
    dollars = usd_per_step(plan, estimate, pricer.model, pricer.cluster, job)
    energy = energy_of(plan, estimate, pricer.cluster)
    kwh = None if energy is None else energy.kwh_per_step
    run, seconds = whole_run(plan, estimate, pricer.model, pricer.cluster, job), None
    if run is not None:  # a step's part of the whole
        steps = run.goodput.work_seconds / estimate.step_seconds
        dollars = None if run.usd is None else run.usd / steps
        kwh = None if run.kwh is None else run.kwh / steps
        if job.objective is Objective.DAYS and math.isfinite(run.days):
            seconds = run.goodput.seconds
    return Alternative(
        why=words,
        plan=plan,
        step_seconds=estimate.step_seconds,
        quantile_seconds=step_quantile(pricer, plan, quantile),
        quantile=quantile,
        usd_per_step=dollars,
        devices=devices_in_use(plan),
        kwh_per_step=kwh,
        gap=None if found.certificate is None else found.certificate.gap,
        usd_gap=None if least is None else _gap(dollars, least.usd_per_step),
        kwh_gap=None if least is None else _gap(kwh, least.kwh_per_step),
        run_seconds=seconds,
    )


def _gap(has: float | None, least: float | None) -> float | None:
    return None if not has or least is None else 1.0 - least / has


def _amount(found: Alternative, job: Job) -> float | None:
    """Of what the job's aim counts, in a step; the days of the whole run."""
    if job.objective is Objective.ENERGY_PER_TOKEN:
        return found.kwh_per_step
    if job.objective is Objective.DAYS:
        return found.run_seconds
    if job.objective is Objective.ROBUST:
        return found.worst_seconds
    return found.usd_per_step if job.objective is Objective.COST_PER_TOKEN else found.step_seconds


def _aim(found: Alternative, job: Job) -> float:
    seconds = found.step_seconds if job.quantile is None else found.quantile_seconds
    # Rent, energy and days grow with the step; a late step is paid as well.
    amount = _amount(found, job)
    if amount is None:
        return math.inf if job.objective in (Objective.DAYS, Objective.ROBUST) else 0.0
    return amount * seconds / found.step_seconds


def _words(result: SearchResult, ranked: Sequence[Alternative]) -> str:
    """What the plan is best at, and of how many."""
    best, count = ranked[0], len(ranked)
    job, certificate = result.inputs.job, result.certificate
    # Of one step, padding left out.
    tokens = result.estimate.tokens_per_second * result.estimate.step_seconds
    amount, proof = _amount(best, job) or 0.0, "no certificate goes with this aim"
    if job.objective is Objective.DAYS:
        aim = f"days: {format_brief(amount) if amount else 'it never ends'}"
        if certificate is not None and job.total_tokens is not None:
            lower = job.total_tokens / tokens * certificate.lower_bound_seconds
            proof = f"no plan ends before {format_brief(lower)}, its steps alone"
    elif job.objective is Objective.ROBUST:
        nominal = next(each for each in ranked if each.plan == result.plan)
        other = best.plan != result.plan
        worst, middle = (
            f"{getattr(best, name):.4g} s"
            + f" instead of {getattr(nominal, name):.4g} s" * other
            + f" ({getattr(best, name) / getattr(nominal, name) - 1.0:+.1%})" * other
            for name in ("worst_seconds", "median_seconds")
        )
        aim = f"worst tenth of draws: {worst}, median {middle}"
        proof = "the certificate is of the step at the cluster's figures, not of that tenth"
    elif job.objective in _MISSING:
        money = job.objective is Objective.COST_PER_TOKEN
        unit, gap = ("USD", best.usd_gap) if money else ("kWh", best.kwh_gap)
        name = "cost" if money else "energy"
        aim = f"{name} per token: {amount / tokens * 1e6:.4g} {unit} per 1M"
        aim += " with lost time" * (job.total_tokens is not None)
        if job.quantile is not None:
            aim += f" at the mean step, chosen by the step's p{job.quantile * 100:g}"
        if gap is not None:
            least = amount * (1.0 - gap) / tokens * 1e6
            proof = f"no plan of them takes less than {least:.4g} {unit} (gap {gap:.1%})"
    elif job.quantile is not None:
        aim = f"p{job.quantile * 100:g} of the step: {best.quantile_seconds:.4g} s"
    else:
        return ""
    among = f"best of {counted(count, 'plan')} of nearby questions ({best.why})"
    return f"{aim}; {among}; {proof}"


def _alternatives(ranked: Sequence[Alternative], top: int) -> tuple[Alternative, ...]:
    """The best of every layout that is not beaten by every aim, in the order of the job's aim."""
    best_of_layout: dict[tuple[object, ...], Alternative] = {layout(ranked[0].plan): ranked[0]}
    for plan in ranked[1:]:
        if not any(_beats(other, plan) for other in ranked):
            best_of_layout.setdefault(layout(plan.plan), plan)
    return tuple(best_of_layout.values())[1:top]


def _front(ranked: Sequence[Alternative]) -> tuple[Alternative, ...]:
    """Those that none beats in step, cost, energy and devices, fastest first."""
    alike = [replace(each, quantile_seconds=each.step_seconds) for each in ranked]
    kept = [
        own
        for own, each in zip(ranked, alike, strict=True)
        if not any(_beats(other, each) for other in alike)
    ]
    return tuple(sorted(kept, key=lambda each: each.step_seconds))


def _beats(one: Alternative, two: Alternative) -> bool:
    """Whether `one` is at least as good by every aim and better by some.

    A plan of which a figure is not known, or is none as its run never ends, beats none that has it.
    """
    pairs = [
        (one.step_seconds, two.step_seconds),
        (one.quantile_seconds, two.quantile_seconds),
        (float(one.devices), float(two.devices)),
    ]
    for name in ("usd_per_step", "kwh_per_step", "run_seconds"):
        left, right = getattr(one, name), getattr(two, name)
        if left is None and right is not None:
            return False
        if left is not None and right is not None:
            pairs.append((left, right))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def layout(plan: Plan) -> tuple[object, ...]:
    """What near-copies share: everything but layers, stages and exact devices."""
    return (
        len(plan.pipelines),
        tuple(sorted({(r.tp, r.cp, r.ep, r.dp, r.microbatch_size) for r in plan.replicas})),
        tuple(sorted({stage.recompute.words for stage in plan.stages})),
        tuple(sorted({(p.schedule.name, p.schedule.virtual_stages) for p in plan.pipelines})),
        plan.sharding.value,
        plan.optimizer_offload,
    )


def has_other_aim(job: Job, top: int = 1, *, front: bool = False) -> bool:
    """Whether more is asked than the plan with the shortest step."""
    varies = any(each.spread or len({*each.samples}) > 1 for each in job.vary)
    plain = (Objective.STEP_TIME, Objective.STEP_TIME if varies else Objective.ROBUST)
    other = job.objective not in plain or job.quantile is not None
    return other or top > 1 or front


def by_objective(
    result: SearchResult,
    predictor: Predictor,
    *,
    top: int = 1,
    front: bool = False,
    end: float = math.inf,
    progress: _Progress = None,
) -> SearchResult:
    """The best plan that was found for the job's aim, and up to `top` - 1 alternatives; or instead
    of these the whole front, that plan's own point included.

    The result itself where the job asks for the shortest step and nothing else. The search is
    asked again for every nearby question, each within the job's limit and all by the moment `end`;
    `progress` is told (number, of how many, words) before each.
    """
    inputs, job = result.inputs, result.inputs.job
    check_varied(job)
    if not has_other_aim(job, top, front=front):
        return result
    worlds = Worlds.of(inputs, predictor) if job.objective is Objective.ROBUST else None
    with ends_by(end):
        bad_days = worlds.bad_days() if worlds else ()
        plans, ended_by = _pool(result, predictor, progress, bad_days)
    if ended_by is KeyboardInterrupt:
        result = interrupted(result)
    pricer = Pricer(inputs.model, inputs.cluster, job, predictor)
    least = None
    if front or job.objective in _MISSING:
        least = least_of([found.inputs for _, found in plans.values()], predictor)
    ranked = _ranked(pricer, plans, least, worlds)
    best = ranked[0]
    estimate = estimate_with(pricer, best.plan)
    return replace(
        result,
        plan=best.plan,
        estimate=estimate,
        certificate=certificate_beside(result, estimate.step_seconds),
        objective=_words(result, ranked)
        + "; others were left out for the time limit" * (ended_by is OutOfTimeError),
        alternatives=_front(ranked) if front else _alternatives(ranked, top),
    )
