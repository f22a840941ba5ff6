"""`hetplan profile --for`: measure what shrinks the interval of a job's best plans most, first."""

from __future__ import annotations

from pathlib import Path

from hetplan.cli.options import read_inputs, say
from hetplan.cli.profile_for_loop import Report, measure_for
from hetplan.cli.profile_for_show import show_order, show_report
from hetplan.cli.profile_for_world import Machine
from hetplan.cli.profile_request import ProfileRequest
from hetplan.errors import InputError
from hetplan.profiling.together import processes_together
from hetplan.search.what_to_measure import Choice
from hetplan.units import format_about

DEFAULT_BUDGET_SECONDS = 600.0  # what a person waits for beside other work


def profile_for(request: ProfileRequest, cluster: Path | None, *, only_list: bool) -> None:
    """Measure for this job within the budget, or list what would be measured."""
    if request.model is None or request.job is None or cluster is None:
        raise InputError("--for needs --model and --cluster too: it searches the job's plans")
    _check(request)
    inputs = read_inputs(request.model, cluster, request.job)
    machine = Machine(request, inputs)
    budget = request.budget or DEFAULT_BUDGET_SECONDS
    spent = _first(machine, budget, only_list=only_list)
    say("hetplan: searching the plans that the measurements are for")
    if only_list:
        show_order(request, machine.look(), inputs)
        return
    report = measure_for(machine, budget - spent, on_begin=_say_begin)
    _refuse_too_small(report, budget, spent)
    show_report(request, report, inputs)


def _check(request: ProfileRequest) -> None:
    """An InputError where options were given that --for decides itself, or does not do."""
    given = {
        "--link": request.link,
        "--pace": request.pace,
        "--again": request.again or None,
        "--sizes": request.sizes,
        "--groups": request.groups,
        "--microbatch": request.microbatch,
        "--tp": request.tp,
    }
    wrong = [name for name, value in given.items() if value is not None]
    if wrong:
        raise InputError(f"--for decides what is measured; leave out {' and '.join(wrong)}")
    if processes_together() > 1:
        raise InputError("--for starts the ranks of a link itself; run it without torchrun")


def _first(machine: Machine, budget: float, *, only_list: bool) -> float:
    """Seconds spent on what a prediction needs at all, on kinds that have no datasheet."""
    unknown = machine.unknown_kinds()
    if not unknown:
        return 0.0
    away = [kind for kind in unknown if not machine.here.is_kind(kind)]
    if away:
        raise InputError(
            f"nothing is known of device kind {', '.join(away)}: no samples and no datasheet "
            "figures for the job's precision; run this command on a machine that has it, with a "
            "store that this one can read"
        )
    if only_list:
        raise InputError(
            f"nothing is known of device kind {', '.join(unknown)} yet, so no plan can be priced; "
            "run the command without --list: it measures each kind of layer once first"
        )
    return machine.measure_first(unknown, budget, say)


def _say_begin(choice: Choice, spent: float) -> None:
    say(
        f"hetplan: {format_about(spent) if spent else '0 s'} spent; measuring "
        f"{choice.measurement.name}, about {format_about(choice.measurement.seconds)}"
    )


def _refuse_too_small(report: Report, budget: float, spent: float) -> None:
    if not report.done and not spent and report.least_seconds is not None:
        raise InputError(
            f"--budget of {format_about(budget)} is too small for one measurement: the shortest "
            f"that is worth it, {report.least}, takes about {format_about(report.least_seconds)}"
        )
