"""How a plan compares with each device kind training by itself: HETHUB's figure of merit.

homogeneous_sum_ratio = tokens/s of the plan / sum over kinds of the best tokens/s of that kind
alone, each with the same model, global batch, sequence and target, and a gap of at most 1 %.
roofline_ratio = tokens/s of the plan / sum over devices of peak rate / operations per token.
Both sides are predicted. The sum is no bound: a kind that cannot hold the model alone adds to the
mix and has no plan of its own; it counts with its roofline.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from hetplan.cluster.spec import Cluster
from hetplan.errors import InfeasibleError, InputError, LimitError
from hetplan.job.spec import Forbids, Job, Pins
from hetplan.model.spec import ModelSpec
from hetplan.model.work import layer_work_at
from hetplan.predict.predictor import Predictor
from hetplan.search.families.allowed import allowed_cluster
from hetplan.search.reasons.constraints import Question
from hetplan.search.reasons.room import room_lines
from hetplan.search.result import HomogeneousSum, KindAlone, SearchResult
from hetplan.search.search import search
from hetplan.search.solver import Progress

_MAX_GAP = 0.01

_PASSES = 3
"""A training step is a forward pass and a backward pass of twice its operations."""


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
        _alone(inputs.model, cluster, inputs.job, kind, predictor, time_limit_seconds, progress)
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


def _ratio(tokens_per_second: float, parts: list[float | None]) -> float | None:
    """The plan over the sum of the parts; None where a part is unknown."""
    known = [part for part in parts if part is not None]
    return tokens_per_second / math.fsum(known) if len(known) == len(parts) else None


def _alone(
    model: ModelSpec,
    cluster: Cluster,
    job: Job,
    kind: str,
    predictor: Predictor,
    time_limit_seconds: float | None,
    progress: Callable[[Progress], None] | None,
) -> KindAlone:
    islands = tuple(
        island for island in cluster.islands if island.device.kind == kind and island.usable_nodes
    )
    names = {island.name for island in islands}
    part = replace(
        cluster,
        islands=islands,
        links=tuple(link for link in cluster.links if set(link.between) <= names),
    )
    own_job = replace(
        job,
        gap=min(job.gap, _MAX_GAP),
        time_limit_seconds=time_limit_seconds,
        pin=Pins(),
        forbid=Forbids(),
    )
    tokens, gap, reason = 0.0, 0.0, ""
    try:
        found = search(model, part, own_job, predictor, progress=progress, reasons=False)
        tokens = found.estimate.tokens_per_second
        gap = found.certificate.gap if found.certificate is not None else 1.0
        if found.certificate is not None and found.certificate.status == "interrupted":
            raise KeyboardInterrupt  # half of a search is no comparison
    except InfeasibleError as error:
        lacking = room_lines(Question(model=model, cluster=part, job=own_job), predictor)
        reason = (*lacking, str(error).splitlines()[0])[0]
    # InputError: the kind lacks a rate for the job's precision, and the plan left it unused.
    except (InputError, LimitError) as error:
        reason = str(error).splitlines()[0]
    devices = sum(len(island.usable_nodes) * island.devices_per_node for island in islands)
    peaks = dict(islands[0].device.peak_flops_per_second)
    peak = peaks.get(job.precision.value)
    return KindAlone(
        device=kind,
        devices=devices,
        tokens_per_second=tokens,
        roofline_tokens_per_second=(
            None if peak is None else devices * peak / operations_per_token(model, job)
        ),
        gap=gap,
        reason=reason,
    )


def operations_per_token(model: ModelSpec, job: Job) -> float:
    """Operations of one training step per token, without recomputation; layers may differ."""
    length = job.sequence_length
    row = range(len(model.layers))
    return _PASSES * math.fsum(layer_work_at(model, at, 1, length).flops for at in row) / length
