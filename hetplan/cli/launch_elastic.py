"""`hetplan launch --elastic`: train on through faults, with the hosts that are there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hetplan.cli.options import INTERRUPTED, emit, read_predictor, say

if TYPE_CHECKING:
    from rich.table import Table

    from hetplan.launchers.elastic_runs import RealWorld
    from hetplan.launchers.elastic_values import History, Rules
    from hetplan.launchers.run_log import LossCheck
    from hetplan.runtime.measured import StepRecord
    from hetplan.search.result import SearchResult

_SAMPLES_AT_A_TIME = 8
"""Of the one process that losses are compared with; a choice, as its plans had several sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRequest:
    """What the command line asks of an elastic run; None: as the library has it."""

    plan: Path
    steps: int
    warmup: int
    pace: Path | None
    save: Path | None
    save_every: int
    load: Path | None
    keep: int | None
    run_log: Path | None
    log_folder: Path | None
    check_loss: bool
    max_ranks: int
    timeout: float
    stall: float | None
    emulation: str
    max_restarts: int | None
    grow: str | None
    wait_for_hosts: float | None
    replan_seconds: float | None
    predictor: Path | None
    store: list[Path] | None
    as_json: bool


def launch_elastic(asked: ElasticRequest) -> None:
    """Train to the last step over as many phases as it takes, and show them all."""
    from hetplan.cli.launch_show import loss_line
    from hetplan.errors import LaunchError
    from hetplan.launchers.elastic import ElasticRun
    from hetplan.launchers.losses import check_losses
    from hetplan.search.files import load_legal_plan

    rules, given = _rules(asked), load_legal_plan(asked.plan)
    world = _world(asked, given)
    run = ElasticRun(world, rules, total_steps=asked.steps)
    try:
        run.train()
    except KeyboardInterrupt:
        _show(run.history, None, as_json=asked.as_json)
        say(f"interrupted; {world.where_to_go_on()}; the logs of all ranks are in {world.logs}")
        raise typer.Exit(INTERRUPTED) from None
    except LaunchError as error:
        _show(run.history, None, as_json=asked.as_json)
        raise LaunchError(
            f"{error}\n{world.where_to_go_on()}\nthe logs of all ranks are in {world.logs}"
        ) from error
    except BaseException:
        world.remove_logs()
        raise
    world.remove_logs()
    check = None
    if asked.check_loss:
        model, job = given.inputs.model, given.inputs.job
        size = min(_SAMPLES_AT_A_TIME, job.global_batch_size)
        check = check_losses(model, job, run.history.steps, microbatch_size=size)
    _show(run.history, check, as_json=asked.as_json)
    if check is not None and not check.equal:
        raise LaunchError(loss_line(check))


def _rules(asked: ElasticRequest) -> Rules:
    from hetplan.errors import InputError
    from hetplan.launchers.elastic_values import Grow, Rules

    rules = Rules()
    grow = rules.grow if asked.grow is None else asked.grow
    if grow not in tuple(Grow):
        raise InputError(f"--grow {grow}: it is one of {', '.join(Grow)}")
    return Rules(
        max_restarts=rules.max_restarts if asked.max_restarts is None else asked.max_restarts,
        grow=Grow(grow),
        wait_seconds=rules.wait_seconds if asked.wait_for_hosts is None else asked.wait_for_hosts,
    )


def _world(asked: ElasticRequest, given: SearchResult) -> RealWorld:
    """What the run acts on; an InputError where what is asked does not go together."""
    from hetplan.cli.launch_checkpoints import asked_checkpoints
    from hetplan.errors import InputError
    from hetplan.files.writing import check_writable
    from hetplan.launchers.elastic_plans import DEFAULT_REPLAN_SECONDS, Replanner, check_predictor
    from hetplan.launchers.elastic_runs import RealWorld, RunSettings
    from hetplan.profiling.pacing import load_pace
    from hetplan.runtime.checkpoints import last_checkpoint
    from hetplan.units import format_seconds

    if asked.save is None:
        raise InputError("--elastic needs --save DIR, a folder for its checkpoints")
    if asked.check_loss:
        _check_losses_comparable(asked, given)
    for name in ("predictor", "store", "replan_seconds"):
        if not asked.emulation and getattr(asked, name) is not None:
            option = name.replace("_", "-")
            raise InputError(
                f"--{option} is for planning again, which takes the hosts of --emulation; on this "
                "machine the plan stays"
            )
    if asked.run_log is not None:
        check_writable(asked.run_log)
    saves = asked_checkpoints(
        given,
        target="native",
        steps=asked.steps,
        save=asked.save,
        save_every=asked.save_every,
        load=asked.save if last_checkpoint(asked.save) is not None else asked.load,
        keep=asked.keep,
    )
    settings = RunSettings(
        steps=asked.steps,
        save=Path(saves.save),
        save_every=asked.save_every,
        load=Path(saves.load) if saves.load else None,
        keep=saves.keep,
        warmup_steps=asked.warmup,
        pace=None if asked.pace is None else load_pace(asked.pace),
        max_ranks=asked.max_ranks,
        timeout_seconds=asked.timeout,
        stall_seconds=asked.stall,
        log_folder=asked.log_folder,
        run_log=asked.run_log,
    )
    replanner = None
    if asked.emulation:
        predictor, digest = read_predictor(asked.predictor, asked.store)
        check_predictor(given, digest)
        limit = DEFAULT_REPLAN_SECONDS if asked.replan_seconds is None else asked.replan_seconds
        replanner = Replanner(given, predictor, limit_seconds=limit)

    def tell(record: StepRecord) -> None:
        say(
            f"step {record.step + 1}/{asked.steps}: loss {record.loss:.4f}, "
            f"{format_seconds(record.seconds)}"
        )

    return RealWorld(
        given,
        settings,
        emulation=asked.emulation,
        replanner=replanner,
        on_step=tell,
        tell=say,
    )


def _check_losses_comparable(asked: ElasticRequest, given: SearchResult) -> None:
    """An InputError where the run's losses cannot be those of one process from the seed on."""
    from hetplan.errors import InputError
    from hetplan.launchers.local import precision_faults
    from hetplan.runtime.checkpoints import checkpoint_at, last_checkpoint
    from hetplan.runtime.checkpoints_checks import check_loss_faults, resume_of

    inputs = given.inputs
    faults = [*precision_faults(inputs.job.precision, "cpu", check_loss=True)]
    folder = last_checkpoint(asked.save) if asked.save is not None else None
    if folder is None and asked.load is not None:
        folder = checkpoint_at(asked.load)
    if folder is not None:
        faults += check_loss_faults(resume_of(folder, inputs.model, inputs.job, steps=asked.steps))
    if faults:
        raise InputError(*faults)


def _show(history: History, check: LossCheck | None, *, as_json: bool) -> None:
    """Every phase, what it cost that they were several, and the losses."""
    if as_json:
        from hetplan.launchers.elastic_log import report_text

        emit(report_text(history, check))
        return
    if not history.phases:
        return
    from hetplan.cli.launch_show import loss_line
    from hetplan.reports.terminal import print_table

    print_table(_phase_table(history))
    for line in _lines(history):
        emit(line)
    if check is not None:
        emit(loss_line(check))


def _phase_table(history: History) -> Table:
    from rich.markup import escape
    from rich.table import Table

    from hetplan.units import format_seconds

    table = Table(title="Phases of the run", title_justify="left")
    for name in (
        "phase",
        "hosts",
        "steps",
        "checkpoint",
        "predicted",
        "measured",
        "first step after",
    ):
        table.add_column(name, justify="left" if name == "hosts" else "right")
    table.add_column("ended")
    for number, phase in enumerate(history.phases, start=1):
        begins, ends = phase.first_step + 1, phase.steps_done
        table.add_row(
            str(number),
            escape(", ".join(phase.hosts)),
            f"{begins} to {ends}" if ends >= begins else "none",
            str(phase.checkpoint_step) if phase.checkpoint_step else "none",
            format_seconds(phase.predicted_step_seconds),
            "" if phase.median_step_seconds is None else format_seconds(phase.median_step_seconds),
            "" if phase.start_seconds is None else format_seconds(phase.start_seconds),
            phase.ended,
        )
    return table


def _lines(history: History) -> Iterator[str]:
    for number, phase in enumerate(history.phases, start=1):
        if phase.reason:
            yield f"phase {number}: {phase.reason.splitlines()[0]}"
    lost = sum(phase.lost_steps for phase in history.phases)
    if lost:
        yield f"{lost} steps were trained again, or will be: no checkpoint had them"
    if history.steps:
        first, last = history.steps[0], history.steps[-1]
        yield (
            f"loss {first.loss:.4f} at step {first.step + 1}, {last.loss:.4f} at step "
            f"{last.step + 1}"
        )
