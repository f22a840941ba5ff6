"""The plan beside two others: a target that can run more plans, and each device kind alone.

`restriction`: the same job for hetplan's own trainer, whose plans include those of other targets;
where the target has one library of collectives and the cluster several, for FlagScale if it can,
which is what mixes them under Megatron-LM.

`homogeneous_sum` is HETHUB's figure of merit:

    homogeneous_sum_ratio = tokens/s of the plan / sum over kinds of the best tokens/s of that kind
                            alone, with the same model, batch, sequence and target, to the job's gap
    roofline_ratio        = tokens/s of the plan / sum over devices of peak rate / operations per
                            token

Both sides are predicted. The sum is no bound: a kind that cannot hold the model alone adds to the
mix and has no plan of its own; it counts with its roofline.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hetplan.cluster.libraries import island_library
from hetplan.cost.model_flops import flops_per_token, product_format
from hetplan.deadline import check_time, seconds_left
from hetplan.errors import InfeasibleError, LimitError
from hetplan.job.spec import Pins
from hetplan.job.trainer import trainer_faults
from hetplan.plans.check_job import check_job_against
from hetplan.search.result import (
    NO_TIME,
    BestAlone,
    HomogeneousSum,
    KindAlone,
    Question,
    Restriction,
    SearchResult,
)
from hetplan.whatif.ask import NO_ANSWER, ask, first_line, libraries_apart
from hetplan.whatif.memory_shortage import room_lines
from hetplan.whatif.smaller_questions import Answers, alone, usable_islands, usable_kinds
from hetplan.whatif.within_limits import may_break

WIDER = "native"
"""The target that is asked."""

MIXES = "flagscale"
"""The one that is asked first where the plan's target cannot mix libraries."""

STOCK = "megatron"
"""What would train a kind alone: of the trainers with one library it has the most choices."""

_WIDER_GAP = 0.02
"""Least gap of that search: the restriction's cost need not be known more closely."""

_WIDER_SECONDS = 30.0
"""Longest search; it ends with whatever bound it has."""


def restriction(result: SearchResult, answers: Answers) -> Restriction | None:
    """A wider target's plan of the same model, cluster and job, to the same gap or 2 %, or half a
    minute.

    Not searched where a short proof shows that it cannot be faster. None where the result is of
    that target already, it cannot train this model, or it lacks what the job asks of its trainer.
    OutOfTimeError where there was no time for a plan of it (`hetplan.deadline`).
    """
    inputs = result.inputs
    if inputs.job.target in (WIDER, "any"):
        return None
    kept_apart = libraries_apart(inputs)
    for name in (MIXES, WIDER) if kept_apart else (WIDER,):
        asked = replace(inputs.job, target=name)
        if not check_job_against(asked, inputs.model, inputs.cluster):
            break
    else:
        return None
    wider = inputs.changed(job=asked)
    check_time()
    step = result.estimate.step_seconds
    if answers.none_below(wider, step):
        return Restriction(
            target=name, libraries=kept_apart, step_seconds=step, lower_bound_seconds=step
        )
    left = max(0.0, min(_WIDER_SECONDS, seconds_left()))
    try:
        found = ask(
            wider.looser(_WIDER_GAP, left),
            answers.predictor,
            known_plans=(result.plan,),
            progress=answers.shown(name),
        )
    except NO_ANSWER:
        check_time()
        return None
    lower = found.estimate.step_seconds
    if found.certificate is not None:
        lower = found.certificate.lower_bound_seconds
    return Restriction(
        target=name,
        libraries=kept_apart,
        mixed=bool(kept_apart) and len(set(map(island_library, found.used_islands))) > 1,
        step_seconds=found.estimate.step_seconds,
        lower_bound_seconds=lower,
    )


def homogeneous_sum(result: SearchResult, answers: Answers) -> HomogeneousSum:
    """The result's plan against each device kind of its cluster alone.

    Forbidden nodes stay out, pins do not count for a kind alone. Kinds that `answers` does not know
    are searched. The result's own plan counts where it uses one kind.
    """
    inputs = result.inputs
    kinds_alone = tuple(
        _at_least(result, _alone(inputs, kind, answers)) for kind in usable_kinds(inputs)
    )
    tokens = result.estimate.tokens_per_second
    parts = [
        None
        if kind.reason == NO_TIME
        else kind.tokens_per_second or kind.roofline_tokens_per_second
        for kind in kinds_alone
    ]
    return HomogeneousSum(
        kinds=kinds_alone,
        homogeneous_sum_ratio=_ratio(tokens, parts),
        roofline_ratio=_ratio(tokens, [kind.roofline_tokens_per_second for kind in kinds_alone]),
    )


def strongest_alone(
    result: SearchResult, figure: HomogeneousSum, answers: Answers
) -> BestAlone | None:
    """The best single kind beside a plan that may mix kinds.

    Under the plan's target, or under Megatron-LM where that is faster: one more search. None where
    no kind has a plan alone, or the target cannot mix the cluster's libraries.
    """
    inputs = result.inputs
    best = max(figure.kinds, key=lambda kind: kind.tokens_per_second)
    if not best.tokens_per_second or libraries_apart(inputs):
        return None
    question = inputs.with_job(target=STOCK)
    if inputs.job.target != STOCK and not any(trainer_faults(question.job)):
        stock = _alone(question, best.device, answers)
        if stock.tokens_per_second > best.tokens_per_second:
            return BestAlone(target=STOCK, kind=stock)
    return BestAlone(target=inputs.job.target, kind=best)


def _at_least(result: SearchResult, kind: KindAlone) -> KindAlone:
    """The kind with the result's plan for its own where that uses no other kind, and is faster."""
    tokens, certificate = result.estimate.tokens_per_second, result.certificate
    used = {island.device.kind for island in result.used_islands}
    if used != {kind.device} or tokens <= kind.tokens_per_second:
        return kind
    gap = 1.0 if certificate is None else certificate.gap
    return replace(kind, tokens_per_second=tokens, gap=gap, reason="")


def _ratio(tokens_per_second: float, parts: list[float | None]) -> float | None:
    """The plan over the sum of the parts; None where a part is unknown."""
    known = [part for part in parts if part is not None]
    return tokens_per_second / math.fsum(known) if len(known) == len(parts) else None


def _alone(question: Question, kind: str, answers: Answers) -> KindAlone:
    own = alone(question.with_job(pin=Pins()), kind)
    mine = usable_islands(own)
    found = answers.of_real_target(f"{kind} alone", own)
    devices = sum(each.num_usable_devices for each in mine)
    peak = dict(mine[0].device.peak_flops_per_second).get(product_format(question.job))
    certificate = None if found is None else found.certificate
    used = devices
    if found is not None and may_break(own):  # limits of sites may not allow all of them
        used = sum(each.num_devices for each in found.plan.replicas)
    return KindAlone(
        device=kind,
        devices=used,
        tokens_per_second=0.0 if found is None else found.estimate.tokens_per_second,
        roofline_tokens_per_second=(
            None if peak is None else devices * peak / flops_per_token(question.model, question.job)
        ),
        gap=0.0 if found is None else 1.0 if certificate is None else certificate.gap,
        reason="" if found is not None else _no_plan(own, answers),
    )


def _no_plan(own: Question, answers: Answers) -> str:
    """Why a kind alone has no plan, in one line."""
    error = answers.error(own)
    if isinstance(error, InfeasibleError):
        return (*room_lines(own, answers.predictor), first_line(error))[0]
    # InputError: the kind lacks a rate for the job's precision, and the plan left it unused.
    return NO_TIME if error is None or isinstance(error, LimitError) else first_line(error)
