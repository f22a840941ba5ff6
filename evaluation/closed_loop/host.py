"""Trains one plan after another on one host: `python -m evaluation.closed_loop.host`.

One process per host imports torch once and meets the others at a store on the control network. It
reads a path of an item per line of stdin; the hosts of the item open a process group in the order
of the plan's ranks, train, and close it. Rank 0 writes the report beside the item, and each host
answers with a line on stdout.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.launchers.run_folder import START_SECONDS, RunFolder
from hetplan.runtime.training import Training

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ITEM_SCHEMA = "hetplan.closed-loop-item/1"
REPORT_SUFFIX = ".report"
PORT = 29400
"""Of the store. The control network is the emulation's own: nobody else can have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One plan to train."""

    training: Training
    hosts: tuple[int, ...]
    """Number of the host of each rank of the plan, from 0."""


def main() -> None:
    """Train items until stdin ends."""
    # Libraries print to stdout; answers have it for themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    torch.set_num_threads(1)
    host = int(os.environ["HETPLAN_HOST_NUMBER"])
    store = TCPStore(
        os.environ["HETPLAN_RENDEZVOUS_ADDRESS"],
        PORT,
        is_master=host == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=START_SECONDS),
    )
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        path = Path(line.strip())
        item = decode(read_document(path), Item, schema=ITEM_SCHEMA)
        # Keys of earlier process groups stay in the store, under prefixes of their own.
        _train(item, item.hosts.index(host), PrefixStore(path.name, store), path)
        print("done", file=answers, flush=True)


def _train(item: Item, rank: int, store: Store, path: Path) -> None:
    import torch.distributed as dist

    from hetplan.profiling.backends import open_backend
    from hetplan.runtime.loop import train

    training = item.training
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=len(item.hosts),
        timeout=timedelta(seconds=START_SECONDS + training.timeout_seconds),
    )
    try:
        report = train(training, rank, open_backend(training.backend, index=0))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if rank == 0 and report is not None:
        text = encode(report, schema=RunFolder.REPORT_SCHEMA)
        write_atomically(path.with_suffix(REPORT_SUFFIX), text)


if __name__ == "__main__":
    main()
