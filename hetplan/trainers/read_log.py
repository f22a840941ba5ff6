"""From the log files of one run to its steps: the verb behind `hetplan compare`.

The first reader of `_READERS` that finds steps in a file names the trainer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

from hetplan.errors import Fault, InputError
from hetplan.importers.lines import finite_number
from hetplan.trainers.megatron import log as megatron_log
from hetplan.trainers.torchtitan import log as torchtitan_log
from hetplan.trainers.training_log import (
    Attempts,
    FileLog,
    LoggedFact,
    LoggedStep,
    LogLine,
    Mark,
    Trainer,
    TrainingLog,
    log_lines,
    merged,
)

_STEP = re.compile(
    r"\bglobal_step: {0,4}(\d{1,12}) \|.{0,2000}?train_step_timing in s: {0,4}"
    r"([\d.]{1,24}(?:[eE][+-]?\d{1,3})?)"
)
_BATCH = re.compile(r"\bglobal_batch_size: {0,4}(\d{1,12}) \|")
_MEMORY = re.compile(r"\bpeak_memory_usage: {0,4}(\d{1,18}) \|")


class NemoLog:
    """One file of NeMo 2 while it is read (nemo/lightning, ProgressPrinter).

        Training epoch 0, iteration 10/99 | lr: 1e-05 | global_batch_size: 128 | global_step: 10 |
        peak_memory_usage: 70833405952 | ... | train_step_timing in s: 12.39 | ...

    The time is one step's; `global_step` counts from 0.
    """

    WORDS = (b"train_step_timing in s:", b"Validation: iteration", b"checkpoint save")

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


class _Reader(Protocol):
    """Looks at the lines of one file, in order."""

    log: FileLog
    """What they said so far."""

    def take(self, line: LogLine) -> None:
        """One line; most say nothing to this reader."""
        ...


_READERS = (
    (Trainer.MEGATRON, megatron_log.MegatronLog, megatron_log.WORDS),
    (Trainer.NEMO, NemoLog, NemoLog.WORDS),
    (Trainer.TORCHTITAN, torchtitan_log.TorchtitanLog, torchtitan_log.WORDS),
)
TRAINERS = tuple(trainer.value for trainer, _, _ in _READERS)
"""Trainers whose text logs are read."""


def read_training_log(paths: Sequence[Path], trainer: str | None = None) -> TrainingLog:
    """What the files of one run say: one file, one per rank, or one per restart.

    `trainer` is one of `TRAINERS`; None: whose lines are found. InputError where no file holds a
    step, naming what was looked for, and where files are of several trainers.
    """
    if not paths:
        raise InputError("name at least one log file")
    if trainer is not None and trainer not in TRAINERS:
        raise InputError(f"trainer {trainer[:60]!a}: no such log; known: {', '.join(TRAINERS)}")
    logs = [_read(path, trainer) for path in paths]
    found = dict.fromkeys(log.trainer for log in logs if log.steps)
    if not found:
        raise _nothing_found(paths, trainer)
    if len(found) > 1:
        raise InputError(
            f"the files are of {' and '.join(found)}; compare one run at a time, or say --trainer"
        )
    steps = merged(logs)
    with_steps = next(log for log in logs if log.steps)
    return TrainingLog(
        trainer=with_steps.trainer,
        files=tuple(str(path) for path in paths),
        steps=steps,
        facts=_facts(paths, logs),
        peak_memory_bytes=max(log.peak_memory_bytes for log in logs) or None,
        memory_kind=with_steps.memory_kind,
        notes=tuple(dict.fromkeys(chain.from_iterable(log.last_notes() for log in logs))),
    )


def _read(path: Path, trainer: str | None) -> FileLog:
    """One file by the reader that finds steps in it; without any the first one's log."""
    readers: list[_Reader] = []
    words: tuple[bytes, ...] = ()
    for name, kind, needed in _READERS:
        if trainer is None or trainer == name:
            readers.append(kind())
            words += needed
    for line in log_lines(path, tuple(dict.fromkeys(words))):
        for at, reader in enumerate(readers):
            reader.take(line)
            if reader.log.steps:
                # It is chosen before those behind it, which take most of the time.
                del readers[at + 1 :]
                break
    chosen = next((reader for reader in readers if reader.log.steps), readers[0])
    return chosen.log


def _facts(paths: Sequence[Path], logs: Sequence[FileLog]) -> tuple[LoggedFact, ...]:
    """Settings of all files; an InputError where two contradict each other."""
    known: dict[str, tuple[int, Path]] = {}
    for path, log in zip(paths, logs, strict=True):
        for fact in log.values():
            value, where = known.setdefault(fact.name, (fact.value, path))
            if value != fact.value:
                raise InputError(
                    f"{where} has {fact.name} {value}, {path} {fact.value}: these are different "
                    "runs; compare one at a time"
                )
    return tuple(LoggedFact(name=name, value=known[name][0]) for name in sorted(known))


def _of_any(paths: Sequence[Path]) -> list[FileLog]:
    """Logs with steps, whoever wrote them."""
    return [log for log in (_read(path, None) for path in paths) if log.steps]


def _nothing_found(paths: Sequence[Path], trainer: str | None) -> InputError:
    looked = {
        Trainer.MEGATRON: "`iteration 10/ 100 | ... elapsed time per iteration (ms): ... |`",
        Trainer.NEMO: "`Training epoch 0, iteration 10/99 | ... train_step_timing in s: ...`",
        Trainer.TORCHTITAN: "`step: 10  loss: ...  tps: ...`",
    }
    wanted = [text for name, text in looked.items() if trainer is None or trainer == name]
    others = {log.trainer for log in _of_any(paths)} if trainer is not None else set()
    if others:
        message = f"is of {' and '.join(sorted(others))}, not of {trainer}; leave --trainer out"
        return InputError(Fault(file=str(paths[0]), message=message))
    message = (
        f"holds no line of a finished step; looked for {', '.join(wanted)}. Is it the log of the "
        "rank that prints them (Megatron-LM: the last rank), and did a step end?"
    )
    return InputError(*(Fault(file=str(path), message=message) for path in paths))
