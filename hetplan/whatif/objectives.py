"""Plans for other aims than the shortest step: robust, cheap, or a choice of several.

    step_time        the step, or what it stays below with the job's quantile
    cost_per_token   dollars per token, by the mean step or by the same quantile of it

    usd_per_step = sum over nodes in use of price per device hour x devices x step
                   + sum over links of bytes that cross x price per byte

A node of which a plan uses some devices is paid whole. A plan has no price where one of its islands
has none.

The search finds the plan of the shortest step. Plans that are more robust, cheaper or simply
different are the best ones of nearby questions (`nearby`): without one island, with one device kind
only, with fewer nodes, with other degrees, without interleaving, with and without recomputation.
The questions depend on the first plan and nothing else, so equal inputs give an equal pool.

Alternatives are plans that no other plan of the pool beats by every aim at once (Pareto), at most
one of each layout: plans that share islands, degrees, recomputation and schedule are near-copies.
No certificate goes with another aim: the bound that stands beside a plan is that of the step time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from hetplan.cluster.spec import Cluster, Island
from hetplan.cost.estimate import estimate_with, step_quantile
from hetplan.cost.network.segments import LinkScope
from hetplan.cost.step_model.pricer import Pricer
from hetplan.cost.traffic import ledger
from hetplan.deadline import check_time, ends_by
from hetplan.errors import Fault, InputError, OutOfTimeError
from hetplan.job.spec import Job, Objective
from hetplan.plans.pieces import islands_in_use
from hetplan.plans.plan import Plan, RecomputeGranularity
from hetplan.predict.predictor import Predictor
from hetplan.search.descriptions import devices_in_use
from hetplan.search.result import Alternative, Certificate, Question, SearchResult
from hetplan.whatif.ask import NO_ANSWER, Change, ask, is_interrupted
from hetplan.whatif.plan_use import used_devices

_SECONDS_PER_HOUR = 3600.0


def usd_per_step(pricer: Pricer, plan: Plan, step_seconds: float) -> float | None:
    """Dollars of one step; None where an island in use has no price."""
    cluster = pricer.cluster
    per_hour = rent_usd_per_hour(plan, cluster)
    if per_hour is None:
        return None
    traffic = 0.0
    if _any_link_has_a_price(cluster):
        for entry in ledger(plan, pricer.model, cluster, pricer.job, None).entries:
            if entry.link.scope is LinkScope.ISLANDS:
                link = cluster.link_between(entry.link.left, entry.link.right)
                traffic += entry.bytes_per_step * (link.price_usd_per_byte or 0.0)
    return per_hour / _SECONDS_PER_HOUR * step_seconds + traffic


def _any_link_has_a_price(cluster: Cluster) -> bool:
    links = [each.link for each in cluster.links]
    links += [each.link for each in cluster.region_links]
    links += [each for each in (cluster.within_region, cluster.across_regions) if each is not None]
    return any(link.price_usd_per_byte for link in links)


def rent_usd_per_hour(plan: Plan, cluster: Cluster) -> float | None:
    """Price of the nodes in use; None where one has none."""
    prices = []
    for island, mine in used_devices(plan, cluster):
        nodes = int(mine.any(axis=1).sum())
        if nodes:
            if island.price_usd_per_device_hour is None:
                return None
            prices.append(nodes * island.devices_per_node * island.price_usd_per_device_hour)
    return math.fsum(prices)


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
        fewer = _fewer_nodes(question.job, usable, part)
        if fewer != question.job:
            yield Change(words=f"{part:.0%} of the nodes", question=question.changed(job=fewer))
    yield from _other_degrees(plan, question)


def _fewer_nodes(job: Job, islands: list[Island], part: float) -> Job:
    """The last nodes of every island are left out, so that device numbers stay."""
    out = []
    for island in islands:
        kept = max(1, round(part * len(island.usable_nodes)))
        out += [f"{island.name}/{node}" for node in island.usable_nodes[kept:]]
    if not out:
        return job
    return replace(job, forbid=replace(job.forbid, nodes=(*job.forbid.nodes, *out)))


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


def _pool(
    result: SearchResult, predictor: Predictor, progress: Callable[[int, int, str], None] | None
) -> tuple[dict[Plan, tuple[str, float]], type[BaseException] | None]:
    """(words of its question, step) of the result's plan and of the best plans of nearby questions,
    and whether every question was asked: Ctrl-C and the time limit end them with the plans so far.

    Questions without a plan are left out. They do not start from each other's plans: a plan that
    is good enough for two questions would answer both, and the choice would be smaller.
    """
    plans = {result.plan: ("the shortest step", result.estimate.step_seconds)}
    if is_interrupted(result):
        return plans, KeyboardInterrupt
    asked = [*nearby(result)]
    for number, change in enumerate(asked):
        if progress is not None:
            progress(number, len(asked), change.words)
        try:
            check_time()
            other = ask(change.question.looser(_LOOSE_GAP), predictor)
        except NO_ANSWER:
            continue
        except (KeyboardInterrupt, OutOfTimeError) as error:
            return plans, type(error)
        plans.setdefault(other.plan, (change.words, other.estimate.step_seconds))
    return plans, None


def interrupted(result: SearchResult) -> SearchResult:
    """The result, whose certificate says that more was wanted."""
    if result.certificate is None:
        return result
    return replace(result, certificate=replace(result.certificate, status="interrupted"))


USUAL_QUANTILE = 0.9
"""Shown where the job asks for none."""


def _ranked(job: Job, pricer: Pricer, plans: Mapping[Plan, tuple[str, float]]) -> list[Alternative]:
    """The plans by every aim, best first by the job's own.

    InputError where money is the aim and a price is missing everywhere.
    """
    quantile = USUAL_QUANTILE if job.quantile is None else job.quantile
    ranked = [
        Alternative(
            why=words,
            plan=plan,
            step_seconds=step_seconds,
            quantile_seconds=step_quantile(pricer, plan, quantile),
            quantile=quantile,
            usd_per_step=usd_per_step(pricer, plan, step_seconds),
            devices=devices_in_use(plan),
        )
        for plan, (words, step_seconds) in plans.items()
    ]
    if job.objective is Objective.COST_PER_TOKEN:
        ranked = [plan for plan in ranked if plan.usd_per_step is not None]
        if not ranked:
            raise InputError(
                Fault(
                    field="objective",
                    message="cost_per_token needs `price` of the islands that plans use; the "
                    "cluster gives none",
                )
            )
    return sorted(ranked, key=lambda plan: (_aim(plan, job), plan.step_seconds))


def _aim(found: Alternative, job: Job) -> float:
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


def _words(job: Job, best: Alternative, count: int, tokens: float) -> str:
    """What the plan is best at, and of how many."""
    if job.objective is Objective.COST_PER_TOKEN:
        aim = f"cost per token: {(best.usd_per_step or 0.0) / tokens * 1e6:.4g} USD per 1M"
        if job.quantile is not None:
            aim += f" at the mean step, chosen by the step's p{job.quantile * 100:g}"
    elif job.quantile is not None:
        aim = f"p{job.quantile * 100:g} of the step: {best.quantile_seconds:.4g} s"
    else:
        return ""
    return (
        f"{aim}; best of {count} plan{'s' * (count > 1)} of nearby questions "
        f"({best.why}); no certificate goes with this aim"
    )


def _alternatives(ranked: Sequence[Alternative], top: int) -> tuple[Alternative, ...]:
    """The best of every layout that is not beaten by every aim, in the order of the job's aim."""
    best_of_layout: dict[tuple[object, ...], Alternative] = {layout(ranked[0].plan): ranked[0]}
    for plan in ranked[1:]:
        if not any(_beats(other, plan) for other in ranked):
            best_of_layout.setdefault(layout(plan.plan), plan)
    return tuple(best_of_layout.values())[1:top]


def _beats(one: Alternative, two: Alternative) -> bool:
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
    return (
        len(plan.pipelines),
        tuple(sorted({(r.tp, r.cp, r.ep, r.dp, r.microbatch_size) for r in plan.replicas})),
        tuple(sorted({stage.recompute.words for stage in plan.stages})),
        tuple(sorted({(p.schedule.name, p.schedule.virtual_stages) for p in plan.pipelines})),
        plan.sharding.value,
        plan.optimizer_offload,
    )


def has_other_aim(job: Job, top: int = 1) -> bool:
    """Whether more is asked than the plan with the shortest step."""
    return job.objective is not Objective.STEP_TIME or job.quantile is not None or top > 1


def by_objective(
    result: SearchResult,
    predictor: Predictor,
    *,
    top: int = 1,
    end: float = math.inf,
    progress: Callable[[int, int, str], None] | None = None,
) -> SearchResult:
    """The best plan that was found for the job's aim, and up to `top` - 1 alternatives.

    The result itself where the job asks for the shortest step and nothing else. The search is
    asked again for every nearby question, each within the job's limit and all by the moment `end`;
    `progress` is told (number, of how many, words) before each.
    """
    inputs, job = result.inputs, result.inputs.job
    if not has_other_aim(job, top):
        return result
    with ends_by(end):
        plans, ended_by = _pool(result, predictor, progress)
    if ended_by is KeyboardInterrupt:
        result = interrupted(result)
    pricer = Pricer(inputs.model, inputs.cluster, job, predictor)
    ranked = _ranked(job, pricer, plans)
    best = ranked[0]
    estimate = estimate_with(pricer, best.plan)
    # Of one step, padding left out.
    tokens = result.estimate.tokens_per_second * result.estimate.step_seconds
    return replace(
        result,
        plan=best.plan,
        estimate=estimate,
        certificate=_certificate(result, estimate.step_seconds),
        objective=_words(job, best, len(ranked), tokens)
        + "; others were left out for the time limit" * (ended_by is OutOfTimeError),
        alternatives=_alternatives(ranked, top),
    )
