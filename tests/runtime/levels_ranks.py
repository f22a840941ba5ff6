"""One of six ranks of the tests: sums every case that it has a place in; rank, ranks, folder."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

RANKS = 6
FLOATS = "float32"


@dataclass(frozen=True)
class LevelCase:
    name: str
    ranks: tuple[int, ...]
    levels: tuple[tuple[int, ...], ...]
    count: int
    dtype: str = FLOATS
    staged: bool = False


def _drawn(seed: int) -> LevelCase:
    """Any ranks in any order, in any units, with messages from shorter than the group on."""
    draw = random.Random(seed)
    ranks = tuple(draw.sample(range(RANKS), draw.randint(2, RANKS)))
    units = tuple(draw.randint(0, 2) for _ in ranks)
    outer = [draw.randint(0, 1) for _ in range(3)]
    levels = (units, tuple(outer[unit] for unit in units))[: draw.randint(0, 2)]
    count = draw.choice((1, 2, 3, 5, 17, 100, 70_001, 300_000))
    dtype = draw.choice((FLOATS, FLOATS, "bfloat16"))
    staged = draw.random() < 0.4
    name = f"{seed}: {len(ranks)} ranks, {levels}, {count} {dtype}{', staged' * staged}"
    return LevelCase(name, ranks, levels, count, dtype, staged)


CASES = (
    LevelCase("3 + 1", (0, 1, 2, 3), ((0, 0, 0, 1),), 600_000),
    LevelCase("2 + 2", (0, 1, 2, 3), ((0, 0, 1, 1),), 600_000),
    LevelCase("3 + 2 + 1", (0, 1, 2, 3, 4, 5), ((0, 0, 0, 1, 1, 2),), 70_001, staged=True),
    *(_drawn(seed) for seed in range(12)),
)


def contributions(case: LevelCase, step: int) -> list[list[float]]:
    """What each rank of the case puts in, again and again up to the message's length."""
    draw = random.Random(f"{case.name} {step}")
    length = min(case.count, 50)
    return [[draw.uniform(-1, 1) for _ in range(length)] for _ in case.ranks]


def main(rank: int, ranks: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    from hetplan.cost.network.segments import TrafficClass
    from hetplan.runtime.communicator.channels import SentBytes, open_channel

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    found = defaultdict(list)
    for case in CASES:
        sent = SentBytes(float)
        channel = open_channel(
            case.ranks,
            rank,
            sent,
            backend="gloo",
            timeout=limit,
            staged=case.staged,
            levels=case.levels,
        )
        if channel is None:
            continue
        tensor = torch.zeros(case.count, dtype=getattr(torch, case.dtype))
        summed = channel.sum_of(tensor, TrafficClass.DATA_PARALLEL)
        for step in range(2):
            if step == 1:
                summed.expect()
            mine = torch.tensor(contributions(case, step)[case.ranks.index(rank)])
            repeated = mine.repeat(-(-case.count // len(mine)))[: case.count]
            tensor.copy_(repeated)
            summed.start().wait()
            whole = torch.tensor(contributions(case, step), dtype=torch.float64).sum(0)
            expected = whole.repeat(-(-case.count // len(mine)))[: case.count]
            data = tensor.view(torch.uint8).numpy().tobytes()
            found[case.name].append(
                {
                    "bits": sha256(data).hexdigest(),
                    "worst": (tensor.double() - expected).abs().max().item(),
                    "largest": expected.abs().max().item(),
                }
            )
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
