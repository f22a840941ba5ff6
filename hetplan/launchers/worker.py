"""One rank of a run: `python -m hetplan.launchers.worker FOLDER RANK PARENT`.

FOLDER holds `training.json`. The rank meets the others, trains its part and leaves: rank 0 writes
one line per step to `progress.jsonl` and the report to `report.json`; a rank that fails writes
`rank-N.failed`. What it is doing it tells in `rank-N.activity`; a file `stop` asks the run to leave
after its present step, with a checkpoint where there shall be any. Rank 0 opens the meeting point
at the ranks' own address, on a port that the system gives it, and writes the number to `port`, so
that no port can be taken by another program in between.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.emulation.namespaces import die_with_parent
from hetplan.errors import HetplanError, LaunchError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.launchers.run_folder import MEETING_VARIABLE, START_SECONDS, RunFolder
from hetplan.runtime.activity import Activity, ActivityKind, Heartbeat

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_LOOPBACK = "127.0.0.1"


def main(arguments: list[str], train: Callable[[RunFolder, int, Activity], None]) -> int:
    """Run one rank by `train`; 0, or the process ends here with code 1."""
    folder, rank = RunFolder(Path(arguments[0])), int(arguments[1])
    if sys.platform == "linux":
        # The launcher may have no chance to end its ranks.
        die_with_parent(int(arguments[2]), signal.SIGKILL)
    activity = Activity()
    heartbeat = Heartbeat(activity, folder.activity(rank))
    try:
        train(folder, rank, activity)
    except Exception as error:
        # What it was doing, for the launcher, which looks once the process is gone.
        heartbeat.stop()
        message = (
            str(error) if isinstance(error, HetplanError) else f"{type(error).__name__}: {error}"
        )
        folder.failure(rank).write_text(f"{time.monotonic()} {message}\n")
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # Tidying up would wait for transfers that no peer answers any more.
        os._exit(1)
    # Written at once: while the interpreter unloads libraries, seconds on a busy machine, no thread
    # runs that could, and a rank that was heard of last inside a step would seem to hang.
    activity.begin("its end", kind=ActivityKind.ENDING)
    heartbeat.stop()
    return 0


def _train(folder: RunFolder, rank: int, activity: Activity) -> None:
    activity.begin("import of torch", kind=ActivityKind.LOADING)
    import torch
    import torch.distributed as dist

    from hetplan.profiling.backends import open_backend
    from hetplan.runtime.loop import train
    from hetplan.runtime.telemetry import Recorder
    from hetplan.runtime.training import SCHEMA, Training

    training = decode(read_document(folder.training), Training, schema=SCHEMA)
    torch.set_num_threads(1)
    backend = open_backend(training.backend, index=rank if training.backend == "cuda" else 0)
    timeout = timedelta(seconds=START_SECONDS + training.timeout_seconds)
    world_size = len(training.device_kinds)
    store = meet(folder, rank, world_size, timeout, activity)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    apart = training.backend == "cpu" or all(each.tp == 1 for each in training.plan.replicas)
    recorder = Recorder(folder.telemetry(rank), rank, compute_apart=apart)
    report = train(
        training,
        rank,
        backend,
        on_step=folder.tell if rank == 0 else None,
        stop=lambda done: folder.stop.exists(),
        activity=activity,
        on_rank_step=recorder,
    )
    activity.begin("its end", kind=ActivityKind.ENDING)
    if rank == 0 and report is not None:
        write_atomically(folder.report, encode(report, schema=folder.REPORT_SCHEMA))
    dist.barrier()
    dist.destroy_process_group()


def meet(
    folder: RunFolder, rank: int, world_size: int, timeout: timedelta, activity: Activity
) -> TCPStore:
    """The store of the ranks, when all have come to it; then they connect to each other.

    Loading libraries takes seconds: waiting for the others to start is told apart from connecting.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    others = tuple(other for other in range(world_size) if other != rank)
    activity.begin("wait for all ranks to start", kind=ActivityKind.STARTING)
    address = os.environ.get(MEETING_VARIABLE, _LOOPBACK)
    if rank == 0:
        # Whoever reaches the store can write to it: it listens on the ranks' address alone, not on
        # all interfaces, as it would by itself.
        listening = socket.create_server((address, 0), backlog=world_size)
        port = listening.getsockname()[1]
        store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listening.detach(),
        )
        write_atomically(folder.port, str(port))
    else:
        limit = time.monotonic() + timeout.total_seconds()
        while not folder.port.exists():
            if time.monotonic() > limit:
                raise LaunchError(
                    f"rank 0 did not open a meeting point in {timeout.total_seconds():g} s"
                )
            time.sleep(0.05)
        store = TCPStore(address, int(folder.port.read_text()), is_master=False, timeout=timeout)
    store.set(f"started/{rank}", "")
    store.wait([f"started/{other}" for other in others], timeout)
    activity.begin("opening of connections", others, kind=ActivityKind.CONNECTING)
    return store


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], _train))
