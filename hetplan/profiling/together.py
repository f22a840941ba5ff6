"""Measuring a layer while the machine's other cores do the same, as they do in training.

Cores share caches, memory and often execution units; a core that is measured while the others rest
is faster than one of many that train. Started by torchrun with one process per core that will
train, the first rank measures and keeps, and the others work on the same units until it is done.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from hetplan.profiling.measure_layers import LayerProfiler, Unit


def processes_together() -> int:
    """Processes that torchrun started to measure at the same time; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def neighbours(profiler: LayerProfiler, work: Sequence[Unit]) -> Iterator[bool]:
    """Whether this process is the one that measures; the others work until it has left.

    Without torchrun it is, and has no neighbours.
    """
    if processes_together() == 1:
        yield True
        return
    dist.init_process_group("gloo")
    try:
        first = dist.get_rank() == 0
        dist.barrier()
        if not first:
            _work_until_all_are_done(profiler, work)
        yield first
        if first:
            dist.barrier()
    finally:
        dist.destroy_process_group()


def _work_until_all_are_done(profiler: LayerProfiler, work: Sequence[Unit]) -> None:
    for unit in work:
        profiler.measure_unit(unit)
    done = dist.barrier(async_op=True)
    while not done.is_completed():
        profiler.measure_unit(work[-1])
