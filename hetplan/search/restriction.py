"""What the target costs: the same job for a trainer that can run more plans."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from hetplan.errors import InfeasibleError, InputError, LimitError
from hetplan.plans.formats import summed_as
from hetplan.predict.predictor import Predictor
from hetplan.search.result import Restriction, SearchResult
from hetplan.search.search import search
from hetplan.search.solver import Progress

WIDER = "native"
"""The target that is asked."""

_MAX_GAP = 0.02
"""Least gap of that search: the restriction's cost need not be known more closely."""

_MAX_SECONDS = 30.0
"""Longest search; it ends with whatever bound it has."""


def restriction(
    result: SearchResult,
    predictor: Predictor,
    *,
    time_limit_seconds: float | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Restriction | None:
    """The native plan of the same model, cluster and job, to the same gap or 2 %, or half a minute.

    None where the result is of that target already, or it cannot train this model.
    """
    inputs = result.inputs
    if inputs.job.target in (WIDER, "any"):
        return None
    job = replace(
        inputs.job,
        target=WIDER,
        gap=max(inputs.job.gap, _MAX_GAP),
        time_limit_seconds=min(
            _MAX_SECONDS, math.inf if time_limit_seconds is None else time_limit_seconds
        ),
    )
    try:
        found = search(
            inputs.model,
            inputs.cluster,
            job,
            predictor,
            progress=progress,
            start=(summed_as(replace(result.plan, target=WIDER), job),),
            reasons=False,
        )
    except (InfeasibleError, InputError, LimitError):
        return None
    lower = found.estimate.step_seconds
    if found.certificate is not None:
        if found.certificate.status == "interrupted":
            raise KeyboardInterrupt  # half of a search is no comparison
        lower = found.certificate.lower_bound_seconds
    return Restriction(
        target=WIDER, step_seconds=found.estimate.step_seconds, lower_bound_seconds=lower
    )
