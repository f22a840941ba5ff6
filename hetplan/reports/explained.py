"""What `hetplan explain` prints: limits, the worth of changes, another plan, ranks, traffic."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.markup import escape
from rich.table import Table

from hetplan.cost.network.segments import LinkScope, TrafficClass
from hetplan.cost.traffic import Ledger, all_classes, ledger
from hetplan.files.encoding import encode
from hetplan.plans.ranks import RankRow, rank_rows
from hetplan.predict.predictor import Predictor
from hetplan.reports.terminal import folded, print_small, small_table, text_width
from hetplan.search.result import BreakEven, IdleCause, IdleReason, SearchResult, ShadowPrice
from hetplan.search.solver import RESOLUTION
from hetplan.units import format_brief, format_bytes, format_rate, format_seconds
from hetplan.whatif.against import Against
from hetplan.whatif.idle import MOST_OPEN, closed_question
from hetplan.whatif.limits import FASTER, Limits
from hetplan.whatif.shadow_prices import most_of
from hetplan.whatif.within_limits import full_limits

EXPLAIN_SCHEMA = "hetplan.explain/3"
RANKS_SCHEMA = "hetplan.ranks/1"

_SHOWN = 5
"""Stages, and boundaries, with the largest gains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One answer about a plan, with what limits it."""

    limits: Limits
    idle: tuple[IdleReason, ...] = ()
    """Only of `hetplan explain limits`."""
    shadow_prices: tuple[ShadowPrice, ...] = ()
    """Only of `hetplan explain prices`."""
    against: Against | None = None


def limit_lines(limits: Limits) -> Iterator[str]:
    """What would shorten the step most, and whose memory is nearly full."""
    worth = gains_worth_saying(limits)
    step = format_brief(limits.step_seconds)
    if worth:
        yield f"{step} a step; it would be shorter, with one change at a time, by"
    else:
        yield f"{step} a step; no single part shortens it by {_WORTH_SAYING:.1%} or more"
    for gain, change in worth:
        yield f"  {gain:.1%} with {change}"
    if limits.memory:
        fullest = max(limits.memory, key=lambda each: each.used)
        more = len(limits.memory) - 1
        others = f"; {more} more stage{'s' * (more > 1)} above 90%" if more else ""
        yield (
            f"memory: stage {_place(fullest.pipeline, fullest.stage)} ({fullest.island}) is "
            f"{fullest.used:.0%} full, most of it {fullest.largest}{others}"
        )


def gains_worth_saying(limits: Limits) -> list[tuple[float, str]]:
    """(part of the step, change that saves it), one change at a time, the largest few first."""
    gains = sorted(_gains(limits), key=lambda each: -each[0])
    return [each for each in gains if each[0] >= _WORTH_SAYING][:_MOST_SAID]


_WORTH_SAYING, _MOST_SAID = 0.005, 3
"""Least gain of a change that is said without --verbose, and how many are."""


def _gains(limits: Limits) -> Iterator[tuple[float, str]]:
    """Part of the step that each change saves; a stage that is its islands' only one comes once."""
    alone = {island.island for island in limits.islands if island.stages == 1}
    for island in limits.islands:
        passes = "all passes" if island.stages > 1 else "passes"
        yield island.gain, f"{passes} on {island.island} {FASTER:.0%} shorter"
    for stage in limits.stages:
        if stage.island not in alone:
            place = _place(stage.pipeline, stage.stage)
            yield stage.gain, f"passes of stage {place} ({stage.island}) {FASTER:.0%} shorter"
    for boundary in limits.boundaries:
        left, right = boundary.between
        place = _place(boundary.pipeline, boundary.stage)
        yield boundary.gain, f"free transfers behind stage {place} ({left} to {right})"
    for end in limits.ends:
        yield end.seconds / limits.step_seconds, f"no {end.component.value} at the end of the step"


def every_limit(limits: Limits) -> Iterator[str]:
    """Every limit that was looked at, most first."""
    yield f"step {format_seconds(limits.step_seconds)}; what limits it, one change at a time:"
    for island in limits.islands:
        stages = f"{island.stages} stage{'s' * (island.stages > 1)}"
        yield (
            f"  compute of {island.island} ({stages}): {FASTER:.0%} shorter passes save "
            f"{island.gain:.1%} of the step"
        )
    for stage in limits.stages[:_SHOWN]:
        if stage.gain:
            yield (
                f"  stage {_place(stage.pipeline, stage.stage)} ({stage.island}) alone: "
                f"{stage.gain:.2%}"
            )
    exposed = [boundary for boundary in limits.boundaries if boundary.gain][:_SHOWN]
    for boundary in exposed:
        left, right = boundary.between
        place = _place(boundary.pipeline, boundary.stage)
        yield (
            f"  transfers behind stage {place} ({left} to {right}): free ones save "
            f"{boundary.gain:.2%}"
        )
    if limits.boundaries and not exposed:
        yield "  transfers between stages: all hidden, free ones save nothing"
    for end in limits.ends:
        if end.seconds:
            share = end.seconds / limits.step_seconds
            yield f"  {end.component.value}, after the pipeline: {share:.2%} of the step"
    for memory in limits.memory:
        yield (
            f"  memory of stage {_place(memory.pipeline, memory.stage)} "
            f"({memory.island}): {memory.used:.0%} full, most of it {memory.largest}"
        )


_CAUSES = {
    IdleCause.LIBRARY: "{target} has one library of collectives, {island} another one",
    IdleCause.BANDWIDTH: "its link to {other} is too narrow",
    IdleCause.ROUND_TRIP: "the round trip to {other} is too long",
    IdleCause.MEMORY: "its memory is too small",
    IdleCause.LIMIT: "{other} leaves no room for a faster plan with more of them",
    IdleCause.BATCH: "the batch is too small for it or does not divide over it",
    IdleCause.DEGREES: "{target} gives all stages the same degrees, {other} does not",
}

_FIGURES: dict[str, Callable[[float], str]] = {
    "bandwidth": lambda value: format_rate(8 * value, "bit/s"),
    "round_trip": format_seconds,
    "memory": lambda value: f"{format_bytes(value)} per device",
    "global_batch_size": lambda value: f"a batch of {value:,.0f}",
}


def _rounded(words: str) -> str:
    """The number in it with three digits: `12.9 Gbit/s` of `12.92 Gbit/s`."""
    return re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.3g}", words)


def idle_lines(
    idle: Iterable[IdleReason], result: SearchResult, *, verbose: bool = False
) -> Iterator[str]:
    """A sentence for each island with too little to do: why, and from where it pays."""
    step = result.estimate.step_seconds
    open_ = 0.0 if result.certificate is None else result.certificate.gap
    closed = closed_question(result) if open_ > MOST_OPEN else None
    for each in idle:
        what = f"{each.island}, {each.idle_devices} of {each.usable_devices} devices idle"
        if not each.idle_devices:
            what = f"{each.island} computes for {each.busy_share:.0%} of the step"
        full = full_limits(result, each.island)
        if full:
            yield f"{what}: {' and '.join(full)} has no room for more of them"
            continue
        unknown = not each.causes and open_ > MOST_OPEN and each.seconds_with_it is None
        if unknown:
            sooner = ", or for flagscale or megatron, whose searches close sooner" if closed else ""
            yield (
                f"{what}: why is not known: the search left {open_:.0%} open; plan longer{sooner}"
            )
            continue
        parts = [f"{what}: {_why(each, result)}"]
        if each.break_even is not None:
            others = "with the other causes gone, " if len(each.causes) > 1 else ""
            parts.append(f"{others}{_pays(each.break_even, verbose)}")
        elif each.causes:
            parts.append(f"without that {each.gain:+.1%} tokens/s")
        if each.seconds_with_it is not None:
            longer = _longer(each.seconds_with_it, step)
            takes = f"{format_seconds(each.seconds_with_it)}, {longer}" if verbose else longer
            parts.append(f"with it today a step takes {takes}")
        if closed is not None and IdleCause.LIMIT not in each.causes:
            parts.append(
                f"shown for plans of {closed.job.target}; {open_:.0%} of this search is open"
            )
        yield "; ".join(parts)


def _why(reason: IdleReason, result: SearchResult) -> str:
    """The causes, or that there is none."""
    words = {
        "island": reason.island,
        "other": reason.other or "the others",
        "target": result.inputs.job.target,
    }
    if reason.causes:
        return ", and ".join(_CAUSES[cause].format(**words) for cause in reason.causes)
    return (
        "it is too slow for a share of the work: no link, memory, batch or trainer that was tried "
        "changes that"
    )


def _longer(seconds: float, than: float) -> str:
    more = seconds / than - 1.0
    return f"{abs(more):.1%} {'longer' if more >= 0 else 'shorter'}"


def _pays(even: BreakEven, verbose: bool) -> str:
    """`it pays from 13.4 Gbit/s (today 10 Gbit/s)`; verbose: and what the proof leaves open."""
    words = _FIGURES[even.name]
    if even.value == even.today:
        return "a plan with it is as good today, within the gap"
    if not verbose:
        value, today = (_rounded(words(each)) for each in (even.value, even.today))
        return f"it pays from {value} (today {today})"
    other = even.lower if even.value == even.upper else even.upper
    open_ = f", by at most {even.gap:.1%}" if even.gap > RESOLUTION else ""
    return (
        f"it pays from {words(even.value)} on (today {words(even.today)}); at {words(other)} no "
        f"plan found is faster with it{open_}"
    )


def _place(pipeline: int, stage: int) -> str:
    return str(stage) if pipeline == 0 else f"{pipeline}.{stage}"


def price_lines(prices: Sequence[ShadowPrice], *, verbose: bool = False) -> Iterator[str]:
    """The changes that are worth most, what a narrower link costs, and how many are worth little or
    have no price.

    verbose: all that have one, each with what it is worth to the layout as it is.
    """
    priced = [price for price in prices if not price.note]
    worth = [price for price in priced if verbose or is_worth_saying(price)]
    losses = [price for price in worth[::-1] if most_of(price) < _WORTH_SAYING]
    gains = [price for price in worth if price not in losses]
    shown = worth if verbose else [*gains[:_SHOWN], *losses[:_MOST_SAID]]
    if worth:
        yield "what one change is worth in tokens/s, planned again:"
    for price in shown:
        same = price.same_plan_gain if verbose else None
        own = "" if same is None else f"; {same:+.1%} with the layout as it is"
        yield f"  {worth_words(price)}: {price.words}{own}"
    if len(worth) > len(shown):
        yield f"  and {len(worth) - len(shown)} more, worth less (--verbose)"
    little = len(priced) - len(worth)
    if little:
        yield f"{little} other change{'s' * (little > 1)}: less than {_WORTH_SAYING:.1%} each"
    for note in dict.fromkeys(price.note for price in prices if price.note):
        yield f"no price of {sum(price.note == note for price in prices)}: {note}"


def is_worth_saying(price: ShadowPrice) -> bool:
    """Whether it may gain something, or loses something."""
    return max(most_of(price), -price.least_gain) >= _WORTH_SAYING


def worth_words(price: ShadowPrice) -> str:
    """`+18.6% to 19.8%`; what the proof leaves open is never rounded away."""
    least = f"{price.least_gain:.1%}".replace("-0.0%", "0.0%")
    sign = "+" if price.least_gain > RESOLUTION else ""
    if price.most_gain is None:
        return f"{sign}{least} or more"
    most = f"{price.most_gain:.1%}".replace("-0.0%", "0.0%")
    if price.most_gain <= price.least_gain + RESOLUTION:
        return f"{sign}{least}"
    if least == most:
        return f"{sign}{price.least_gain:.2%} to {price.most_gain:.2%}"
    return f"{sign}{least} to {most}"


def against_lines(compared: Against) -> Iterator[str]:
    """The verdict on the other plan in words."""
    if compared.inputs_differ:
        yield (
            f"note: the other plan was made for another {' and '.join(compared.inputs_differ)}; "
            "here it is priced with this plan's"
        )
    for fault in compared.illegal:
        yield f"the other plan is not possible here: {fault}"
    if compared.other_seconds is None:
        yield "it cannot be priced"
        return
    found, other = compared.found_seconds, compared.other_seconds
    yield (
        f"this plan takes {format_brief(found)} a step, the other {format_brief(other)}: "
        f"{_longer(other, found)}"
    )
    if compared.below_bound:
        yield (
            "the other plan is faster than this plan's bound: it is none of the plans that were "
            "searched (the plan file says which were)"
        )
    elif other < found and not compared.illegal:
        yield "the other plan is better, within the gap of this plan"


def spent_lines(compared: Against, *, verbose: bool = False) -> Iterator[str]:
    """Where the seconds go that are between the two plans; verbose: all of them."""
    gains = sorted(compared.components, key=lambda each: -abs(each.more_seconds))
    words = [
        f"{each.component.value} {'-' if each.more_seconds < 0 else '+'}"
        f"{format_brief(abs(each.more_seconds))}"
        for each in gains
        if abs(each.more_seconds) >= (0.0 if verbose else _WORTH_SAYING * compared.found_seconds)
    ]
    if words:
        shown = words if verbose else words[:_MOST_SAID]
        yield f"the other plan's step has: {', '.join(shown)}"


def choice_table(compared: Against) -> Table:
    """What the two plans decide differently."""
    table = small_table("choice | this plan | the other plan")
    for choice in compared.choices:
        table.add_row(choice.name, escape(choice.found), escape(choice.other))
    return table


def print_ranks(result: SearchResult, *, as_json: bool) -> None:
    """Every rank of the plan, row by row: a plan may have a hundred thousand."""
    rows = rank_rows(result.plan, result.inputs.cluster)
    for line in _rank_json(rows) if as_json else _rank_table(rows, result):
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _rank_table(rows: Iterable[RankRow], result: SearchResult) -> Iterator[str]:
    names = ["rank", "device", "island", "node", "local", "stage", "dp", "cp", "tp"]
    if len(result.plan.pipelines) > 1:
        names.insert(5, "pipeline")
    if any(replica.ep * replica.etp > 1 for replica in result.plan.replicas):
        names += ["ep", "etp"]
    if any(island.node_names for island in result.inputs.cluster.islands):
        names.insert(4, "node_name")
    islands = max(len(island.name) for island in result.inputs.cluster.islands)
    widths = [max(len(name), islands if name == "island" else 7) for name in names]

    def line(cells: Iterable[object]) -> str:
        return "  ".join(f"{cell!s:>{width}}" for cell, width in zip(cells, widths, strict=True))

    yield line(name.replace("_", " ") for name in names)
    for row in rows:
        values = (getattr(row, name) for name in names)
        yield line("-" if value is None else value for value in values)


def _rank_json(rows: Iterable[RankRow]) -> Iterator[str]:
    """One document, one rank in a line."""
    yield "{"
    yield '  "ranks": ['
    before = None
    for row in rows:
        if before is not None:
            yield f"    {before},"
        before = json.dumps(asdict(row), sort_keys=True)
    yield f"    {before}"
    yield "  ],"
    yield f'  "schema": "{RANKS_SCHEMA}"'
    yield "}"


# ---- bytes per link and class, and switches


TRAFFIC_SCHEMA = "hetplan.traffic/1"
SWITCH_BITS_PER_SECOND = 51.2e12
"""One switch of 64 ports of 800 Gbit/s, one direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switching:
    """What the network of one island carries, evenly over a step."""

    island: str
    bytes_per_step: float
    """Between its nodes, to other islands and to storage; each byte once."""
    bits_per_second: float
    switches: int
    """Of 51.2 Tbit/s, at full load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficReport:
    """A plan's traffic with what follows from it."""

    model: str
    """`ring`, or `priced`: the algorithms that are cheapest by the predictor."""
    ledger: Ledger
    step_seconds: float
    """As estimated in the plan's file."""
    switching: tuple[Switching, ...]


def traffic_report(
    result: SearchResult, model: str, tokens: int | None, predictor: Predictor | None
) -> TrafficReport:
    """A plan's traffic by `ring` or `priced` (with a predictor)."""
    inputs, step = result.inputs, result.estimate.step_seconds
    counted = ledger(
        result.plan, inputs.model, inputs.cluster, inputs.job, predictor, total_tokens=tokens
    )
    names = tuple(island.name for island in inputs.cluster.islands)
    return TrafficReport(
        model=model,
        ledger=counted,
        step_seconds=step,
        switching=switching_of(counted, names, step),
    )


def print_traffic(report: TrafficReport, *, as_json: bool) -> None:
    """The ledger and the switches."""
    if as_json:
        print(encode(report, schema=TRAFFIC_SCHEMA), end="", flush=True)
        return
    print("bytes per step, all devices, counted where sent", flush=True)
    print_small(ledger_table(report))
    for line in folded(ledger_lines(report), text_width()):
        print(line, flush=True)


def switching_of(
    ledger: Ledger, islands: tuple[str, ...], step_seconds: float
) -> tuple[Switching, ...]:
    """What each island's switches must carry."""
    switching = []
    for island in islands:
        size = ledger.switched(island)
        bits = 8.0 * size / step_seconds
        switching.append(
            Switching(
                island=island,
                bytes_per_step=size,
                bits_per_second=bits,
                switches=math.ceil(bits / SWITCH_BITS_PER_SECOND),
            )
        )
    return tuple(switching)


def ledger_table(report: TrafficReport) -> Table:
    """One row per link, one column per class that carries anything."""
    ledger = report.ledger
    classes = tuple(all_classes(ledger))
    columns = ["link", *(f">{traffic.value}" for traffic in classes), ">all"]
    table = small_table(" | ".join(columns))
    for link in ledger.links:
        own = {
            entry.traffic: entry.bytes_per_step for entry in ledger.entries if entry.link == link
        }
        cells = [_bytes(own[traffic]) if traffic in own else "" for traffic in classes]
        table.add_row(escape(str(link)), *cells, _bytes(ledger.over(link)))
    totals = [_bytes(ledger.of_class(traffic)) for traffic in classes]
    table.add_row("all links", *totals, _bytes(ledger.bytes_per_step))
    return table


def ledger_lines(report: TrafficReport) -> Iterator[str]:
    """The run as a whole, switches, and storage."""
    ledger = report.ledger
    tokens, steps = ledger.total_tokens, ledger.steps
    if tokens is not None and steps is not None:
        per_class = ", ".join(
            f"{traffic.value} {_bytes(ledger.of_class(traffic) * steps)}"
            for traffic in all_classes(ledger)
        )
        yield (
            f"{tokens:,} tokens, {steps:,.0f} steps: {_bytes(ledger.bytes_per_step * steps)} "
            f"({per_class})"
        )
    else:
        yield "the whole run is not counted: give --tokens, or total_tokens in the job"
    yield (
        f"switches, mean over the step of {format_seconds(report.step_seconds)} (peaks are "
        f"higher), of {format_rate(SWITCH_BITS_PER_SECOND, 'bit/s')} each:"
    )
    for island in report.switching:
        if island.bytes_per_step:
            yield (
                f"  {island.island}: {_bytes(island.bytes_per_step)} per step, "
                f"{format_rate(island.bits_per_second, 'bit/s')}, {island.switches} "
                f"{'switch' if island.switches == 1 else 'switches'}"
            )
    stored = sum(
        entry.bytes_per_step for entry in ledger.entries if entry.link.scope is LinkScope.STORAGE
    )
    if TrafficClass.CHECKPOINT not in all_classes(ledger):
        yield (
            f"storage: {_bytes(stored)} per step; no checkpoints are counted "
            "(checkpoint_interval_steps of the job)"
        )
    else:
        yield f"storage: {_bytes(stored)} per step"


def _bytes(size: float) -> str:
    """In powers of 1000, as networks count, up to exabytes."""
    return f"{size / 1e18:,.4g} EB" if size >= 1e18 else format_rate(size, "B")
