"""The answer: what a plan is and what it costs, in two sentences and a table of the questions that
a team asks of it; numbers in words, with three digits, one unit and their interval.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetplan.cost.estimate_values import Estimate, StepRange
from hetplan.cost.network.segments import LinkScope
from hetplan.plans.pieces import used_devices
from hetplan.predict.predictor import MEASURED
from hetplan.reports.days import days_line, failure_words, lost_words, run_of
from hetplan.reports.energy import (
    FRONT_PROOF,
    energy_line,
    front_cells,
    saved_part,
    watts_words,
)
from hetplan.reports.explained import gains_worth_saying, idle_lines
from hetplan.reports.html.values import LinkUse, PlanView
from hetplan.reports.plans import mixing_line
from hetplan.reports.summary import next_lines, stage_rows, step_words
from hetplan.search.descriptions import devices_in_use, layout_words
from hetplan.search.result import ChangeKind, SearchResult, ShadowPrice
from hetplan.search.space.allowed import allowed_cluster
from hetplan.units import (
    UNITS,
    Dimension,
    counted,
    digits,
    format_brief,
    format_bytes,
    format_each,
    format_rate,
    format_seconds,
)
from hetplan.whatif.plan_use import idle_islands

SPACE = "\u00a0"
"""Between a number and its unit: it breaks no line."""


def share_words(part: float | None) -> str:
    """`41.2 %`, or that it is not known."""
    return "not known" if part is None else f"{_three(100 * part)}{SPACE}%"


def change_words(part: float | None) -> str:
    """`+12.3 %`; below a tenth of a thousandth nothing changes."""
    if part is None:
        return "not known"
    return f"{'-' if part < 0 else '+'}{share_words(abs(part))}" if abs(part) >= 1e-4 else "same"


def gain_words(least: float, most: float | None) -> str:
    """`+3.1 % to +5.3 %`, `-12 %`, `0 % or more`: what a change is worth, from and to."""
    low, high = (_signed(least), _signed(least if most is None else most))
    return f"{low} or more" if most is None else low if low == high else f"{low} to {high}"


def _signed(part: float) -> str:
    return change_words(part) if abs(part) >= 1e-4 else f"0{SPACE}%"


def seconds_words(seconds: float, like: float | None = None) -> str:
    """A time with three digits, in the unit of another one where that is given."""
    return format_brief(seconds, like).replace(" ", SPACE)


def _three(number: float) -> str:
    return digits(number) if number else "0"


def bytes_words(size: float) -> str:
    """As memory is counted, with three digits."""
    number, unit = format_bytes(size).split()
    return f"{_three(float(number))}{SPACE}{unit}"


def decimal_bytes(size: float) -> str:
    """As networks count, with three digits."""
    return format_rate(float(f"{size:.3g}"), "B").replace(" ", SPACE)


def range_words(share: str, least: str, most: str) -> str:
    """`(90 %: 22.3 to 48.1 s)`, the unit once."""
    unit = most.partition(SPACE)[2]
    return f"({share.replace(' ', SPACE)}: {least.removesuffix(unit).rstrip()} to {most})"


def ticks(end: float, count: int = 6) -> Iterator[tuple[float, str]]:
    """(part of the way, words) of round times from 0 to the end, about so many."""
    unit = format_seconds(end).split()[1]
    whole = end / UNITS[Dimension.TIME][unit]
    size = 10.0 ** math.floor(math.log10(whole / count))
    size = next(size * each for each in (1, 2, 5, 10) if whole / (size * each) <= count)
    for number in range(math.floor(whole / size * (1 + 1e-9)) + 1):
        at = number * size
        yield at / whole, f"{float(f'{at:.6g}'):,.10g}{SPACE}{unit}"


# ---- the answer


def headline(result: SearchResult) -> str:
    """What the plan is and what it costs, in two sentences."""
    estimate, inputs, plan = result.estimate, result.inputs, result.plan
    step = estimate.step_seconds
    cluster = allowed_cluster(inputs.cluster, inputs.job)
    usable = sum(island.num_usable_devices for island in cluster.islands)
    stages = counted(len(plan.stages), "stage")
    if len(plan.pipelines) > 1:
        stages += f" of {len(plan.pipelines)} pipelines"
    trainer = "any trainer" if plan.target == "any" else plan.target
    mfu = "" if estimate.mfu is None else f", MFU {share_words(estimate.mfu)}"
    fits = "" if estimate.fits else " It does not fit in memory."
    return (
        f"{inputs.model.name} trains under {trainer} in {stages} on {devices_in_use(plan):,} of "
        f"{counted(usable, 'device')}. A step is predicted to take {_step_words(estimate, step)}: "
        f"{estimate.tokens_per_second:,.0f} tokens/s{mfu}.{fits}"
    )


def _step_words(estimate: Estimate, step: float) -> str:
    """A step with its interval."""
    within = estimate.step_range
    own, low, high = (seconds_words(each, step) for each in (step, *within[:2]))
    return f"{own} {range_words(within.share, low, high)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One question and its answer."""

    name: str
    words: str
    section: str = ""
    """Of the page, that says more."""


def facts(view: PlanView) -> Iterator[Fact]:
    """The table below the answer, most asked first."""
    yield from _costs(view)
    yield from _layout(view)
    yield from _limits(view)
    yield from _changes(view)
    yield Fact(name="Proof", words=_proof(view.result), section="search")
    yield Fact(name="Not measured", words=_unmeasured(view), section="sources")
    *_, start = next_lines(view.result, Path(view.name))
    name, _, how = start.partition(": ")
    yield Fact(name=name.capitalize(), words=how, section="start")


def _costs(view: PlanView) -> Iterator[Fact]:
    """How long, how fast, how dear."""
    result = view.result
    estimate = result.estimate
    step, within = estimate.step_seconds, estimate.step_range
    tokens = estimate.tokens_per_second * step
    least, most = (f"{tokens / end:,.0f}" for end in (within.high_seconds, within.low_seconds))
    yield Fact(name="Step", words=_step_words(estimate, step), section="step")
    rate = f"{estimate.tokens_per_second:,.0f} {range_words(within.share, least, most)}"
    yield Fact(name="Tokens per second", words=rate)
    if estimate.kinds:
        yield Fact(name="MFU", words=_mfu_words(estimate, within), section="use")
    # Runs of other lengths are multiples of a trillion tokens.
    run = run_of(result, 10**12)
    if run is not None:
        yield Fact(name="Whole run", words=days_line(run))
        yield Fact(name="Lost time", words=lost_words(run))
        yield Fact(name="Failures", words=failure_words(run))
        if run.notes:
            yield Fact(name="Assumed of the run", words="; ".join(run.notes))
    if view.usd_per_step is not None:
        yield Fact(name="Price", words=f"{view.usd_per_step:,.4g} USD per step", section="energy")
    if view.energy is not None:
        low, high = view.energy.kwh_range
        words = range_words("90 %", f"{low:,.3g}", f"{high:,.3g}")
        words = f"{view.energy.kwh_per_step:,.3g} kWh per step {words}"
        yield Fact(name="Energy", words=words, section="energy")


def _layout(view: PlanView) -> Iterator[Fact]:
    """What runs where."""
    result, job = view.result, view.result.inputs.job
    yield Fact(name="Trainer", words=result.plan.target, section="start")
    yield Fact(name="Layout", words=_degrees(result), section="timeline")
    batch = f"{job.global_batch_size:,} sequences of {job.sequence_length:,} tokens"
    yield Fact(name="Batch", words=f"{batch}, {job.precision.value}")
    yield Fact(name="Devices", words=_devices(result), section="cluster")
    yield Fact(name="Fullest memory", words=_fullest(result.estimate), section="memory")


def _degrees(result: SearchResult) -> str:
    """Degrees; of one pipeline whose islands differ in them, of each island by itself."""
    plan, rows = result.plan, [*stage_rows(result)]
    whole = layout_words(plan)
    islands = [row.islands for row in rows]
    apart = len({*islands}) == len(islands) == len({*(each for row in islands for each in row)})
    if len(plan.pipelines) > 1 or "/" not in whole or not apart or len(rows) > _MOST_LAYOUTS:
        return whole
    parts = []
    for row in rows:
        degrees = [(name, format_each(getattr(row, name))) for name in ("tp", "cp", "ep", "dp")]
        words = [f"{name} {value}" for name, value in degrees if name == "tp" or value != "1"]
        words.append(f"microbatch size {format_each(row.microbatch_size)}")
        words += [f"recompute {row.recompute}"] * (row.recompute != "none")
        at = f"stage{'s' * (row.first != row.last)} {row.name}"
        names = " and ".join(island.name for island in row.islands)
        parts.append(f"{', '.join(words)} in {at} on {names}")
    return f"{counted(len(plan.stages), 'stage')}: {'; '.join(parts)}"


_MOST_LAYOUTS = 4
"""Islands whose degrees stand in the table one by one."""


def _limits(view: PlanView) -> Iterator[Fact]:
    """What holds the plan up, and what stands idle."""
    words = step_words(view.result.estimate)
    for gain, change in gains_worth_saying(view.limits)[:1]:
        words += f". The step would be {share_words(gain)} shorter with {change}"
    yield Fact(name="What limits it", words=words, section="step")
    yield Fact(name="Fullest link", words=_fullest_link(view), section="cluster")
    yield Fact(name="Idle devices", words=_idle(view), section="help")


def _idle(view: PlanView) -> str:
    """Which devices are idle, and why."""
    result = view.result
    why, left = [*idle_lines(result.idle, result)], [*idle_devices(result)]
    if not why:
        asked = not_asked(view, result.certificate is not None)
        if result.objective:
            asked = f"not known of a plan chosen by {result.objective}"
        return f"{', '.join(left)}; why is {asked}" if left else "none"
    more = f", and {len(why) - _MOST_IDLE} more islands below" * (len(why) > _MOST_IDLE)
    return "; ".join(why[:_MOST_IDLE]) + more


_MOST_IDLE = 2
"""Islands whose reasons stand in the table: each is a sentence."""


def _fullest_link(view: PlanView) -> str:
    step = view.result.estimate.step_seconds
    known = [(share, use) for use in view.links if (share := use.share(step)) is not None]
    if not known:
        return "none: nothing is sent over a link whose bandwidth is known"
    share, use = max(known, key=lambda each: each[0])
    return f"{use.link}, {share_words(share)} of its bandwidth on average"


def _changes(view: PlanView) -> Iterator[Fact]:
    """One more node, half of a link, one kind alone; what was not asked is none of the answers."""
    result = view.result
    prices, asked = result.prices, result.certificate is not None
    nodes = [each for each in prices if each.kind is ChangeKind.NODE]
    words = "; ".join(f"{gain_of(each)} tokens/s with {each.words}" for each in nodes)
    yield Fact(name="One more node", words=words or not_asked(view, asked), section="help")
    halves = [each for each in prices if each.kind is ChangeKind.NARROWER]
    worst = min(halves, key=lambda each: each.least_gain, default=None)
    felt = [use for use in view.links if use.at_half is not None]
    if worst is not None:
        words = f"{gain_of(worst)} tokens/s with {worst.words}, planned again"
        # Nobody plans links inside nodes again: said where the step feels one of them more.
        inside = [use for use in felt if use.link.scope is LinkScope.NODE]
        if any((1 + worst.least_gain) * (1 + (use.at_half or 0.0)) > 1 for use in inside):
            words += f"; {_at_half(inside)}"
    elif felt:
        words = _at_half(felt)
    else:
        words = "nothing changes: no link with a known bandwidth is used"
    yield Fact(name="Half of a link's bandwidth", words=words, section="cluster")
    if result.alone is not None:
        yield Fact(name="Beside one kind", words=mixing_line(result, result.alone))


def _at_half(links: Sequence[LinkUse]) -> str:
    """The link whose half makes the step longest."""
    most = max(links, key=lambda use: use.at_half or 0.0)
    return f"step {change_words(most.at_half)} with half of {most.link}, this layout kept"


def gain_of(price: ShadowPrice) -> str:
    """What a change is worth, or why that is not known."""
    return price.note or gain_words(price.least_gain, price.most_gain)


def not_asked(view: PlanView, searched: bool) -> str:
    """What answers it; of a layout that was given no search does."""
    if not searched:
        return f"not known: {view.result.unproven}"
    return f"not planned yet: hetplan report {shlex.quote(view.name)} --what-if"


def idle_devices(result: SearchResult) -> Iterator[str]:
    """`8 of 32 devices of h100`, of every island with some."""
    cluster = allowed_cluster(result.inputs.cluster, result.inputs.job)
    for island, left in idle_islands(result.plan, cluster):
        yield f"{left:,} of {island.num_usable_devices:,} devices of {island.name}"


def _unmeasured(view: PlanView) -> str:
    """The part of the step that rests on figures of others, and the largest of them."""
    estimate = view.result.estimate
    sources = f"predicted from {', '.join(estimate.sources)} figures"
    if MEASURED not in estimate.sources:
        return f"everything: {sources}"
    if view.is_priced_anew or not estimate.causes:
        return f"not known part by part; {sources}"
    others = [
        each
        for each in sorted(estimate.causes, key=lambda one: -one.seconds)
        if MEASURED not in view.sources.get((each.cause, each.part), ())
    ]
    part = sum(each.seconds for each in others) / estimate.step_seconds
    if not part:
        return f"nothing of the step; {sources}"
    names = dict.fromkeys(f"{each.cause} {each.part}".strip() for each in others[:_MOST_NAMED])
    return f"{share_words(part)} of the step, most of it {', '.join(names)}; {sources}"


_MOST_NAMED = 3
"""Parts of a step that a line names."""


def _mfu_words(estimate: Estimate, within: StepRange) -> str:
    rate = f"{estimate.flops_per_second / 1e12:,.3g} TFLOP/s per device"
    if estimate.mfu is None:
        return f"not known, as a kind has no peak rate; {rate}"
    flops = estimate.mfu * estimate.step_seconds
    least, most = (share_words(flops / end) for end in (within.high_seconds, within.low_seconds))
    words = f"{share_words(estimate.mfu)} {range_words(within.share, least, most)}; {rate}"
    if len(estimate.kinds) > 1:
        words += f". {', '.join(f'{e.device} {share_words(e.mfu)}' for e in estimate.kinds)}"
    return words


def _fullest(estimate: Estimate) -> str:
    """The stage that fills most of its devices' memory."""
    uses = [stage.memory for stage in estimate.stages]
    part, at = max((use.total_bytes / use.available_bytes, at) for at, use in enumerate(uses))
    words = f"{bytes_words(uses[at].total_bytes)} of {bytes_words(uses[at].available_bytes)}"
    fits = "" if estimate.fits else "; DOES NOT FIT"
    return f"{words}, {share_words(part)} ({estimate.stage_name(at)}){fits}"


def _proof(result: SearchResult) -> str:
    certificate = result.certificate
    if certificate is None:
        return f"none: {result.unproven}"
    least = seconds_words(certificate.lower_bound_seconds, result.estimate.step_seconds)
    return f"within {share_words(certificate.gap)} of the best plan: none takes less than {least}"


def _devices(result: SearchResult) -> str:
    """`640 x a100, 128 x mi210`."""
    found = [
        f"{int(mine.sum()):,} x {island.device.kind} of {island.name}"
        for island, mine in used_devices(result.plan, result.inputs.cluster)
        if mine.any()
    ]
    return ", ".join(found)


# ---- the section of energy, cost and the front


def energy_section(view: PlanView) -> dict[str, Any]:
    """What the template fills in."""
    result = view.result
    line, part = energy_line(result), saved_part(view.clocks, view.energy)
    if part is not None and part > 0.0:
        line += f"; the clocks below would save {part:.1%} of the energy"
    slower = [each for each in view.clocks if each.mean_clock < 1.0]
    several = len(result.plan.pipelines) > 1
    return {
        "line": line[:1].upper() + line[1:],
        "islands": [
            {
                "part": each,
                "computing": watts_words(each.law.computing_watts),
                "communicating": watts_words(each.law.communicating_watts),
                "mean": watts_words(each.mean_watts),
                "kwh": digits(each.kwh_per_step),
            }
            for each in (() if view.energy is None else view.energy.islands)
        ],
        "clocks": [
            {
                "stage": (f"pipeline {each.pipeline}, " if several else "") + f"stage {each.stage}",
                "clock": each.mean_clock,
                "saved": "unknown" if each.kwh_saved is None else digits(each.kwh_saved),
            }
            for each in slower[:_MOST_STAGES]
        ],
        "front": [
            {"cells": front_cells(point), "layout": layout_words(point.plan)}
            for point in (result.alternatives if result.is_front else ())
        ],
        "proof": FRONT_PROOF,
    }


_MOST_STAGES = 64
"""Rows of a table that can still be looked through."""
