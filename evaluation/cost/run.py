"""What the cost model is worth: its speed, and its errors on published measurements.

Speed in CPU seconds of this process, warm. Plans are those of 16 stages and 64 microbatches of a
96-layer model on 512 of the 768 devices of two kinds in configs/, cut at random: no two of them are
alike, so what is kept between them are the costs of layers, transfers, messages and stages of one
size. The first plan pays for all that.

Errors come from the folder of reference data where it is given.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evaluation.cost.bounds import BoundRow, bound_rows
from evaluation.cost.collective_laws import LawRow
from evaluation.cost.collectives import CollectiveRow, collective_law_rows, collective_rows
from evaluation.cost.long_link_models import LeftOutErrors
from evaluation.cost.long_links import long_link_errors
from evaluation.cost.memory import MemoryErrors, memory_accuracy
from evaluation.cost.replay import AnomalyRow, ReplayTiming, anomalies, replay_timings
from hetplan.cluster.load import load_cluster
from hetplan.cost.estimate import estimate_with
from hetplan.cost.priced.pricer import Pricer
from hetplan.errors import InputError
from hetplan.files.shipped import shipped_folder
from hetplan.job.load import load_job
from hetplan.model.load import load_model
from hetplan.plans.build import Degrees, StageChoice, build_plan
from hetplan.plans.plan import Plan
from hetplan.predict.fit import FittedPredictor

STAGES, MICROBATCHES = 16, 64
"""Of the plans that replays and estimates are timed on."""

_KNOWN, _TIMED, _REPEATS = 400, 100, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateTiming:
    """CPU time of one plan."""

    what: str
    stages: int
    microbatches: int
    plans: int
    cpu_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBench:
    """Every table of `python -m evaluation cost`; errors are fractions, times seconds."""

    replays: tuple[ReplayTiming, ...]
    estimates: tuple[EstimateTiming, ...]
    bounds: tuple[BoundRow, ...]
    """With eager sends."""
    rendezvous_bounds: tuple[BoundRow, ...]
    """With sends that wait for their receivers."""
    anomalies: tuple[AnomalyRow, ...]
    memory: tuple[MemoryErrors, ...]
    collectives: tuple[CollectiveRow, ...]
    collective_laws: tuple[LawRow, ...] = ()
    """The laws of links without samples, parts of their data left out in turn."""
    long_links: tuple[LeftOutErrors, ...]
    missing: tuple[str, ...]
    """What could not be measured, and why."""


def cost_bench(reference: Path | None, *, cases: int = 1000) -> CostBench:
    """All of it; without reference data its tables are empty and named in `missing`."""
    missing: list[str] = []
    memory: tuple[MemoryErrors, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    laws: tuple[LawRow, ...] = ()
    long_links: tuple[LeftOutErrors, ...] = ()
    if reference is None:
        missing.append("memory, collectives and long links: no folder of reference data was given")
    else:
        try:
            memory = memory_accuracy(reference).groups
        except InputError as error:
            missing.append(f"memory: {error}")
        try:
            collectives = collective_rows(reference)
            laws = collective_law_rows(reference)
        except InputError as error:
            missing.append(f"collectives: {error}")
        try:
            long_links = long_link_errors(reference)
        except InputError as error:
            missing.append(f"long links: {error}")
    return CostBench(
        replays=replay_timings(),
        estimates=estimate_timings(),
        bounds=bound_rows(cases=cases),
        rendezvous_bounds=bound_rows(cases=cases, rendezvous=True),
        anomalies=anomalies(cases=cases),
        memory=memory,
        collectives=collectives,
        collective_laws=laws,
        long_links=long_links,
        missing=tuple(missing),
    )


def estimate_timings(
    known: int = _KNOWN, timed: int = _TIMED, repeats: int = _REPEATS
) -> tuple[EstimateTiming, ...]:
    """Of the first plan, of plans after `known` others, and of one whole estimate."""
    pricer, plans = random_plans(known + repeats * timed)
    rows = [_row("first plan, nothing known", 1, _cpu_seconds(pricer, plans[:1]))]
    for plan in plans[1:known]:
        pricer.step(plan)
    # The least of several runs: what the machine does beside only adds.
    runs = [plans[known + at * timed : known + (at + 1) * timed] for at in range(repeats)]
    best = min(_cpu_seconds(pricer, run) / timed for run in runs)
    rows.append(_row("step with memory, other cuts", timed, best))
    started = time.process_time()
    estimate_with(pricer, plans[0])
    rows.append(_row("estimate with break-down and interval", 1, time.process_time() - started))
    return tuple(rows)


def _row(what: str, plans: int, seconds: float) -> EstimateTiming:
    return EstimateTiming(
        what=what, stages=STAGES, microbatches=MICROBATCHES, plans=plans, cpu_seconds=seconds
    )


def _cpu_seconds(pricer: Pricer, plans: Sequence[Plan]) -> float:
    started = time.process_time()
    for plan in plans:
        pricer.step(plan)
    return time.process_time() - started


def random_plans(count: int, seed: int = 0) -> tuple[Pricer, list[Plan]]:
    """So many plans cut at random, and a pricer that knows none of them."""
    configs = shipped_folder("configs")
    model = load_model(configs / "models" / "llama-140b.yaml")
    cluster = load_cluster(configs / "clusters" / "mixed-768.yaml")
    degrees = Degrees(tp=8, dp=4, microbatch_size=1)
    job = replace(
        load_job(configs / "jobs" / "llama-140b.yaml"),
        global_batch_size=MICROBATCHES * degrees.dp * degrees.microbatch_size,
    )
    drawn = random.Random(seed)
    islands = ["mi210"] * 4 + ["a100"] * (STAGES - 4)
    plans = []
    for _ in range(count):
        cuts = [0, *sorted(drawn.sample(range(1, model.num_layers), STAGES - 1)), model.num_layers]
        choices = [
            StageChoice(island=island, transformer_layers=stop - start)
            for island, start, stop in zip(islands, cuts, cuts[1:], strict=False)
        ]
        plans.append(build_plan(model, cluster, job, choices, degrees))
    return Pricer(model, cluster, job, FittedPredictor.datasheet_only()), plans
