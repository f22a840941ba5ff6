"""What a person sees of a plan: its stages, what it costs, how good it is and what to doubt."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from rich.markup import escape
from rich.table import Table

from hetplan.cluster.devices import CPU_KIND
from hetplan.cost.estimate_values import Estimate, StageEstimate
from hetplan.cost.goodput.lost_nic import LostNic
from hetplan.cost.step_model.pricer import Pricer
from hetplan.cost.terms import EXTRAPOLATING
from hetplan.errors import InputError
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Plan, Stage, expand
from hetplan.plans.ranks import limits_of, pins_line
from hetplan.plans.rules import some
from hetplan.reports.days import days_lines, run_of
from hetplan.reports.energy import energy_line, power_lines
from hetplan.reports.summary import emit_target, gibibytes
from hetplan.reports.terminal import new_table, small_table
from hetplan.search.descriptions import layout_words
from hetplan.search.result import (
    NO_TIME,
    BestAlone,
    Certificate,
    HomogeneousSum,
    Restriction,
    SearchResult,
)
from hetplan.units import (
    GIBIBYTE,
    digits,
    format_brief,
    format_bytes,
    format_seconds,
    format_share,
)
from hetplan.whatif.local_steps import LocalSteps, kept_out
from hetplan.whatif.smaller_questions import usable_kinds

STAGE_WORDS = "of a stage: forward and backward of one microbatch, the others of the whole step"


def stage_table(model: ModelSpec, plan: Plan, estimate: Estimate) -> Table:
    """One row per stage: on how many devices of which island, its layers, times and memory."""
    stages = [
        (p, s, stage)
        for p, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
    ]
    table = small_table(
        "stage | on | layers | >forward | >backward | >waits | >reduce | >update | >memory, GiB"
    )
    for (p, s, stage), cost in zip(stages, estimate.stages, strict=True):
        memory = cost.memory
        table.add_row(
            str(s) if len(plan.pipelines) == 1 else f"{p}.{s}",
            f"{sum(replica.num_devices for replica in stage.replicas)} {escape(cost.island)}",
            _layers(model, stage),
            _time(cost, "forward", cost.forward_seconds),
            _time(cost, "backward", cost.backward_seconds),
            format_brief(cost.wait_seconds),
            _time(cost, "reduction", cost.reduction_seconds),
            _time(cost, "optimizer", cost.optimizer_seconds),
            f"{digits(memory.total_bytes / GIBIBYTE)} of {gibibytes(memory.available_bytes)}"
            + ("" if memory.fits else " TOO FULL"),
        )
    return table


def _time(cost: StageEstimate, name: str, seconds: float) -> str:
    """A time, marked where a size behind it was not measured."""
    return format_brief(seconds) + (EXTRAPOLATED if name in cost.extrapolating else "")


EXTRAPOLATED = "*"
"""Behind every number of a table that rests on sizes outside of what was measured."""


def component_table(estimate: Estimate) -> Table:
    """The step along its critical path, component by component."""
    table = small_table("component | >time | >of the step | >hidden | ")
    for entry in estimate.components:
        hidden = format_brief(entry.hidden_seconds) if entry.hidden_seconds else ""
        table.add_row(
            entry.component.value,
            format_brief(entry.seconds),
            f"{entry.seconds / estimate.step_seconds:.1%}",
            hidden,
            escape(entry.note),
        )
    return table


def _layers(model: ModelSpec, stage: Stage) -> str:
    """`E+10`, `12`, `10+H`: transformer layers, E for the embedding, H for the head, and P for
    multi-token prediction; chunks in order, as in `E+2 4`.
    """
    total, last = len(model.layers), model.num_layers
    chunks = []
    for chunk in stage.chunks:
        count = min(chunk.stop, last + 1) - max(chunk.start, 1)
        predicting = min(chunk.stop, total - 1) - max(chunk.start, last + 1)
        words = [
            *(["E"] if chunk.start == 0 else []),
            *([str(count)] if count > 0 else []),
            *([f"{predicting}P"] if predicting > 0 else []),
            *(["H"] if chunk.stop == total else []),
        ]
        chunks.append("+".join(words))
    return " ".join(chunks)


def memory_line(estimate: Estimate) -> str | None:
    """What the fullest stage takes from its device; None where torch allocates without a cache."""
    s, stage = max(enumerate(estimate.stages), key=lambda entry: entry[1].memory.reserved_bytes)
    memory = stage.memory
    if stage.device == CPU_KIND:
        return None
    runtime = (
        f"{format_bytes(memory.runtime_bytes)} of it by driver and communication library"
        if memory.runtime_bytes
        else "without driver and communication library"
    )
    return (
        f"most memory on {estimate.stage_name(s)}: {format_bytes(memory.total_bytes)} allocated, "
        f"about {format_bytes(memory.reserved_bytes)} reserved (the allocator takes "
        f"{memory.reserve_factor:.2f} times as much; {runtime})"
    )


def estimate_lines(estimate: Estimate) -> Iterator[str]:
    """What to know before trusting the step and its interval."""
    if estimate.interval_note:
        yield f"interval: {estimate.interval_note.removeprefix('interval ')}"
    for stages, numbers in _extrapolating(estimate):
        yield f"*{stages}: {numbers} extrapolating, see the notes"
    for note in grouped(estimate.warnings):
        yield f"note: {note}"


def _extrapolating(estimate: Estimate) -> Iterator[tuple[str, str]]:
    """(stages, which of their times rest on sizes that were not measured), alike ones together."""
    several = len({stage.pipeline for stage in estimate.stages}) > 1
    stages_of: dict[tuple[str, ...], list[str]] = {}
    counts: dict[int, int] = {}
    for stage in estimate.stages:
        place = counts.get(stage.pipeline, 0)
        counts[stage.pipeline] = place + 1
        if stage.extrapolating:
            name = f"{stage.pipeline}.{place}" if several else str(place)
            stages_of.setdefault(stage.extrapolating, []).append(name)
    for numbers, stages in stages_of.items():
        if len(stages) == len(estimate.stages):
            where = "all stages" if len(stages) > 1 else "the stage"
        elif len(stages) > _MAX_STAGES_NAMED:
            where = f"{len(stages)} stages, {stages[0]} to {stages[-1]}"
        else:
            where = f"stage{'s' if len(stages) > 1 else ''} {', '.join(stages)}"
        yield where, ", ".join(numbers)


_MAX_STAGES_NAMED = 8
"""More are named by the first and the last."""


def grouped(notes: Iterable[str]) -> Iterator[str]:
    """Notes of the form `what: text`, those of one text in one line: `text: what; what`.

    Texts of extrapolations keep the word: `extrapolating: hidden 16384 > 8192 measured: what`.
    """
    subjects: dict[str, list[str]] = {}
    for note in notes:
        subject, mark, text = note.rpartition(f": {EXTRAPOLATING}")
        if mark:
            text = EXTRAPOLATING + text
        else:
            subject, _, text = note.rpartition(": ")
        subjects.setdefault(text, []).append(subject)
    for text, whose in subjects.items():
        if len(whose) > 1:
            yield f"{text}: {'; '.join(_by_cause(whose))}"
        else:
            yield f"{whose[0]}: {text}" if whose[0] else text


def _by_cause(subjects: Iterable[str]) -> Iterator[str]:
    """`kind: embedding forward` and `kind: head forward` as `kind (embedding forward, head
    forward)`.
    """
    subjects_of: dict[str, list[str]] = {}
    for subject in subjects:
        cause, _, what = subject.partition(": ")
        subjects_of.setdefault(cause, []).extend([what] if what else [])
    for cause, whats in subjects_of.items():
        yield f"{cause} ({', '.join(dict.fromkeys(whats))})" if whats else cause


def certificate_line(certificate: Certificate) -> str:
    """What became of the candidates of a search."""
    return (
        f"{certificate.candidates} candidates: {certificate.pruned_by_bound} pruned by bound, "
        f"{certificate.searched} searched: {certificate.closed_by_program} closed by programs, "
        f"{certificate.closed_by_listing} by listing every plan, {certificate.left_open} left "
        f"open; {certificate.replays} replays"
    )


def restriction_line(
    restriction: Restriction, step_seconds: float, left_out: Sequence[str] = ()
) -> str:
    """What the target costs, in tokens per second, against a trainer that can run more, or mix
    libraries.

    left_out: kinds that the plan does not use.
    """
    gain = step_seconds / restriction.step_seconds - 1.0
    least = restriction.lower_bound_seconds
    most = step_seconds / least - 1.0 if least > 0.0 else math.inf
    name, mix, advice = restriction.target, " and ".join(restriction.libraries), ""
    if mix and (gain <= 0.0 or most <= 0.0):
        name += f", which can mix {mix},"
        advice = f"; leave {', '.join(left_out)} out" if left_out else ""
    if most <= 0.0:
        no_less = format_seconds(least)
        return f"{name} cannot be faster: no plan of it takes less than {no_less}{advice}"
    limit = f"at most {most:.1%}" if least > 0.0 else "no bound was found"
    if gain <= 0.0:
        limit += " faster" if least > 0.0 else ""
        return f"{name} has no faster plan as far as was searched ({limit}){advice}"
    if restriction.mixed:
        return f"{name} can mix {mix}: {gain:.1%} faster, at least ({limit})"
    return f"{name} would be {gain:.1%} faster ({limit})"


def local_steps_lines(found: LocalSteps | str) -> Iterator[str]:
    """What local steps bring or cost, from which link on, and whose devices only they use; or why
    there are none.
    """
    if isinstance(found, str):
        yield from [f"local steps: {found}"] * bool(found)
        return
    parts = " + ".join(f"{samples:,} {region}" for region, samples in found.sites)
    step, least = found.result.estimate.step_seconds, format_brief(found.bound_seconds)
    yield f"local steps on {parts} samples: {format_brief(step)} a step (these: at least {least})"
    run, job, others = run_of(found.result), found.result.inputs.job, some(found.idle)
    than = f"than without {others}" if others else "than all devices together"
    at = "" if job.quantile is None else f" at the step's p{100 * job.quantile:g}"
    gain = f"{abs(found.gain):.1%} {'faster' if found.gain >= 0 else 'slower'} {than}{at}"
    if math.isinf(found.gain):
        gain = "the synchronous run never ends"
    more = f"with {100 * found.result.plan.extra_tokens:.3g}% extra tokens"
    whole = "" if run is None else f" and lost time their run takes {format_brief(run.seconds)}:"
    yield f"{more}{whole or ' their run is'} {gain}"
    (rate, wide), (trip, far) = found.bandwidth, found.round_trip
    ends = [
        f"below {digits(8e-9 * wide)} Gbit/s (today {digits(8e-9 * rate)})" if wide else "",
        f"beyond {format_brief(far)} (today {format_brief(trip)})" if far else "",
    ]
    if any(ends):
        yield f"of the plans found local steps win {' or '.join(filter(None, ends))} between sites"


def kept_out_lines(result: SearchResult) -> Iterator[str]:
    """Regions that only local steps could use."""
    seconds, out = kept_out(result)
    if out:
        yield f"{some(out)} idle: gradients would cross the link in {format_brief(seconds)}; local"
        yield "steps could use it: docs/days.md"


def unused_kinds(result: SearchResult) -> tuple[str, ...]:
    """Device kinds that the job may use and the plan does not."""
    used = {island.device.kind for island in result.used_islands}
    return tuple(kind for kind in usable_kinds(result.inputs) if kind not in used)


def launch_lines(plan: Plan) -> Iterator[str]:
    """What of a plan for hetplan's own trainer it does not run yet, and the pins that help."""
    if plan.target not in _OWN_TRAINER:
        return
    limits = list(limits_of(plan))
    places = Counter(limit.message for limit in limits)
    first = {limit.message: limit.field for limit in reversed(limits)}
    said = []
    for message, count in islice(places.items(), _MAX_LIMITS):
        more = f" and {count - 1} more" if count > 1 else ""
        said.append(f"{first[message]}{more}: {message}")
    if len(places) > _MAX_LIMITS:
        said.append(f"{len(places) - _MAX_LIMITS} more such limits")
    if said:
        yield f"`hetplan launch` does not run it yet: {'; '.join(said)}"
    yield from pins_line(limits)


_OWN_TRAINER = ("native", "any")
"""Targets whose plans `hetplan launch` may be asked to run."""

_MAX_LIMITS = 4
"""More are counted."""


def homogeneous_lines(figure: HomogeneousSum) -> Iterator[str]:
    """The plan against the sum of what its kinds reach alone."""
    for kind in figure.kinds:
        alone = f"{kind.tokens_per_second:,.0f} tokens/s alone (gap {kind.gap:.1%})"
        if kind.reason == NO_TIME:
            alone = NO_TIME
        elif kind.reason:
            alone = f"no plan alone ({kind.reason}); its roofline counts"
        peak = kind.roofline_tokens_per_second
        roofline = "no peak rate known" if peak is None else f"roofline {peak:,.0f} tokens/s"
        yield f"{kind.devices} x {kind.device}: {alone}, {roofline}"
    yield (
        f"homogeneous-sum ratio {format_share(figure.homogeneous_sum_ratio)} (predicted on both "
        f"sides{_of_the_able(figure)}), roofline ratio {format_share(figure.roofline_ratio)}"
    )


def mixing_line(result: SearchResult, alone: BestAlone) -> str:
    """The plan against the best single kind by itself, in tokens per second."""
    best = alone.kind
    used = dict.fromkeys(island.device.kind for island in result.used_islands)
    plan = "the mix" if len(used) > 1 else "this plan"
    trainer = "any trainer" if alone.target == "any" else alone.target
    other = f"{best.devices} x {best.device} alone under {trainer}"
    ratio = result.estimate.tokens_per_second / best.tokens_per_second
    if ratio >= 1.0 and list(used) == [best.device]:
        return f"no mix that was found is faster than {other}"
    if ratio >= 1.0:
        return f"{plan} is {ratio - 1.0:.1%} faster than {other}, the best kind alone"
    others = [kind for kind in used if kind != best.device]
    advice = f"plan for {alone.target}"
    if others:
        advice = f"leave {', '.join(others)} out"
    elif alone.target == result.plan.target:
        advice = "plan longer"
    return f"{plan} is {1.0 - ratio:.1%} slower than {other}: {advice}"


def _of_the_able(figure: HomogeneousSum) -> str:
    """The ratio to the kinds that can train the model alone, where others count with a roofline."""
    able = sum(kind.tokens_per_second for kind in figure.kinds)
    if figure.homogeneous_sum_ratio is None or not able or not any(k.reason for k in figure.kinds):
        return ""
    whole = sum(k.tokens_per_second or k.roofline_tokens_per_second or 0.0 for k in figure.kinds)
    return f"; {format_share(figure.homogeneous_sum_ratio * whole / able)} without rooflines"


def detail_lines(result: SearchResult) -> Iterator[str]:
    """What the ten lines of a result leave out, below its tables."""
    memory = memory_line(result.estimate)
    if memory is not None:
        yield memory
    yield from estimate_lines(result.estimate)
    run = run_of(result)
    if run is not None:
        yield from days_lines(run)
    yield from power_lines(result)
    if result.certificate is None:
        return
    yield energy_line(result)
    yield certificate_line(result.certificate)
    if result.restriction is not None:
        step, unused = result.estimate.step_seconds, unused_kinds(result)
        yield restriction_line(result.restriction, step, unused)
    yield f"searched: {result.certificate.space}"


def alternatives_table(result: SearchResult) -> Table:
    """One row per alternative."""
    found = result.alternatives
    runs = any(plan.run_seconds is not None for plan in found)
    table = new_table(
        f"best | >step | >p{found[0].quantile * 100:g} | >USD per step | "
        + ">whole run | " * runs
        + ">devices | layout",
        title="Other plans, none beaten by another in every column",
    )
    for plan in found:
        price = "-" if plan.usd_per_step is None else f"{plan.usd_per_step:.4g}"
        whole = "-" if plan.run_seconds is None else format_brief(plan.run_seconds)
        table.add_row(
            escape(plan.why),
            format_seconds(plan.step_seconds),
            format_seconds(plan.quantile_seconds),
            price,
            *([whole] if runs else []),
            f"{plan.devices:,}",
            layout_words(plan.plan),
        )
    return table


def refused_lines(result: SearchResult) -> Iterator[str]:
    """Why `hetplan emit` refuses this plan for its target, and what helps."""
    from hetplan.schedulers.launch import EmissionOptions
    from hetplan.trainers import TRAINERS, trainer_named
    from hetplan.trainers.emission import plan_faults, refusals

    name = emit_target(result)
    if name not in TRAINERS:
        return
    named = with_node_names(result)
    try:
        faults = plan_faults(refusals(named, trainer_named(name), EmissionOptions()))
    except InputError as error:
        faults = error.faults
    for fault in faults[:_MAX_LIMITS]:
        place = f"{fault.field}: " if fault.field else ""
        yield f"`hetplan emit --target {name}` refuses this plan: {place}{fault.message}"
    if len(faults) > _MAX_LIMITS:
        yield f"and {len(faults) - _MAX_LIMITS} more such reasons"
    if faults:
        yield "`hetplan emit --nearest FILE` finds the fastest plan that it takes"


def with_node_names(result: SearchResult) -> SearchResult:
    """The result with a name for every node: names can be given later, so only the other reasons
    are about the plan.
    """
    cluster = result.inputs.cluster
    islands = tuple(
        island
        if island.node_names
        else replace(island, node_names=(f"i{at}-n[0-{island.nodes - 1}]",))
        for at, island in enumerate(cluster.islands)
    )
    inputs = replace(result.inputs, cluster=replace(cluster, islands=islands))
    return replace(result, inputs=inputs)


def lost_nic_lines(lost: LostNic, pricer: Pricer, plan: Plan) -> Iterator[str]:
    """What a lost NIC does to the plan's step."""
    if not any(
        device in lost.devices
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for replica in stage.replicas
        for device in expand(replica.devices)
    ):
        yield "the plan uses no device of that node; nothing changes"
        return
    yield from lost.notes
    if lost.kept == 0:
        yield "the node is cut off; plan again without it"
        return
    before, after = (
        replace(pricer, cluster=cluster, _known={}).step(plan).step_seconds
        for cluster in (lost.before, lost.after)
    )
    yield (
        f"the step takes {format_seconds(after)} instead of {format_seconds(before)} "
        f"({after / before - 1:+.1%}), once {format_seconds(lost.detection_seconds)} to notice"
    )
