"""Measure layers, operators or a link of this machine into a profile store.

Each function measures what the store does not have, keeps every sample before the next is
measured, and returns all samples of the shapes that were wanted.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from hetplan.cluster.catalogue import load_catalogue
from hetplan.errors import InputError, ProfileError
from hetplan.job.kernels import job_on
from hetplan.job.trainer import trainer_settings
from hetplan.model.spec import LayerKind
from hetplan.profiling.backends import Backend, open_backend
from hetplan.profiling.grid import ShapeOptions
from hetplan.profiling.measure_layers import Unit, has_pace, unit_work, units
from hetplan.profiling.measure_links import LinkCase, LinkProfiler, link_cases, process_group
from hetplan.profiling.measure_operators import operator_units
from hetplan.profiling.measure_operators import unit_work as operator_unit_work
from hetplan.profiling.needs import link_case, link_sizes
from hetplan.profiling.pacing import SAMPLE_DEBT_LIMIT_SECONDS, PacedKind, Pacer
from hetplan.profiling.provenance import provenance_here
from hetplan.profiling.samples import (
    SHAPE_COLUMNS,
    LayerSample,
    LinkSample,
    OperatorSample,
    ProfileSet,
    Provenance,
    Shape,
)
from hetplan.profiling.store import LayerWriter, LinkWriter, OperatorWriter, SampleWriter
from hetplan.profiling.timing import Timing
from hetplan.profiling.work import Work, measure_all

SampleT = TypeVar("SampleT", LayerSample, OperatorSample)

ShowProgress = Callable[[int, int, float | None, str], None]
"""Called with finished, total, seconds left and what was measured last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """Where and how to measure."""

    store: Path
    device: str | None = None
    """torch device type; None: the first accelerator here, else the CPU."""
    kind: str | None = None
    """Device kind of the samples; None: the catalogue's."""
    threads: int = 1
    budget_seconds: float = float("inf")
    again: bool = False
    """Measure what the store already has, and keep both."""
    pace: PacedKind | None = None
    """Device that this CPU plays."""
    command: str = ""
    """Command line for the provenance."""
    progress: ShowProgress = lambda *_: None
    tell: Callable[[str], None] = lambda _: None
    """Called with a line for the person who waits."""


def processes_together() -> int:
    """Processes that torchrun started to measure at the same time; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def profile_layers(measuring: Measuring, shapes: ShapeOptions) -> ProfileSet | None:
    """Measure layers; None in processes that only keep other cores busy (`core_contention`)."""
    backend = open_backend(measuring.device)
    pace = measuring.pace
    if pace is not None and backend.is_accelerator:
        raise InputError("--pace plays another device on a CPU; add --device cpu")
    wanted = units(shapes.grid(is_accelerator=backend.is_accelerator))
    if pace is not None:
        wanted = _paced_units(wanted, pace, measuring.tell)
    provenance = _provenance(measuring, backend, together=processes_together())
    pacer = Pacer(pace, debt_limit_seconds=SAMPLE_DEBT_LIMIT_SECONDS) if pace else None
    work = [unit_work(unit, provenance.device, backend, pacer) for unit in wanted]
    with core_contention(work) as measures:
        if not measures:
            return None
        layers = measure_into(measuring, work, LayerWriter(measuring.store, provenance))
    if pacer is not None and pacer.overruns:
        measuring.tell(
            f"{pacer.overruns} of {pacer.passes} paced passes took longer than their nominal "
            "time; slow the pace down, or free the machine"
        )
    return ProfileSet(layers=layers, links=(), provenance=(provenance,))


def profile_operators(measuring: Measuring, shapes: ShapeOptions) -> ProfileSet:
    """Measure operators of the layers, with the kernels of the job's trainer."""
    if processes_together() > 1:
        raise InputError("operators are measured by one process; start it without torchrun")
    backend = open_backend(measuring.device)
    provenance = _provenance(measuring, backend)
    kernels = None
    if shapes.job is not None:
        known = next((k for k in load_catalogue() if k.kind == provenance.device), None)
        job = shapes.job if known is None else job_on(known, shapes.job)
        kernels = trainer_settings(job).kernels
    wanted = operator_units(shapes.grid(is_accelerator=backend.is_accelerator), kernels)
    work = [operator_unit_work(unit, provenance.device, backend) for unit in wanted]
    operators = measure_into(measuring, work, OperatorWriter(measuring.store, provenance))
    return ProfileSet(layers=(), links=(), provenance=(provenance,), operators=operators)


def measure_into(
    measuring: Measuring, work: Sequence[Work], writer: SampleWriter[SampleT]
) -> tuple[SampleT, ...]:
    """Measure what the population lacks of this work; all its samples of this work."""

    def failed(each: Work, error: Exception) -> None:
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        measuring.tell(f"not measured: {each.name}: {reason}")

    samples, fresh = measure_missing(
        work,
        writer,
        again=measuring.again,
        budget_seconds=measuring.budget_seconds,
        on_progress=measuring.progress,
        on_failure=failed,
    )
    names = SHAPE_COLUMNS[writer.sample_type]
    wanted = {tuple(keys[name] for name in names) for each in work for keys in each.keys}
    if missing := len(wanted - samples.keys()):
        measuring.tell(
            f"{missing} of {len(wanted)} samples are missing; the same command goes on from there"
        )
    result = tuple(sample for shape, sample in samples.items() if shape in wanted)
    measuring.tell(f"{fresh} samples measured, {len(result)} in {writer.folder}")
    return result


def measure_missing(
    work: Sequence[Work],
    writer: SampleWriter[SampleT],
    *,
    on_failure: Callable[[Work, Exception], None],
    again: bool = False,
    budget_seconds: float = float("inf"),
    on_progress: ShowProgress = lambda *_: None,
) -> tuple[dict[Shape, SampleT], int]:
    """Measure what the population lacks (`again`: all) of this work: its samples, how many are new.

    Raises ProfileError where the device's clock does not advance.
    """
    names = SHAPE_COLUMNS[writer.sample_type]
    columns = tuple(field.name for field in fields(writer.sample_type))
    samples: dict[Shape, SampleT] = {sample.shape: sample for sample in writer.samples}
    fresh: set[Shape] = set()

    def has(keys: dict[str, Any]) -> bool:
        return tuple(keys[name] for name in names) in (fresh if again else samples)

    def keep(row: dict[str, Any]) -> None:
        if row["median_seconds"] <= 0:
            raise ProfileError(f"the clock of {row['device']} did not advance")
        values = {name: row[name] for name in columns if name in row}
        today = datetime.date.today().isoformat()
        sample = writer.sample_type(**values | {"measured_on": today})
        writer.append(sample)
        samples[sample.shape] = sample
        fresh.add(sample.shape)

    measure_all(
        work,
        has,
        keep,
        budget_seconds=budget_seconds,
        on_progress=on_progress,
        on_failure=on_failure,
    )
    return samples, len(fresh)


def profile_link(
    measuring: Measuring,
    link: str,
    shapes: ShapeOptions,
    *,
    sizes: Sequence[int] = (),
    groups: Sequence[int] = (),
) -> ProfileSet | None:
    """Measure the link between the ranks of this torchrun job; None but on rank 0."""
    if processes_together() < 2:
        raise InputError(
            "a link needs ranks on both of its ends: torchrun --nproc-per-node 2 -m hetplan "
            f"profile links {link}"
        )
    backend = open_backend(measuring.device, index=int(os.environ.get("LOCAL_RANK", "0")))
    sizes = sizes or link_sizes(shapes.model, shapes.job, is_accelerator=backend.is_accelerator)
    cases = link_cases(processes_together(), sizes, groups=groups)
    with process_group(backend) as rank:
        provenance = _provenance(measuring, backend)
        if rank:
            LinkProfiler(backend).run(cases, on_sample=lambda *_: None)
            return None
        links = _lead(measuring, link, backend, cases, provenance)
    return ProfileSet(layers=(), links=links, provenance=(provenance,))


def _lead(
    measuring: Measuring,
    link: str,
    backend: Backend,
    cases: Sequence[LinkCase],
    provenance: Provenance,
) -> tuple[LinkSample, ...]:
    """Rank 0's part: it keeps the samples."""
    writer = LinkWriter(measuring.store, link, provenance)
    samples = {link_case(sample): sample for sample in writer.samples}
    measured = () if measuring.again else tuple(samples)
    started = time.monotonic()

    def keep(case: LinkCase, timing: Timing, finished: int, total: int) -> None:
        sample = LinkSample(
            link=link,
            operation=case.operation,
            backend=backend.collectives,
            group_size=case.group_size,
            message_bytes=case.message_bytes,
            median_seconds=timing.median_seconds,
            p10_seconds=timing.p10_seconds,
            p90_seconds=timing.p90_seconds,
            repeats=timing.repeats,
            outliers=timing.outliers,
            measured_on=provenance.measured_on,
        )
        writer.append(sample)
        samples[case] = sample
        # Larger messages come last: the estimate is low at first and right at the end.
        left = (time.monotonic() - started) / finished * (total - finished)
        measuring.progress(finished, total, left, f"{case.operation} {case.message_bytes} B")

    LinkProfiler(backend).run(cases, measured=measured, on_sample=keep)
    return tuple(sample for case, sample in samples.items() if case in set(cases))


def _provenance(measuring: Measuring, backend: Backend, *, together: int = 1) -> Provenance:
    return provenance_here(
        backend,
        device=measuring.kind,
        threads=measuring.threads,
        command=measuring.command,
        pace=measuring.pace,
        together=together,
    )


def _paced_units(
    work: Sequence[Unit], pace: PacedKind, tell: Callable[[str], None]
) -> tuple[Unit, ...]:
    """The units that the pace has times of."""
    paced = tuple(unit for unit in work if has_pace(pace, unit))
    if not any(unit.kind is LayerKind.TRANSFORMER for unit in paced):
        raise InputError(
            f"the pace of device kind {pace.device} has no transformer layer at any microbatch "
            "size and tp of this job"
        )
    if left_out := len(work) - len(paced):
        tell(f"{left_out} of {len(work)} shapes are left out: the pace has no times")
    return paced


@contextmanager
def core_contention(work: Sequence[Work]) -> Iterator[bool]:
    """Measure while the machine's other cores do the same, as they do in training.

    Cores share caches, memory and execution units: one that is measured while the others rest is
    faster than one of many that train. torchrun starts one process per core that will train. Gives
    True in the process that measures; the others work on the same units until it is done.
    """
    if processes_together() == 1:
        yield True
        return
    dist.init_process_group("gloo")
    try:
        measures = dist.get_rank() == 0
        dist.barrier()
        if not measures:
            _work_until_all_are_done(work)
        yield measures
        if measures:
            dist.barrier()
    finally:
        dist.destroy_process_group()


def _work_until_all_are_done(work: Sequence[Work]) -> None:
    for each in work:
        list(each.rows())
    done = dist.barrier(async_op=True)
    while not done.is_completed():
        list(work[-1].rows())
