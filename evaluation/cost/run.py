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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from evaluation.cost.collectives import (
    CollectiveErrors,
    LawRow,
    collective_law_rows,
    collective_rows,
)
from evaluation.cost.long_links import LeftOutErrors, long_link_errors
from evaluation.cost.memory import MemoryErrors, memory_accuracy
from evaluation.cost.replay import (
    AnomalyRow,
    BoundRow,
    ReplayTiming,
    anomalies,
    bound_rows,
    replay_timings,
)
from evaluation.output import table_of
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
from hetplan.units import format_bytes, format_seconds, format_share

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
    collectives: tuple[CollectiveErrors, ...]
    collective_laws: tuple[LawRow, ...] = ()
    """The laws of links without samples, parts of their data left out in turn."""
    long_links: tuple[LeftOutErrors, ...]
    missing: tuple[str, ...]
    """What could not be measured, and why."""


def cost_bench(reference: Path | None, *, cases: int = 1000) -> CostBench:
    """All of it; without reference data its tables are empty and named in `missing`."""
    missing: list[str] = []
    memory: tuple[MemoryErrors, ...] = ()
    collectives: tuple[CollectiveErrors, ...] = ()
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


def cost_tables(bench: CostBench) -> Iterator[Table]:
    """The tables that have rows."""
    yield table_of(
        "One replay, CPU time, warm",
        ("replay", "schedule", "sends"),
        ("stages", "virtual stages", "microbatches", "time"),
        (
            (
                each.what, each.schedule, _sends(each.rendezvous), each.stages,
                each.virtual_stages, each.microbatches, format_seconds(each.cpu_seconds),
            )
            for each in bench.replays
        ),
    )  # fmt: skip
    yield table_of(
        "One estimate, CPU time",
        ("estimate",),
        ("stages", "microbatches", "plans", "time of one"),
        (
            (
                each.what, each.stages, each.microbatches, each.plans,
                format_seconds(each.cpu_seconds),
            )
            for each in bench.estimates
        ),
    )  # fmt: skip
    for title, rows in (("eager", bench.bounds), ("rendezvous", bench.rendezvous_bounds)):
        yield table_of(
            f"Replay over its lower bound less 1, {title} sends",
            ("schedule", "transfers"),
            ("cases", "mean", "p99", "worst", "bound above replay"),
            (
                (
                    each.schedule, each.transfers, each.cases, format_share(each.mean),
                    format_share(each.p99), format_share(each.worst), each.violations,
                )
                for each in rows
            ),
        )  # fmt: skip
    yield table_of(
        "Steps that a faster shared wire makes slower",
        ("sends",),
        ("wires", "pipelines", "cases", "slower", "worst", "worst of the bound"),
        (
            (
                _sends(each.rendezvous), each.wires, each.pipelines, each.cases,
                f"{each.share:.1%}", f"{each.worst_excess:.2%}", f"{each.worst_of_bound:.1%}",
            )
            for each in bench.anomalies
        ),
    )  # fmt: skip
    yield from _reference_tables(bench)


def _reference_tables(bench: CostBench) -> Iterator[Table]:
    """Those that stand on published measurements."""
    if bench.memory:
        yield table_of(
            "Memory against published runs",
            ("runs",),
            ("rows", "suspect", "mean error", "worst", "constant"),
            (
                (
                    each.group, each.rows, each.suspect_rows, f"{each.mean_error:.2%}",
                    f"{each.worst_error:.2%}",
                    format_bytes(each.constant_bytes) if each.constant_bytes else "none",
                )
                for each in bench.memory
            ),
        )  # fmt: skip
    yield from _link_tables(bench)


def _link_tables(bench: CostBench) -> Iterator[Table]:
    if bench.collectives:
        yield table_of(
            "Collectives from figures alone against published measurements",
            ("source", "group", "algorithm"),
            ("rows", "mean error", "predicted over measured"),
            (
                (
                    each.source, each.group, each.algorithm, each.rows,
                    f"{each.mean_error:.1%}", f"{each.median_ratio:.3f}",
                )
                for each in bench.collectives
            ),
        )  # fmt: skip
    if bench.collective_laws:
        yield table_of(
            "Laws of links without samples, one source or number of nodes left out in turn",
            ("law", "left out"),
            ("rows", "mean error", "median", "largest"),
            (
                (
                    each.law, each.left_out, each.rows, f"{each.mean_error:.1%}",
                    f"{each.median_error:.1%}", f"{each.worst_error:.0%}",
                )
                for each in bench.collective_laws
            ),
        )  # fmt: skip
    if bench.long_links:
        yield table_of(
            "Long links, every pair of cities left out in turn",
            ("model",),
            ("pairs", "mean error", "median", "largest", "inside the interval"),
            (
                (
                    each.model.value, each.pairs, f"{each.mean:.1%}", f"{each.median:.1%}",
                    f"{each.largest:.1%}", f"{each.covered:.0%}",
                )
                for each in bench.long_links
            ),
        )  # fmt: skip


def _sends(rendezvous: bool) -> str:
    return "rendezvous" if rendezvous else "eager"
