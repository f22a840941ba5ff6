"""The folder of a run: its files, and how the launcher learns of finished steps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hetplan.errors import Fault, InputError
from hetplan.runtime.measured import StepRecord

# Importing torch takes a rank some 2 s of a core, and ranks may share few: 16 ranks on one busy
# core meet within this time.
START_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a rank wrote when it failed by itself."""

    seconds: float
    """When, on the machine's monotonic clock."""
    reason: str


MEETING_VARIABLE = "HETPLAN_MEETING_ADDRESS"
"""Environment variable with the address of the ranks' meeting point; without it this machine's."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    REPORT_SCHEMA: ClassVar[str] = "hetplan.training-report/1"

    @property
    def training(self) -> Path:
        """What to train (`hetplan.runtime.training.Training`)."""
        return self.path / "training.json"

    @property
    def report(self) -> Path:
        """What was measured (`hetplan.runtime.measured.TrainingReport`)."""
        return self.path / "report.json"

    @property
    def port(self) -> Path:
        """Port of the ranks' meeting point, which rank 0 opens."""
        return self.path / "port"

    @property
    def progress(self) -> Path:
        """One line per finished step."""
        return self.path / "progress.jsonl"

    def log(self, rank: int) -> Path:
        """Output of a rank."""
        return self.path / f"rank-{rank}.log"

    def failure(self, rank: int) -> Path:
        """When and why a rank failed."""
        return self.path / f"rank-{rank}.failed"

    def failed(self, rank: int) -> Failure | None:
        """Content of `failure`; None where the rank wrote none."""
        try:
            words = self.failure(rank).read_text().split(maxsplit=1)
        except OSError:
            return None
        reason = words[1].splitlines()[0] if len(words) > 1 else ""
        return Failure(seconds=float(words[0]), reason=reason) if words else None

    def activity(self, rank: int) -> Path:
        """What a rank does (`hetplan.runtime.activity`)."""
        return self.path / f"rank-{rank}.activity"

    def telemetry(self, rank: int) -> Path:
        """What a rank measured of every step (`hetplan.runtime.telemetry`)."""
        return self.path / f"rank-{rank}.telemetry"

    @property
    def stop(self) -> Path:
        """Made by whoever wants the run to save a checkpoint and leave after its present step."""
        return self.path / "stop"

    def check_unused(self) -> None:
        """InputError where a run left its logs here, or the phases of an elastic one."""
        if self.training.exists() or any(self.path.glob("phase-*")):
            message = "has the logs of another run; choose another folder, or remove it"
            raise InputError(Fault(file=str(self.path), message=message))

    def clear(self) -> None:
        """Remove what an earlier run in this folder left."""
        for path in (self.training, self.report, self.port, self.progress, self.stop):
            path.unlink(missing_ok=True)
        for what in ("log", "failed", "activity", "telemetry"):
            for path in self.path.glob(f"rank-*.{what}"):
                path.unlink()

    def tell(self, record: StepRecord) -> None:
        """Add a finished step to the progress."""
        line = json.dumps([record.step, record.seconds, record.loss])
        with self.progress.open("a") as stream:
            stream.write(line + "\n")

    def told(self, already: int) -> list[StepRecord]:
        """Finished steps after the first `already` of them."""
        if not self.progress.exists():
            return []
        # What follows the last line break is a line that is still being written.
        lines = self.progress.read_text().split("\n")[already:-1]
        return [
            StepRecord(step=step, seconds=seconds, loss=loss)
            for step, seconds, loss in map(json.loads, lines)
        ]
