"""A rank that goes wrong: as `hetplan.launchers.worker`, until `FAULT` has its turn.

`FAULT` is KIND:RANK:PASS: at this forward pass (counted from 1) the rank raises, or computes for
ever.
"""

from __future__ import annotations

import os
import sys

from hetplan.launchers import worker
from hetplan.launchers.run_folder import RunFolder
from hetplan.runtime.activity import Activity


def train(folder: RunFolder, rank: int, activity: Activity) -> None:
    from hetplan.runtime.passes import Passes

    kind, which, number = os.environ["FAULT"].split(":")
    forward, passes = Passes._forward, [0]

    def faulty(self: Passes, *arguments: object) -> None:
        passes[0] += 1
        if rank == int(which) and passes[0] == int(number):
            if kind == "raise":
                raise ValueError("a matrix of the wrong shape")
            while True:
                pass
        forward(self, *arguments)  # type: ignore[arg-type]

    Passes._forward = faulty  # type: ignore[method-assign, assignment]
    worker._train(folder, rank, activity)


if __name__ == "__main__":
    sys.exit(worker.main(sys.argv[1:], train))
