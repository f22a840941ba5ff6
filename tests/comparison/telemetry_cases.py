"""Made-up telemetry of a plan, from its own prediction and ledger, with a planted fault.

It tests the judge; nothing here was measured.
"""

from __future__ import annotations

import random
from pathlib import Path

from compare_cases import PREDICTOR, small_result
from cost_fakes import job, model, two_islands
from estimate_plans import plan_with, stages_of
from trainer_plans import result_of

from hetplan.comparison.telemetry import Run
from hetplan.cost.estimate import estimate
from hetplan.runtime.telemetry import COLUMNS, COMPUTE, Record
from hetplan.search.result import SearchResult


def copies() -> SearchResult:
    """Eight copies of the model on the two nodes of island a."""
    asked, shape, machines = job(global_batch_size=32), model(), two_islands()
    stages = stages_of([(0,)], (8,), shape.num_layers + 2, num_microbatches=4)
    plan = plan_with(shape, machines, asked, [(stages, 4)])
    priced = estimate(plan, shape, machines, asked, PREDICTOR)
    return result_of(machines, plan, shape, asked, priced=priced)


def run() -> Run:
    """Eight ranks of equal work on two hosts, four on each."""
    return Run.of(copies())


def stages_apart() -> Run:
    """Two stages of unlike work, each on a host of its own."""
    return Run.of(small_result())


def timers(
    run: Run, rng: random.Random, *, steps: int = 40, slow: dict[int, float], noise: float = 0.05
) -> list[Record]:
    """Compute as predicted, times log-normal noise; ranks wait for the slowest."""
    records = []
    for step in range(steps):
        compute = [
            work.compute_seconds * slow.get(rank, 1.0) * rng.lognormvariate(0.0, noise)
            for rank, work in enumerate(run.ranks)
        ]
        for rank, seconds in enumerate(compute):
            common = {"begin_seconds": float(10 * step), "window_seconds": 9.0}
            parts = {COMPUTE: seconds, "wait": max(compute) - seconds}
            records += [
                Record(**common, rank=rank, step=step, part=part, seconds=each)
                for part, each in parts.items()
            ]
    return records


def flows(
    ends: list[tuple[str, str]],
    rng: random.Random,
    *,
    windows: int = 40,
    slow: dict[tuple[str, str], float] | None = None,
    lossy: dict[tuple[str, str], float] | None = None,
    busy: bool = True,
) -> list[Record]:
    """A megabyte in each window, in 0.1 s unless slow; a lossy flow loses in half of them."""
    records = []
    for window in range(windows):
        for flow in ends:
            seconds = 0.1 * (slow or {}).get(flow, 1.0) * rng.lognormvariate(0.0, 0.05)
            share = (lossy or {}).get(flow, 0.0) * (rng.random() < 0.5)
            records.append(
                Record(
                    begin_seconds=float(10 * window),
                    window_seconds=9.0,
                    source=flow[0],
                    target=flow[1],
                    bytes=1e6,
                    busy_seconds=seconds if busy else None,
                    resent_bytes=share * 1e6 if busy else None,
                )
            )
    return records


def csv_text(records: list[Record]) -> str:
    return "".join(f"{line}\n" for line in (",".join(COLUMNS), *(each.row for each in records)))


def write(folder: Path, text: str, name: str = "telemetry.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path
