"""The plan for the job's own aim, from the one with the shortest step."""

from __future__ import annotations

from collections.abc import Callable

from hetplan.job.spec import Job, Objective
from hetplan.predict.predictor import Predictor
from hetplan.search.objectives.choose import choose
from hetplan.search.objectives.pool import pool
from hetplan.search.result import SearchResult


def has_other_aim(job: Job, top: int = 1) -> bool:
    """Whether more is asked than the plan with the shortest step."""
    return job.objective is not Objective.STEP_TIME or job.quantile is not None or top > 1


def by_objective(
    result: SearchResult,
    predictor: Predictor,
    *,
    top: int = 1,
    time_limit_seconds: float | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> SearchResult:
    """The best plan that was found for the job's aim, and up to `top` - 1 alternatives.

    The result itself where the job asks for the shortest step and nothing else. The search is
    asked again for every nearby question, each within `time_limit_seconds` or the job's limit.
    """
    if not has_other_aim(result.inputs.job, top):
        return result
    found = pool(result, predictor, time_limit_seconds=time_limit_seconds, progress=progress)
    # A Ctrl-C on the way shows in the first one's certificate.
    return choose(found[0].result, found, predictor, top=top)
