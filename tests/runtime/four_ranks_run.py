"""The real processes of one test module, four or more: their script, their logs, their end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RANKS = 4


def run_four_ranks(script: Path, folder: Path, *, seconds: float = 120.0) -> None:
    """`run_ranks` of four."""
    run_ranks(script, folder, count=RANKS, seconds=seconds)


def run_ranks(script: Path, folder: Path, *, count: int, seconds: float = 120.0) -> None:
    """Run the script once per rank (arguments rank, ranks, folder) until all have ended well."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = []
    try:
        for rank in range(count):
            with (folder / f"{rank}.log").open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, script, str(rank), str(count), folder],
                        stdout=log,
                        stderr=log,
                        env=environment,
                    )
                )
        codes = [rank.wait(timeout=seconds) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    logs = "\n".join((folder / f"{rank}.log").read_text()[-2000:] for rank in range(count))
    assert codes == [0] * count, logs
