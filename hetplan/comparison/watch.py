"""Judging a run of the reference trainer while it goes on, from its growing folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from hetplan.comparison.suspects import blocks, judge_block
from hetplan.comparison.telemetry import Run, Tail, check, tails_of
from hetplan.errors import InputError, printable
from hetplan.launchers.run_folder import RunFolder
from hetplan.launchers.watching import SILENT_START_SECONDS
from hetplan.runtime.activity import read_beat
from hetplan.runtime.telemetry import Record

LOOK_SECONDS = 1.0


def watch(folder: Path, run: Run, tell: Callable[[str], None]) -> None:
    """Tell each change of who stands out once; return when the run has ended.

    Each block of steps is judged by itself.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder of a run (hetplan launch --log-folder)")
    tails, waiting = dict[Path, Tail](), list[Record]()
    ends, known = dict[tuple[str, str, int | None, str], float](), dict[str, str]()
    number, told, over = 0, 0, False
    while not over:
        over = _is_over(folder)  # before reading, so that nothing is missed
        for tail in tails_of(folder):
            tails.setdefault(tail.path, tail)
        waiting += check([new for tail in tails.values() for new in tail.more()], run, ends)
        # A block is whole when the next one could be judged.
        *whole, waiting = blocks(waiting)
        for block in [*whole, waiting] if over else whole:
            number += 1
            suspects, _ = judge_block(block, run, number)
            now = {f"{each.cause} {each.kind}: {each.name}": each.line for each in suspects}
            lines = [line for name, line in now.items() if name not in known]
            lines += [f"{printable(name)} is over" for name in known if name not in now]
            for line in lines:
                tell(line)
            known, told = now, told + len(lines)
        if not over:
            time.sleep(LOOK_SECONDS)
    if not told:
        tell("nobody stood out")


def _is_over(folder: Path) -> bool:
    """Whether the run has ended, well or not."""
    beats = [read_beat(path) for path in folder.glob("rank-*.activity")]
    last = max((beat.seconds for beat in beats if beat is not None), default=math.inf)
    ended = RunFolder(folder).report.exists() or any(folder.glob("rank-*.failed"))
    return ended or time.monotonic() - last > SILENT_START_SECONDS
