import os
import pickle
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hetplan.profiling.backends import CpuBackend
from hetplan.profiling.measure_links import (
    LinkLimits,
    LinkProfiler,
    link_cases,
)

LIMITS = LinkLimits(warmup=1, min_repeats=3, max_repeats=3, seconds=0.01)


def _rank_main(rank: int, world: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    profiler = LinkProfiler(CpuBackend(), LIMITS)
    assert profiler._clock_offset == 0.0
    cases = link_cases(world, (4096,))
    samples, progress = [], []

    def keep(case, timing, finished, total) -> None:
        samples.append((case, timing))
        progress.append((finished, total))

    profiler.run(cases, on_sample=keep)
    held = {case for case, _ in samples[:-2]}
    first = list(samples)
    samples.clear()
    profiler.run(cases, measured=held, on_sample=keep)
    second = list(samples)
    # Ranks of one machine share a clock; as if they did not, the estimate must be near zero.
    if rank == 0:
        for other in range(1, world):
            profiler._answer_pings(other)
    else:
        assert abs(profiler._ping()) < 0.05
    # What the last rank's start means: rank 0 comes late, and that is not the link's time.
    late = profiler._repeat(lambda: dist.barrier(), profiler._control, 0.1 * (rank == 0), 1)
    waited = profiler._gathered(late, profiler._control)
    # Clocks that are wrong by more than a transfer takes give no sample, rather than a made-up one.
    profiler._repeat = lambda run, control, delay, repeats: [(1.0, 1.0)] * repeats
    samples.clear()
    profiler.run(cases, on_sample=keep)
    impossible = list(samples)
    if rank == 0:
        with open(f"{folder}/samples", "wb") as file:
            pickle.dump((first, second, progress, waited, impossible), file)
    else:
        assert not first
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_link_of_three_ranks(tmp_path) -> None:
    world = 3
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_rank_main, args=(world, port, str(tmp_path)), nprocs=world)
    first, second, progress, waited, impossible = pickle.loads((tmp_path / "samples").read_bytes())
    cases = link_cases(world, (4096,))
    assert [case for case, _ in first] == list(cases)
    assert [case for case, _ in second] == list(cases[-2:])
    assert progress[: len(cases)] == [(n + 1, len(cases)) for n in range(len(cases))]
    for _, timing in first:
        assert 0 < timing.median_seconds < 1
        assert timing.p10_seconds <= timing.median_seconds <= timing.p90_seconds
        assert timing.repeats == 3
    assert waited[0] < 0.09
    assert impossible == []
