"""`hetplan.replan`: the next plan of a run whose cluster changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.drafting.changed import with_gained, without_lost
from hetplan.errors import Fault, InputError, printable
from hetplan.files.reading import read_document
from hetplan.library.inputs import predictor_of
from hetplan.library.result import Result
from hetplan.library.values import File, fields_of
from hetplan.plans.check_job import check_job_against
from hetplan.predict.predictor import Predictor
from hetplan.reports.replanned import replanned_lines
from hetplan.reports.terminal import folded
from hetplan.search.files import load_legal_plan
from hetplan.search.result import SearchResult
from hetplan.whatif import replan as core
from hetplan.whatif.replan import Replanned, Source, Terms, source_named, with_horizon


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChange:
    """What a run goes on with."""

    cluster: Cluster
    sudden: bool
    """Nodes were lost before anything could be saved."""
    sha256: tuple[tuple[str, str], ...]
    """Of the inputs that still are what they were."""


def change_of(
    before: SearchResult,
    lost: Sequence[str],
    gained: Sequence[str],
    cluster: Cluster | File | None,
    *,
    announced: bool,
) -> ClusterChange:
    """The plan's cluster without what it lost and with what it gained, or another one."""
    inputs = before.inputs
    if cluster is not None and (lost or gained):
        raise InputError("--cluster is all that there is; leave out --lost and --gained")
    if cluster is None and not (lost or gained):
        raise InputError("say what changes: --lost NODES, --gained WORDS or --cluster FILE")
    kept = [each for each in inputs.sha256 if each[0] != "cluster"]
    if cluster is None:
        left = without_lost(inputs.cluster, before.plan, lost) if lost else inputs.cluster
        new = with_gained(left, gained)
        return ClusterChange(cluster=new, sudden=bool(lost) and not announced, sha256=tuple(kept))
    if isinstance(cluster, Cluster):
        return ClusterChange(cluster=cluster, sudden=False, sha256=tuple(kept))
    document = read_document(Path(cluster))
    kept.append(("cluster", document.sha256))
    return ClusterChange(cluster=load_cluster(document), sudden=False, sha256=tuple(sorted(kept)))


def planned_again(
    before: SearchResult,
    change: ClusterChange,
    predictor: Predictor,
    terms: Terms,
    batch: int | None = None,
) -> Replanned:
    """The next plan; InfeasibleError with the reasons where there is none."""
    job = before.inputs.job
    if batch is not None:
        job = replace(job, global_batch_size=batch)
        faults = check_job_against(job, before.inputs.model, change.cluster)
        if faults:
            raise InputError(*faults)
    return core.replan(
        before,
        change.cluster,
        predictor,
        terms,
        sudden=change.sudden,
        job=job,
        sha256=change.sha256,
    )


class NextPlan(Replanned):
    """A `Replanned` with its ten lines."""

    __slots__ = ("_terms",)
    _terms: Terms

    def summary(self, width: int = 80) -> str:
        """What was lost, what changes, what moves, and when it pays back."""
        return "\n".join(map(printable, folded(replanned_lines(self, self._terms), width)))


def replan(
    plan: SearchResult | File,
    *,
    lost: Sequence[str] | str = (),
    gained: Sequence[str] | str = (),
    cluster: Cluster | File | None = None,
    predictor: Predictor | File | None = None,
    horizon: str | None = None,
    batch: int | None = None,
    **terms: object,
) -> NextPlan:
    """The best next plan of a run, the cost of moving and of starting again included.

    plan: what `plan` gives, or its file. lost: names of nodes; gained: nodes in words, as in "2x8
    h100 @A", or the name of one that is back; or cluster: all that there is from now on. horizon:
    "500B" tokens or "6h" that the next plan is for; batch: another global batch. Also announced
    (bool), start_seconds, source ("checkpoint" or "peers"), storage_bytes_per_second and
    search_seconds. `result` of the answer is the plan, `best` what it costs, `summary()` says it.

    InputError: something given is wrong; InfeasibleError: there is no plan, and why.
    """
    announced = bool(terms.pop("announced", False))
    known = [name for name in Terms.__dataclass_fields__ if not name.startswith("horizon")]
    unknown = sorted(set(terms) - set(known))
    if unknown:
        message = f"unknown; known: horizon, announced, {', '.join(known)}"
        raise InputError(*(Fault(field=name, message=message) for name in unknown))
    source = source_named(terms.pop("source", Source.CHECKPOINT), "source")
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int)):
        raise InputError(Fault(field="batch", message=f"found {batch!a:.40}; give a whole number"))
    for name, given in (("lost", lost), ("gained", gained), ("horizon", horizon or "")):
        many = name != "horizon" and isinstance(given, list | tuple)
        if not all(isinstance(each, str) for each in (given if many else (given,))):
            raise InputError(Fault(field=name, message=f"found {given!a:.40}; give text"))
    asked = with_horizon(Terms(source=source, **terms), horizon)  # type: ignore[arg-type]
    before = plan if isinstance(plan, SearchResult) else load_legal_plan(Path(plan))
    names = (lost,) if isinstance(lost, str) else lost
    words = (gained,) if isinstance(gained, str) else gained
    change = change_of(before, names, words, cluster, announced=announced)
    own = getattr(before, "_predictor", None) if predictor is None else None
    predict = own or predictor_of(predictor)[0]
    found = planned_again(before, change, predict, asked, batch)
    answer = NextPlan(**fields_of(replace(found, result=Result.of(found.result, predict))))
    object.__setattr__(answer, "_terms", asked)
    return answer
