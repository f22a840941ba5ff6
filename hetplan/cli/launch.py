"""`hetplan launch`: train a plan and compare its step with the prediction.

On this machine, or over the hosts of an emulation that is up on it (--emulation).

With hetplan's own trainer, or with megatron-core (--target megatron-core); or check all hosts of a
plan that will be started elsewhere (--check), or whether its device kinds compute the same
(--check-numerics).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import AsJson, emit, say

if TYPE_CHECKING:
    from hetplan.launchers.run_log import RunLog
    from hetplan.runtime.checkpoints import CheckpointRequest
    from hetplan.runtime.measured import StepRecord


def launch(
    plan: Annotated[Path, typer.Argument(help="Plan file that `hetplan plan` wrote.")],
    target: Annotated[
        str,
        typer.Option(
            help="Trainer: native (hetplan's own, plans for target native) or megatron-core."
        ),
    ] = "native",
    steps: Annotated[int, typer.Option(help="Steps to train.")] = 20,
    warmup: Annotated[
        int, typer.Option(help="First steps that are left out of the measured median.")
    ] = 1,
    pace: Annotated[
        Path | None,
        typer.Option(help="Pace file: play slower device kinds on this machine's cores."),
    ] = None,
    run_log: Annotated[
        Path | None, typer.Option(help="File to which the run is added, one line of JSON per run.")
    ] = None,
    log_folder: Annotated[
        Path | None, typer.Option(help="Folder for the logs of all ranks.")
    ] = None,
    check_loss: Annotated[
        bool,
        typer.Option("--check-loss", help="Also train in one process and compare the losses."),
    ] = False,
    emulation: Annotated[
        str,
        typer.Option(
            help="Name of an emulation that is up (hetplan emulate up): each rank runs on its host "
            "that holds the rank's device."
        ),
    ] = "",
    save: Annotated[
        Path | None,
        typer.Option(help="Folder for checkpoints; one is saved when the run ends."),
    ] = None,
    save_every: Annotated[
        int, typer.Option(min=0, help="With --save: steps from one checkpoint to the next.")
    ] = 0,
    load: Annotated[
        Path | None,
        typer.Option(
            help="Go on from this checkpoint, or from the last one of a --save folder, under this "
            "plan; --steps counts those that are done."
        ),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(min=0, help="With --save: checkpoints that stay, by default 2; 0: all."),
    ] = None,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="Train on through faults from the last checkpoint of --save, planned again for "
            "the hosts of --emulation that are left, and for those that come back.",
        ),
    ] = False,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0, help="With --elastic: restarts in a row without a new checkpoint; 3 by default."
        ),
    ] = None,
    grow: Annotated[
        str | None,
        typer.Option(
            help="With --elastic: leave a run for hosts that came back when it is worth it "
            "(default), always, or never."
        ),
    ] = None,
    wait_for_hosts: Annotated[
        float | None,
        typer.Option(
            help="With --elastic: seconds that hosts are waited for where no plan fits those that "
            "are left; 0 by default."
        ),
    ] = None,
    replan_seconds: Annotated[
        float | None,
        typer.Option(help="With --elastic: longest search for another plan; 10 by default."),
    ] = None,
    predictor: Annotated[
        Path | None,
        typer.Option(help="With --elastic: predictor that the plan was made with; skips the fit."),
    ] = None,
    store: Annotated[
        list[Path] | None,
        typer.Option(help="With --elastic: profile store, as `hetplan plan` takes it."),
    ] = None,
    max_ranks: Annotated[int, typer.Option(help="Most processes to start.")] = 16,
    timeout: Annotated[
        float,
        typer.Option(
            help="Seconds without a finished step after which the run is ended; with --check, that "
            "hosts wait for each other."
        ),
    ] = 300.0,
    stall: Annotated[
        float | None,
        typer.Option(
            help="Seconds without a finished operation of any rank after which the run is ended. "
            "Left out: 10, or 5 times the longest operation that is predicted, or was seen so far."
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Train nothing: check every host of the plan, or of an emitted folder, before it "
            "is started.",
        ),
    ] = False,
    check_numerics: Annotated[
        bool,
        typer.Option(
            "--check-numerics",
            help="Train nothing: compare what the plan's device kinds compute with float64 and "
            "with each other.",
        ),
    ] = False,
    numerics_out: Annotated[
        Path | None,
        typer.Option(help="With --check-numerics: file for the answers of this machine's kinds."),
    ] = None,
    numerics_with: Annotated[
        list[Path] | None,
        typer.Option(help="With --check-numerics: answers of another machine; can be repeated."),
    ] = None,
    numerics_tokens: Annotated[
        int | None,
        typer.Option(
            help="With --check-numerics: tokens that are computed. Left out: a microbatch, or as "
            "many as a float64 reference takes a few minutes for."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a plan on this machine, one process per rank, and compare measured with predicted."""
    from hetplan.errors import InputError, LaunchError

    if emulation and (check or check_numerics or target != "native"):
        raise InputError("--emulation trains with hetplan's own trainer; leave it or the check out")
    if elastic:
        if check or check_numerics or target != "native":
            raise InputError("--elastic trains with hetplan's own trainer; leave it or that out")
        from hetplan.cli.launch_elastic import ElasticRequest, launch_elastic

        return launch_elastic(
            ElasticRequest(
                plan=plan,
                steps=steps,
                warmup=warmup,
                pace=pace,
                save=save,
                save_every=save_every,
                load=load,
                keep=keep,
                run_log=run_log,
                log_folder=log_folder,
                check_loss=check_loss,
                max_ranks=max_ranks,
                timeout=timeout,
                stall=stall,
                emulation=emulation,
                max_restarts=max_restarts,
                grow=grow,
                wait_for_hosts=wait_for_hosts,
                replan_seconds=replan_seconds,
                predictor=predictor,
                store=store,
                as_json=as_json,
            )
        )
    if any(each is not None for each in (max_restarts, grow, wait_for_hosts, replan_seconds)) or (
        predictor is not None or store
    ):
        raise InputError(
            "--max-restarts, --grow, --wait-for-hosts, --replan-seconds, --predictor and --store "
            "belong to --elastic; add it"
        )
    if check_numerics:
        from hetplan.cli.launch_numerics import check_numerics as compare_kinds

        return compare_kinds(
            plan,
            pace=pace,
            tokens=numerics_tokens,
            out=numerics_out,
            others=numerics_with or (),
            as_json=as_json,
        )
    if numerics_out is not None or numerics_with or numerics_tokens is not None:
        raise InputError("--numerics-out, -with and -tokens belong to --check-numerics; add it")
    if check:
        return _check(plan, timeout, as_json=as_json)
    from hetplan.cli.launch_checkpoints import asked_checkpoints
    from hetplan.cli.launch_show import loss_line, show_run
    from hetplan.files.writing import check_writable
    from hetplan.launchers.run_log import append_run, run_line
    from hetplan.model.layer_units import own_numerics_remark
    from hetplan.search.files import load_legal_plan
    from hetplan.units import format_seconds

    result = load_legal_plan(plan)
    if run_log is not None:
        check_writable(run_log)
    remark = own_numerics_remark(result.inputs.model) if target == "native" else ""
    if remark:
        say(f"note: {remark}")

    checkpoints = asked_checkpoints(
        result,
        target=target,
        steps=steps,
        save=save,
        save_every=save_every,
        load=load,
        keep=keep,
    )
    if emulation and pace is None:
        say("note: without --pace every device computes as fast as a core of this machine")

    def tell(record: StepRecord) -> None:
        say(
            f"step {record.step + 1}/{steps}: loss {record.loss:.4f}, "
            f"{format_seconds(record.seconds)}"
        )

    run = _runner(target, pace, emulation, checkpoints, stall)(
        result,
        steps=steps,
        warmup_steps=warmup,
        out=log_folder,
        max_ranks=max_ranks,
        timeout_seconds=timeout,
        check_loss=check_loss,
        on_step=tell,
    )
    if run_log is not None:
        append_run(run_log, run)
    if as_json:
        emit(run_line(run))
    else:
        show_run(run)
    if run.loss_check is not None and not run.loss_check.equal:
        raise LaunchError(loss_line(run.loss_check))


def _check(plan: Path, timeout: float, *, as_json: bool) -> None:
    """Every host before the start; a LaunchError where something must be mended or not all were
    checked.
    """
    from hetplan.errors import LaunchError
    from hetplan.launchers.preflight import preflight, sheet_of_folder, sheet_of_plan
    from hetplan.search.files import load_legal_plan

    sheet = sheet_of_folder(plan) if plan.is_dir() else sheet_of_plan(load_legal_plan(plan))
    say(f"checking {len(sheet.hosts)} hosts, {len(sheet.pairs)} links between them")
    report = preflight(sheet, wait_seconds=timeout)
    emit(report.json if as_json else report.text)
    if report.failed:
        count = sum(each.status == "fail" for each in report.findings)
        raise LaunchError(f"{count} of the checks failed; see what to mend above")
    if report.unchecked:
        raise LaunchError(report.unchecked)


def _runner(
    target: str,
    pace: Path | None,
    emulation: str,
    checkpoints: CheckpointRequest,
    stall: float | None,
) -> Callable[..., RunLog]:
    """The launcher of this trainer."""
    from hetplan.errors import InputError

    if target == "native":
        from hetplan.launchers import local
        from hetplan.profiling.pacing import load_pace

        return partial(
            local.launch,
            pace=load_pace(pace) if pace is not None else None,
            emulation=emulation,
            checkpoints=checkpoints,
            stall_seconds=stall,
        )
    if target != "megatron-core":
        raise InputError(f"--target {target}: hetplan launches native and megatron-core")
    if pace is not None:
        raise InputError(
            "--pace plays device kinds with hetplan's own layers; leave it out with --target "
            "megatron-core"
        )
    if stall is not None:
        raise InputError(
            "--stall is for hetplan's own trainer, which says what it does; use --timeout with "
            "--target megatron-core"
        )
    from hetplan.launchers import megatron_core

    return megatron_core.launch_with_core
