"""From the log files of one run to its steps: the verb behind `hetplan compare`.

The first reader of `_READERS` that finds steps in a file names the trainer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from hetplan.errors import Fault, InputError
from hetplan.trainers.log_lines import log_lines
from hetplan.trainers.megatron import log as megatron_log
from hetplan.trainers.torchtitan import log as torchtitan_log
from hetplan.trainers.training_log import (
    FileLog,
    LogForm,
    LoggedFact,
    LogReader,
    Mark,
    Trainer,
    TrainingLog,
    merged,
)

_NEMO = LogForm(
    trainer=Trainer.NEMO,
    words=(b"train_step_timing in s:", b"Validation: iteration", b"checkpoint save"),
    example="`Training epoch 0, iteration 10/99 | ... train_step_timing in s: ...`",
    iteration=re.compile(r"\bglobal_step: {0,4}(\d{1,12}) \|"),
    first_iteration=0,
    time=(
        "seconds",
        (
            (
                re.compile(r"\btrain_step_timing in s: {0,4}([\d.]{1,24}(?:[eE][+-]?\d{1,3})?)"),
                1.0,
            ),
        ),
    ),
    figures=(
        ("global_batch_size", re.compile(r"\bglobal_batch_size: {0,4}(\d{1,12}) \|"), 1.0),
        ("peak_memory_bytes", re.compile(r"\bpeak_memory_usage: {0,4}(\d{1,18}) \|"), 1.0),
    ),
    metrics=("train_step_timing in s:",),
    events=(
        (re.compile(r"Validation: iteration()"), Mark.EVALUATION),
        (re.compile(r"checkpoint save()"), Mark.CHECKPOINT),
    ),
)
"""NeMo 2 (nemo/lightning, ProgressPrinter); the time is one step's.

    Training epoch 0, iteration 10/99 | lr: 1e-05 | global_batch_size: 128 | global_step: 10 |
    peak_memory_usage: 70833405952 | ... | train_step_timing in s: 12.39 | ...
"""
_READERS = (
    (megatron_log.FORM, megatron_log.MegatronLog),
    (_NEMO, LogReader),
    (torchtitan_log.FORM, torchtitan_log.TorchtitanLog),
)
TRAINERS = tuple(form.trainer.value for form, _ in _READERS)
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
    readers = [kind(form) for form, kind in _READERS if trainer in (None, form.trainer)]
    words = dict.fromkeys(word for reader in readers for word in reader.form.words)
    for line in log_lines(path, tuple(words)):
        for at, reader in enumerate(readers):
            reader.take(line)
            if reader.log.steps:
                # It is chosen before those behind it, which take most of the time.
                del readers[at + 1 :]
                break
    return next((reader for reader in readers if reader.log.steps), readers[0]).log


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


def _nothing_found(paths: Sequence[Path], trainer: str | None) -> InputError:
    examples = [form.example for form, _ in _READERS if trainer in (None, form.trainer)]
    others = {log.trainer for log in (_read(path, None) for path in paths) if log.steps}
    if others:
        message = f"is of {' and '.join(sorted(others))}, not of {trainer}; leave --trainer out"
        return InputError(Fault(file=str(paths[0]), message=message))
    message = (
        f"holds no line of a finished step; looked for {', '.join(examples)}. Is it the log of the "
        "rank that prints them (Megatron-LM: the last rank), and did a step end?"
    )
    return InputError(*(Fault(file=str(path), message=message) for path in paths))
