"""Real ranks for tests: processes forked from a server that has imported torch once."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

RankMain = Callable[[int, int, Path], None]
"""A function of a module of the tests: rank, number of ranks, folder."""

_CONTEXT = multiprocessing.get_context("forkserver")
# The last is what torch imports at the first update: 2 s of CPU, once and not on every rank.
_CONTEXT.set_forkserver_preload(["torch.distributed", "hetplan.runtime.loop", "torch._dynamo"])


def run_ranks(main: RankMain, folder: Path, *, count: int = 4, seconds: float = 120.0) -> None:
    """Run `main` once per rank until all ranks have ended well; each gets a log in the folder."""
    ranks = [
        _CONTEXT.Process(target=_run, args=(main, rank, count, folder)) for rank in range(count)
    ]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(seconds)
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    logs = "\n".join((folder / f"{rank}.log").read_text()[-2000:] for rank in range(count))
    assert codes == [0] * count, logs


def _run(main: RankMain, rank: int, count: int, folder: Path) -> None:
    with (folder / f"{rank}.log").open("wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    code = 0
    try:
        main(rank, count, folder)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # As a rank of a run that failed: tidying up would wait for peers that are gone.
    os._exit(code)
