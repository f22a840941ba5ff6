"""What `hetplan profile for-job` prints: the plans, what was measured, what others can measure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from hetplan.advice.candidates import Candidate
from hetplan.advice.loop import Done, Report, View, growth, plan_order
from hetplan.advice.measurement_order import Choice
from hetplan.cli.options import emit, emit_lines, say
from hetplan.cli.profile_show import CommandInputs
from hetplan.cluster.devices import CPU_KIND
from hetplan.cluster.spec import Cluster
from hetplan.files.encoding import encode
from hetplan.plans.plan import Plan
from hetplan.profiling.grid import job_grid
from hetplan.profiling.measure_layers import units
from hetplan.profiling.needs import LinkPlace, layer_need
from hetplan.search.result import Inputs
from hetplan.units import format_about, format_brief, format_range

SCHEMA = "hetplan.profile-for/2"
_PORT = 29500  # torchrun's own default, written out so that both ends agree


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPlan:
    """One of the plans that cannot be told apart."""

    plan: str
    step_seconds: float
    p5_seconds: float
    p95_seconds: float
    chance: float
    """That it is the best of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedView:
    """How things stand."""

    plans: tuple[ListedPlan, ...]
    """Best first."""
    regret: float
    """Expected loss of taking the first, as a part of its step."""
    log_halfwidth: float
    """Of the first one's 90 % interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedChoice:
    """One measurement, in the order of its worth."""

    what: str
    seconds: float
    log_halfwidth_after: float
    """Of the best plan's interval to first order, all before it in the order measured too."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """What only other machines can measure."""

    where: str
    commands: tuple[str, ...]
    """One per node."""
    seconds: float | None
    """Expected; None where nothing is known of the kind."""
    then: str = ""
    """What is to be done after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForReport:
    """Everything that is said."""

    before: ListedView
    after: ListedView | None
    """None where nothing was measured."""
    done: tuple[Done, ...]
    spent_seconds: float
    ended: str
    left_here: tuple[ListedChoice, ...]
    elsewhere: tuple[Elsewhere, ...]
    notes: tuple[str, ...]
    wider: str = ""
    """Which prediction made the best plan's interval wider than before, where it is."""


def listed_view(view: View, cluster: Cluster) -> ListedView:
    """How the plans stand."""
    stands = view.standing
    plans = []
    for each in view.priced:
        step, estimate = each.estimate.step_seconds, each.estimate
        plans.append(
            ListedPlan(
                plan=plan_words(each.plan, cluster),
                step_seconds=step,
                p5_seconds=step if estimate.p5_seconds is None else estimate.p5_seconds,
                p95_seconds=step if estimate.p95_seconds is None else estimate.p95_seconds,
                chance=stands.chances[each.name],
            )
        )
    return ListedView(plans=tuple(plans), regret=stands.regret, log_halfwidth=view.log_halfwidth)


def plan_words(plan: Plan, cluster: Cluster) -> str:
    """The plan in one line: degrees of its first replica, and how many stages lie where."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    replica = stages[0].replicas[0]
    islands: dict[str, int] = {}
    for stage in stages:
        name = cluster.island_of_device(stage.replicas[0].devices[0].start).name
        islands[name] = islands.get(name, 0) + 1
    where = ", ".join(f"{name} {count}" for name, count in islands.items())
    full = ", recompute" if stages[0].recompute.granularity.value == "full" else ""
    degrees = f"tp {replica.tp}, dp {replica.dp}, microbatch {replica.microbatch_size}"
    return f"{degrees}{full}, stages: {where}"


def show_order(
    files: CommandInputs,
    view: View,
    inputs: Inputs,
    budget_seconds: float,
    *,
    verbose: bool,
    as_json: bool,
) -> None:
    """Print what would be measured, and why."""
    choices = plan_order(view, budget_seconds=budget_seconds)
    report = ForReport(
        before=listed_view(view, inputs.cluster),
        after=None,
        done=(),
        spent_seconds=0.0,
        ended="",
        left_here=_listed(choices, view),
        elsewhere=elsewhere(files, view, inputs),
        notes=_notes(view),
    )
    if as_json:
        emit(encode(report, schema=SCHEMA))
        return
    _print_view("now", report.before, verbose)
    _print_left("this machine would measure, in this order:", report.left_here, verbose)
    _print_elsewhere(report, verbose)


def show_report(
    files: CommandInputs, report: Report, inputs: Inputs, *, verbose: bool, as_json: bool
) -> None:
    """Print what was measured, what it changed and what is left."""
    before, after = (listed_view(view, inputs.cluster) for view in (report.before, report.after))
    measured = {each.name for each in report.done}
    choices = plan_order(report.after, passed_over=measured)
    listed = ForReport(
        before=before,
        after=after,
        done=report.done,
        spent_seconds=report.spent_seconds,
        ended=report.ended,
        left_here=_listed(choices, report.after),
        elsewhere=elsewhere(files, report.after, inputs),
        notes=_notes(report.after),
        wider=growth(report.before, report.after),
    )
    if as_json:
        emit(encode(listed, schema=SCHEMA))
        return
    _print_view("before", before, verbose)
    _print_done(report)
    _print_view("after", after, verbose)
    emit_lines(filter(None, [listed.wider]))
    emit_lines([f"ended: {report.ended}"])
    _print_left("still worth measuring on this machine:", listed.left_here, verbose)
    _print_elsewhere(listed, verbose)


def _listed(choices: Sequence[Choice[Candidate]], view: View) -> tuple[ListedChoice, ...]:
    return tuple(
        ListedChoice(
            what=each.measurement.name,
            seconds=each.measurement.seconds,
            log_halfwidth_after=each.log_halfwidth,
            reason=_reason(each, view),
        )
        for each in choices
    )


def _reason(choice: Choice[Candidate], view: View) -> str:
    """How much of the best plan it is about and how well that is known; else whose."""
    asked = {each.asked for each in choice.measurement.leaves}
    for rank, plan in enumerate(view.plans):
        parts = [part for part in plan.parts if part.asked in asked]
        seconds = math.fsum(part.seconds for part in parts)
        if not seconds:
            continue
        mean = math.fsum(part.seconds * part.log_halfwidth for part in parts) / seconds
        whose = "the best plan's step" if rank == 0 else f"the step of plan {rank + 1}"
        return f"{seconds / plan.step_seconds:.0%} of {whose}, known to +{math.expm1(mean):.0%}"
    return ""


def elsewhere(files: CommandInputs, view: View, inputs: Inputs) -> tuple[Elsewhere, ...]:
    """Commands for other machines, in the order of their worth."""
    groups: dict[tuple[str, ...], list[Candidate]] = {}
    for choice in plan_order(view, here=False):
        candidate = choice.measurement
        if candidate.why_not:
            continue
        place = candidate.place
        key = ("link", place.name) if place is not None else ("layers", *candidate.kinds)
        groups.setdefault(key, []).append(candidate)
    return tuple(_commands(files, group, inputs) for group in groups.values())


def _commands(files: CommandInputs, group: Sequence[Candidate], inputs: Inputs) -> Elsewhere:
    place = group[0].place
    return (
        _layer_commands(files, group, inputs)
        if place is None
        else _link_commands(files, group[0], place)
    )


def _layer_commands(files: CommandInputs, group: Sequence[Candidate], inputs: Inputs) -> Elsewhere:
    """Everything that a law of this kind's layers at these sizes needs."""
    (kind,) = group[0].kinds
    island = next(each for each in inputs.cluster.islands if each.device.kind == kind)
    points = [unit.point for each in group for unit in each.units]
    sizes = sorted({point.microbatch_size for point in points})
    degrees = sorted({point.tp for point in points})
    grid = job_grid(inputs.model, inputs.job, tp_degrees=degrees, microbatch_sizes=sizes)
    need = layer_need(kind, island.device, units(grid), ())
    words = (
        "hetplan profile layers",
        *files.words("model", "job"),
        f"--microbatch {','.join(map(str, sizes))} --tp {','.join(map(str, degrees))}",
        "--device cpu" if kind == CPU_KIND else f"--kind {shlex.quote(kind)}",
        *files.words("store"),
    )
    return Elsewhere(
        where=f"on a node of island {island.name}",
        commands=(" ".join(filter(None, words)),),
        seconds=need.seconds,
    )


def _link_commands(files: CommandInputs, candidate: Candidate, place: LinkPlace) -> Elsewhere:
    words = (
        f"-m hetplan profile links {shlex.quote(place.name)}",
        f"--sizes {','.join(map(str, candidate.sizes))}",
        "--device cpu" if place.is_host_staged else "",
        *files.words("store"),
    )
    what = " ".join(filter(None, words))
    each = f"--nproc-per-node {place.processes_per_node}"
    commands: tuple[str, ...] = (f"torchrun --standalone {each} {what}",)
    if place.nodes > 1:
        commands = tuple(
            f"torchrun --nnodes {place.nodes} --node-rank {rank} {each} --master-addr ADDRESS "
            f"--master-port {_PORT} {what}"
            for rank in range(place.nodes)
        )
    then = "" if place.is_named else f"write `samples: {place.name}` at it in the cluster file"
    return Elsewhere(where=place.words, commands=commands, seconds=candidate.seconds, then=then)


def _notes(view: View) -> tuple[str, ...]:
    return view.notes + tuple(
        f"{each.name} is not measured here: {each.why_not}"
        for each in view.candidates
        if each.why_not
    )


_MOST_LISTED = 4
"""Measurements, and notes, that are shown without --verbose."""


def _print_view(when: str, view: ListedView, verbose: bool) -> None:
    """The best plan and how sure it is; verbose: every plan that could be the best."""
    best, others = view.plans[0], len(view.plans) - 1
    step = format_range(best.step_seconds, best.p5_seconds, best.p95_seconds, "90 %")
    rest = f", {others} other plan{'s' * (others > 1)} could be" if others else ""
    shown = view.plans if verbose else view.plans[:1]
    emit_lines(
        [
            f"{when}: {step}; it is the best with a chance of {best.chance:.0%}{rest}; taking it "
            f"costs {view.regret:.1%} in the mean",
            f"  {best.plan}",
            *(
                f"  or {each.chance:.0%}, {format_brief(each.step_seconds)}: {each.plan}"
                for each in shown[1:]
            ),
        ]
    )


def _print_done(report: Report) -> None:
    if not report.done:
        emit("nothing was measured")
        return
    emit(f"measured {len(report.done)} in {format_brief(report.spent_seconds)}")
    emit_lines(f"  refused: {each.name}: {each.refused}" for each in report.done if each.refused)


def _print_left(title: str, choices: Sequence[ListedChoice], verbose: bool) -> None:
    """What is worth measuring; verbose: all of it, and why."""
    if not choices:
        return
    emit(title)
    shown = choices if verbose else choices[:_MOST_LISTED]
    for each in shown:
        words = f"  {each.what}, about {format_about(each.seconds)}"
        if verbose:
            words += f": then known to +{math.expm1(each.log_halfwidth_after):.1%}; {each.reason}"
        emit_lines([words])
    if len(choices) > len(shown):
        emit(f"  and {len(choices) - len(shown)} more: --verbose")


def _print_elsewhere(report: ForReport, verbose: bool) -> None:
    for each in report.elsewhere:
        then = f"; then {each.then}" if each.then else ""
        about = "" if each.seconds is None else f" (about {format_about(each.seconds)})"
        emit_lines([f"{each.where}{about}{then}:"])
        for rank, command in enumerate(each.commands):
            node = f"node {rank}: " if len(each.commands) > 1 else ""
            emit(f"    {node}{command}")
    shown = report.notes if verbose else report.notes[:_MOST_LISTED]
    emit_lines(f"note: {note}" for note in shown)
    if len(report.notes) > len(shown):
        emit(f"{len(report.notes) - len(shown)} more notes: --verbose")


def say_begin(choice: Choice[Candidate], spent: float) -> None:
    """One line before a measurement."""
    say(
        f"{format_about(spent) if spent else '0 s'} spent; measuring {choice.measurement.name}, "
        f"about {format_about(choice.measurement.seconds)}"
    )
