"""The verbs that answer with a `Result` or a table: plan, estimate, load_plan, sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from hetplan.cluster.spec import Cluster
from hetplan.cost import estimate as cost
from hetplan.cost.estimate_values import Estimate
from hetplan.cost.step_model.pricer import Pricer
from hetplan.deadline import moment_in
from hetplan.errors import Fault, InputError
from hetplan.files.reading import decode
from hetplan.files.settings import given_path, keywords
from hetplan.files.writing import ScratchFolder
from hetplan.job.spec import Job
from hetplan.job.sweep_form import SWEEP_SCHEMA
from hetplan.kernels import clock
from hetplan.library.inputs import check_before_search, predictor_of, question_of
from hetplan.library.result import Result
from hetplan.library.values import File
from hetplan.model.spec import ModelSpec
from hetplan.plans.layout import Layout, plan_of_layout
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Predictor
from hetplan.reports.terminal import ProgressLine, each_shown_on
from hetplan.search import files
from hetplan.search.files import priced_result
from hetplan.search.journal import JournalFile
from hetplan.search.result import Inputs, SearchResult
from hetplan.search.space.allowed import allowed_cluster
from hetplan.whatif.local_steps import LocalSteps, beside
from hetplan.whatif.no_plan import with_reasons
from hetplan.whatif.objectives import by_objective, interrupted
from hetplan.whatif.robust import check_varied
from hetplan.whatif.smaller_questions import Answers, best_plan

if TYPE_CHECKING:
    from pandas import DataFrame

    from hetplan.whatif.sweep import Row

LAYOUT_SCHEMA = "hetplan.layout/1"
"""Of the keywords of `estimate`; there is no such file."""


def plan(
    model: ModelSpec | File,
    cluster: Cluster | File,
    job: Job | File,
    predictor: Predictor | File | None = None,
    *,
    top: int = 1,
    front: bool = False,
    progress: bool | None = None,
) -> Result:
    """The fastest plan, its estimate and a certificate of how good it is.

    model, cluster, job: paths, or what `load_model`, `load_cluster`, `load_job` and `make_job`
    give. The aim is the job's objective, at its quantile where it has one; the certificate is about
    the step time, whatever the aim. predictor: a file of `hetplan fit`, a profile store, or what
    `fit` gives; None: fitted from your own store and the shipped profiles, and devices that nobody
    measured are predicted from their datasheets, which `result.summary()` says. top: above 1 the
    result has up to that many plans less one as `alternatives`, none of them better by every aim
    than another. front: these are the Pareto front of time, cost, energy and devices instead, with
    gaps. progress: one line while it searches; None: on a terminal and in a notebook.

    An interrupt (Ctrl-C, or a notebook's stop button) ends the search with the best plan so far.
    InputError: something given is wrong; InfeasibleError: there is no plan, and why; LimitError:
    the job's time limit came before any plan.
    """
    inputs, document = question_of(model, cluster, job)
    end = moment_in(inputs.job.time_limit_seconds)
    predict, digest = predictor_of(predictor)
    check_before_search(inputs, document, cluster, predict)
    check_varied(inputs.job)
    if digest:
        inputs = replace(inputs, sha256=(*inputs.sha256, ("predictor", digest)))
    found, _ = planned(inputs, Answers(predict), top=top, front=front, end=end, progress=progress)
    return Result.of(found, predict)


def planned(
    inputs: Inputs,
    answers: Answers,
    *,
    top: int,
    front: bool,
    end: float,
    journal: JournalFile | None = None,
    progress: bool | None = None,
) -> tuple[SearchResult, LocalSteps | str]:
    """The best plan by the moment `end` for the job's aim, or of local steps where their run ends
    first; and how these compare with it (`beside`). After Ctrl-C the best so far.
    """
    predict, found = answers.predictor, None
    try:
        with ProgressLine("closing candidates", progress) as line:
            answers.shown = each_shown_on(line)
            with with_reasons(inputs, predict, end):
                found = best_plan(inputs, answers, journal=journal, end=_before_local(inputs, end))
            line.begin("planning nearby questions")
            found = by_objective(
                found,
                predict,
                top=top,
                front=front,
                end=end,
                progress=lambda at, of, words: line.show(at, of, None, words),
            )
            local = beside(found, predict, end)
    except KeyboardInterrupt:
        if found is None:
            raise
        return interrupted(found), ""
    return (found if isinstance(local, str) or not local.wins else local.result), local


def _before_local(inputs: Inputs, end: float) -> float:
    """By when the synchronous plan has to be there: half of the time is for local steps, where the
    job asks for them.
    """
    return end if inputs.job.synchronisation is None else (clock() + end) / 2


def load_plan(path: File) -> Result:
    """The result in a plan file.

    `hetplan plan`, `hetplan estimate` and `Result.save` write them. InputError lists what is wrong
    in it, and says where the file was changed since.
    """
    return Result.of(files.load_legal_plan(given_path(path, "path")))


class LayoutKeywords(TypedDict, total=False):
    """A layout as keywords of `estimate`; what is left out is as `Layout` has it."""

    tp: int
    pp: int | None
    dp: int | None
    microbatch_size: int
    layers: Sequence[int] | None
    islands: Sequence[str] | str | None
    recompute: bool
    cp: int
    ep: int
    etp: int | None
    sequence_parallel: bool
    schedule: str | None
    virtual_stages: int
    recompute_modules: Sequence[str]
    recompute_layers: int | None
    sharding: str | None
    shards: int | None
    offload: float
    overlap: Sequence[str] | None


@overload
def estimate(
    plan: Plan,
    model: ModelSpec | File,
    cluster: Cluster | File,
    job: Job | File,
    predictor: Predictor | File | None = None,
) -> Estimate: ...


@overload
def estimate(
    model: ModelSpec | File,
    cluster: Cluster | File,
    job: Job | File,
    predictor: Predictor | File | None = None,
    **layout: Unpack[LayoutKeywords],
) -> Result: ...


def estimate(*given: Any, **named: Any) -> Estimate | Result:
    """What one step of a layout costs, without a search.

    `estimate(model, cluster, job, tp=8, pp=4, layers=[20, 20, 20, 20])`: degrees are whole numbers,
    layers has the transformer layers of each stage, islands the island of each stage or one for
    all; also dp, microbatch_size (sequences), cp, ep, etp, schedule, virtual_stages, recompute,
    recompute_layers, recompute_modules, sequence_parallel, sharding, shards, offload (a part of 1)
    and overlap. What is left out is even, or as the job's trainer has it. The result has no
    certificate; one that needs more memory than there is is priced all the same, and `fits` is
    False.

    `estimate(plan, model, cluster, job)` is for a `Plan`, as in `result.plan`, on these inputs.

    model, cluster, job, predictor: as of `plan`. InputError names what does not divide or fit.
    """
    if isinstance(named.get("plan", given[0] if given else None), Plan):
        return estimate_plan(*given, **named)
    return estimate_layout(*given, **named)


def estimate_plan(
    plan: Plan,
    model: ModelSpec | File,
    cluster: Cluster | File,
    job: Job | File,
    predictor: Predictor | File | None = None,
) -> Estimate:
    """The estimate of a plan on these inputs."""
    if isinstance(model, ModelSpec) and isinstance(cluster, Cluster) and isinstance(job, Job):
        return cost.estimate(plan, model, cluster, job, predictor_of(predictor)[0])
    inputs, _ = question_of(model, cluster, job, searched=False)
    return cost.estimate(plan, inputs.model, inputs.cluster, inputs.job, predictor_of(predictor)[0])


def estimate_layout(
    model: ModelSpec | File,
    cluster: Cluster | File,
    job: Job | File,
    predictor: Predictor | File | None = None,
    **layout: Unpack[LayoutKeywords],
) -> Result:
    """A layout in keywords, priced."""
    if isinstance(islands := layout.get("islands"), str):
        layout["islands"] = [islands]
    chosen = decode(keywords(layout, LAYOUT_SCHEMA), Layout, schema=LAYOUT_SCHEMA)
    inputs, _ = question_of(model, cluster, job, searched=False)
    usable = allowed_cluster(inputs.cluster, inputs.job)
    given = plan_of_layout(chosen, inputs.model, usable, inputs.job)
    predict, digest = predictor_of(predictor)
    estimated = cost.estimate_with(Pricer(inputs.model, usable, inputs.job, predict), given)
    return Result.of(priced_result(inputs, given, estimated, digest), predict)


def sweep(
    file: File | None = None,
    *,
    predictor: Predictor | File | None = None,
    table: File | None = None,
    plans: File | None = None,
    progress: bool | None = None,
    **axes: Any,
) -> DataFrame:
    """A grid of questions as a DataFrame, one row for each.

    file: a sweep file (docs/file-forms.md); without one its keys, as in `sweep(models=["m.yaml"],
    clusters=["c.yaml"], jobs=["j.yaml"], links=[{"between": ["a", "b"], "bandwidth": ["10 Gbit/s",
    "100 Gbit/s"]}])`. table: a CSV file that keeps finished rows, so that the same call goes on
    where it ended. plans: a folder for the plan files.

    Times are in seconds; `status` is optimal, limit, open, infeasible or error, and `reason` says
    why there is no plan. InputError: something in the grid is wrong.
    """
    import pandas as pd

    from hetplan.whatif.sweep import run_sweep
    from hetplan.whatif.sweep_grid import load_sweep, read_sweep

    for name in ("models", "clusters", "jobs"):
        for at, each in enumerate(axes.get(name, ())):
            if not isinstance(each, str | PathLike):
                message = f"found a value of {type(each).__name__}; a sweep reads files: give paths"
                raise InputError(Fault(field=f"{name}[{at}]", message=message))
    if file is not None and axes:
        message = f"{file} has its own; leave the keywords out, or the file"
        raise InputError(Fault(field=", ".join(axes), message=message))
    questions = (
        load_sweep(given_path(file, "file"))
        if file
        else read_sweep(keywords(axes, SWEEP_SCHEMA), Path())
    )
    predict, digest = predictor_of(predictor)
    with ScratchFolder("sweep") as folder, ProgressLine("planning", progress) as line:
        rows = folder / "sweep.csv" if table is None else Path(table)

        def show(done: int, total: int, row: Row) -> None:
            line.show(done, total, None, row.words)

        run_sweep(
            questions,
            rows,
            resume=True,
            predictor=predict,
            digest=digest,
            plans=None if plans is None else Path(plans),
            progress=show,
        )
        found = pd.read_csv(rows, keep_default_na=False)
    for name in _NUMBERS:
        found[name] = pd.to_numeric(found[name])
    return found


_NUMBERS = (
    "step_seconds", "tokens_per_second", "gap", "lower_bound_seconds", "devices_in_use",
)  # fmt: skip
"""Columns of a sweep that are empty where there is no plan: NaN there."""
