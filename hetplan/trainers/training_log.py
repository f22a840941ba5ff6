"""A trainer's log as steps and timers in base units.

A logged step is one metrics line: the mean over the steps since the line before. What happened in
those steps besides training (a checkpoint, an evaluation) is kept as its marks; which steps count
is decided in `hetplan.comparison.steps`.

Every rank may print its own line of a step, in one file with or without a rank before it, or in a
file per rank. A rank's iteration number that does not rise is a restart from a checkpoint: the
steps after it are another attempt, and both attempts were measured. Of the lines of one step the
slowest counts, because a step ends when its last rank ends.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from hetplan.errors import InputError
from hetplan.importers.lines import finite_number
from hetplan.trainers.log_lines import LogLine


class Trainer(StrEnum):
    """The trainer that wrote a log."""

    MEGATRON = "megatron"
    """Megatron-LM and what prints its lines: FlagScale, MindSpeed, Bridge."""
    TORCHTITAN = "torchtitan"
    NEMO = "nemo"
    NATIVE = "native"
    """hetplan's own run log."""


class Mark(StrEnum):
    """What a logged step holds besides training."""

    FIRST = "first of its start"
    """Compilation, connections and empty caches stand in it."""
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    SKIPPED = "skipped update"
    """An overflow or a loss that is no number: no update was made in one of the steps."""


class TimerRanks(StrEnum):
    """The ranks that a timer covers."""

    ALL = "all ranks"
    FIRST = "rank 0"
    LAST = "last rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTimer:
    """Seconds of one step that one timer counted."""

    name: str
    """As the trainer prints it."""
    least_seconds: float
    """Of the ranks that ran it."""
    most_seconds: float
    ranks: TimerRanks = TimerRanks.ALL

    def __post_init__(self) -> None:
        if not 0 <= self.least_seconds <= self.most_seconds:
            raise InputError(
                f"timer {self.name} says {self.least_seconds} to {self.most_seconds} s; the least "
                "is at least 0 and not above the most"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """One metrics line."""

    iteration: int
    """The last optimizer step it counts, from 1."""
    seconds: float | None
    """Of one step; None where the trainer prints only rates."""
    attempt: int = 0
    """0, and one more after every restart."""
    tokens_per_second: float | None = None
    """Of one device."""
    samples_per_second: float | None = None
    """Sequences, of all devices."""
    global_batch_size: int | None = None
    """Sequences of one step."""
    peak_memory_bytes: float | None = None
    """Most on one device that the line tells of."""
    marks: tuple[Mark, ...] = ()
    timers: tuple[LoggedTimer, ...] = ()


class MemoryKind(StrEnum):
    """Which figure of torch's allocator a trainer logs."""

    ALLOCATED = "allocated"
    RESERVED = "reserved"
    PROCESS = "process growth"
    """hetplan's own trainer on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedFact:
    """One setting of the run that the log says, for the check that plan and log belong together."""

    name: str
    """`world_size`, `tp`, `pp`, `cp`, `ep`, `microbatch_size`, `global_batch_size`,
    `sequence_length`, `num_layers`, `hidden_size`."""
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLog:
    """One run's log, of one or several files."""

    trainer: Trainer
    files: tuple[str, ...]
    steps: tuple[LoggedStep, ...]
    """In the order in which they ran; restarts run some again."""
    facts: tuple[LoggedFact, ...] = ()
    peak_memory_bytes: float | None = None
    memory_kind: MemoryKind = MemoryKind.ALLOCATED
    warmup_steps: int | None = None
    """First steps that the log's timers, which are medians of the whole run, leave out; None where
    every step has timers of its own."""
    notes: tuple[str, ...] = ()
    """What was passed over, and what a reader must know of this trainer's figures."""


class Quantity(StrEnum):
    """What a timer counts, in the plan's words."""

    FORWARD = "forward passes"
    BACKWARD = "backward passes"
    PASSES = "passes"
    PASSES_AND_WAITS = "passes and waits"
    SCHEDULE = "passes, waits and reduction"
    WAITS = "waits in the pipeline"
    REDUCTION = "gradient reduction"
    EMBEDDING = "tied embedding"
    WAITS_TO_THE_END = "waits, and those of the tied embedding"
    END = "norm, update and gathering"
    NORM = "gradient norm"
    UPDATE = "optimizer update"
    GATHERING = "parameter gathering"
    DATA = "data loading"
    TENSOR_PARALLEL = "tp"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerMeaning:
    """What one timer of a trainer counts."""

    timer: str
    """As the trainer prints it."""
    quantity: Quantity | None
    """None: nothing that the plan predicts by itself."""
    note: str = ""


IN_PASSES = "holds tp, cp and ep communication"
WAITING = "waiting for the other side included: bubble and transfer are not told apart"
ONE_OF = "one of several steps of the update"


def meanings(*rows: tuple[str, Quantity | None, str]) -> tuple[TimerMeaning, ...]:
    """The timers of a trainer from rows (timer, quantity, note)."""
    return tuple(TimerMeaning(timer=timer, quantity=what, note=note) for timer, what, note in rows)


MAX_STEPS = 20_000
"""Steps of a file that are kept, evenly spread over it: with 20 timers each some 60 MB."""

MAX_STEP_SECONDS = 1e8
"""Three years: a line with a longer step is damaged."""


@dataclass(slots=True)
class Attempts:
    """Which attempt each rank is in."""

    last: dict[str, int] = field(default_factory=dict)
    attempt: dict[str, int] = field(default_factory=dict)

    def of(self, rank: str, iteration: int) -> int:
        """The attempt of this rank's line; a restart begins the next one."""
        before = self.last.get(rank)
        # Lines without a rank may be several ranks': the same number again is another rank's.
        again = before is not None and (iteration < before or (rank != "" and iteration == before))
        self.attempt[rank] = self.attempt.get(rank, 0) + again
        self.last[rank] = iteration
        return self.attempt[rank]


@dataclass(slots=True)
class FileLog:
    """What one file says, while it is read."""

    trainer: Trainer
    steps: list[LoggedStep] = field(default_factory=list)
    events: list[tuple[int, Mark]] = field(default_factory=list)
    """(iteration after which it happened, what)."""
    facts: dict[str, int] = field(default_factory=dict)
    peak_memory_bytes: float = 0.0
    memory_kind: MemoryKind = MemoryKind.ALLOCATED
    cut_lines: int = 0
    notes: list[str] = field(default_factory=list)
    lines: int = 0
    """Metrics lines so far."""
    _stride: int = 1
    """Of so many lines one is kept."""

    def add(self, step: LoggedStep) -> bool:
        """Keep the step, unless there are so many that one of several is enough; whether."""
        if step.seconds is not None and step.seconds > MAX_STEP_SECONDS:
            self.cut_lines += 1
            return False
        self.lines += 1
        if (self.lines - 1) % self._stride:
            return False
        if len(self.steps) >= MAX_STEPS:
            self.steps, self._stride = self.steps[::2], 2 * self._stride
            if (self.lines - 1) % self._stride:
                return False
        self.steps.append(step)
        return True

    def note(self, text: str) -> None:
        """The note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def fact(self, name: str, value: int) -> None:
        """The setting as the file says it first."""
        self.facts.setdefault(name, value)

    def last_notes(self) -> list[str]:
        """All notes, what was passed over included."""
        notes = list(self.notes)
        if self.cut_lines:
            count = self.cut_lines
            notes.append(f"{count} metrics lines without a time (cut off, or damaged): left out")
        if self._stride > 1:
            notes.append(f"one of {self._stride} of its {self.lines:,} metrics lines was used")
        return notes

    def values(self) -> tuple[LoggedFact, ...]:
        """The settings, by name."""
        return tuple(LoggedFact(name=name, value=self.facts[name]) for name in sorted(self.facts))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogForm:
    """What a trainer prints about a step, as patterns of one line."""

    trainer: Trainer
    words: tuple[bytes, ...]
    """A line without one of these says nothing."""
    example: str
    """A metrics line, for a reader whose file has none."""
    iteration: re.Pattern[str]
    """Number of the step, in front of its time."""
    first_iteration: int = 1
    """What the trainer calls its first step."""
    time: tuple[str, tuple[tuple[re.Pattern[str], float], ...]]
    """Field of LoggedStep, and its number's patterns with the factors to base units."""
    figures: tuple[tuple[str, re.Pattern[str], float], ...] = ()
    """The same for fields that a line may lack."""
    metrics: tuple[str, ...] = ()
    """A line with a number of a step and all of these words lacks its time: it is damaged."""
    ends_with_line: bool = True
    """Whether the time may be cut off where the line is; otherwise a sign follows its number."""
    skipped: re.Pattern[str] | None = None
    """In lines of steps without an update."""
    events: tuple[tuple[re.Pattern[str], Mark], ...] = ()
    """What happens between steps; a group holds the iteration before it, empty: the last one."""
    memory_kind: MemoryKind = MemoryKind.ALLOCATED


class LogReader:
    """Reads the lines of one file, in order."""

    def __init__(self, form: LogForm) -> None:
        self.form = form
        self.log = FileLog(trainer=form.trainer, memory_kind=form.memory_kind)
        self.has_step = False
        """Whether the last metrics line became the log's last step."""
        self._attempts = Attempts()
        self._at = 0

    def take(self, line: LogLine) -> None:
        """One line; most say nothing to this reader."""
        if self.form.iteration.search(line.text) is not None:
            self._step(line)
            return
        for pattern, mark in self.form.events:
            found = pattern.search(line.text)
            if found is not None:
                self.log.events.append((int(found.group(1) or self._at), mark))
                return
        self.other(line.text)

    def other(self, text: str) -> None:
        """A line that is neither a step nor an event."""

    def _step(self, line: LogLine) -> None:
        form, text = self.form, line.text
        time_field, patterns = form.time
        found = next(((m, f) for p, f in patterns if (m := p.search(text)) is not None), None)
        time = None if found is None else _number(found[0], found[1])
        if found is None or not time or time < 0 or (form.ends_with_line and line.cut):
            self.log.cut_lines += all(word in text for word in form.metrics)
            self.has_step = False
            return
        # A line that another rank's cut in two has two numbers: the time is the second's.
        numbers = list(form.iteration.finditer(text[: found[0].start()]))
        if not numbers:
            return
        figures: dict[str, Any] = {time_field: time}
        for field_name, pattern, factor in form.figures:
            figure = pattern.search(text)
            if figure is not None:
                figures[field_name] = _number(figure, factor)
        batch = figures.get("global_batch_size")
        figures |= {"global_batch_size": None if batch is None else int(batch)}
        figures.setdefault("seconds", None)
        self._at = int(numbers[-1].group(1)) + 1 - form.first_iteration
        self.log.peak_memory_bytes = max(
            self.log.peak_memory_bytes, figures.get("peak_memory_bytes") or 0.0
        )
        skipped = form.skipped is not None and form.skipped.search(text) is not None
        self.has_step = self.log.add(
            LoggedStep(
                iteration=self._at,
                attempt=self._attempts.of(line.rank, self._at),
                marks=(Mark.SKIPPED,) if skipped else (),
                **figures,
            )
        )


def _number(found: re.Match[str], factor: float) -> float | None:
    number = finite_number(found.group(1).replace(",", ""))
    return None if number is None else number * factor


def merged(files: Sequence[FileLog]) -> tuple[LoggedStep, ...]:
    """The steps of all files, in the order in which they ran, each once per attempt, marked.

    Files that share more than half of their iterations are ranks of one run; others are parts of
    it, one after the other (a restart writes a new file).
    """
    together: list[list[LoggedStep]] = []
    for log in files:
        if not log.steps:
            continue
        mine = {step.iteration for step in log.steps}
        for group in together:
            theirs = {step.iteration for step in group}
            if len(mine & theirs) > min(len(mine), len(theirs)) / 2:
                group.extend(log.steps)
                break
        else:
            together.append(list(log.steps))
    steps: list[LoggedStep] = []
    for group in sorted(together, key=lambda group: min(step.iteration for step in group)):
        first = steps[-1].attempt + 1 if steps else 0
        steps += [replace(step, attempt=step.attempt + first) for step in _once(group)]
    return _marked(steps, [event for log in files for event in log.events])


def _once(steps: Iterable[LoggedStep]) -> list[LoggedStep]:
    """One value per attempt and iteration, in this order."""
    found: dict[tuple[int, int], LoggedStep] = {}
    for step in steps:
        key = (step.attempt, step.iteration)
        found[key] = _slower(found[key], step) if key in found else step
    return [found[key] for key in sorted(found)]


def _slower(one: LoggedStep, other: LoggedStep) -> LoggedStep:
    """The two as one: slowest time, lowest rates, most memory, all marks, the timers of either."""
    timers = {timer.name: timer for timer in one.timers}
    for timer in other.timers:
        known = timers.get(timer.name)
        if known is not None:
            timer = replace(
                timer,
                least_seconds=min(timer.least_seconds, known.least_seconds),
                most_seconds=max(timer.most_seconds, known.most_seconds),
            )
        timers[timer.name] = timer
    return replace(
        one,
        seconds=_either(max, one.seconds, other.seconds),
        tokens_per_second=_either(min, one.tokens_per_second, other.tokens_per_second),
        samples_per_second=_either(min, one.samples_per_second, other.samples_per_second),
        peak_memory_bytes=_either(max, one.peak_memory_bytes, other.peak_memory_bytes),
        marks=tuple(dict.fromkeys((*one.marks, *other.marks))),
        timers=tuple(timers.values()),
    )


def _either(
    choose: Callable[[float, float], float], one: float | None, other: float | None
) -> float | None:
    if one is None or other is None:
        return one if other is None else other
    return choose(one, other)


def _marked(
    steps: Sequence[LoggedStep], events: Sequence[tuple[int, Mark]]
) -> tuple[LoggedStep, ...]:
    """The steps with what happened in them; the first of every attempt is marked as that."""
    by_iteration: dict[int, set[Mark]] = {}
    for iteration, mark in events:
        by_iteration.setdefault(iteration, set()).add(mark)
    happened = sorted(by_iteration)
    marked: list[LoggedStep] = []
    before: LoggedStep | None = None
    for step in steps:
        first = before is None or before.attempt != step.attempt
        since = 0 if first or before is None else before.iteration
        # An event after iteration k delays the steps from k + 1 on, which the next line counts.
        events_inside = happened[
            bisect_left(happened, since) : bisect_left(happened, step.iteration)
        ]
        inside = {
            mark for iteration in events_inside for mark in by_iteration[iteration] if not first
        }
        marks = [*step.marks, *([Mark.FIRST] if first else []), *sorted(inside)]
        marked.append(replace(step, marks=tuple(dict.fromkeys(marks))))
        before = step
    return tuple(marked)
