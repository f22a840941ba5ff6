"""`hetplan launch`: train a plan and compare its step with the prediction.

`run` (also without its name: `hetplan launch PLAN`) trains on this machine or over the hosts of an
emulation, `elastic` trains on through faults, `check-numerics` compares what device kinds compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import (
    INTERRUPTED,
    AsJson,
    PredictorFile,
    Stores,
    Verbose,
    emit,
    read_predictor,
    say,
)

if TYPE_CHECKING:
    from hetplan.launchers.elastic import Grow, History, Rules
    from hetplan.launchers.elastic_backend import HostBackend
    from hetplan.launchers.local import LaunchSettings
    from hetplan.launchers.run_log import LossCheck
    from hetplan.profiling.pacing import Pace
    from hetplan.runtime.measured import StepRecord
    from hetplan.runtime.training import CheckpointRequest
    from hetplan.search.result import SearchResult

_CHECKPOINTS, _ELASTIC, _LIMITS = "Checkpoints", "Elastic runs", "Limits"
_SAMPLES_AT_A_TIME = 8
"""Of the one process that an elastic run's losses are compared with; its plans have several."""

PlanFile = Annotated[Path, typer.Argument(help="Plan file that `hetplan plan` wrote.")]
Steps = Annotated[int, typer.Option(help="Steps of the whole training.")]
PaceFile = Annotated[
    Path | None,
    typer.Option(help="Pace file: play slower device kinds on this machine's cores."),
]
RunLogFile = Annotated[
    Path | None, typer.Option(help="File to which the run is added as a line of JSON.")
]
CheckLoss = Annotated[
    bool, typer.Option("--check-loss", help="Also train in one process and compare the losses.")
]
EmulationName = Annotated[
    str,
    typer.Option(help="Emulation that is up (hetplan emulate up): each rank runs on its host."),
]
Save = Annotated[
    Path | None,
    typer.Option(
        help="Folder for checkpoints; one is saved when the run ends.",
        rich_help_panel=_CHECKPOINTS,
    ),
]
SaveEvery = Annotated[
    int,
    typer.Option(
        min=0, help="Steps from one checkpoint to the next.", rich_help_panel=_CHECKPOINTS
    ),
]
Load = Annotated[
    Path | None,
    typer.Option(
        help="Checkpoint, or --save folder, to resume from under this plan; --steps counts the "
        "steps that are done.",
        rich_help_panel=_CHECKPOINTS,
    ),
]
Keep = Annotated[
    int,
    typer.Option(min=0, help="Checkpoints that stay; 0: all.", rich_help_panel=_CHECKPOINTS),
]
Timeout = Annotated[
    float,
    typer.Option(
        help="Seconds without a step that end the run.",
        rich_help_panel=_LIMITS,
    ),
]
Stall = Annotated[
    float | None,
    typer.Option(
        help="Seconds without a finished operation that end the run. "
        "Default: 10, or 5 times the longest operation that is predicted, or was seen so far.",
        rich_help_panel=_LIMITS,
    ),
]
MaxRanks = Annotated[
    int, typer.Option(help="Maximum number of processes.", rich_help_panel=_LIMITS)
]
Warmup = Annotated[int, typer.Option(help="First steps that do not count.", hidden=True)]
LogFolder = Annotated[Path | None, typer.Option(help="Folder for the logs of all ranks.")]


GrowWhen = Annotated[
    str,
    typer.Option(
        help="Go on with hosts that came back: worth (if it pays), always or never.",
        rich_help_panel=_ELASTIC,
    ),
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        min=0, help="Restarts in a row without a new checkpoint.", rich_help_panel=_ELASTIC
    ),
]
WaitForHosts = Annotated[
    float,
    typer.Option(
        help="Seconds to wait where no plan fits the hosts.",
        rich_help_panel=_ELASTIC,
    ),
]
ReplanSeconds = Annotated[
    float, typer.Option(help="Time limit of a search for another plan.", hidden=True)
]


# As above, where a command has options enough to show.
HiddenTimeout = Annotated[float, typer.Option("--timeout", hidden=True)]
HiddenStall = Annotated[float | None, typer.Option("--stall", hidden=True)]
HiddenKeep = Annotated[int, typer.Option("--keep", min=0, hidden=True)]
HiddenMaxRanks = Annotated[int, typer.Option("--max-ranks", hidden=True)]
HiddenLogFolder = Annotated[Path | None, typer.Option("--log-folder", hidden=True)]

DEFAULT_COMMAND = "run"
"""What `hetplan launch PLAN` is."""

app = typer.Typer(
    help="Train a plan, one process per rank, and compare the measured with the predicted step. "
    "`hetplan launch PLAN` is `hetplan launch run PLAN`.",
    no_args_is_help=True,
)


@app.command()
def run(
    plan: PlanFile,
    steps: Steps = 20,
    pace: PaceFile = None,
    run_log: RunLogFile = None,
    check_loss: CheckLoss = False,
    emulation: EmulationName = "",
    save: Save = None,
    save_every: SaveEvery = 0,
    load: Load = None,
    keep: Keep = 2,
    timeout: Timeout = 300.0,
    stall: Stall = None,
    max_ranks: MaxRanks = 16,
    log_folder: LogFolder = None,
    warmup: Warmup = 1,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Train a plan on this machine, or over the hosts of an emulation."""
    result = _plan_to_train(plan, run_log)  # before torch is imported, which takes seconds
    from hetplan.errors import LaunchError
    from hetplan.launchers import local
    from hetplan.launchers.local import LaunchSettings
    from hetplan.launchers.run_log import append_run, run_line
    from hetplan.reports.launch import loss_line, show_run

    settings = LaunchSettings(
        steps=steps,
        warmup_steps=warmup,
        pace=_pace(pace),
        log_folder=log_folder,
        max_ranks=max_ranks,
        timeout_seconds=timeout,
        stall_seconds=stall,
        check_loss=check_loss,
        emulation=emulation,
        checkpoints=_checkpoints(save, save_every, load, keep),
    )
    if emulation and pace is None:
        say("note: without --pace every device computes as fast as a core of this machine")
    with _steps_shown(steps, verbose) as on_step:
        done = local.launch(result, settings, on_step=on_step, tell=say)
    if run_log is not None:
        append_run(run_log, done)
    if as_json:
        emit(run_line(done))
    else:
        show_run(done, verbose=verbose)
    if done.loss_check is not None and not done.loss_check.equal:
        raise LaunchError(loss_line(done.loss_check))


@app.command()
def elastic(
    plan: PlanFile,
    save: Annotated[Path, typer.Option(help="Folder for checkpoints.")],
    save_every: SaveEvery,
    steps: Steps = 20,
    emulation: EmulationName = "",
    pace: PaceFile = None,
    run_log: RunLogFile = None,
    check_loss: CheckLoss = False,
    load: Load = None,
    grow: GrowWhen = "worth",
    max_restarts: MaxRestarts = 3,
    wait_for_hosts: WaitForHosts = 0.0,
    replan_seconds: ReplanSeconds = 10.0,
    predictor: PredictorFile = None,
    store: Stores = None,
    timeout: HiddenTimeout = 300.0,
    stall: HiddenStall = None,
    keep: HiddenKeep = 2,
    max_ranks: HiddenMaxRanks = 16,
    log_folder: HiddenLogFolder = None,
    warmup: Warmup = 1,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Train on through faults, planned again for the hosts of --emulation that are there."""
    from hetplan.launchers.elastic import Rules
    from hetplan.launchers.elastic_backend import HostBackend, elastic_settings, replanner_for
    from hetplan.launchers.local import LaunchSettings, kept_folders

    rules = Rules(max_restarts=max_restarts, grow=_grow(grow), wait_seconds=wait_for_hosts)
    settings = LaunchSettings(
        steps=steps,
        warmup_steps=warmup,
        pace=_pace(pace),
        log_folder=log_folder,
        max_ranks=max_ranks,
        timeout_seconds=timeout,
        stall_seconds=stall,
        check_loss=check_loss,
        emulation=emulation,
        checkpoints=_checkpoints(save, save_every, load, keep),
    )
    given = _plan_to_train(plan, run_log)
    with kept_folders(settings):
        settings, notes = elastic_settings(given, settings)
        for note in notes:
            say(note)
        replanner = None
        if emulation:
            known, digest = read_predictor(predictor, store)
            replanner = replanner_for(given, known, digest, limit_seconds=replan_seconds)
        with _steps_shown(steps, verbose) as on_step:
            backend = HostBackend(
                given, settings, run_log=run_log, replanner=replanner, on_step=on_step, tell=say
            )
            show = partial(_show_history, as_json=as_json)
            _train_elastically(given, settings, rules, backend, show)


@app.command("check-numerics")
def check_numerics(
    plan: PlanFile,
    out: Annotated[
        Path | None, typer.Option(help="File for the results of this machine's kinds.")
    ] = None,
    other: Annotated[
        list[Path] | None,
        typer.Option("--with", help="Results of another machine; can be repeated."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens to compute. Default: a microbatch, or as many as the float64 reference "
            "computes in a few minutes."
        ),
    ] = None,
    pace: PaceFile = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Compare what a plan's device kinds compute with float64 and with each other."""
    from hetplan.errors import LaunchError
    from hetplan.files.encoding import encode
    from hetplan.files.writing import check_writable
    from hetplan.launchers.numerics import SCHEMA, save_numerics
    from hetplan.launchers.numerics_work import check_plan_numerics
    from hetplan.reports.launch import show_numerics
    from hetplan.reports.terminal import ProgressLine
    from hetplan.search.files import load_legal_plan

    result = load_legal_plan(plan)
    if out is not None:
        check_writable(out)
    played = _pace(pace)
    paced = () if played is None else tuple(kind.device for kind in played.kinds)
    with ProgressLine("computing") as shown:
        check = check_plan_numerics(
            result,
            tokens=tokens,
            paced=paced,
            others=other or (),
            tell=say if verbose else lambda what: shown.show(0, 0, None, what),
        )
    if out is not None:
        save_numerics(check.own, out)
    if as_json:
        emit(encode(check.all, schema=SCHEMA).rstrip("\n"))
    else:
        passed = not check.faults and not check.missing_kinds
        show_numerics(check.all, passed=passed)
    if check.faults:
        lines = "\n".join(check.faults)
        raise LaunchError(f"these kinds must not be mixed:\n{lines}")
    if check.missing_kinds:
        line = (
            f"no results of {', '.join(check.missing_kinds)}: run this with --out FILE where they "
            "are, then here with --with FILE"
        )
        if out is None:
            raise LaunchError(line)
        say(line)


def _checkpoints(
    save: Path | None, save_every: int, load: Path | None, keep: int
) -> CheckpointRequest:
    from hetplan.runtime.training import CheckpointRequest

    return CheckpointRequest(
        save="" if save is None else str(save),
        save_every=save_every,
        load="" if load is None else str(load),
        keep=keep,
    )


def _pace(path: Path | None) -> Pace | None:
    from hetplan.profiling.pacing import load_pace

    return None if path is None else load_pace(path)


def _plan_to_train(plan: Path, run_log: Path | None) -> SearchResult:
    """The plan, where it is legal and its run can be written down."""
    from hetplan.files.writing import check_writable
    from hetplan.model.layer_units import own_numerics_remark
    from hetplan.search.files import load_legal_plan

    result = load_legal_plan(plan)
    remark = own_numerics_remark(result.inputs.model)
    if remark:
        say(f"note: {remark}")
    if run_log is not None:
        check_writable(run_log)
    return result


def _grow(text: str) -> Grow:
    from hetplan.errors import InputError
    from hetplan.launchers.elastic import Grow

    if text not in tuple(Grow):
        raise InputError(f"--grow {text}: it is one of {', '.join(Grow)}")
    return Grow(text)


@contextmanager
def _steps_shown(steps: int, verbose: bool) -> Iterator[Callable[[StepRecord], None]]:
    """Tells how far the training is; verbose: every step, a line each."""
    from hetplan.reports.terminal import ProgressLine
    from hetplan.units import format_brief

    if verbose:
        yield lambda record: say(
            f"step {record.step + 1}/{steps}: loss {record.loss:.4f}, "
            f"{format_brief(record.seconds)}"
        )
        return
    with ProgressLine("training") as line:
        yield lambda record: line.show(
            record.step + 1,
            steps,
            record.seconds * (steps - record.step - 1),
            f"loss {record.loss:.4f}, {format_brief(record.seconds)} a step",
        )


def _train_elastically(
    given: SearchResult,
    settings: LaunchSettings,
    rules: Rules,
    backend: HostBackend,
    show: Callable[[History, LossCheck | None], None],
) -> None:
    """Train to the last step over as many phases as it takes, and show them all."""
    from hetplan.errors import LaunchError
    from hetplan.launchers.elastic import ElasticRun
    from hetplan.launchers.local import check_losses
    from hetplan.reports.launch import loss_line

    elastic_run = ElasticRun(backend, rules, total_steps=settings.steps)
    try:
        elastic_run.train()
    except KeyboardInterrupt:
        backend.end_logs(kept=True)
        show(elastic_run.history, None)
        say(
            f"interrupted; {backend.where_to_resume()}; the logs of all ranks are in {backend.logs}"
        )
        raise typer.Exit(INTERRUPTED) from None
    except LaunchError as error:
        backend.end_logs(kept=True)
        show(elastic_run.history, None)
        raise LaunchError(
            f"{error}\n{backend.where_to_resume()}\nthe logs of all ranks are in {backend.logs}"
        ) from error
    except BaseException:
        backend.end_logs(kept=False)
        raise
    backend.end_logs(kept=False)
    loss_check = None
    if settings.check_loss:
        model, job = given.inputs.model, given.inputs.job
        size = min(_SAMPLES_AT_A_TIME, job.global_batch_size)
        loss_check = check_losses(model, job, elastic_run.history.steps, microbatch_size=size)
    show(elastic_run.history, loss_check)
    if loss_check is not None and not loss_check.equal:
        raise LaunchError(loss_line(loss_check))


def _show_history(history: History, loss_check: LossCheck | None, *, as_json: bool) -> None:
    if as_json:
        from hetplan.launchers.elastic_backend import report_text

        emit(report_text(history, loss_check))
        return
    from hetplan.reports.launch import show_history

    show_history(history, loss_check)
