"""What a person sees of why a plan is as fast as it is, what would help, why not another one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from hetplan.search.explained.against import Against
from hetplan.search.explained.limits import FASTER, Limits
from hetplan.search.explained.shadow_prices import ShadowPrice
from hetplan.units import format_seconds

EXPLAIN_SCHEMA = "hetplan.explain/1"

_SHOWN = 5
"""Stages, and boundaries, with the largest gains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Everything that was asked about a plan."""

    limits: Limits
    shadow_prices: tuple[ShadowPrice, ...] = ()
    """Empty where they were not asked for."""
    against: Against | None = None


def limit_lines(limits: Limits) -> Iterator[str]:
    """What limits the plan, most first."""
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
    exposed = [each for each in limits.boundaries if each.gain][:_SHOWN]
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
    for idle in limits.idle:
        yield f"  idle: {idle.devices} of {idle.usable} of {idle.island}"


def _place(pipeline: int, stage: int) -> str:
    return str(stage) if pipeline == 0 else f"{pipeline}.{stage}"


def price_table(prices: Iterable[ShadowPrice]) -> Table:
    """What each change is worth."""
    table = Table(title="What a change is worth, planned again", title_justify="left")
    table.add_column("change", overflow="fold")
    for name in ("tokens/s", "known to", "same layout"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("", overflow="fold")
    for each in prices:
        same = "" if each.same_plan_gain is None else f"{each.same_plan_gain:+.1%}"
        if each.note:
            table.add_row(escape(each.words), "", "", same, escape(each.note))
            continue
        note = "another layout" if each.changed else "today's layout stays best"
        if abs(each.gain) <= each.uncertain:
            note = "no more than the gaps of both plans"
        table.add_row(escape(each.words), f"{each.gain:+.1%}", f"{each.uncertain:.1%}", same, note)
    return table


def against_lines(found: Against) -> Iterator[str]:
    """The verdict on the other plan in words."""
    if found.inputs_differ:
        yield (
            f"note: the other plan was made for another {' and '.join(found.inputs_differ)}; it is "
            "held to this plan's"
        )
    for fault in found.illegal:
        yield f"the other plan is not possible here: {fault}"
    if found.other_seconds is None:
        yield "it cannot be priced"
        return
    more = found.other_seconds / found.found_seconds - 1.0
    words = "slower" if more >= 0 else "faster"
    yield (
        f"this plan {format_seconds(found.found_seconds)}, the other one "
        f"{format_seconds(found.other_seconds)}: {abs(more):.1%} {words}"
    )
    if found.below_bound:
        yield (
            "the other plan is faster than this plan's bound: it lies outside of what was searched "
            "(the plan file says what that is)"
        )
    elif more < 0 and not found.illegal:
        yield "the other plan is better, within the gap that this plan's search left open"


def choice_table(found: Against) -> Table:
    """What the two plans decide differently."""
    table = Table(title="What differs", title_justify="left")
    for name in ("choice", "this plan", "the other plan"):
        table.add_column(name, overflow="fold")
    for each in found.choices:
        table.add_row(each.name, escape(each.found), escape(each.other))
    return table


def difference_table(found: Against) -> Table:
    """Where the seconds go, along both critical paths."""
    table = Table(title="Along the critical path", title_justify="left")
    table.add_column("component", overflow="fold")
    for name in ("this plan", "the other plan", "more"):
        table.add_column(name, justify="right", overflow="fold")
    for each in found.components:
        sign = "-" if each.more_seconds < 0 else "+"
        table.add_row(
            each.component.value,
            format_seconds(each.found_seconds),
            format_seconds(each.other_seconds),
            f"{sign}{format_seconds(abs(each.more_seconds))}",
        )
    return table
