"""torchtitan's metrics lines (torchtitan/components/metrics.py, `MetricsProcessor.log`).

    step: 10  loss:  9.3421  grad_norm:  1.2  memory: 48.91GiB(51.52%)  tps: 21,734  tflops: ...

`tps` (`wps` in 2024) is tokens per second of one device: the tokens of a rank over time and over
the degrees that are not data parallel. So a step takes

    tokens of the global batch / (tps * devices)

seconds, the mean over the steps since the line before (`log_freq`); the first line is step 1's
alone. Every rank that is not filtered by torchrun prints a line. Validation restarts the clock,
saving a checkpoint does not. `memory` is the most that the allocator reserved.
"""

from __future__ import annotations

import re

from hetplan.importers.lines import finite_number
from hetplan.trainers.training_log import (
    Attempts,
    FileLog,
    LoggedStep,
    LogLine,
    Mark,
    MemoryKind,
    Trainer,
)
from hetplan.units import GIBIBYTE

WORDS = (b"step: ", b"Saving ", b"device mesh", b"batch size")

_STEP = re.compile(r"(?<!validate )\bstep: {0,12}(\d{1,12})\b", re.ASCII)
_RATE = re.compile(r"\b[tw]ps: {0,6}([\d,]{1,24})(?=\s|$)", re.ASCII)
_MEMORY = re.compile(r"\bmemory: {0,6}([\d.]{1,24})GiB", re.ASCII)
_VALIDATED = re.compile(r"\bvalidate step: {0,12}(\d{1,12})\b", re.ASCII)
_SAVING = re.compile(r"\bSaving (?:the|a [\w ]{1,60}) ?checkpoint|\bSaving a full checkpoint")
_MESH = re.compile(r"device mesh with parallelism: ([\w=, ]{1,200})")
_MESH_LISTS = re.compile(r"device mesh with \[([^\]]{1,200})\], \[([\d, ]{1,100})\]")
_START = re.compile(r"global batch size (\d{1,12}).{0,80}?sequence length (\d{1,12})")
_DATA = ("dp", "dp_replicate", "dp_shard")


class TorchtitanLog:
    """One file while it is read."""

    def __init__(self) -> None:
        self.log = FileLog(trainer=Trainer.TORCHTITAN, memory_kind=MemoryKind.RESERVED)
        self._attempts = Attempts()
        self._at = 0

    def take(self, line: LogLine) -> None:
        """One line of the file, cleaned."""
        text = line.text
        validated = _VALIDATED.search(text)
        if validated is not None:
            self.log.events.append((int(validated.group(1)), Mark.EVALUATION))
        elif "step: " in text and (step := _STEP.search(text)) is not None:
            self._step(line, int(step.group(1)))
        elif _SAVING.search(text):
            self.log.events.append((self._at, Mark.CHECKPOINT))
        else:
            self._settings(text)

    def _step(self, line: LogLine, number: int) -> None:
        found = _RATE.search(line.text)
        rate = finite_number(found.group(1).replace(",", "")) if found is not None else None
        if rate is None or rate <= 0 or line.cut:
            # Other programs print `step: 10` too; only a line that began as a metrics line counts.
            self.log.cut_lines += "loss: " in line.text and "memory: " in line.text
            return
        memory = _MEMORY.search(line.text)
        peak = (finite_number(memory.group(1)) or 0.0) * GIBIBYTE if memory else None
        self._at = number
        self.log.peak_memory_bytes = max(self.log.peak_memory_bytes, peak or 0.0)
        self.log.add(
            LoggedStep(
                iteration=number,
                seconds=None,
                attempt=self._attempts.of(line.rank, number),
                tokens_per_second=rate,
                peak_memory_bytes=peak,
            )
        )

    def _settings(self, text: str) -> None:
        mesh, lists, start = (each.search(text) for each in (_MESH, _MESH_LISTS, _START))
        degrees: dict[str, int] = {}
        if mesh is not None:
            pairs = (part.split("=") for part in mesh.group(1).split(",") if part.count("=") == 1)
            degrees = {name.strip(): int(size) for name, size in pairs if size.strip().isdecimal()}
        elif lists is not None:
            names = [name.strip(" '\"") for name in lists.group(1).split(",")]
            sizes = [int(size) for size in lists.group(2).split(",") if size.strip()]
            degrees = dict(zip(names, sizes, strict=False))
        if degrees:
            for name in ("pp", "tp", "cp"):
                self.log.fact(name, degrees.get(name, 1))
            world = 1
            for name in (*_DATA, "pp", "tp", "cp"):
                # dp_shard -1 is "the rest" and never printed as such here.
                world *= degrees.get(name, 1)
            self.log.fact("world_size", world)
        if start is not None:
            self.log.fact("global_batch_size", int(start.group(1)))
            self.log.fact("sequence_length", int(start.group(2)))
