"""How one set of processes trains one plan after another: one rank per host of an emulation.

`python -m hetplan.launchers.persistent_ranks FOLDER`, on every host. The processes meet once, at a
store on the control network. Whoever started them then writes one `item-N.json` after another;
for each, the hosts that are named in it open a process group in the order of the plan's ranks,
train, and close it. Rank 0 writes `report-N.json`, a rank that fails writes `host-H.failed`.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.errors import HetplanError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.launchers.run_folder import START_SECONDS
from hetplan.runtime.training import Training

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ITEM_SCHEMA = "hetplan.in-turn/1"
REPORT_SCHEMA = "hetplan.training-report/1"
PORT = 29400
"""Of the meeting point. The control network is the emulation's own: nobody else can have it."""
_LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One plan to train; an item without a training is the last."""

    training: Training | None
    hosts: tuple[int, ...]
    """Number of the host of each rank of the plan, from 0."""


@dataclass(frozen=True)
class TurnFolder:
    """The folder that the processes and whoever started them share."""

    path: Path

    def item(self, number: int) -> Path:
        """What is trained at this turn."""
        return self.path / f"item-{number}.json"

    def report(self, number: int) -> Path:
        """What it measured."""
        return self.path / f"report-{number}.json"

    def failure(self, host: int) -> Path:
        """Why a host failed."""
        return self.path / f"host-{host}.failed"

    def ready(self, host: int) -> Path:
        """There as soon as the host's process waits for items."""
        return self.path / f"host-{host}.ready"

    def log(self, host: int) -> Path:
        """What a host's process printed."""
        return self.path / f"host-{host}.log"


def main(folder: TurnFolder) -> int:
    """Train one item after another; the exit code of this host's process."""
    host = int(os.environ["HETPLAN_HOST_NUMBER"])
    try:
        _train_in_turn(folder, host)
    except Exception as error:
        message = (
            str(error) if isinstance(error, HetplanError) else f"{type(error).__name__}: {error}"
        )
        write_atomically(folder.failure(host), message + "\n")
        traceback.print_exc()
        return 1
    return 0


def _train_in_turn(folder: TurnFolder, host: int) -> None:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    torch.set_num_threads(1)
    store = TCPStore(
        os.environ["HETPLAN_RENDEZVOUS_ADDRESS"],
        PORT,
        is_master=host == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=START_SECONDS),
    )
    write_atomically(folder.ready(host), "")
    number = 0
    while True:
        while not folder.item(number).exists():
            time.sleep(_LOOK_SECONDS)
        item = decode(read_document(folder.item(number)), Item, schema=ITEM_SCHEMA)
        if item.training is None:
            return
        if host in item.hosts:
            _train(folder, number, item.training, item.hosts.index(host), store)
        number += 1


def _train(folder: TurnFolder, number: int, training: Training, rank: int, store: Store) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    from hetplan.profiling.backends import open_backend
    from hetplan.runtime.loop import train

    dist.init_process_group(
        "gloo",
        # What an earlier plan's groups have left in the store is not found under another prefix.
        store=PrefixStore(f"turn-{number}", store),
        rank=rank,
        world_size=len(training.device_kinds),
        timeout=timedelta(seconds=START_SECONDS + training.timeout_seconds),
    )
    try:
        report = train(training, rank, open_backend(training.backend, index=0))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if rank == 0 and report is not None:
        write_atomically(folder.report(number), encode(report, schema=REPORT_SCHEMA))


if __name__ == "__main__":
    sys.exit(main(TurnFolder(Path(sys.argv[1]))))
