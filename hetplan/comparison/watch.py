"""Judging a run of the reference trainer while it goes on, from its growing folder."""

from __future__ import annotations

import math
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
    known: dict[str, str] = {}
    blocks = told = 0
    over = False
    while not over:
        over = _is_over(folder)  # before reading, so that nothing is missed
        for tail in tails_of(folder):
            tails.setdefault(tail.path, tail)
        new = [placed for tail in tails.values() for placed in tail.more()]
        checks.check(new)
        waiting += [each.record for each in new]
        while waiting and (over or len({each.step for each in waiting} - {None}) > BLOCK):
            inside, waiting = _first_block(waiting)
            suspects = judge(inside, run, blocks_before=blocks).suspects
            now = {f"{each.cause} {each.kind}: {each.name}": each.line for each in suspects}
            lines = [line for name, line in now.items() if name not in known]
            lines += [f"{printable(name)} is over" for name in known if name not in now]
            for line in lines:
                tell(line)
            known, blocks, told = now, blocks + 1, told + len(lines)
        if not over:
            time.sleep(LOOK_SECONDS)
    if not told:
        tell("nobody stood out")


def _first_block(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Those of the first steps, and the rest; flows belong to the time in which they begin."""
    steps = sorted({each.step for each in records if each.step is not None})
    if len(steps) <= BLOCK:
        return list(records), []
    end = steps[BLOCK]
    begin = min(each.begin_seconds for each in records if each.step == end)
    split: tuple[list[Record], list[Record]] = ([], [])
    for each in records:
        split[each.begin_seconds >= begin if each.step is None else each.step >= end].append(each)
    return split


def _is_over(folder: Path) -> bool:
    """Whether the run has ended, well or not."""
    beats = [read_beat(path) for path in folder.glob("rank-*.activity")]
    last = max((beat.seconds for beat in beats if beat is not None), default=math.inf)
    ended = RunFolder(folder).report.exists() or any(folder.glob("rank-*.failed"))
    return ended or time.monotonic() - last > SILENT_START_SECONDS
