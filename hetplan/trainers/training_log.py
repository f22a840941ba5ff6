"""The lines of a trainer's log, and its steps and timers in base units.

A logged step is one metrics line: the mean over the steps since the line before. What happened in
those steps besides training (a checkpoint, an evaluation) is kept as its marks; which steps count
is decided in `hetplan.comparison.steps`.

Every rank may print its own line of a step, in one file with or without a rank before it, or in a
file per rank. A rank's iteration number that does not rise is a restart from a checkpoint: the
steps after it are another attempt, and both attempts were measured. Of the lines of one step the
slowest counts, because a step ends when its last rank ends.

Logs are read once, line by line: a log of a gigabyte takes no more memory than its longest line,
and lines longer than `MAX_LINE_LENGTH` are cut there. gzip is read as it is. torchrun writes
`[rank0]:` or `[default0]:` before a line, srun `0: `, several of them one behind the other, colours
are ANSI escape sequences, a progress bar leaves carriage returns, and a job that is killed leaves
half a line.
"""

from __future__ import annotations

import gzip
import re
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import IO, cast

from hetplan.errors import Fault, InputError


class Trainer(StrEnum):
    """Whose log it is."""

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
    """Whose time a timer is."""

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
"""Three years: a step that is said to take longer is a damaged line."""


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
        inside = {
            mark
            for iteration in _between(happened, since, step.iteration)
            for mark in by_iteration[iteration]
            if not first
        }
        marks = [*step.marks, *([Mark.FIRST] if first else []), *sorted(inside)]
        marked.append(replace(step, marks=tuple(dict.fromkeys(marks))))
        before = step
    return tuple(marked)


def _between(values: Sequence[int], start: int, stop: int) -> Sequence[int]:
    """Those of the sorted values from start up to but not including stop."""
    return values[bisect_left(values, start) : bisect_left(values, stop)]


# ---- lines

MAX_LINE_LENGTH = 1 << 16
"""Bytes of a line that are looked at; a metrics line has a few hundred."""

_GZIP = b"\x1f\x8b"  # RFC 1952, section 2.3.1
_WIDE = (b"\xff\xfe", b"\xfe\xff")  # byte order marks of UTF-16; UTF-32's begins alike
_PACKED = (
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bzip2"),
    (b"PK\x03\x04", "zip"),
)
_MAX_RANKS = 4  # before one line: of srun, mpirun and torchrun inside of each other, and to spare
_ANSI = re.compile(r"\x1b\[[0-9;?]{0,20}[ -/]?[@-~]")
_RANK = re.compile(
    r"\s{0,8}(?:"
    r"\[(?:rank|default|[a-z_]{0,20})[ _-]?(\d{1,7})\]:?[ \t]?"  # torchrun
    r"|(\d{1,7}):[ \t]"  # srun --label
    r"|\[\d{1,7},(\d{1,7})\]<std\w{1,6}>:?[ \t]?"  # Open MPI --tag-output
    r"|\[(\d{1,7})\][ \t]"  # MPICH -prepend-rank
    r")",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line as its process wrote it."""

    number: int
    """From 1."""
    text: str
    rank: str
    """What the launcher says of who wrote it; empty where it says nothing."""
    cut: bool = False
    """Whether its end is missing: the job was killed, or still runs."""


def log_lines(path: Path, words: tuple[bytes, ...]) -> Iterator[LogLine]:
    """The lines that hold one of these words, in order; InputError for what is no text."""
    number = 0
    # One pattern for all words is three times as fast as looking for each of 20.
    wanted = re.compile(b"|".join(map(re.escape, words)))
    with ExitStack() as stack:
        stream = _opened(path, stack)
        whole = True
        try:
            while raw := stream.readline(MAX_LINE_LENGTH):
                number += whole
                # What follows the first part of a very long line is no line of its own.
                if whole and wanted.search(raw):
                    yield _cleaned(number, raw)
                whole = raw.endswith(b"\n")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            if number == 0:
                message = f"is no gzip file, or a broken one: {error}; unpack it"
                raise InputError(Fault(file=str(path), message=message)) from error
            # A log that is still being packed, or was cut: what could be read counts.


def _opened(path: Path, stack: ExitStack) -> IO[bytes]:
    """The file's bytes, unpacked; an InputError where it is missing, empty or no text."""
    file = str(path)
    try:
        if path.is_dir():
            raise InputError(Fault(file=file, message="is a folder; name the log files in it"))
        if path.exists() and not path.is_file():
            raise InputError(Fault(file=file, message="is not a regular file; name a file"))
        plain = stack.enter_context(path.open("rb"))
        head = plain.read(MAX_LINE_LENGTH)
        plain.seek(0)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(Fault(file=file, message=f"cannot be read: {reason}")) from error
    if head.startswith(_GZIP):
        packed = gzip.GzipFile(fileobj=plain)
        stack.enter_context(packed)
        return cast("IO[bytes]", packed)
    packed_by = next((name for magic, name in _PACKED if head.startswith(magic)), None)
    if packed_by is not None:
        message = f"is packed by {packed_by}; unpack it (gzip is read as it is)"
        raise InputError(Fault(file=file, message=message))
    if head.startswith(_WIDE) or _looks_wide(head):
        message = "is UTF-16 (a PowerShell redirection writes that); save it as UTF-8 text"
        raise InputError(Fault(file=file, message=message))
    if not head.strip():
        raise InputError(Fault(file=file, message="the file is empty"))
    return plain


def _looks_wide(head: bytes) -> bool:
    """Whether every other byte is zero, as in ASCII text in UTF-16 without a mark.

    Letters beyond ASCII leave fewer of them; a fifth of all bytes is more than any text has. Zeros
    side by side are no letters: a log that was truncated while it was written begins with them.
    """
    few, many = sorted((head[0::2].count(0), head[1::2].count(0)))
    return len(head) >= 8 and many > len(head) / 5 and few < many / 2


def _cleaned(number: int, raw: bytes) -> LogLine:
    text = raw.decode("utf-8", errors="replace").lstrip("\ufeff").rstrip("\r\n")
    # A progress bar writes over itself: what was written last stands at the end.
    text = _ANSI.sub("", text.rpartition("\r")[2])
    ranks: list[str] = []
    while (found := _RANK.match(text)) is not None and len(ranks) < _MAX_RANKS:
        ranks.append(next(group for group in found.groups() if group is not None))
        text = text[found.end() :]
    cut = not raw.endswith(b"\n")
    return LogLine(number=number, text=text, rank="/".join(ranks), cut=cut)
