"""The plan beside two others: a target that can run more plans, and each device kind alone.

`restriction`: the same job for hetplan's own trainer, whose plans include those of other targets;
where the target has one library of collectives and the cluster several, for FlagScale if it can,
which is what mixes them under Megatron-LM.

`homogeneous_sum` is HETHUB's figure of merit:

    homogeneous_sum_ratio = tokens/s of the plan / sum over kinds of the best tokens/s of that kind
                            alone, with the same model, batch, sequence and target, to a gap of 1 %
    roofline_ratio        = tokens/s of the plan / sum over devices of peak rate / operations per
                            token

Both sides are predicted. The sum is no bound: a kind that cannot hold the model alone adds to the
mix and has no plan of its own; it counts with its roofline.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from hetplan.cluster.libraries import island_library
from hetplan.cost.model_flops import flops_per_token, product_format
from hetplan.errors import InfeasibleError
from hetplan.job.spec import Forbids, Pins
from hetplan.job.trainer import trainer_faults
from hetplan.plans.check_job import check_job_against
from hetplan.plans.formats import summed_as
from hetplan.predict.predictor import Predictor
from hetplan.search.result import HomogeneousSum, KindAlone, Question, Restriction, SearchResult
from hetplan.search.solver import Progress
from hetplan.search.space.allowed import allowed_cluster, apart
from hetplan.whatif.ask import NO_ANSWER, ask, first_line
from hetplan.whatif.memory_shortage import room_lines

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


def restriction(
    result: SearchResult,
    predictor: Predictor,
    *,
    time_limit_seconds: float | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Restriction | None:
    """A wider target's plan of the same model, cluster and job, to the same gap or 2 %, or half a
    minute.

    None where the result is of that target already, it cannot train this model, or it lacks what
    the job asks of its trainer.
    """
    inputs = result.inputs
    if inputs.job.target in (WIDER, "any"):
        return None
    kept_apart = apart(allowed_cluster(inputs.cluster, inputs.job), inputs.job)
    for name in (MIXES, WIDER) if kept_apart else (WIDER,):
        asked = replace(inputs.job, target=name)
        if not check_job_against(asked, inputs.model, inputs.cluster):
            break
    else:
        return None
    wider = inputs.changed(job=asked)
    limit = math.inf if time_limit_seconds is None else time_limit_seconds
    known = summed_as(replace(result.plan, target=name), wider.job)
    try:
        found = ask(
            wider.looser(_WIDER_GAP, min(_WIDER_SECONDS, limit)),
            predictor,
            known_plans=(known,),
            progress=progress,
        )
    except NO_ANSWER:
        return None
    lower = found.estimate.step_seconds
    if found.certificate is not None:
        lower = found.certificate.lower_bound_seconds
    return Restriction(
        target=name,
        libraries=kept_apart,
        mixed=len(set(map(island_library, found.used_islands))) > 1,
        step_seconds=found.estimate.step_seconds,
        lower_bound_seconds=lower,
    )


_ALONE_GAP = 0.01


def homogeneous_sum(
    result: SearchResult,
    predictor: Predictor,
    *,
    time_limit_seconds: float | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> HomogeneousSum:
    """The result's plan against each device kind of its cluster alone.

    Forbidden nodes stay out, pins do not count for a kind alone. `time_limit_seconds` is for each
    kind's own search.
    """
    inputs = result.inputs
    cluster = allowed_cluster(inputs.cluster, inputs.job)
    kinds = dict.fromkeys(island.device.kind for island in cluster.islands if island.usable_nodes)
    alone = tuple(
        _alone(inputs.changed(cluster=cluster), kind, predictor, time_limit_seconds, progress)
        for kind in kinds
    )
    tokens = result.estimate.tokens_per_second
    return HomogeneousSum(
        kinds=alone,
        homogeneous_sum_ratio=_ratio(
            tokens, [kind.tokens_per_second or kind.roofline_tokens_per_second for kind in alone]
        ),
        roofline_ratio=_ratio(tokens, [kind.roofline_tokens_per_second for kind in alone]),
    )


def strongest_alone(
    result: SearchResult,
    figure: HomogeneousSum,
    predictor: Predictor,
    *,
    time_limit_seconds: float | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[str, KindAlone] | None:
    """(target, what it reaches) of the best single kind beside a plan that may mix kinds.

    Under the plan's target, or under Megatron-LM where that is faster: one more search. None where
    no kind has a plan alone, or the target cannot mix the cluster's libraries.
    """
    inputs = result.inputs
    cluster = allowed_cluster(inputs.cluster, inputs.job)
    best = max(figure.kinds, key=lambda kind: kind.tokens_per_second)
    if not best.tokens_per_second or apart(cluster, inputs.job):
        return None
    job = replace(inputs.job, target=STOCK)
    if inputs.job.target != STOCK and not any(trainer_faults(job)):
        question = inputs.changed(cluster=cluster, job=job)
        stock = _alone(question, best.device, predictor, time_limit_seconds, progress)
        if stock.tokens_per_second > best.tokens_per_second:
            return STOCK, stock
    return inputs.job.target, best


def _ratio(tokens_per_second: float, parts: list[float | None]) -> float | None:
    """The plan over the sum of the parts; None where a part is unknown."""
    known = [part for part in parts if part is not None]
    return tokens_per_second / math.fsum(known) if len(known) == len(parts) else None


def _alone(
    question: Question,
    kind: str,
    predictor: Predictor,
    time_limit_seconds: float | None,
    progress: Callable[[Progress], None] | None,
) -> KindAlone:
    cluster, model = question.cluster, question.model
    islands = tuple(
        island for island in cluster.islands if island.device.kind == kind and island.usable_nodes
    )
    names = {island.name for island in islands}
    part = replace(
        cluster,
        islands=islands,
        links=tuple(link for link in cluster.links if set(link.between) <= names),
    )
    job = replace(
        question.job,
        gap=min(question.job.gap, _ALONE_GAP),
        time_limit_seconds=time_limit_seconds,
        pin=Pins(),
        forbid=Forbids(),
    )
    alone = question.changed(cluster=part, job=job)
    tokens, gap, reason = 0.0, 0.0, ""
    try:
        found = ask(alone, predictor, progress=progress)
        tokens = found.estimate.tokens_per_second
        gap = found.certificate.gap if found.certificate is not None else 1.0
    except InfeasibleError as error:
        reason = (*room_lines(alone, predictor), first_line(error))[0]
    # InputError: the kind lacks a rate for the job's precision, and the plan left it unused.
    except NO_ANSWER as error:
        reason = first_line(error)
    devices = sum(len(island.usable_nodes) * island.devices_per_node for island in islands)
    peaks = dict(islands[0].device.peak_flops_per_second)
    peak = peaks.get(product_format(job))
    return KindAlone(
        device=kind,
        devices=devices,
        tokens_per_second=tokens,
        roofline_tokens_per_second=(
            None if peak is None else devices * peak / flops_per_token(model, job)
        ),
        gap=gap,
        reason=reason,
    )
