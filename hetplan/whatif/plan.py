"""The library's verb: the best plan for a model, a cluster and a job."""

from __future__ import annotations

from hetplan.cluster.spec import Cluster
from hetplan.files.shipped import default_stores
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.predict.fit import fit_stores, with_shipped
from hetplan.predict.predictor import Predictor
from hetplan.search.result import Question, SearchResult
from hetplan.whatif.no_plan import with_reasons
from hetplan.whatif.objectives import by_objective
from hetplan.whatif.smaller_questions import Answers, best_plan


def plan(
    model: ModelSpec,
    cluster: Cluster,
    job: Job,
    predictor: Predictor | None = None,
    *,
    top: int = 1,
) -> SearchResult:
    """The best plan for this job's aim, its estimate and its certificate.

    The aim is `job.objective`, at `job.quantile` where one is given; the certificate is about the
    step time, whatever the aim (`result.objective` says so). With `top` above 1 the result has up
    to that many plans less one as `alternatives`, none of them better by every aim than another.

    Without a predictor one is fitted from the user's profile store and the shipped profiles; kinds
    that others measured go by their operators. Other kinds are predicted from their datasheets, and
    the estimate says so.
    InfeasibleError where no plan exists, LimitError where the job's time limit came first.
    """
    if predictor is None:
        predictor = with_shipped(fit_stores(*default_stores())[0])
    question = Question(model=model, cluster=cluster, job=job)
    with with_reasons(question, predictor):
        found = best_plan(question, Answers(predictor))
    return by_objective(found, predictor, top=top)
