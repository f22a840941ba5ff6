"""From the log files of one run to its steps: the verb behind `hetplan compare`.

All readers look at every line, because Megatron-DeepSpeed prints the lines of two; the first of
`_READERS` that finds steps names the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

from hetplan.errors import Fault, InputError
from hetplan.trainers import deepspeed_log, nemo_log
from hetplan.trainers.log_lines import LogLine, log_lines
from hetplan.trainers.megatron import log as megatron_log
from hetplan.trainers.torchtitan import log as torchtitan_log
from hetplan.trainers.training_log import FileLog, LoggedFact, Trainer, TrainingLog, merged


class _Reader(Protocol):
    """Looks at the lines of one file, in order."""

    log: FileLog
    """What they said so far."""

    def take(self, line: LogLine) -> None:
        """One line; most say nothing to this reader."""
        ...


_READERS = (
    (Trainer.MEGATRON, megatron_log.MegatronLog, megatron_log.WORDS),
    (Trainer.NEMO, nemo_log.NemoLog, nemo_log.WORDS),
    (Trainer.TORCHTITAN, torchtitan_log.TorchtitanLog, torchtitan_log.WORDS),
    (Trainer.DEEPSPEED, deepspeed_log.DeepspeedLog, deepspeed_log.WORDS),
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
        Trainer.DEEPSPEED: "`CurrSamplesPerSec=...` or `steps: 10 ... iter time (s): ...`",
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
