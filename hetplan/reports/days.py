"""The whole run for a person: its days in one line, and where the lost time goes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from hetplan.cost.goodput.run import goodput
from hetplan.cost.goodput.values import FAILURES, Cause, Goodput
from hetplan.search.result import SearchResult
from hetplan.units import (
    counted,
    digits,
    format_brief,
    format_bytes,
    format_count,
    format_range,
    scaled,
)

_SHOWN_SHARE = 0.005
"""Of the run; what rounds to nothing is not in the one line."""
_ONE_PERCENT = 0.01
_WORTH_NAMING = 0.02
"""Lost shares below it have no causes in the one line."""


def run_of(result: SearchResult, tokens: int | None = None) -> Goodput | None:
    """The whole run, of so many tokens where the job does not say how long it is; or None."""
    inputs, job = result.inputs, result.inputs.job
    job = replace(job, total_tokens=job.total_tokens or tokens)
    if job.total_tokens is None:
        return None
    return goodput(result.plan, result.estimate, inputs.model, inputs.cluster, job)


def days_line(found: Goodput) -> str:
    """`178 d for 2T tokens (90 %: 170 to 224 d), 11.2B a day; 9% lost: failures 8%`."""
    if math.isinf(found.seconds):
        words = f"{format_count(found.total_tokens)} tokens: the run never ends, {_endless(found)}"
        return words + _extrapolated(found)
    what = f"for {format_count(found.total_tokens)} tokens"
    low, high = found.low_seconds, found.high_seconds
    whole = format_range(found.seconds, low, high, found.share, what=what)
    if math.isinf(high):
        least = format_brief(low, found.seconds)
        whole = f"{format_brief(found.seconds)} {what} ({found.share}: {least} to never)"
    part = f"{found.lost_share:.0%}" if found.lost_share >= _ONE_PERCENT else "under 1%"
    words = f"{whole}, {count_words(found.tokens_per_day)} a day; {part} lost"
    if found.lost_share < _WORTH_NAMING:
        return words + _extrapolated(found)
    shares = [
        (name, found.lost_to(*causes) / found.seconds)
        for name, causes in (
            ("failures", FAILURES),
            ("checkpoints", (Cause.SAVING,)),
            ("start-up", (Cause.START_UP,)),
            ("data", (Cause.DATA,)),
        )
    ]
    parts = (
        f"{name} {share:.0%}"
        for name, share in sorted(shares, key=lambda each: -each[1])
        if share >= _SHOWN_SHARE
    )
    return f"{words}: {', '.join(parts)}{_extrapolated(found)}"


def _extrapolated(found: Goodput) -> str:
    """What makes the days doubtful; nothing where such starts were measured."""
    if not found.start_up.extrapolates:
        return ""
    start = f"a start of {format_brief(found.start_up.seconds)} is extrapolated"
    if math.isinf(found.seconds) and math.isfinite(found.low_seconds):
        return f"; {start}: {format_brief(found.low_seconds)} with a fast one"
    return f"; {start}"


def count_words(number: float) -> str:
    """`11.2B`."""
    return scaled(number, ("T", 1e12), ("B", 1e9), ("M", 1e6), ("", 1.0))


def lost_words(found: Goodput) -> str:
    """`15.3 d: starting again after failures 8.1 d (53%), ...`, most first."""
    if math.isinf(found.seconds):
        return f"all: {_endless(found)}"
    lost = found.seconds - found.work_seconds
    parts = [
        f"{each.cause.value} {format_brief(each.seconds)} ({each.seconds / lost:.0%})"
        for each in sorted(found.lost, key=lambda each: -each.seconds)
        if each.seconds >= _SHOWN_SHARE * lost > 0.0
    ]
    return f"{format_brief(lost)}: {', '.join(parts)}" if parts else "nothing"


def _endless(found: Goodput) -> str:
    rate = sum(each.failures_per_second for each in found.parts if not each.falls_back)
    best = f" (best: {found.best_interval_steps:,})"
    return (
        f"as a failure comes every {format_brief(1.0 / rate)}, a checkpoint every "
        f"{counted(found.interval_steps, 'step')}{best * (not found.from_peers)}, and starting "
        f"again takes {format_brief(found.recovery_seconds)}"
    )


def days_lines(found: Goodput) -> Iterator[str]:
    """What the one line leaves out."""
    yield f"lost of the run: {lost_words(found)}"
    yield f"failures: {failure_words(found)}"
    if math.isinf(found.seconds):
        return
    yield f"checkpoints: {checkpoint_words(found)}"
    yield f"starting again: {restart_words(found)}"
    network = any(each.falls_back for each in found.parts)
    change = found.other_failover_seconds - found.seconds
    other = "without backup paths" if network else "with backup paths (run.failover)"
    if math.isinf(change):
        yield f"{other} the run never ends"
    elif abs(change) >= 1.0:
        per_day = abs(change) / found.seconds * 86400.0
        yield (
            f"{other} the run takes {format_brief(abs(change))} "
            f"{'more' if change > 0 else 'less'}, {format_brief(per_day)} a day"
        )
    if found.notes:
        yield f"assumed: {'; '.join(found.notes)}"


def failure_words(found: Goodput) -> str:
    """`133 restarts, one every 1.22 d: nvidia-h100-80gb-sxm 61%, host 25%, ...`."""
    rates: dict[str, float] = {}
    for each in found.parts:
        rates[each.part] = rates.get(each.part, 0.0) + each.failures_per_second
    whole = sum(rates.values())
    if whole == 0.0:
        return "none"
    shares = ", ".join(
        f"{part} {rate / whole:.0%}" for part, rate in sorted(rates.items(), key=lambda x: -x[1])
    )
    backed = sum(each.failures_per_second for each in found.parts if each.falls_back)
    again = backed < whole
    every = f"one every {format_brief(1.0 / (whole - backed))}" if again else ""
    if math.isinf(found.seconds):
        return f"{every}: {shares}"
    many = f"{digits(found.restarts)} restarts, {every}" if again else "no restarts"
    fall = f", {digits(backed * found.seconds)} on backup paths" if backed else ""
    return f"{many}{fall}: {shares}"


def checkpoint_words(found: Goodput) -> str:
    """What is saved, how often, and what another interval would cost."""
    check, step = found.checkpoint, found.work_seconds
    each = f"{format_bytes(check.saved_bytes)}, {format_brief(check.save_seconds)}"
    if check.delay_seconds:
        each += f" of waiting and {format_brief(check.delay_seconds)} of writing"
    if found.from_peers:
        return f"{each}, read by no restart: other hosts hold all state"
    steps = counted(found.interval_steps, "step")
    words = f"{each}, every {steps}"
    if not found.others or not step:
        return words
    same = found.interval_steps == found.best_interval_steps
    against = [f"{counted(found.best_interval_steps, 'step')} would be best"] if not same else []
    against += [
        f"{other.interval_steps:,} "
        f"{'+' if other.seconds >= found.seconds else '-'}"
        f"{format_brief(abs(other.seconds - found.seconds))}"
        for other in found.others
        if math.isfinite(other.seconds)
    ]
    return f"{words}{', the best' if same else ''}; {', '.join(against)}"


def restart_words(found: Goodput) -> str:
    """How long a restart takes, and a first start."""
    start, check = found.start_up, found.checkpoint
    source = "from other hosts" if found.from_peers else "from storage"
    return (
        f"{format_brief(found.recovery_seconds)} from a failure to the next step, reading "
        f"{format_brief(check.load_seconds)} of it {source}; a first start "
        f"{format_brief(start.seconds)}"
    )
