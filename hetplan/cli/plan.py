"""`hetplan plan`: the fastest plan for a job, with a proof of how good it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.one_line import (
    WITHOUT_FILES,
    OneLine,
    batch_option,
    between_option,
    model_option,
    nodes_option,
    question_of,
    seq_option,
    tokens_option,
)
from hetplan.cli.options import (
    INTERRUPTED,
    AsJson,
    HiddenStores,
    PredictorFile,
    Settings,
    TargetName,
    TraceFile,
    Verbose,
    check_replaceable,
    emit,
    emit_lines,
    job_settings,
    note,
    read_predictor,
    say,
    show_summary,
    write_trace,
)

if TYPE_CHECKING:
    from hetplan.predict.predictor import Predictor
    from hetplan.search.result import SearchResult
    from hetplan.whatif.smaller_questions import Answers

JOB, SEARCH = "Over the job file", "Search and report"
MAX_ALTERNATIVES = 50


def plan(
    model: Annotated[str, model_option()],
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Cluster file (YAML).")
    ] = None,
    job: Annotated[Path | None, typer.Option(metavar="FILE", help="Job file (YAML).")] = None,
    nodes: Annotated[list[str] | None, nodes_option(**WITHOUT_FILES)] = None,
    between: Annotated[list[str] | None, between_option(**WITHOUT_FILES)] = None,
    batch: Annotated[int | None, batch_option(**WITHOUT_FILES)] = None,
    sequence: Annotated[int | None, seq_option(**WITHOUT_FILES)] = None,
    tokens: Annotated[str | None, tokens_option(hidden=True)] = None,
    target: TargetName = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Plan file to write (JSON).")] = Path(
        "plan.json"
    ),
    setting: Settings = None,
    gap: Annotated[
        float | None,
        typer.Option(
            metavar="FRACTION",
            help="Stop when the plan is proven this close to the best.",
            rich_help_panel=JOB,
        ),
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Search time limit, as in '60 s'. Limits under 10 s may overrun by 1 s.",
            rich_help_panel=JOB,
        ),
    ] = None,
    predictor: PredictorFile = None,
    store: HiddenStores = None,
    top: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=MAX_ALTERNATIVES,
            help="Number of distinct plans to report.",
            rich_help_panel=SEARCH,
            hidden=True,
        ),
    ] = 1,
    objective: Annotated[
        str | None,
        typer.Option(
            metavar="AIM", help="time, days, cost, energy.", rich_help_panel=JOB, hidden=True
        ),
    ] = None,
    front: Annotated[
        bool,
        typer.Option(
            "--front",
            help="Report the Pareto front of time, cost, energy and devices.",
            rich_help_panel=SEARCH,
            hidden=True,
        ),
    ] = False,
    journal: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Save the state of the search while it runs.",
            rich_help_panel=SEARCH,
            hidden=True,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue from the journal.", rich_help_panel=SEARCH, hidden=True
        ),
    ] = False,
    native: Annotated[
        bool,
        typer.Option(
            help="Compare with a trainer that can run more plans.",
            rich_help_panel=SEARCH,
            hidden=True,
        ),
    ] = True,
    trace: TraceFile = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Find the fastest plan for a model, a cluster and a job.

    As in: hetplan plan --nodes "4x8 h100 @A" --nodes "8x8 mi300x @B" --between "A B 10Gbit 30ms"
    --model llama-3-70b --batch 1024 --seq 4096 --tokens 2T. `hetplan init` makes files of the
    same words.

    Ctrl-C ends the search, writes the best plan so far and exits with 130. --top N reports
    several plans, --front those that none beats in time, cost, energy and devices; --objective
    days, cost or energy has another aim; --journal FILE saves the search while it runs, and
    --resume continues one that was killed; --store DIR fits to other measurements; --trace FILE
    writes the plan's timeline for ui.perfetto.dev.
    """
    from hetplan.errors import InputError
    from hetplan.files.writing import check_writable
    from hetplan.kernels import clock
    from hetplan.model.layer_units import own_numerics_remark
    from hetplan.search.files import SCHEMA, result_text
    from hetplan.trainers.before_search import unknown_kinds

    began = clock()
    _check_journal(journal, resume)
    inputs, where = question_of(
        model,
        cluster,
        job,
        OneLine(nodes=nodes, between=between, batch=batch, sequence=sequence, tokens=tokens),
        settings=job_settings(setting, gap=gap, time_limit=time_limit, objective=objective),
        target=target,
    )
    replacing = check_replaceable(out, SCHEMA, "plan")
    if trace is not None:
        check_writable(trace)
    predict, digest = read_predictor(predictor, store)
    unknown = tuple(unknown_kinds(inputs, predict, where))
    if unknown:
        raise InputError(*unknown)
    from hetplan.search.journal import JournalFile  # last: the imports take a second
    from hetplan.whatif.no_plan import with_reasons
    from hetplan.whatif.smaller_questions import Answers, best_plan

    inputs = replace(inputs, sha256=(*inputs.sha256, ("predictor", digest)))
    answers = Answers(predict)

    def run_search() -> SearchResult:
        with with_reasons(inputs, predict):
            file = None if journal is None else JournalFile(journal, resume)
            return best_plan(inputs, answers, journal=file, began=began)

    result = _saved(run_search, answers, (top, front), out)
    say(f"wrote {out}{replacing}")
    write_trace(trace, result, predict)
    remark = own_numerics_remark(inputs.model) if result.plan.target == "native" else ""
    if remark:
        note(remark)
    if as_json:
        emit(result_text(result))
    else:
        _show(result, verbose, predict)
    if result.certificate is not None and result.certificate.status == "interrupted":
        raise typer.Exit(INTERRUPTED)
    if not as_json:
        if native:
            with _comparison("a wider target", answers, out):
                _show_restriction(result, answers, verbose)
        with _comparison("each kind alone", answers, out):
            _show_homogeneous(result, answers, verbose, out)
        _show_next(result, out, drafted=cluster is None)


@contextmanager
def _shown(answers: Answers) -> Iterator[None]:
    """Searches show how far they are, in one line after the other."""
    from hetplan.reports.progress import ProgressLine, each_shown_on

    with ProgressLine("closing candidates") as line:
        answers.shown = each_shown_on(line)
        yield


@contextmanager
def _comparison(other: str, answers: Answers, out: Path) -> Iterator[None]:
    """Ctrl-C ends a comparison, and the command with it; the plan was written before."""
    try:
        with _shown(answers):
            yield
    except KeyboardInterrupt:
        say(f"comparison with {other} interrupted; {out} is kept")
        raise typer.Exit(INTERRUPTED) from None


def _saved(
    run_search: Callable[[], SearchResult], answers: Answers, wanted: tuple[int, bool], out: Path
) -> SearchResult:
    """The plan for the job's objective, written to `out`; after Ctrl-C the best plan so far.

    wanted: number of plans to report, and whether the front is.
    """
    from hetplan.search.files import save_result
    from hetplan.whatif.objectives import interrupted

    result: SearchResult | None = None
    try:
        with _shown(answers):
            result = run_search()
        result = _by_objective(result, answers, *wanted)
        save_result(result, out)
    except KeyboardInterrupt:
        if result is None:
            raise
        result = interrupted(result)
        save_result(result, out)
    return result


def _by_objective(result: SearchResult, answers: Answers, top: int, front: bool) -> SearchResult:
    from hetplan.reports.progress import ProgressLine
    from hetplan.whatif.objectives import by_objective, has_other_aim

    if not has_other_aim(result.inputs.job, top, front=front):
        return result
    with ProgressLine("planning nearby questions") as line:
        return by_objective(
            result,
            answers.predictor,
            top=top,
            front=front,
            progress=lambda at, of, words: line.show(at, of, None, words),
        )


def _check_journal(journal: Path | None, resume: bool) -> None:
    """A journal is never overwritten by mistake."""
    from hetplan.errors import Fault, InputError

    if resume and journal is None:
        raise InputError("--resume needs --journal FILE, which an earlier search wrote")
    if journal is None:
        return
    if resume and not journal.is_file():
        raise InputError(
            Fault(file=str(journal), message="there is no such journal; leave out --resume")
        )
    if not resume and journal.exists():
        message = "exists already; continue it with --resume, or name another file"
        raise InputError(Fault(file=str(journal), message=message))


def _show_next(result: SearchResult, out: Path, *, drafted: bool) -> None:
    from hetplan.reports.summary import next_lines

    emit_lines(next_lines(result, out, drafted=drafted))


def _show(result: SearchResult, verbose: bool, predictor: Predictor) -> None:
    from hetplan.reports.energy import FRONT_PROOF, front_table
    from hetplan.reports.plans import alternatives_table, launch_lines, refused_lines
    from hetplan.reports.terminal import print_table

    show_summary(result, verbose=verbose, predictor=predictor)
    emit_lines((*launch_lines(result.plan), *refused_lines(result)))
    if result.is_front:
        print_table(front_table(result))
        emit_lines([FRONT_PROOF])
    elif result.alternatives:
        print_table(alternatives_table(result))


def _show_restriction(result: SearchResult, answers: Answers, verbose: bool) -> None:
    """What a trainer that can run more plans would gain, if that is more than the job's gap."""
    from hetplan.reports.plans import restriction_line, unused_kinds
    from hetplan.whatif.baselines import restriction

    restricted, step = restriction(result, answers), result.estimate.step_seconds
    worth = step * (1.0 - result.inputs.job.gap)
    if restricted is not None and (verbose or restricted.step_seconds < worth):
        emit_lines([restriction_line(restricted, step, unused_kinds(result))])


def _show_homogeneous(result: SearchResult, answers: Answers, verbose: bool, out: Path) -> None:
    """The plan against the best kind alone, and the sum of all, where the job may use several; the
    plan file keeps the former.
    """
    from hetplan.reports.plans import homogeneous_lines, mixing_line
    from hetplan.search.files import save_result
    from hetplan.whatif.baselines import homogeneous_sum, strongest_alone
    from hetplan.whatif.smaller_questions import usable_kinds

    if len(usable_kinds(result.inputs)) < 2:
        return
    figure = homogeneous_sum(result, answers)
    best = strongest_alone(result, figure, answers)
    if verbose:
        emit_lines(homogeneous_lines(figure))
    if best is not None:
        save_result(replace(result, alone=best), out)
        emit_lines([mixing_line(result, best)])
