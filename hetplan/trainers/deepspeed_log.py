"""DeepSpeed's lines of speed, of its pipeline engine, and its wall-clock breakdown.

    epoch=0/micro_step=40/global_step=10, RunningAvgSamplesPerSec=25.0, CurrSamplesPerSec=25.7, ...
    steps: 10 loss: 7.1234 iter time (s): 1.234 samples/sec: 207.456
    time (ms) | fwd: 54.76 | bwd: 122.95 | bwd_inner: 12.22 | bwd_allreduce: 103.64 | step: 0.34

The first (deepspeed/utils/timer.py, `ThroughputTimer`) is the rate of the last step, forward to
update, over the samples of the global batch; the second (runtime/pipe/engine.py) the mean of
`steps_per_print` steps. Timers are rank 0's. Of the two breakdown lines that follow each other the
one without `microstep` counts: it is the step's, the other one microbatch's. The pipeline engine's
timers add up `steps_per_print` steps and are divided by them here.
"""

from __future__ import annotations

import re

from hetplan.importers.lines import finite_number
from hetplan.trainers.log_lines import LogLine
from hetplan.trainers.training_log import (
    IN_PASSES,
    ONE_OF,
    WAITING,
    Attempts,
    FileLog,
    LoggedStep,
    LoggedTimer,
    Mark,
    Quantity,
    TimerRanks,
    Trainer,
    meanings,
)
from hetplan.units import GIBIBYTE

WORDS = (
    b"SamplesPerSec=", b"iter time (s)", b"time (ms) |", b"skipped=", b"checkpoint", b"....",
)  # fmt: skip

_RATE = re.compile(
    r"(?:global_step=|\b\d{1,12}/)(\d{1,12}), .{0,80}?\bCurrSamplesPerSec=([\d.eE+-]{1,40}),"
)
_AVERAGE = re.compile(r"(?:global_step=|\b\d{1,12}/)(\d{1,12}), .{0,20}?SamplesPerSec=")
_MEMORY = re.compile(r"\bMaxMemAllocated=([\d.]{1,24})GB")
_PIPELINE = re.compile(
    r"\bsteps?: {0,6}(\d{1,12})\b.{0,400}?iter time \(s\): {0,4}([\d.]{1,24}) samples/sec: [\d.]"
)
_SKIPPED = re.compile(r"\bstep=(\d{1,12}), skipped=(\d{1,12}),")
_TIMERS = re.compile(r"time \(ms\)((?: \| [\w/ -]{1,60}: [\d.eE+]{1,24})+)", re.ASCII)
_SAVED = re.compile(r"[Ss]av(?:ing|ed) (?:model )?checkpoint|[Ss]aved .{0,60}global_step")
_SETTING = re.compile(
    r"(?:^|\s)(train_batch_size|train_micro_batch_size_per_gpu|world_size) \.{3,60} (\d{1,12})\s*$"
)
_FACTS = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "microbatch_size",
    "world_size": "world_size",
}
_SUMS = (
    "forward", "backward", "backward_inner", "backward_allreduce", "backward_tied_allreduce",
    "step", "batch_input", "pipe_send_output", "pipe_send_grad", "pipe_recv_input",
    "pipe_recv_grad",
)  # fmt: skip
"""Timers of the pipeline engine, which add up the steps since they were printed before."""
_OWN = {
    *_SUMS, "fwd", "bwd", "bwd_inner", "bwd_allreduce", "fwd_microstep", "forward_microstep",
    "optimizer_step", "optimizer_gradients", "optimizer_allgather",
}  # fmt: skip
"""Lines with one of these are DeepSpeed's; Megatron-LM's own have a hyphen in their names."""

TIMERS = meanings(
    # DeepSpeed, deepspeed/runtime/engine.py and runtime/pipe/engine.py.
    ("fwd", Quantity.FORWARD, IN_PASSES),
    ("bwd", None, "bwd_inner and bwd_allreduce together"),
    ("bwd_inner", Quantity.BACKWARD, f"{IN_PASSES}, and recomputation"),
    ("bwd_allreduce", Quantity.REDUCTION, "what nothing hides"),
    ("step", Quantity.END, "holds norm, update and gathering"),
    ("optimizer_step", Quantity.UPDATE, ONE_OF),
    ("optimizer_gradients", Quantity.UPDATE, ONE_OF),
    ("optimizer_allgather", Quantity.GATHERING, "after the update"),
    ("forward", Quantity.FORWARD, IN_PASSES),
    ("backward", None, "backward passes and their reduction together"),
    ("backward_inner", Quantity.BACKWARD, f"{IN_PASSES}, and recomputation"),
    ("backward_allreduce", Quantity.REDUCTION, "what nothing hides"),
    ("backward_tied_allreduce", Quantity.EMBEDDING, "waits for the other end included"),
    ("batch_input", Quantity.DATA, "outside of forward"),
    ("pipe_send_output", Quantity.WAITS, WAITING),
    ("pipe_send_grad", Quantity.WAITS, WAITING),
    ("pipe_recv_input", Quantity.WAITS, WAITING),
    ("pipe_recv_grad", Quantity.WAITS, WAITING),
)  # fmt: skip
"""What each timer counts; docs/compare.md shows this table."""


class BreakDown:
    """Timers of the wall-clock breakdown since they were taken last."""

    def __init__(self) -> None:
        self.pipeline = False
        """Whether they are the pipeline engine's, which add up steps."""
        self._seconds: dict[str, list[float]] = {}

    def take(self, text: str) -> bool:
        """One `time (ms)` line; False where it is not DeepSpeed's."""
        found = _TIMERS.search(text)
        parts = [part.rpartition(": ") for part in found.group(1).split(" | ")[1:]] if found else []
        names = {name for name, _, _ in parts}
        # Megatron-LM of 2020 has `forward` too, beside names with hyphens and spaces.
        if not names & _OWN or any("-" in name or " " in name for name in names):
            return False
        for name, _, value in parts:
            seconds = finite_number(value)
            if seconds is not None and not name.endswith("microstep"):
                self._seconds.setdefault(name, []).append(seconds / 1e3)
        return True

    def taken(self, steps: int = 0) -> tuple[LoggedTimer, ...]:
        """Of one step; the pipeline engine's timers are of `steps` of them, where that is known."""
        timers = []
        pipeline = self.pipeline or "forward" in self._seconds
        for name, values in self._seconds.items():
            seconds = sum(values) / len(values)
            if pipeline and name in _SUMS:
                if steps < 1:
                    continue
                seconds = sum(values) / steps
            timers.append(
                LoggedTimer(
                    name=name,
                    least_seconds=seconds,
                    most_seconds=seconds,
                    ranks=TimerRanks.FIRST,
                )
            )
        self._seconds = {}
        return tuple(timers)


class DeepspeedLog:
    """One file while it is read."""

    def __init__(self) -> None:
        self.log = FileLog(trainer=Trainer.DEEPSPEED)
        self._attempts = Attempts()
        self._at = 0
        self._skipped = 0
        self._marks: set[Mark] = set()
        self._waiting = BreakDown()

    def take(self, line: LogLine) -> None:
        """One line of the file, cleaned."""
        text = line.text
        if "CurrSamplesPerSec=" in text and (rate := _RATE.search(text)) is not None:
            self._step(line, int(rate.group(1)), None, finite_number(rate.group(2)))
        elif "iter time (s)" in text and (found := _PIPELINE.search(text)) is not None:
            self._waiting.pipeline = True
            self._step(line, int(found.group(1)), finite_number(found.group(2)), None)
        elif "time (ms) |" in text:
            self._waiting.take(text)
        elif (skipped := _SKIPPED.search(text)) is not None:
            count = int(skipped.group(2))
            if count > self._skipped:
                self._marks.add(Mark.SKIPPED)
            self._skipped = count
        elif "SamplesPerSec=" in text and _AVERAGE.search(text) is not None:
            self.log.note("lines with only a running average of the rate were passed over")
        elif _SAVED.search(text):
            self.log.events.append((self._at, Mark.CHECKPOINT))
        elif (setting := _SETTING.search(text)) is not None:
            self.log.fact(_FACTS[setting.group(1)], int(setting.group(2)))

    def _step(self, line: LogLine, number: int, seconds: float | None, rate: float | None) -> None:
        figure = seconds if seconds is not None else rate
        if line.cut or figure is None or figure <= 0:
            self.log.cut_lines += 1
            return
        memory = _MEMORY.search(line.text)
        # Bytes over 1024**3, printed as GB.
        peak = (finite_number(memory.group(1)) or 0.0) * GIBIBYTE if memory else None
        self.log.peak_memory_bytes = max(self.log.peak_memory_bytes, peak or 0.0)
        self.log.add(
            LoggedStep(
                iteration=number,
                seconds=seconds,
                attempt=self._attempts.of(line.rank, number),
                samples_per_second=rate,
                peak_memory_bytes=peak,
                marks=tuple(sorted(self._marks)),
                timers=self._waiting.taken(number - self._at if self._at else 0),
            )
        )
        self._at, self._marks = number, set()
