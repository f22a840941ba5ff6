"""Choose the logged steps that count; their times and their spread.

Left out are the first steps of every start (compilation, connections, the allocator's growth until
the optimizer state exists), steps with a checkpoint, an evaluation or a skipped update in them,
steps of another global batch (a ramp), and single steps far above the median that the log gives no
reason for. What would leave nothing is not left out, and a note says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetplan.errors import InputError
from hetplan.profiling.timing import quantile
from hetplan.search.descriptions import devices_in_use
from hetplan.search.result import SearchResult
from hetplan.trainers.training_log import MAX_STEP_SECONDS, LoggedStep, Mark, TrainingLog

WARMUP_STEPS = 3
"""Steps of each start, a choice: the first compiles and connects, the second is the first with
optimizer state in memory, and the third the first with nothing new."""
SLOW_FACTOR = 1.5
"""A choice: such a step was interrupted. The median hardly moves by it, the spread does."""
MAX_SLOW = 0.1
"""A choice: more than this part of the steps is no exception but how the run was."""
_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Logged steps that do not count, for one reason."""

    reason: str
    count: int
    iterations: str
    """Which, as in `1, 10, 20`; the first of many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpread:
    """The logged steps that count."""

    count: int
    """Metrics lines; each may be the mean of several steps."""
    median_seconds: float
    p10_seconds: float
    p90_seconds: float
    iterations: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """A logged step and its time."""

    step: LoggedStep
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSteps:
    """The steps that count and what was left out."""

    used: tuple[TimedStep, ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]

    @property
    def spread(self) -> StepSpread:
        """Median, p10 and p90."""
        seconds = sorted(timed_step.seconds for timed_step in self.used)
        return StepSpread(
            count=len(seconds),
            median_seconds=statistics.median(seconds),
            p10_seconds=quantile(seconds, 0.1),
            p90_seconds=quantile(seconds, 0.9),
            iterations=_listed([timed_step.step for timed_step in self.used]),
        )


def choose_steps(
    log: TrainingLog, result: SearchResult, warmup_steps: int | None = None
) -> ChosenSteps:
    """The steps of the log that measure this plan; InputError where none does.

    Without `warmup_steps` those that the log's own timers leave out, else `WARMUP_STEPS`.
    """
    given_warmup = warmup_steps
    if warmup_steps is None:
        warmup_steps = WARMUP_STEPS if log.warmup_steps is None else log.warmup_steps
    if warmup_steps < 0:
        raise InputError(f"warm-up of {warmup_steps} steps; it is at least 0")
    batch = result.inputs.job.global_batch_size
    right = [s for s in log.steps if s.global_batch_size in (None, batch)]
    if not right:
        batches = sorted({s.global_batch_size for s in log.steps if s.global_batch_size})
        raise InputError(
            f"the log's steps have a global batch of {', '.join(map(str, batches[:5]))}, the "
            f"plan's job {batch}: this is another run; price its layout with "
            "`hetplan estimate --out`"
        )
    left: list[LeftOut] = []
    notes: list[str] = []
    _leave(left, "another global batch", [s for s in log.steps if s not in set(right)])
    timed = _timed(right, result, left)
    starts: dict[int, int] = {}
    for timed_step in timed:
        starts.setdefault(timed_step.step.attempt, timed_step.step.iteration)
    rules: tuple[tuple[str, Callable[[TimedStep], bool]], ...] = (
        (
            f"first {warmup_steps} of a start" if warmup_steps > 1 else "first of a start",
            lambda t: (
                warmup_steps > 0
                and (
                    Mark.FIRST in t.step.marks
                    or t.step.iteration < starts[t.step.attempt] + warmup_steps
                )
            ),
        ),
        (f"{Mark.SKIPPED} in it", lambda t: Mark.SKIPPED in t.step.marks),
        (f"{Mark.CHECKPOINT} in it", lambda t: Mark.CHECKPOINT in t.step.marks),
        (f"{Mark.EVALUATION} in it", lambda t: Mark.EVALUATION in t.step.marks),
    )
    for reason, applies in rules:
        out = [timed_step for timed_step in timed if applies(timed_step)]
        if out and len(out) == len(timed):
            notes.append(f"every step that was left has `{reason}`; they count all the same")
            continue
        _leave(left, reason, [timed_step.step for timed_step in out])
        timed = [timed_step for timed_step in timed if not applies(timed_step)]
    if log.warmup_steps is None:
        timed = _without_slow(timed, left, notes)
    elif given_warmup is not None and given_warmup != log.warmup_steps:
        notes.append(
            f"the timers are medians over all steps but the first {log.warmup_steps}, whatever "
            "--warmup says: they need not add up to the step"
        )
    return ChosenSteps(used=tuple(timed), left_out=tuple(left), notes=(*notes, *_doubts(timed)))


def _timed(
    steps: Sequence[LoggedStep], result: SearchResult, left: list[LeftOut]
) -> list[TimedStep]:
    """The steps whose times are times: a damaged rate makes seconds that nobody waits for."""
    every = [TimedStep(step=step, seconds=step_seconds(step, result)) for step in steps]
    odd = [
        timed_step.step for timed_step in every if not 0.0 < timed_step.seconds <= MAX_STEP_SECONDS
    ]
    if len(odd) == len(every):
        raise InputError(
            f"no step took more than 0 and at most {MAX_STEP_SECONDS:g} s; step "
            f"{odd[0].iteration} would have taken {every[0].seconds:g} s: the log is damaged"
        )
    _leave(left, "no time that a step can take", odd)
    return [timed_step for timed_step in every if 0.0 < timed_step.seconds <= MAX_STEP_SECONDS]


def step_seconds(step: LoggedStep, result: SearchResult) -> float:
    """What the step took; where the log has only rates, from the plan's tokens or sequences."""
    if step.seconds is not None:
        return step.seconds
    if step.samples_per_second is not None:
        return result.inputs.job.global_batch_size / step.samples_per_second
    if step.tokens_per_second is not None:
        estimate = result.estimate
        tokens = estimate.tokens_per_second * estimate.step_seconds
        return tokens / (step.tokens_per_second * devices_in_use(result.plan))
    raise InputError(f"step {step.iteration} of the log has neither a time nor a rate")


def _without_slow(timed: list[TimedStep], left: list[LeftOut], notes: list[str]) -> list[TimedStep]:
    middle = statistics.median(timed_step.seconds for timed_step in timed)
    slow = [timed_step for timed_step in timed if timed_step.seconds > SLOW_FACTOR * middle]
    if not slow:
        return timed
    if len(slow) > MAX_SLOW * len(timed):
        notes.append(
            f"{len(slow)} of {len(timed)} steps took more than {SLOW_FACTOR:g} times the median, "
            "too many to leave out: this run had two states, or is short"
        )
        return timed
    reason = f"over {SLOW_FACTOR:g} x the median, without a reason in the log"
    _leave(left, reason, [timed_step.step for timed_step in slow])
    return [timed_step for timed_step in timed if timed_step.seconds <= SLOW_FACTOR * middle]


def _doubts(timed: Sequence[TimedStep]) -> list[str]:
    """What makes the median mean less."""
    doubts = []
    if len(timed) < 5:
        doubts.append(f"only {len(timed)} logged steps count: the median is of little weight")
    quarter = len(timed) // 4
    if quarter >= 5:
        first = statistics.median(timed_step.seconds for timed_step in timed[:quarter])
        last = statistics.median(timed_step.seconds for timed_step in timed[-quarter:])
        if abs(last / first - 1) > 0.03:
            doubts.append(
                f"the last quarter of the steps took {last / first - 1:+.1%} of the first: clocks, "
                "neighbours or fragmentation changed during the run"
            )
    return doubts


def _leave(left: list[LeftOut], reason: str, steps: Sequence[LoggedStep]) -> None:
    if steps:
        left.append(LeftOut(reason=reason, count=len(steps), iterations=_listed(steps)))


def _listed(steps: Sequence[LoggedStep]) -> str:
    """`10, 20, 30`; of many the first and the last."""
    numbers = [str(step.iteration) for step in steps]
    if len(numbers) <= _SHOWN:
        return ", ".join(numbers)
    return ", ".join((*numbers[: _SHOWN - 2], "...", numbers[-1]))
