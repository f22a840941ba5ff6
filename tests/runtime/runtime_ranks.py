"""One rank of the tests: trains every case it has a place in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from runtime_cases import CASES_NORM, Case

from hetplan.profiling.backends import CpuBackend
from hetplan.runtime import gradients
from hetplan.runtime.communicator import channels, staging
from hetplan.runtime.gradient_groups import sums_of
from hetplan.runtime.loop import train
from hetplan.runtime.placement import place_ranks
from hetplan.runtime.training import Training


def main(cases: Sequence[Case], rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    gradients.MAX_NORM = CASES_NORM
    staging.CHUNK_BYTES = 1000
    store = dist.FileStore(str(folder / "store"), ranks)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    found = {}
    for case in cases:
        # Host buffers between CPU tensors, which need none: the same bytes, many chunks.
        channels.needs_staging = lambda *_, staged=case.staged: staged
        places = place_ranks(case.plan)
        training = Training(
            model=case.model,
            job=case.job,
            plan=case.plan,
            device_kinds=("cpu",) * len(places),
            backend="cpu",
            pace=None,
            steps=case.steps,
            warmup_steps=1,
            timeout_seconds=60.0,
            sums=sums_of(case.plan, case.machines),
        )
        report = train(training, rank, CpuBackend())
        assert (report is None) == (rank >= len(places))
        if report is None:
            continue
        found[case.name] = {
            "losses": [step.loss for step in report.steps],
            "ranks": [
                [r.step_seconds, r.busy_seconds, r.wait_seconds, r.reduction_seconds]
                for r in report.ranks
            ],
            "sent": [[s.source, s.target, s.traffic, s.bytes_per_step] for s in report.sent],
        }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
