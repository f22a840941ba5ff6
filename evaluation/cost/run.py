"""What the cost model is worth: its speed, how tight its bounds are, and its errors.

Speed is in CPU seconds of this process, warm: kernels are compiled and the programs of a shape are
there. Replays are called from Python as costs and search call them. Estimates are of plans with 16
stages and 64 microbatches of a 96-layer model on 512 of the 768 devices of two kinds in configs/,
cut at random: no two of them are alike, so what is kept between them are the costs of layers,
transfers, messages and stages of one size. The first plan pays for all that.

Bounds: random uneven pipelines per schedule and length of transfers; step over bound less 1. The
worst cases are tiny (few microbatches, long transfers).

Errors come from the folder of reference data where it is given.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from evaluation.cost.collectives import collective_section, law_section
from evaluation.cost.long_links import long_link_section
from evaluation.cost.memory import memory_section
from evaluation.output import WORDS, Answer, Section
from hetplan.cluster.load import load_cluster
from hetplan.cost.bounds.closed_forms import gpipe_bound_seconds, lower_bound_seconds
from hetplan.cost.estimate import estimate_with
from hetplan.cost.replay.step import replay_seconds, step_ends
from hetplan.cost.replay.times import PipelineTimes
from hetplan.cost.schedules import warmup_depths
from hetplan.cost.step_model.pricer import Pricer
from hetplan.errors import InputError
from hetplan.files.shipped import shipped_folder
from hetplan.job.load import load_job
from hetplan.model.load import load_model
from hetplan.plans.build import Degrees, StageChoice, build_plan
from hetplan.plans.plan import Plan
from hetplan.predict.fit import FittedPredictor
from hetplan.units import format_seconds, format_share

STAGES, MICROBATCHES = 16, 64
"""Of the plans that estimates are timed on."""
_KNOWN, _TIMED, _REPEATS = 400, 100, 5
_SEED = 4
_TARGET_SECONDS = 0.02
"""CPU time of one run, long against the clock's resolution (1 us)."""

TRANSFERS = {"none": 0.0, "small": 0.1, "long": 1.0}
"""Longest send and latency of a hop; a forward pass takes 0.2 to 1."""
ROUNDING = 1e-9
"""Relative; bound and replay add the same times in another order."""
_MAX_STAGES = 16
_MAX_MICROBATCHES = 96
_PER_SHAPE = 25
"""Cases of one number of stages and microbatches; a new shape is compiled anew."""


def cost_answer(reference: Path | None, *, cases: int = 1000) -> Answer:
    """Every table; those of published measurements need the folder `reference`."""
    sections = [_replay_section(replay_timings()), _estimate_section(estimate_timings())]
    for sends in ("eager", "rendezvous"):
        found = bound_rows(cases=cases, rendezvous=sends == "rendezvous")
        sections.append(_bound_section(found, sends))
    missing = []
    if reference is None:
        missing.append("memory, collectives and long links: no folder of reference data was given")
    else:
        for make in (memory_section, collective_section, law_section, long_link_section):
            try:
                sections.append(make(reference))
            except InputError as error:
                missing.append(str(error))
    lines = tuple(f"left out: {line}" for line in missing)
    return Answer(sections=tuple(sections), lines=lines, values={"missing": missing})


def replay_timings(repeats: int = _REPEATS) -> pandas.DataFrame:
    """The search's 1F1B kernel, the schedules without shared wires, and shared wires."""
    rows = []
    for stages, microbatches in ((16, 64), (64, 512)):
        for rendezvous in (False, True):
            for what, schedule, chunks, wires in (
                ("search kernel", "1f1b", 1, 0),
                ("no shared wire", "1f1b", 1, 0),
                ("no shared wire", "gpipe", 1, 0),
                ("no shared wire", "zb-h1", 1, 0),
                ("no shared wire", "interleaved-1f1b", 2, 0),
                ("3 shared wires", "1f1b", 1, 3),
            ):
                times = random_pipeline(
                    np.random.default_rng(_SEED), schedule, (stages, chunks), microbatches,
                    longest=0.5, wires=wires,
                )  # fmt: skip
                call = _search_call if what == "search kernel" else _general_call
                rows.append(
                    {
                        "what": what,
                        "schedule": schedule,
                        "sends": "rendezvous" if rendezvous else "eager",
                        "stages": stages,
                        "virtual_stages": chunks,
                        "microbatches": microbatches,
                        "cpu_seconds": _seconds_of_call(call(times, rendezvous), repeats),
                    }
                )
    return pandas.DataFrame(rows)


def _search_call(times: PipelineTimes, rendezvous: bool) -> Callable[[], object]:
    arguments = (*_arguments(times), np.array(times.warmup, dtype=np.int64))
    tail = np.zeros(times.num_stages)
    return lambda: replay_seconds(*arguments, times.num_microbatches, tail, rendezvous)


def _general_call(times: PipelineTimes, rendezvous: bool) -> Callable[[], object]:
    return lambda: step_ends((times,), rendezvous=rendezvous)


def _arguments(times: PipelineTimes) -> tuple[Any, ...]:
    """What kernels of one chunk per stage take first."""
    return (
        np.ascontiguousarray(times.forward[:, 0]),
        np.ascontiguousarray(times.backward[:, 0]),
        times.send_forward,
        times.send_backward,
        times.wire_latency,
        times.rendezvous_extra,
    )


def _seconds_of_call(call: Callable[[], object], repeats: int) -> float:
    """The least over `repeats` runs of many calls."""
    call()  # compiles and fills the store of programs
    begin = time.process_time()
    call()
    count = max(1, int(_TARGET_SECONDS / max(time.process_time() - begin, 1e-6)))
    best = float("inf")
    for _ in range(repeats):
        begin = time.process_time()
        for _ in range(count):
            call()
        best = min(best, (time.process_time() - begin) / count)
    return best


def estimate_timings(
    known: int = _KNOWN, timed: int = _TIMED, repeats: int = _REPEATS
) -> pandas.DataFrame:
    """Of the first plan, of plans after `known` others, and of one whole estimate."""
    pricer, plans = random_plans(known + repeats * timed)

    def seconds(some: list[Plan]) -> float:
        started = time.process_time()
        for plan in some:
            pricer.step(plan)
        return time.process_time() - started

    first = seconds(plans[:1])
    seconds(plans[1:known])
    # The least of several runs: what the machine does beside only adds.
    runs = [plans[known + at * timed : known + (at + 1) * timed] for at in range(repeats)]
    later = min(map(seconds, runs)) / timed
    started = time.process_time()
    estimate_with(pricer, plans[0])
    whole = time.process_time() - started
    rows = (
        ("first plan, nothing known", 1, first),
        ("step with memory, other cuts", timed, later),
        ("estimate with break-down and interval", 1, whole),
    )
    found = pandas.DataFrame(rows, columns=["what", "plans", "cpu_seconds"])
    return found.assign(stages=STAGES, microbatches=MICROBATCHES)


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


def bound_rows(*, cases: int = 1000, seed: int = 0, rendezvous: bool = False) -> pandas.DataFrame:
    """One row per schedule and length of transfers, `cases` pipelines each; shares of the bound.

    `violations`: cases in which the bound was above the replay; each is a fault of hetplan.
    """
    rows: list[dict[str, Any]] = []
    for schedule in ("1f1b", "gpipe"):
        for name, longest in TRANSFERS.items():
            rng = np.random.default_rng([seed, len(rows)])
            pipelines = _random_pipelines(schedule, longest, cases, rng, rendezvous)
            over = np.array([_over(times, rendezvous) for times in pipelines])
            rows.append(
                {
                    "schedule": schedule,
                    "transfers": name,
                    "cases": len(over),
                    "mean": float(over.mean()),
                    "p99": float(np.quantile(over, 0.99)),
                    "worst": float(over.max()),
                    "violations": int((over < -ROUNDING).sum()),
                }
            )
    return pandas.DataFrame(rows)


def _over(times: PipelineTimes, rendezvous: bool) -> float:
    (ends,) = step_ends([times], rendezvous=rendezvous)
    m, tail = times.num_microbatches, np.zeros(times.num_stages)
    if times.schedule == "gpipe":
        bound = gpipe_bound_seconds(*_arguments(times), m, tail, rendezvous)
    else:
        warmup = np.array(times.warmup, np.int64)
        bound = lower_bound_seconds(*_arguments(times), warmup, m, tail, rendezvous)
    return float(ends.max()) / float(bound) - 1.0


def _random_pipelines(
    schedule: str, longest: float, cases: int, rng: np.random.Generator, rendezvous: bool
) -> Iterator[PipelineTimes]:
    for first in range(0, cases, _PER_SHAPE):
        stages = int(rng.integers(1, _MAX_STAGES + 1))
        m = int(rng.integers(1, _MAX_MICROBATCHES + 1))
        warmup = np.array(warmup_depths(schedule, stages, m))
        if schedule == "1f1b" and rng.random() < 0.3:
            # Deeper before some boundary, as to hide a long link behind it; a rendezvous schedule
            # waits for itself where neighbours' depths differ by more than one.
            extra = 0 if rendezvous else int(rng.integers(1, 4))
            warmup[: int(rng.integers(0, stages + 1))] += extra
        for _ in range(min(_PER_SHAPE, cases - first)):
            times = random_pipeline(rng, schedule, (stages, 1), m, longest=longest)
            yield replace(times, warmup=tuple(warmup.tolist()))


def random_pipeline(
    rng: np.random.Generator,
    schedule: str,
    shape: tuple[int, int],
    microbatches: int,
    *,
    longest: float,
    wires: int = 0,
) -> PipelineTimes:
    """Uneven passes of `shape` (stages, chunks) and transfers of up to `longest`.

    Each direction of each hop crosses one of `wires` shared wires, or none of them.
    """
    stages, chunks = shape
    hops = stages * chunks - 1
    # Chunks of a stage run on the same devices and differ by some layers only.
    forward = rng.uniform(0.2, 1.0, (stages, 1)) * rng.uniform(0.8, 1.25, shape)
    backward = forward * rng.uniform(1.3, 2.6, shape)
    # About half of a backward pass is for the weights (arXiv 2401.10241, table 1).
    weight = backward * 0.5 * (schedule == "zb-h1")
    sends = rng.uniform(0.0, longest, (4, hops))
    shared, links = np.zeros((2, hops)), np.full((2, hops), -1)
    if wires:
        shared, links = rng.uniform(0.0, longest, (2, hops)), rng.integers(-1, wires, (2, hops))
    return PipelineTimes(
        schedule=schedule,
        num_microbatches=microbatches,
        warmup=tuple(warmup_depths(schedule, stages, microbatches, chunks)),
        forward=forward,
        backward=backward - weight,
        weight=weight,
        send_forward=sends[0],
        send_backward=sends[1],
        wire_latency=sends[2],
        rendezvous_extra=sends[3],
        link_forward=links[0],
        link_backward=links[1],
        shared_forward=shared[0],
        shared_backward=shared[1],
    )


def _replay_section(found: pandas.DataFrame) -> Section:
    return Section(
        name="replays",
        title="One replay, CPU time, warm",
        frame=found,
        columns={
            "replay": ("what", WORDS),
            "schedule": ("schedule", WORDS),
            "sends": ("sends", WORDS),
            "stages": ("stages", "{:d}"),
            "virtual stages": ("virtual_stages", "{:d}"),
            "microbatches": ("microbatches", "{:d}"),
            "time": ("cpu_seconds", format_seconds),
        },
    )


def _estimate_section(found: pandas.DataFrame) -> Section:
    return Section(
        name="estimates",
        title="One estimate, CPU time",
        frame=found,
        columns={
            "estimate": ("what", WORDS),
            "stages": ("stages", "{:d}"),
            "microbatches": ("microbatches", "{:d}"),
            "plans": ("plans", "{:d}"),
            "time of one": ("cpu_seconds", format_seconds),
        },
    )


def _bound_section(found: pandas.DataFrame, sends: str) -> Section:
    return Section(
        name="bounds" if sends == "eager" else "rendezvous_bounds",
        title=f"Replay over its lower bound less 1, {sends} sends",
        frame=found,
        columns={
            "schedule": ("schedule", WORDS),
            "transfers": ("transfers", WORDS),
            "cases": ("cases", "{:d}"),
            "mean": ("mean", format_share),
            "p99": ("p99", format_share),
            "worst": ("worst", format_share),
            "bound above replay": ("violations", "{:d}"),
        },
    )
