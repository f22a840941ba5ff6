"""What a search without a plan tells its caller: one quick line, or the whole answer."""

from __future__ import annotations

from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.predict.predictor import Predictor
from hetplan.search.reasons.constraints import Question
from hetplan.search.reasons.feasible import Feasible
from hetplan.search.reasons.room import room_lines
from hetplan.search.reasons.why import why_no_plan
from hetplan.search.result import SearchResult


def quick_reasons(
    model: ModelSpec, cluster: Cluster, job: Job, predictor: Predictor
) -> tuple[str, ...]:
    """One line for callers that search many jobs."""
    del cluster, predictor
    return (f"no plan of {model.name} for {job.target} fits the devices and the pins",)


def whole_reasons(
    model: ModelSpec, cluster: Cluster, job: Job, predictor: Predictor
) -> tuple[str, ...]:
    """The smallest conflict, what memory lacks, and what would help (`reasons.why`)."""
    # The search asks this file, and relaxations are verified by a search.
    from hetplan.search.search import search

    def searched(asked: Question) -> SearchResult:
        return search(asked.model, asked.cluster, asked.job, predictor, reasons=False)

    return why_no_plan(
        Question(model=model, cluster=cluster, job=job),
        Feasible(predictor),
        details=lambda asked: room_lines(asked, predictor),
        searched=searched,
    )
