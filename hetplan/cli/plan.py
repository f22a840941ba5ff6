"""`hetplan plan`: the fastest plan for a job, with a proof of how good it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import (
    INTERRUPTED,
    AsJson,
    PredictorFile,
    Stores,
    TargetName,
    check_replaceable,
    emit,
    read_inputs,
    read_predictor,
    say,
)
from hetplan.cli.plan_objectives import MAX_ALTERNATIVES, by_aim, show_aim, with_aim
from hetplan.cli.plan_sweep import plan_sweep

if TYPE_CHECKING:
    from hetplan.cli.progress import ProgressLine
    from hetplan.job.spec import Job
    from hetplan.predict.predictor import Predictor
    from hetplan.search.result import SearchResult
    from hetplan.search.solver import Progress


def plan(
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Model file (YAML, or a Hugging Face config.json)."),
    ] = None,
    cluster: Annotated[Path | None, typer.Option("--cluster", help="Cluster file (YAML).")] = None,
    job: Annotated[Path | None, typer.Option("--job", help="Job file (YAML).")] = None,
    predictor: PredictorFile = None,
    store: Stores = None,
    target: TargetName = None,
    gap: Annotated[
        float | None,
        typer.Option(help="Proven distance to the best plan at which to stop, over the job's."),
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            help="Longest search, as in '60 s' or '5 min', over the job's. The first plan of a "
            "limit under 10 s may come 1 s after it."
        ),
    ] = None,
    objective: Annotated[
        str | None, typer.Option(help="step_time or cost_per_token, over the job's.")
    ] = None,
    quantile: Annotated[
        float | None,
        typer.Option(
            help="Compare what a step stays below with this probability, as in 0.9, over the job's."
        ),
    ] = None,
    top: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_ALTERNATIVES,
            help="How many unlike plans: the best one and others that are good by another aim.",
        ),
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="Plan file to write (JSON; plan.json). --sweep: the table (sweep.csv)."),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(help="Write down what the search finds while it runs (JSON lines)."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from what the journal, or the table, says."),
    ] = False,
    sweep: Annotated[
        Path | None,
        typer.Option(help="Plan a grid of models, clusters, jobs and links (YAML) into a table."),
    ] = None,
    plans: Annotated[
        Path | None, typer.Option(help="--sweep: folder for the plan files too.")
    ] = None,
    native: Annotated[
        bool,
        typer.Option(help="Say what the target costs against hetplan's own trainer."),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Find the fastest plan for a model, a cluster and a job.

    Ctrl-C ends the search, writes the best plan so far and exits with 130. A search that was
    killed goes on from its journal with --resume, a sweep from its table.
    """
    if sweep is not None:
        given = {
            "--model": model, "--cluster": cluster, "--job": job, "--target": target, "--gap": gap,
            "--time-limit": time_limit, "--objective": objective, "--quantile": quantile,
            "--journal": journal, "--top": top if top > 1 else None, "--json": as_json or None,
        }  # fmt: skip
        _refuse_with_sweep([name for name, value in given.items() if value is not None])
        plan_sweep(sweep, out=out, plans=plans, resume=resume, predictor=predictor, store=store)
        return
    if plans is not None:
        _refuse_plans()
    files = _three_files(model, cluster, job)
    out = Path("plan.json") if out is None else out
    _check_journal(journal, resume)
    inputs = read_inputs(*files, target)
    asked = with_aim(_overridden(inputs.job, gap, time_limit), quantile, objective)
    from hetplan.model.layer_units import own_numerics_remark
    from hetplan.search.files import SCHEMA, result_text

    replacing = check_replaceable(out, SCHEMA, "plan")
    predict, digest = read_predictor(predictor, store)
    from hetplan.search.search import search  # last: it takes a second, and faults are told at once

    def ask(progress: Callable[[Progress], None]) -> SearchResult:
        return search(
            inputs.model,
            inputs.cluster,
            asked,
            predict,
            sha256=(*inputs.sha256, ("predictor", digest)),
            progress=progress,
            journal=journal,
            resume=resume,
        )

    result = _saved(ask, predict, top, out)
    say(f"wrote {out}{replacing}")
    remark = own_numerics_remark(inputs.model) if result.plan.target == "native" else ""
    if remark:
        say(f"note: {remark}")
    if as_json:
        emit(result_text(result))
    else:
        _show(result)
        show_aim(result)
    if result.certificate is not None and result.certificate.status == "interrupted":
        raise typer.Exit(INTERRUPTED)
    if not as_json:
        if native:
            with _comparison("native", out):
                _show_restriction(result, predict)
        with _comparison("each kind alone", out):
            _show_homogeneous(result, predict)


@contextmanager
def _comparison(other: str, out: Path) -> Iterator[None]:
    """Ctrl-C ends what comes after the plan was written, and the command with it."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"comparison with {other} interrupted; {out} is kept")
        raise typer.Exit(INTERRUPTED) from None


def _saved(
    ask: Callable[[Callable[[Progress], None]], SearchResult],
    predictor: Predictor,
    top: int,
    out: Path,
) -> SearchResult:
    """The search's plan, for the job's aim, after it was written; after Ctrl-C the best so far."""
    from hetplan.cli.progress import ProgressLine
    from hetplan.search.files import save_result
    from hetplan.search.objectives.pool import interrupted

    found: list[SearchResult] = []
    try:
        with ProgressLine("closing candidates") as line:
            found.append(ask(shown_on(line)))
        found.append(by_aim(found[-1], predictor, top))
        save_result(found[-1], out)
    except KeyboardInterrupt:
        if not found:
            raise
        found.append(interrupted(found[-1]))
        save_result(found[-1], out)
    return found[-1]


def _refuse_with_sweep(given: list[str]) -> None:
    """What is asked of one question stands in the sweep's files."""
    from hetplan.errors import InputError

    if given:
        raise InputError(
            f"{', '.join(given)}: not with --sweep, whose file names models, clusters, jobs and "
            "targets; the jobs have the rest"
        )


def _refuse_plans() -> None:
    from hetplan.errors import InputError

    raise InputError("--plans belongs to --sweep; one plan goes to --out FILE")


def _three_files(
    model: Path | None, cluster: Path | None, job: Path | None
) -> tuple[Path, Path, Path]:
    from hetplan.errors import InputError

    if model is None or cluster is None or job is None:
        named = (("--model", model), ("--cluster", cluster), ("--job", job))
        missing = " ".join(f"{name} FILE" for name, given in named if given is None)
        raise InputError(f"name {missing}; or a grid of questions with --sweep FILE")
    return model, cluster, job


def _check_journal(journal: Path | None, resume: bool) -> None:
    """A journal is never written over by mistake, nor resumed from nothing."""
    from hetplan.errors import Fault, InputError

    if resume and journal is None:
        raise InputError("--resume needs --journal FILE, which a search before wrote")
    if journal is None:
        return
    if resume and not journal.is_file():
        raise InputError(
            Fault(file=str(journal), message="there is no such journal; leave out --resume")
        )
    if not resume and journal.exists():
        message = "exists already; go on from it with --resume, or name another file"
        raise InputError(Fault(file=str(journal), message=message))


def _show_restriction(result: SearchResult, predictor: Predictor) -> None:
    """What a trainer that can run more plans would gain."""
    from hetplan.cli.progress import ProgressLine
    from hetplan.reports.plans import restriction_line
    from hetplan.search.restriction import restriction

    with ProgressLine("closing candidates of native") as line:
        found = restriction(
            result,
            predictor,
            time_limit_seconds=result.inputs.job.time_limit_seconds,
            progress=shown_on(line),
        )
    if found is not None:
        emit(restriction_line(found, result.estimate.step_seconds))


def _overridden(job: Job, gap: float | None, time_limit: str | None) -> Job:
    """The job with what the command line says instead."""
    from dataclasses import replace

    from hetplan.errors import InputError
    from hetplan.units import Dimension, parse_quantity

    if gap is not None:
        try:
            job = replace(job, gap=gap)
        except InputError as error:
            raise InputError(f"--gap: {error}") from None
    if time_limit is not None:
        try:
            seconds = parse_quantity(time_limit, Dimension.TIME)
        except InputError as error:
            raise InputError(f"--time-limit: {error}") from None
        job = replace(job, time_limit_seconds=seconds)
    return job


def _show(result: SearchResult) -> None:
    from hetplan.reports.plans import launch_lines, result_lines, stage_table
    from hetplan.reports.terminal import print_table

    print_table(stage_table(result.inputs.model, result.plan, result.estimate))
    for line in result_lines(result):
        emit(line)
    for line in launch_lines(result.plan):
        emit(line)
    for line in refused_lines(result):
        emit(line)


MAX_REFUSALS = 4
"""Lines of reasons; more are counted."""


def refused_lines(result: SearchResult) -> Iterator[str]:
    """Why `hetplan emit` writes no folder of this plan for its own target, and what helps."""
    from hetplan.errors import InputError
    from hetplan.schedulers.launch import EmissionOptions
    from hetplan.trainers.emission import plan_faults, refusals
    from hetplan.trainers.table import TRAINERS, trainer_named

    name = result.plan.target
    if name not in TRAINERS:
        return
    named, without = _with_node_names(result)
    try:
        faults = plan_faults(refusals(named, trainer_named(name), EmissionOptions()))
    except InputError as error:
        faults = error.faults
    if without:
        yield (
            f"`hetplan emit` needs node_names of {', '.join(without[:MAX_REFUSALS])}"
            + (" and more" if len(without) > MAX_REFUSALS else "")
            + ": give them in the cluster file, or to emit with --cluster FILE"
        )
    for each in faults[:MAX_REFUSALS]:
        where = f"{each.field}: " if each.field else ""
        yield f"`hetplan emit --target {name}` refuses this plan: {where}{each.message}"
    if len(faults) > MAX_REFUSALS:
        yield f"and {len(faults) - MAX_REFUSALS} more such reasons"
    if faults:
        yield "`hetplan emit --nearest FILE` finds the fastest plan that it takes"


def _with_node_names(result: SearchResult) -> tuple[SearchResult, tuple[str, ...]]:
    """The result with names for nodes that have none, and the islands of these.

    Names can be given later; what else an emitter refuses another plan must avoid.
    """
    from dataclasses import replace

    cluster = result.inputs.cluster
    without = tuple(island.name for island in cluster.islands if not island.node_names)
    islands = tuple(
        island
        if island.node_names
        else replace(island, node_names=(f"i{at}-n[0-{island.nodes - 1}]",))
        for at, island in enumerate(cluster.islands)
    )
    inputs = replace(result.inputs, cluster=replace(cluster, islands=islands))
    return replace(result, inputs=inputs), without


def _show_homogeneous(result: SearchResult, predictor: Predictor) -> None:
    """The figure of merit, where the cluster mixes kinds."""
    from hetplan.cli.progress import ProgressLine
    from hetplan.reports.plans import homogeneous_lines
    from hetplan.search.homogeneous import homogeneous_sum

    if len({island.device.kind for island in result.inputs.cluster.islands}) < 2:
        return
    with ProgressLine("closing candidates of each kind alone") as line:
        figure = homogeneous_sum(
            result,
            predictor,
            time_limit_seconds=result.inputs.job.time_limit_seconds,
            progress=shown_on(line),
        )
    for text in homogeneous_lines(figure):
        emit(text)


def shown_on(line: ProgressLine) -> Callable[[Progress], None]:
    """A listener of the search that shows best, bound and gap on this line."""

    def show(progress: Progress) -> None:
        found = (
            "no plan yet"
            if progress.best_seconds == float("inf")
            else f"best {progress.best_seconds:.4g} s, bound {progress.lower_bound_seconds:.4g} s, "
            f"gap {progress.gap:.2%}"
        )
        elapsed = f"{progress.elapsed_seconds:.1f} s"
        line.show(progress.candidates_done, progress.candidates, None, f"{found}, {elapsed}")

    return show
