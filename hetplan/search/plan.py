"""The library's verb: the best plan for a model, a cluster and a job."""

from __future__ import annotations

from hetplan.cluster.spec import Cluster
from hetplan.files.shipped import default_stores
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.predict.fit import fit_stores
from hetplan.predict.predictor import Predictor
from hetplan.search.result import SearchResult
from hetplan.search.search import search


def plan(
    model: ModelSpec, cluster: Cluster, job: Job, predictor: Predictor | None = None
) -> SearchResult:
    """The fastest plan for this job, its estimate and its certificate.

    Without a predictor one is fitted from the user's profile store and the shipped profiles;
    device kinds without samples are predicted from their datasheets, and the estimate says so.
    InfeasibleError where no plan exists, LimitError where the job's time limit came first.
    """
    if predictor is None:
        predictor, _ = fit_stores(*default_stores())
    return search(model, cluster, job, predictor)
