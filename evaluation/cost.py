"""The speed of the cost model.

Speed is in CPU seconds of this process, warm: kernels are compiled and the programs of a shape are
there. Replays are called from Python as costs and search call them. Estimates are of plans with 16
stages and 64 microbatches of a 96-layer model on 512 of the 768 devices of two kinds in configs/,
cut at random: no two of them are alike, so what is kept between them are the costs of layers,
transfers, messages and stages of one size. The first plan pays for all that.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas

from evaluation.output import WORDS, Answer, Section
from hetplan.cluster.load import load_cluster
from hetplan.cost.estimate import estimate_with
from hetplan.cost.replay.ends import step_ends
from hetplan.cost.replay.times import PipelineTimes, replay_seconds
from hetplan.cost.schedules import warmup_depths
from hetplan.cost.step_model.pricer import Pricer
from hetplan.files.shipped import shipped_folder
from hetplan.job.load import load_job
from hetplan.model.load import load_model
from hetplan.plans.layout import Layout, plan_of_layout
from hetplan.plans.plan import Plan
from hetplan.predict.fit import FittedPredictor
from hetplan.units import format_seconds

STAGES, MICROBATCHES = 16, 64
"""Of the plans that estimates are timed on."""
_KNOWN, _TIMED, _REPEATS = 400, 100, 5
_SEED = 4
_TARGET_SECONDS = 0.02
"""CPU time of one run, long against the clock's resolution (1 us)."""


def cost_answer() -> Answer:
    """Both tables."""
    return Answer(
        sections=(_replay_section(replay_timings()), _estimate_section(estimate_timings()))
    )


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
                times = random_pipeline(schedule, (stages, chunks), microbatches, wires)
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
    plain, after = times.plain(), np.zeros(times.num_stages)
    return lambda: replay_seconds(plain, after, rendezvous)


def _general_call(times: PipelineTimes, rendezvous: bool) -> Callable[[], object]:
    return lambda: step_ends((times,), rendezvous=rendezvous)


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
    layout = Layout(tp=8, dp=4, islands=("mi210",) * 4 + ("a100",) * (STAGES - 4))
    job = load_job(configs / "jobs" / "llama-140b.yaml")
    mixed = replace(job.trainer, mixed_libraries=True)
    job = replace(job, global_batch_size=MICROBATCHES * 4, trainer=mixed)
    drawn = random.Random(seed)
    plans = []
    for _ in range(count):
        cuts = [0, *sorted(drawn.sample(range(1, model.num_layers), STAGES - 1)), model.num_layers]
        layers = tuple(stop - start for start, stop in pairwise(cuts))
        plans.append(plan_of_layout(replace(layout, layers=layers), model, cluster, job))
    return Pricer(model, cluster, job, FittedPredictor.datasheet_only()), plans


def random_pipeline(
    schedule: str, shape: tuple[int, int], microbatches: int, wires: int
) -> PipelineTimes:
    """Uneven passes of `shape` (stages, chunks); a forward pass takes 0.2 to 1, a transfer to 0.5.

    Each direction of each hop crosses one of `wires` shared wires, or none of them.
    """
    rng, (stages, chunks) = np.random.default_rng(_SEED), shape
    hops = stages * chunks - 1
    forward = rng.uniform(0.2, 1.0, shape)
    backward = forward * rng.uniform(1.3, 2.6, shape)
    # About half of a backward pass is for the weights (arXiv 2401.10241, table 1).
    weight = backward * 0.5 * (schedule == "zb-h1")
    times = rng.uniform(0.0, 0.5, (6, hops))
    links = rng.integers(-1, wires, (2, hops)) if wires else np.full((2, hops), -1)
    return PipelineTimes(
        schedule=schedule,
        num_microbatches=microbatches,
        warmup=tuple(warmup_depths(schedule, stages, microbatches, chunks)),
        forward=forward,
        backward=backward - weight,
        weight=weight,
        send_forward=times[0],
        send_backward=times[1],
        wire_latency=times[2],
        rendezvous_extra=times[3],
        link_forward=links[0],
        link_backward=links[1],
        shared_forward=times[4],
        shared_backward=times[5],
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
