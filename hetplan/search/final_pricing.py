"""Which of the best plans is the best one when it is placed and priced whole.

A search prices every boundary alone. The last offers are placed on devices, checked against all
rules and priced with the links that they share; the fastest is the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate import estimate_with
from hetplan.cost.estimate_values import Estimate
from hetplan.cost.step_model.draws import DRAWS, MOST_PASSES, WHOLE_PASSES
from hetplan.cost.step_model.pricer import Pricer, StepCost
from hetplan.errors import HetplanError, InputError
from hetplan.plans.build import chosen_of, overlap_of
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import ChosenPlan, Shape
from hetplan.plans.pinned import keeps_pins
from hetplan.plans.plan import Plan
from hetplan.search.solver import Best, Offer
from hetplan.search.space.plan_evaluator import PlanEvaluator, fits

_SETTLED = 32
"""Offers that are priced whole."""

AGREEMENT = 1e-6
"""Prices of search and estimate that are further apart are a fault of hetplan."""

_LEAST_SECONDS, _DEVICE_SECONDS, _STAGE_SECONDS = 0.1, 6e-6, 1e-3
"""CPU seconds from the last look at a plan to its file and report: of any plan, for each of its
devices, and for each of its stages. Random questions took these (`evaluation limits`)."""

_PASS_SECONDS = 1.3e-8
"""Of a replay of draws (`hetplan.cost.step_model.draws`)."""

_SOURCES = 4
"""Replays for each island of a plan that tell where its seconds come from."""

GIVEN = -1
"""Solver number of plans that the caller gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalPlan:
    """The answer, placed and priced."""

    plan: Plan
    estimate: Estimate


def pricing_seconds(chosen: ChosenPlan) -> float:
    """About what this plan takes to be placed, priced whole, written and shown."""
    devices = stages = passes = 0
    for pipeline in chosen.pipelines:
        for stage in pipeline.stages:
            devices += sum(part.shape.num_devices for part in stage.parts)
            stages += 1
            passes += pipeline.num_microbatches * len(stage.layers)
    islands = {part.island for each in chosen.pipelines for s in each.stages for part in s.parts}
    replayed = min(passes, max(WHOLE_PASSES, 6 * stages**2))
    drawn = min(DRAWS * replayed, MOST_PASSES) + _SOURCES * len(islands) * replayed
    seconds = _LEAST_SECONDS + _DEVICE_SECONDS * devices + _STAGE_SECONDS * stages
    return seconds + _PASS_SECONDS * drawn


def least_pricing_seconds(cluster: Cluster) -> float:
    """About what a plan of one stage takes on the whole cluster."""
    devices = sum(each.num_usable_devices for each in cluster.islands)
    return _LEAST_SECONDS + _DEVICE_SECONDS * devices


class WrongOfferError(HetplanError):
    """An offer is no legal plan, or does not take what it is said to: a fault of who offered it."""

    def __init__(self, offer: Offer, message: str) -> None:
        super().__init__(message)
        self.offer = offer


def final_plan(best: Best, evaluator: PlanEvaluator) -> FinalPlan:
    """The fastest of the best offers by its whole price, which is never below the search's.

    WrongOfferError where an offer is no plan of the job or its price is another one.
    """
    found: Plan | None = None
    least = math.inf
    for number, offer in enumerate(nearest(best)):
        if found is not None and offer.seconds >= least * (1.0 - AGREEMENT):
            break
        late = found is not None and best.late
        if (late or number >= _SETTLED) and offer.solver != GIVEN:
            continue  # what the caller gave is never lost
        plan = _placed(offer, evaluator)
        step = _agreeing(offer, plan, evaluator.pricer)
        if fits(step) and step.step_seconds < least:
            found, least = plan, step.step_seconds
    if found is None:
        raise HetplanError("no plan that the search found fits in memory once it is placed")
    return FinalPlan(plan=found, estimate=estimate_with(evaluator.pricer, found))


def nearest(best: Best) -> list[Offer]:
    """The best plans that were found, best first, each once."""
    found: dict[ChosenPlan, Offer] = {}
    for offer in sorted((*best.offers, *best.own.values()), key=lambda offer: offer.seconds):
        found.setdefault(offer.chosen, offer)
    return list(found.values())


def _placed(offer: Offer, evaluator: PlanEvaluator) -> Plan:
    """The plan on devices."""
    try:
        plan = evaluator.place(offer.chosen)
    except InputError as error:
        raise WrongOfferError(offer, f"the search built no plan: {error}") from error
    broken = check_plan(plan, evaluator.model, evaluator.cluster, evaluator.job)
    if broken:
        raise WrongOfferError(offer, f"the search built an illegal plan: {broken[0]}")
    return plan


def _agreeing(offer: Offer, plan: Plan, pricer: Pricer) -> StepCost:
    """The plan's whole price; WrongOfferError where it is less than the search's, or more than
    `_slower_at_most`.
    """
    step = pricer.step(plan)
    more = step.step_seconds - offer.seconds
    if abs(more) > AGREEMENT * offer.seconds and not 0 < more <= _slower_at_most(step, plan):
        raise WrongOfferError(
            offer,
            f"the search priced the plan at {offer.seconds!r} s, its estimate is "
            f"{step.step_seconds!r} s; they must agree",
        )
    return step


def _slower_at_most(step: StepCost, plan: Plan) -> float:
    """By how many seconds a plan can be slower than its numbers in the search say (`is_exact`).

    Unbounded with links that several boundaries share, stages of several parts of which now one,
    now another is the slowest, and several tp, which pad the vocabulary further. Reductions and
    gatherings that another plan's compute would hide better: by what they add here.
    """
    degrees = {stage.unit.replica.tp for pipeline in step.work for stage in pipeline.stages}
    if len(degrees) > 1 or any(
        pipeline.shares or any(len(stage.units) > 1 for stage in pipeline.stages)
        for pipeline in step.work
    ):
        return math.inf
    if not plan.overlap.reduction:
        return 0.0
    ends = [end for row in step.composed.stages for end in row]
    return max(end.reduction.added_seconds for end in ends) + max(
        end.gathering.added_seconds for end in ends
    )


def priced_start(plan: Plan, evaluator: PlanEvaluator) -> Offer | None:
    """The choices of a plan of this or another target, and their step in this job; None where the
    job does not allow them, or pins others.

    What follows from the job's trainer (overlap, number formats, padding) is made anew.
    """
    job, shapes = evaluator.job, [Shape.of(each) for each in plan.replicas]
    own = replace(overlap_of(job, shapes, plan.sharding), send=plan.overlap.send)
    try:
        asked = replace(plan, overlap=own)
        chosen = chosen_of(asked, evaluator.cluster, job, evaluator.model)
    except InputError:
        return None
    legal = evaluator.legal(chosen)
    if legal is None or not keeps_pins(legal, evaluator.cluster, job):
        return None
    step = evaluator.pricer.step(legal)
    return Offer(GIVEN, step.step_seconds, chosen) if fits(step) else None


def offer_starts(start: Sequence[Plan], best: Best, evaluator: PlanEvaluator) -> None:
    """Plans that the caller knows; those that the job does not allow are left out."""
    for plan in start:
        found = priced_start(plan, evaluator)
        if found is not None:
            best.offer(GIVEN, found.chosen, found.seconds)
