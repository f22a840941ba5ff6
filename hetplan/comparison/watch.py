"""Judging a run of the reference trainer while it goes on, from its growing folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hetplan.comparison.suspects import BLOCK, judge
from hetplan.comparison.telemetry import Checks, Run, Tail, tails_of
from hetplan.errors import InputError, printable
from hetplan.launchers.run_folder import RunFolder
from hetplan.launchers.watching import SILENT_START_SECONDS
from hetplan.runtime.activity import read_beat
from hetplan.runtime.telemetry import Record

LOOK_SECONDS = 1.0


def watch(folder: Path, run: Run, tell: Callable[[str], None]) -> None:
    """Tell each change of who stands out once; return when the run has ended.

    Each block of steps is judged by itself, when the step behind it has begun to be told.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder of a run (hetplan launch --log-folder)")
    tails: dict[Path, Tail] = {}
    checks, waiting = Checks(run), list[Record]()
    known: dict[tuple[str, str, str], str] = {}
    blocks = told = 0
    while True:
        over = is_over(folder)  # before reading, so that nothing is missed
        for tail in tails_of(folder):
            tails.setdefault(tail.path, tail)
        new = [placed for tail in tails.values() for placed in tail.more()]
        checks.check(new)
        waiting += [each.record for each in new]
        while waiting:
            steps = sorted({each.step for each in waiting if each.step is not None})
            if len(steps) <= BLOCK and not over:
                break
            inside, waiting = _first_block(waiting, steps)
            verdict = judge(inside, run, blocks_before=blocks)
            blocks += 1
            now = {(each.kind, each.name, each.cause): each.line for each in verdict.suspects}
            lines = [line for named, line in now.items() if named not in known]
            lines += [
                f"{printable(' '.join(named[:2]))} no longer stands out"
                for named in known
                if named not in now
            ]
            for line in lines:
                tell(line)
            known, told = now, told + len(lines)
        if over:
            if not told:
                tell("nobody stood out")
            return
        time.sleep(LOOK_SECONDS)


def _first_block(
    records: Sequence[Record], steps: Sequence[int]
) -> tuple[list[Record], list[Record]]:
    """Those of the first steps, and the rest; flows belong to the time in which they begin."""
    if len(steps) <= BLOCK:
        return list(records), []
    end = steps[BLOCK]
    begin = min(each.begin_seconds for each in records if each.step == end)
    split: tuple[list[Record], list[Record]] = ([], [])
    for each in records:
        later = each.begin_seconds >= begin if each.step is None else each.step >= end
        split[later].append(each)
    return split


def is_over(folder: Path) -> bool:
    """Whether the run has ended, well or not."""
    beats = [read_beat(path) for path in folder.glob("rank-*.activity")]
    silent = [
        beat is not None and time.monotonic() - beat.seconds > SILENT_START_SECONDS
        for beat in beats
    ]
    ended = RunFolder(folder).report.exists() or any(folder.glob("rank-*.failed"))
    return ended or (bool(silent) and all(silent))
