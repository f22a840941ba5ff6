"""What `hetplan explain` prints: limits, the worth of changes, another plan, every rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from rich.markup import escape
from rich.table import Table

from hetplan.plans.ranks import RankRow, rank_rows
from hetplan.reports.terminal import new_table
from hetplan.search.result import SearchResult
from hetplan.units import format_seconds
from hetplan.whatif.against import Against
from hetplan.whatif.limits import FASTER, Limits
from hetplan.whatif.shadow_prices import ShadowPrice

EXPLAIN_SCHEMA = "hetplan.explain/1"
RANKS_SCHEMA = "hetplan.ranks/1"

_SHOWN = 5
"""Stages, and boundaries, with the largest gains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One answer about a plan, with what limits it."""

    limits: Limits
    shadow_prices: tuple[ShadowPrice, ...] = ()
    """Only of `hetplan explain prices`."""
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
    for idle in limits.idle:
        yield f"  idle: {idle.devices} of {idle.usable} of {idle.island}"


def _place(pipeline: int, stage: int) -> str:
    return str(stage) if pipeline == 0 else f"{pipeline}.{stage}"


def price_table(prices: Iterable[ShadowPrice]) -> Table:
    """What each change is worth."""
    table = new_table(
        "change | >tokens/s | >known to | >same layout | ",
        title="What a change is worth, planned again",
    )
    for price in prices:
        same = "" if price.same_plan_gain is None else f"{price.same_plan_gain:+.1%}"
        if price.note:
            table.add_row(escape(price.words), "", "", same, escape(price.note))
            continue
        note = "another layout" if price.changed else "today's layout stays best"
        if abs(price.gain) <= price.uncertain:
            note = "no more than the gaps of both plans"
        table.add_row(
            escape(price.words), f"{price.gain:+.1%}", f"{price.uncertain:.1%}", same, note
        )
    return table


def against_lines(compared: Against) -> Iterator[str]:
    """The verdict on the other plan in words."""
    if compared.inputs_differ:
        yield (
            f"note: the other plan was made for another {' and '.join(compared.inputs_differ)}; "
            "it is held to this plan's"
        )
    for fault in compared.illegal:
        yield f"the other plan is not possible here: {fault}"
    if compared.other_seconds is None:
        yield "it cannot be priced"
        return
    more = compared.other_seconds / compared.found_seconds - 1.0
    words = "slower" if more >= 0 else "faster"
    yield (
        f"this plan {format_seconds(compared.found_seconds)}, the other one "
        f"{format_seconds(compared.other_seconds)}: {abs(more):.1%} {words}"
    )
    if compared.below_bound:
        yield (
            "the other plan is faster than this plan's bound: it lies outside of what was searched "
            "(the plan file says what that is)"
        )
    elif more < 0 and not compared.illegal:
        yield "the other plan is better, within the gap that this plan's search left open"


def choice_table(compared: Against) -> Table:
    """What the two plans decide differently."""
    table = new_table("choice | this plan | the other plan", title="What differs")
    for choice in compared.choices:
        table.add_row(choice.name, escape(choice.found), escape(choice.other))
    return table


def difference_table(compared: Against) -> Table:
    """Where the seconds go, along both critical paths."""
    table = new_table(
        "component | >this plan | >the other plan | >more", title="Along the critical path"
    )
    for component in compared.components:
        sign = "-" if component.more_seconds < 0 else "+"
        table.add_row(
            component.component.value,
            format_seconds(component.found_seconds),
            format_seconds(component.other_seconds),
            f"{sign}{format_seconds(abs(component.more_seconds))}",
        )
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
