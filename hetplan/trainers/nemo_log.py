"""NeMo 2's progress lines (nemo/lightning, ProgressPrinter), which Megatron-core's training prints.

    Training epoch 0, iteration 10/99 | lr: 1e-05 | global_batch_size: 128 | global_step: 10 |
    peak_memory_usage: 70833405952 | reduced_train_loss: 11.0 | train_step_timing in s: 12.39 | ...

The time is one step's; `global_step` counts from 0.
"""

from __future__ import annotations

import re

from hetplan.importers.lines import finite_number
from hetplan.trainers.log_lines import LogLine
from hetplan.trainers.training_log import Attempts, FileLog, LoggedStep, Mark, Trainer

WORDS = (b"train_step_timing in s:", b"Validation: iteration", b"checkpoint save")

_STEP = re.compile(
    r"\bglobal_step: {0,4}(\d{1,12}) \|.{0,2000}?train_step_timing in s: {0,4}"
    r"([\d.]{1,24}(?:[eE][+-]?\d{1,3})?)"
)
_BATCH = re.compile(r"\bglobal_batch_size: {0,4}(\d{1,12}) \|")
_MEMORY = re.compile(r"\bpeak_memory_usage: {0,4}(\d{1,18}) \|")


class NemoLog:
    """One file while it is read."""

    def __init__(self) -> None:
        self.log = FileLog(trainer=Trainer.NEMO)
        self._attempts = Attempts()
        self._at = 0

    def take(self, line: LogLine) -> None:
        """One line of the file, cleaned."""
        text = line.text
        if "Validation: iteration" in text:
            self.log.events.append((self._at, Mark.EVALUATION))
        elif "checkpoint save" in text:
            self.log.events.append((self._at, Mark.CHECKPOINT))
        elif "Training epoch" in text and (found := _STEP.search(text)) is not None:
            seconds = finite_number(found.group(2))
            if line.cut or seconds is None or seconds <= 0:
                self.log.cut_lines += 1
                return
            self._step(line, int(found.group(1)) + 1, seconds)

    def _step(self, line: LogLine, number: int, seconds: float) -> None:
        batch, memory = _BATCH.search(line.text), _MEMORY.search(line.text)
        peak = float(memory.group(1)) if memory else None
        self.log.peak_memory_bytes = max(self.log.peak_memory_bytes, peak or 0.0)
        self._at = number
        self.log.add(
            LoggedStep(
                iteration=number,
                seconds=seconds,
                attempt=self._attempts.of(line.rank, number),
                global_batch_size=int(batch.group(1)) if batch else None,
                peak_memory_bytes=peak,
            )
        )
