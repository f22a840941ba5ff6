"""The next plan beside the one before, in ten lines: what changes, what moves, when it pays."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from hetplan.cost.network.segments import LinkScope
from hetplan.plans.pieces import stage_array
from hetplan.plans.plan import Plan
from hetplan.search.descriptions import devices_in_use
from hetplan.units import counted, format_brief, format_bytes
from hetplan.whatif.against import choices
from hetplan.whatif.replan import Option, Replanned, Source, Terms

REPLANNED_SCHEMA = "hetplan.replanned/1"

_MOST_CHOICES = 4
_TOLD_ELSEWHERE = ("layers, embedding and head", "devices used")


def replanned_lines(found: Replanned, terms: Terms) -> Iterator[str]:
    """What was lost, what changes, how many bytes move over which links, when it pays back."""
    best, before, result = found.best, found.before, found.result
    if found.lost_devices:
        had = devices_in_use(before.plan)
        copies = "" if found.state_is_lost else ", and all of their state has a copy elsewhere"
        yield f"lost: {found.lost_devices:,} of the plan's {had:,} devices{copies}"
    old, new = before.estimate, result.estimate
    more = new.tokens_per_second / old.tokens_per_second - 1.0
    batch = result.inputs.job.global_batch_size
    same = " as before" if batch == before.inputs.job.global_batch_size else ""
    yield (
        f"next: {_from(best)}, {format_brief(new.step_seconds)} a step instead of "
        f"{format_brief(old.step_seconds)} ({more:+.1%} tokens/s), batch {batch:,}{same}"
    )
    yield from _changes(found)
    yield from _stages(found)
    yield from _move(best, terms)
    if best.start_seconds or best.still_seconds:
        again = ""
        if best.steps_again:
            seconds = format_brief(best.steps_again * best.step_seconds)
            again = f", {best.steps_again:,.0f} steps since the checkpoint again {seconds}"
        yield (
            f"stands still {format_brief(best.still_seconds)}: start "
            f"{format_brief(best.start_seconds)}, move {format_brief(best.moving.seconds)}"
            f"{again}"
        )
    if best.steps_again is None:
        yield "steps since the checkpoint are not counted: give checkpoint_interval_steps"
    yield _horizon(found, terms)
    yield from _beside(found)
    certificate = result.certificate
    if certificate is not None:
        yield (
            f"step proven within {certificate.gap:.1%} of the best; the time until the horizon is "
            f"the best of {counted(found.ranked, 'plan')}: the search's, and those near the old one"
        )


def _from(option: Option) -> str:
    return "a plan of the search" if option.words == "the search" else option.words


def _changes(found: Replanned) -> Iterator[str]:
    """What the two plans decide differently."""
    before, result = found.before, found.result
    told = [
        f"{each.name} {each.found} -> {each.other}"
        for each in choices(before.plan, result.plan, before.inputs.cluster, result.inputs.cluster)
        if each.name not in _TOLD_ELSEWHERE
    ]
    if told:
        more = len(told) - _MOST_CHOICES
        rest = f" and {more} more" if more > 0 else ""
        yield f"changes: {'; '.join(told[:_MOST_CHOICES])}{rest}"


def _stages(found: Replanned) -> Iterator[str]:
    """Layers and devices of each stage, before and after; runs of alike ones once."""
    old, new = (", ".join(_rows(each.plan)) for each in (found.before, found.result))
    if old != new:
        yield f"stages of layers on devices: {old} -> {new}"


def _rows(plan: Plan) -> Iterator[str]:
    """`3 x 10 on 64`, and so on."""
    every = (f"{stage.num_layers} on {stage_array(stage).size}" for stage in plan.stages)
    for words, alike in groupby(every):
        times = len([*alike])
        yield f"{times} x {words}" if times > 1 else words


def _move(best: Option, terms: Terms) -> Iterator[str]:
    moving = best.moving
    held = f", {format_bytes(moving.held_bytes)} are there" if moving.held_bytes else ""
    read = ""
    if moving.read_bytes:
        seconds = format_brief(moving.read_seconds)
        read = f", {format_bytes(moving.read_bytes)} are read from the checkpoint in {seconds}"
    yield f"state: {format_bytes(moving.needed_bytes)} on all devices{held}{read}"
    if moving.links:
        shown = sorted(moving.links, key=lambda each: each.link.scope is LinkScope.NODE)
        links = ", ".join(f"{format_bytes(each.bytes)} {each.link}" for each in shown[:3])
        more = f" and {counted(len(shown) - 3, 'more link')}" if len(shown) > 3 else ""
        yield f"over links: {links}{more}, in {format_brief(moving.send_seconds)}"
    if moving.read_bytes and terms.source is Source.PEERS:
        yield "no peer has all that is needed, so the run goes back to its checkpoint"


def _horizon(found: Replanned, terms: Terms) -> str:
    seconds = format_brief(found.best.seconds(found.steps))
    said = "the job's tokens"
    if terms.horizon_tokens is not None or terms.horizon_seconds is not None:
        said = "the horizon"
    elif found.result.inputs.job.total_tokens is None:
        said = "a day (--horizon says how much is left)"
    return f"until the end of {said}, {found.steps:,.0f} steps: {seconds}"


def _beside(found: Replanned) -> Iterator[str]:
    """The plan that costs least to get to, or the next best, and when this one is ahead of it."""
    if not found.others:
        return
    best, steps = found.best, found.steps
    other = min(found.others, key=lambda each: each.still_seconds)
    if other.still_seconds >= best.still_seconds:
        other = found.others[0]
    after, ahead = best.pays_after_seconds(other), other.pays_after_seconds(best)
    pays = "never ahead of this one"
    if after:
        pays = f"ahead of this one for the first {format_brief(after)}"
    elif after is None and ahead:
        pays = f"ahead of this one after {format_brief(ahead)}"
    part = other.seconds(steps) / best.seconds(steps) - 1.0
    yield (
        f"beside it: {_from(other)}, {format_brief(other.step_seconds)} a step after "
        f"{format_brief(other.still_seconds)}: {pays}, {part:.1%} later at the end"
    )
