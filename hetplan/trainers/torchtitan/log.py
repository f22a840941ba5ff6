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

import math
import re

from hetplan.trainers.training_log import LogForm, LogReader, Mark, MemoryKind, Trainer
from hetplan.units import GIBIBYTE

_MESH = re.compile(r"device mesh with parallelism: ([\w=, ]{1,200})")
_MESH_LISTS = re.compile(r"device mesh with \[([^\]]{1,200})\], \[([\d, ]{1,100})\]")
_START = re.compile(r"global batch size (\d{1,12}).{0,80}?sequence length (\d{1,12})")
_DEGREES = ("dp", "dp_replicate", "dp_shard", "pp", "tp", "cp")

FORM = LogForm(
    trainer=Trainer.TORCHTITAN,
    words=(b"step: ", b"Saving ", b"device mesh", b"batch size"),
    example="`step: 10  loss: ...  tps: ...`",
    iteration=re.compile(r"(?<!validate )\bstep: {0,12}(\d{1,12})\b", re.ASCII),
    time=(
        "tokens_per_second",
        ((re.compile(r"\b[tw]ps: {0,6}([\d,]{1,24})(?=\s|$)", re.ASCII), 1.0),),
    ),
    figures=(
        (
            "peak_memory_bytes",
            re.compile(r"\bmemory: {0,6}([\d.]{1,24})GiB", re.ASCII),
            float(GIBIBYTE),
        ),
    ),
    # Other programs print `step: 10` too.
    metrics=("loss: ", "memory: "),
    events=(
        (re.compile(r"\bvalidate step: {0,12}(\d{1,12})\b", re.ASCII), Mark.EVALUATION),
        (re.compile(r"\bSaving (?:the|a [\w ]{1,60}) ?checkpoint()"), Mark.CHECKPOINT),
        (re.compile(r"\bSaving a full checkpoint()"), Mark.CHECKPOINT),
    ),
    memory_kind=MemoryKind.RESERVED,
)


class TorchtitanLog(LogReader):
    """Also reads the settings that a run prints at its start."""

    def other(self, text: str) -> None:
        """Degrees and batch."""
        mesh, lists, start = (pattern.search(text) for pattern in (_MESH, _MESH_LISTS, _START))
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
            # dp_shard -1 is "the rest" and never printed as such here.
            self.log.fact("world_size", math.prod(degrees.get(name, 1) for name in _DEGREES))
        if start is not None:
            self.log.fact("global_batch_size", int(start.group(1)))
            self.log.fact("sequence_length", int(start.group(2)))
