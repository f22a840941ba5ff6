"""A rank that goes wrong: as `hetplan.launchers.worker`, until `FAULT` has its turn.

`FAULT` is `raise:RANK:PASS`: at this forward pass (counted from 1) the rank raises; or
`pretend:RANK:STEPS`, which trains nothing: rank 0 tells of so many steps, without torch.
"""

from __future__ import annotations

import os
import sys

from hetplan.files.encoding import encode
from hetplan.files.writing import write_atomically
from hetplan.launchers import worker
from hetplan.launchers.run_folder import RunFolder
from hetplan.runtime.activity import Activity
from hetplan.runtime.measured import StepRecord, TrainingReport


def pretend(folder: RunFolder, rank: int, steps: int) -> None:
    told = tuple(StepRecord(step=at, seconds=0.5, loss=4.0 - at) for at in range(steps))
    for record in told if rank == 0 else ():
        folder.tell(record)
    if rank == 0:
        report = TrainingReport(steps=told, ranks=(), sent=())
        write_atomically(folder.report, encode(report, schema=folder.REPORT_SCHEMA))


def train(folder: RunFolder, rank: int, activity: Activity) -> None:
    kind, which, number = os.environ["FAULT"].split(":")
    if kind == "pretend":
        return pretend(folder, rank, int(number))
    from hetplan.runtime.passes import Passes

    forward, passes = Passes._forward, [0]

    def faulty(self: Passes, *arguments: object) -> None:
        passes[0] += 1
        if rank == int(which) and passes[0] == int(number):
            raise ValueError("a matrix of the wrong shape")
        forward(self, *arguments)  # type: ignore[arg-type]

    Passes._forward = faulty  # type: ignore[method-assign, assignment]
    worker._train(folder, rank, activity)


if __name__ == "__main__":
    sys.exit(worker.main(sys.argv[1:], train))
