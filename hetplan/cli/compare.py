"""`hetplan compare`: a run's log beside its plan, and predictors corrected by runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import (
    AsJson,
    PredictorFile,
    Stores,
    TraceFile,
    Verbose,
    check_replaceable,
    emit,
    note,
    read_predictor,
    say,
    write_trace,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hetplan.comparison.compare import ComparedRun, Comparison, Repricing
    from hetplan.comparison.logs import RunFiles
    from hetplan.predict.fit import FittedPredictor

app = typer.Typer(
    help="Compare a run's log with its plan, and name the part of the step that is off.\n\n"
    "As in: hetplan compare train.log --plan plan.json, which is `hetplan compare run`.",
    no_args_is_help=True,
)
DEFAULT_COMMAND = "run"
REPRICE = "Price the plan again"

Logs = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Logs of one run, of all ranks and restarts: Megatron-LM, torchtitan, NeMo, or "
        "hetplan's own run log."
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", metavar="FILE", help="Plan file that the run ran, with its inputs."),
]
Runs = Annotated[
    Path | None,
    typer.Option(
        "--runs", metavar="FILE", help="YAML list of several runs, each with `log:` and `plan:`."
    ),
]
Model = Annotated[
    Path | None,
    typer.Option("--model", metavar="FILE", help="Replaces the model.", rich_help_panel=REPRICE),
]
Cluster = Annotated[
    Path | None,
    typer.Option(
        "--cluster", metavar="FILE", help="Replaces the cluster.", rich_help_panel=REPRICE
    ),
]
Job = Annotated[
    Path | None,
    typer.Option("--job", metavar="FILE", help="Replaces the job.", rich_help_panel=REPRICE),
]
Trainer = Annotated[
    str | None,
    typer.Option(
        "--trainer",
        metavar="NAME",
        help="megatron, nemo or torchtitan. Default: detected.",
    ),
]
Warmup = Annotated[
    int | None,
    typer.Option(
        "--warmup",
        metavar="STEPS",
        help="Leave out the first steps of every start. Default: 3; for hetplan's own run log "
        "those that its launch left out.",
    ),
]
Telemetry = Annotated[
    list[Path] | None,
    typer.Option(
        "--telemetry",
        metavar="FILE",
        help="Folder or telemetry of a run: who makes it slow? The argument is its plan file.",
    ),
]
Watch = Annotated[bool, typer.Option("--watch", help="Follow the folder of a run until it ends.")]


@app.command("run")
def compare_run(
    logs: Logs = None,
    plan: PlanFile = None,
    runs: Runs = None,
    trainer: Trainer = None,
    warmup: Warmup = None,
    model: Model = None,
    cluster: Cluster = None,
    job: Job = None,
    predictor: PredictorFile = None,
    store: Stores = None,
    telemetry: Telemetry = None,
    watch: Watch = False,
    trace: TraceFile = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Compare one run, or each of a list, with its plan (default).

    `--trace FILE` writes both timelines for ui.perfetto.dev.
    """
    from hetplan.comparison.compare import compare_runs
    from hetplan.errors import InputError
    from hetplan.files.writing import check_writable

    if telemetry or watch:
        others = (runs, trainer, warmup, model, cluster, job, predictor, store, trace)
        if verbose or any(each not in (None, []) for each in others):
            raise InputError("--telemetry and --watch go with a plan, runs and --json alone")
        _show_telemetry([*(logs or ()), *([plan] if plan else ())], telemetry or [], watch, as_json)
        return
    files = _run_files(logs, plan, runs)
    if trace is not None:
        if len(files) > 1:
            raise InputError(f"--trace shows one run beside its plan; {runs} lists {len(files)}")
        check_writable(trace)
    again = predictor is not None or bool(store) or any((model, cluster, job))
    repricing = _repricing(_fitted(predictor, store), model, cluster, job) if again else None
    compared = compare_runs(files, repricing, trainer=trainer, warmup_steps=warmup)
    _tell_repricing(compared)
    if trace is not None:
        write_trace(trace, compared[0].result, _fitted(predictor, store), compared)
    _show([run.comparison for run in compared], verbose=verbose, as_json=as_json)


@app.command()
def calibrate(
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Predictor to write: the fit with factors.")
    ],
    logs: Logs = None,
    plan: PlanFile = None,
    runs: Runs = None,
    trainer: Trainer = None,
    warmup: Warmup = None,
    model: Model = None,
    cluster: Cluster = None,
    job: Job = None,
    predictor: PredictorFile = None,
    store: Stores = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write factors that do not help too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Correct a fit by measured runs, where that helps."""
    from hetplan.comparison.calibration import (
        SCHEMA,
        MeasuredRun,
        try_calibration,
        with_calibration,
    )
    from hetplan.comparison.compare import compare_runs
    from hetplan.files.encoding import encode
    from hetplan.predict.fit import SCHEMA as PREDICTOR_SCHEMA
    from hetplan.predict.fit import save_predictor
    from hetplan.units import counted

    check_replaceable(out, PREDICTOR_SCHEMA, "predictor")
    files = _run_files(logs, plan, runs)
    fitted = _fitted(predictor, store)
    if fitted.laws.calibration is not None:
        number = fitted.laws.calibration.runs
        say(f"the predictor's calibration by {counted(number, 'run')} is replaced by these runs")
        fitted = with_calibration(fitted, None)
    repricing = _repricing(fitted, model, cluster, job)
    compared = compare_runs(files, repricing, trainer=trainer, warmup_steps=warmup)
    _tell_repricing(compared)
    trial = try_calibration(
        [MeasuredRun(source=_name(run), result=run.result, chosen=run.chosen) for run in compared]
    )
    if as_json:
        emit(encode(trial, schema=SCHEMA))
    else:
        from hetplan.reports.comparison import print_trial

        print_trial(trial)
        for run in compared:
            for doubt in run.doubts:
                note(f"{_name(run)}: {doubt}")
    if not trial.helped and not force:
        say(
            f"{out} was not written: factors from these runs did not make what was held back "
            "better (--force writes it all the same)"
        )
        return
    save_predictor(with_calibration(fitted, trial.calibration), out)
    forced = "" if trial.helped else ", by --force: it did NOT help on what was held back"
    say(f"wrote {out}{forced}")


def _show_telemetry(plans: list[Path], given: list[Path], watch: bool, as_json: bool) -> None:
    """Who stands out in telemetry, at once or while a run goes on."""
    from hetplan.comparison.suspects import SCHEMA, judge
    from hetplan.comparison.telemetry import Run, read_telemetry
    from hetplan.comparison.watch import watch as watch_run
    from hetplan.errors import InputError
    from hetplan.files.encoding import encode
    from hetplan.reports.terminal import folded, text_width
    from hetplan.search.files import load_legal_plan

    def tell(line: str) -> None:
        emit("\n".join(folded([line], text_width())))

    if len(plans) != 1:
        raise InputError("give one plan file with --telemetry, and no log")
    if watch and (len(given) != 1 or as_json):
        raise InputError("give --watch the folder of one run, as in --telemetry RUN, and no --json")
    folder = given[0] if len(given) == 1 and given[0].is_dir() else None
    run = Run.of(load_legal_plan(plans[0]), folder)
    if watch:
        watch_run(given[0], run, tell)
    elif as_json:
        emit(encode(judge(read_telemetry(given, run), run), schema=SCHEMA))
    else:
        for line in judge(read_telemetry(given, run), run).lines:
            tell(line)


def _name(run: ComparedRun) -> str:
    return ", ".join(map(str, run.files.logs))


def _run_files(
    logs: list[Path] | None, plan: Path | None, runs: Path | None
) -> tuple[RunFiles, ...]:
    """The run of the arguments, or those of the list."""
    from hetplan.comparison.logs import RunFiles, load_runs
    from hetplan.errors import InputError

    if runs is not None:
        if logs or plan is not None:
            raise InputError(f"{runs} names logs and plans; leave LOGS and --plan out")
        return load_runs(runs)
    if not logs:
        raise InputError("name the run's log files, or --runs with a list of several runs")
    if plan is None:
        raise InputError("give --plan: the plan file that the run ran")
    return (RunFiles(logs=tuple(logs), plan=plan),)


def _fitted(predictor: Path | None, stores: list[Path] | None) -> FittedPredictor:
    from hetplan.errors import InputError
    from hetplan.predict.fit import FittedPredictor

    loaded, _ = read_predictor(predictor, stores)
    if not isinstance(loaded, FittedPredictor):
        raise InputError("only a fitted predictor can price a plan again")
    return loaded


def _repricing(
    predictor: FittedPredictor, model: Path | None, cluster: Path | None, job: Path | None
) -> Repricing:
    from hetplan.cluster.load import load_cluster
    from hetplan.comparison.compare import Repricing
    from hetplan.job.load import load_job
    from hetplan.model.load import load_model

    return Repricing(
        predictor=predictor,
        model=None if model is None else load_model(model),
        cluster=None if cluster is None else load_cluster(cluster),
        job=None if job is None else load_job(job),
    )


def _tell_repricing(compared: Sequence[ComparedRun]) -> None:
    """How far each new prediction is from the plan file's, on stderr."""
    from hetplan.units import format_seconds

    for run in compared:
        if run.repriced_from_seconds is not None:
            before = format_seconds(run.repriced_from_seconds)
            after = format_seconds(run.result.estimate.step_seconds)
            told = "as in the plan file" if after == before else f"instead of its {before}"
            say(f"{run.files.plan} priced again: {after} {told}")


def _show(comparisons: list[Comparison], *, verbose: bool, as_json: bool) -> None:
    from hetplan.reports.comparison import comparison_text, print_comparisons

    if as_json:
        emit(comparison_text(comparisons))
    else:
        print_comparisons(comparisons, verbose=verbose)
