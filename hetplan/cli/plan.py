"""`hetplan plan`: the fastest plan for a job, with a proof of how good it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
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
    say_left_out,
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
            help="Time limit of the command, as in '60 s', without loading and compiling.",
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
            metavar="AIM",
            help="time, days, cost, energy, robust.",
            rich_help_panel=JOB,
            hidden=True,
        ),
    ] = None,
    vary: Annotated[
        list[str] | None, typer.Option(metavar="'A B 30%'", hidden=True, help="What varies.")
    ] = None,
    vary_file: Annotated[Path | None, typer.Option(hidden=True, help="Bandwidths (CSV).")] = None,
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
        bool | None,
        typer.Option(
            help="Compare with a trainer that can run more plans. Default: with FlagScale, where "
            "the target cannot mix libraries.",
            rich_help_panel=SEARCH,
            hidden=True,
        ),
    ] = None,
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
    days, cost, energy or robust has another aim; --vary "A B 30%" or "h100 5%" says what varies,
    --vary-file CSV from measurements; --journal FILE saves the search while it runs, and
    --resume continues one that was killed; --store DIR fits to other measurements; --trace FILE
    writes the plan's timeline for ui.perfetto.dev.
    """
    from hetplan.kernels import loading

    with loading:
        from hetplan.deadline import ends_by, moment_in
        from hetplan.errors import InputError
        from hetplan.files.writing import check_writable
        from hetplan.library.verbs import planned
        from hetplan.model.layer_units import own_numerics_remark
        from hetplan.reports.plans import kept_out_lines, local_steps_lines
        from hetplan.search.files import SCHEMA, result_text
        from hetplan.search.journal import JournalFile
        from hetplan.trainers.before_search import unknown_kinds
        from hetplan.whatif.robust import check_varied, with_variations
        from hetplan.whatif.smaller_questions import Answers

    _check_journal(journal, resume)
    inputs, where = question_of(
        model,
        cluster,
        job,
        OneLine(nodes=nodes, between=between, batch=batch, sequence=sequence, tokens=tokens),
        settings=job_settings(setting, gap=gap, time_limit=time_limit, objective=objective),
        target=target,
    )
    inputs = with_variations(inputs, vary or (), vary_file)
    check_varied(inputs.job)
    replacing = check_replaceable(out, SCHEMA, "plan")
    if trace is not None:
        check_writable(trace)
    end = moment_in(inputs.job.time_limit_seconds)
    with ends_by(end):
        predict, digest = read_predictor(predictor, store)
        unknown = tuple(unknown_kinds(inputs, predict, where))
    if unknown:
        raise InputError(*unknown)
    inputs = replace(inputs, sha256=(*inputs.sha256, ("predictor", digest)))
    answers, file = Answers(predict), None if journal is None else JournalFile(journal, resume)
    result, local = planned(
        inputs, answers, top=top, front=front, end=end, journal=file, progress=True
    )
    result = _saved(result, out)
    say(f"wrote {out}{replacing}")
    write_trace(trace, result, predict)
    remark = own_numerics_remark(inputs.model) if result.plan.target == "native" else ""
    if remark:
        note(remark)
    if as_json:
        emit(result_text(result))
    else:
        _show(result, verbose, predict)
        emit_lines((*local_steps_lines(local), *kept_out_lines(result)))
    if result.certificate is not None and result.certificate.status == "interrupted":
        raise typer.Exit(INTERRUPTED)
    if not as_json:
        if result.plan.outer is None:
            _show_comparisons(result, answers, out, native=native, verbose=verbose, end=end)
        _show_next(result, out, drafted=cluster is None)


@contextmanager
def _shown(answers: Answers) -> Iterator[None]:
    """Searches show how far they are, in one line after the other."""
    from hetplan.reports.terminal import ProgressLine, each_shown_on

    with ProgressLine("closing candidates") as line:
        answers.shown = each_shown_on(line)
        yield


def _show_comparisons(
    result: SearchResult,
    answers: Answers,
    out: Path,
    *,
    native: bool | None,
    verbose: bool,
    end: float,
) -> None:
    """What the time allows; Ctrl-C ends them, and the command: the plan was written before."""
    from hetplan.deadline import ends_by
    from hetplan.errors import OutOfTimeError
    from hetplan.whatif.ask import libraries_apart
    from hetplan.whatif.smaller_questions import usable_kinds

    if native is None:
        native = bool(libraries_apart(result.inputs))
    known: dict[str, Callable[[SearchResult, Answers, bool], tuple[list[str], str]]] = {}
    if native and result.inputs.job.target not in ("native", "any"):
        known["a wider target"] = _restriction_lines
    if len(usable_kinds(result.inputs)) > 1:
        known["each kind alone"] = partial(_homogeneous_lines, out)
    left_out = []
    for other, lines_of in known.items():
        lines: list[str] = []
        try:
            with _shown(answers), ends_by(end):
                lines, missing = lines_of(result, answers, verbose)
        except OutOfTimeError:
            missing = other
        except KeyboardInterrupt:
            say(f"comparison with {other} interrupted; {out} is kept")
            raise typer.Exit(INTERRUPTED) from None
        emit_lines(lines)
        left_out += [missing] * bool(missing)
    say_left_out(*(f"the comparison with {each}" for each in left_out))


def _saved(result: SearchResult, out: Path) -> SearchResult:
    """The plan, written to `out`; after Ctrl-C as one that was interrupted."""
    from hetplan.search.files import save_result
    from hetplan.whatif.objectives import interrupted

    try:
        save_result(result, out)
    except KeyboardInterrupt:
        result = interrupted(result)
    else:
        return result
    # Here, where the exception and all that it holds, maybe the file's lock, is gone.
    save_result(result, out)
    return result


def _check_journal(journal: Path | None, resume: bool) -> None:
    """A journal is never overwritten by mistake."""
    from hetplan.errors import Fault, InputError
    from hetplan.search.journal import JOURNAL_EXISTS, JournalFile

    if resume and journal is None:
        raise InputError("--resume needs --journal FILE, which an earlier search wrote")
    if journal is None:
        return
    if resume and not JournalFile(journal).is_there:
        raise InputError(
            Fault(file=str(journal), message="there is no such journal; leave out --resume")
        )
    if not resume and journal.exists():
        raise InputError(Fault(file=str(journal), message=JOURNAL_EXISTS))


def _show_next(result: SearchResult, out: Path, *, drafted: bool) -> None:
    from hetplan.reports.summary import next_lines

    emit_lines(next_lines(result, out, drafted=drafted))


def _show(result: SearchResult, verbose: bool, predictor: Predictor) -> None:
    from hetplan.reports.energy import FRONT_PROOF, front_table
    from hetplan.reports.plans import alternatives_table, launch_lines, refused_lines
    from hetplan.reports.terminal import print_small

    show_summary(result, verbose=verbose, predictor=predictor)
    emit_lines((*launch_lines(result.plan), *refused_lines(result)))
    if result.is_front:
        print_small(front_table(result))
        emit_lines([FRONT_PROOF])
    elif result.alternatives:
        print_small(alternatives_table(result))


def _restriction_lines(
    result: SearchResult, answers: Answers, verbose: bool
) -> tuple[list[str], str]:
    """What a trainer that can run more plans would gain, if that is more than the job's gap; and
    what there was no time for.
    """
    from hetplan.reports.plans import restriction_line, unused_kinds
    from hetplan.whatif.baselines import restriction

    restricted, step = restriction(result, answers), result.estimate.step_seconds
    worth = step * (1.0 - result.inputs.job.gap)
    if restricted is None or not (verbose or restricted.step_seconds < worth):
        return [], ""
    return [restriction_line(restricted, step, unused_kinds(result))], ""


def _homogeneous_lines(
    out: Path, result: SearchResult, answers: Answers, verbose: bool
) -> tuple[list[str], str]:
    """The plan against the best kind alone, which the plan file keeps, and the sum of all; and what
    there was no time for.
    """
    from hetplan.reports.plans import homogeneous_lines, mixing_line
    from hetplan.search.files import file_digest, save_in_place
    from hetplan.search.result import NO_TIME
    from hetplan.whatif.baselines import homogeneous_sum, strongest_alone

    figure = homogeneous_sum(result, answers)
    missing = [f"{kind.device} alone" for kind in figure.kinds if kind.reason == NO_TIME]
    if missing and not verbose:
        return [], " and ".join(missing) if len(missing) < len(figure.kinds) else "each kind alone"
    best = strongest_alone(result, figure, answers)
    lines = [*homogeneous_lines(figure)] if verbose else []
    if best is not None:
        lines.append(mixing_line(result, best))
        if not missing:
            save_in_place(replace(result, alone=best), out, file_digest(result))
    return lines, " and ".join(missing)
