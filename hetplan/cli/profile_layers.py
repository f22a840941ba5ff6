"""What `hetplan profile` does on one device: measure layers, keep them, show them."""

from __future__ import annotations

import datetime
from dataclasses import replace

from hetplan.cli.options import say
from hetplan.cli.profile_request import ProfileRequest, command_line
from hetplan.cli.profile_tables import show_layers
from hetplan.cli.progress import ProgressLine
from hetplan.cluster.catalogue import kind_called, load_catalogue
from hetplan.errors import InputError
from hetplan.model.spec import LayerKind
from hetplan.profiling.backends import Backend, default_backend, open_backend, use_threads
from hetplan.profiling.circumstances import circumstances
from hetplan.profiling.measure_layers import (
    LayerProfiler,
    Shape,
    Unit,
    has_pace,
    units,
)
from hetplan.profiling.pacing import SAMPLE_DEBT_LIMIT_SECONDS, PacedKind, Pacer
from hetplan.profiling.samples import LayerSample, ProfileSet, Provenance
from hetplan.profiling.store import LayerWriter
from hetplan.profiling.timing import ACCELERATOR_LIMITS, CPU_LIMITS
from hetplan.profiling.together import neighbours, processes_together


def profile_layers(request: ProfileRequest) -> None:
    """Measure what the store does not have yet; print everything that was asked for."""
    if request.link is not None:
        raise InputError(
            "--link needs ranks on both of its ends: torchrun --nproc-per-node 2 -m hetplan "
            f"profile --link {request.link}"
        )
    backend = open_backend(request.device or default_backend())
    pace = request.paced_kind()
    if pace is not None and backend.is_accelerator:
        raise InputError("--pace plays another device on a CPU; add --device cpu")
    work = _work(request, backend, pace)
    provenance = describe(request, backend, pace, together=processes_together())
    pacer = Pacer(pace, debt_limit_seconds=SAMPLE_DEBT_LIMIT_SECONDS) if pace else None
    profiler = LayerProfiler(
        backend,
        device=provenance.device,
        limits=ACCELERATOR_LIMITS if backend.is_accelerator else CPU_LIMITS,
        pacer=pacer,
    )
    with neighbours(profiler, work) as measures:
        if measures:
            _measure_and_keep(request, profiler, work, provenance)


def _measure_and_keep(
    request: ProfileRequest,
    profiler: LayerProfiler,
    work: tuple[Unit, ...],
    provenance: Provenance,
) -> None:
    writer = LayerWriter(request.store_folder, provenance)
    pacer = profiler.pacer
    wanted = {key for unit in work for key in profiler.shapes(unit)}
    held = {sample.shape: sample for sample in writer.samples}
    fresh = _measure(request, profiler, work, writer, held)
    if pacer is not None and pacer.overruns:
        say(
            f"hetplan: {pacer.overruns} of {pacer.passes} paced passes took longer than their "
            "nominal time; slow the pace down, or free the machine"
        )
    together = {**held, **{sample.shape: sample for sample in fresh}}
    layers = tuple(sample for key, sample in together.items() if key in wanted)
    if missing := len(wanted) - len(layers):
        say(
            f"hetplan: the budget is spent, {missing} of {len(wanted)} samples are missing; "
            "the same command goes on from there"
        )
    say(f"hetplan: {len(fresh)} samples measured, {len(layers)} in {writer.folder}")
    result = ProfileSet(layers=layers, links=(), provenance=(provenance,))
    show_layers(result, as_json=request.as_json)


def describe(
    request: ProfileRequest,
    backend: Backend,
    pace: PacedKind | None = None,
    *,
    together: int = 1,
) -> Provenance:
    """The provenance of what is measured now; sets torch's threads."""
    use_threads(request.threads_here)
    return circumstances(
        backend,
        device=pace.device if pace else request.kind or kind_here(backend),
        threads=request.threads,
        command=command_line(),
        date=datetime.date.today(),
        pace=pace,
        together=together,
    )


def kind_here(backend: Backend) -> str:
    """The catalogue's kind of the device, which cluster files name; else its driver's word."""
    word = backend.kind()
    if not backend.is_accelerator:
        return word
    return kind_called(backend.device_name(), load_catalogue()) or word


def _work(request: ProfileRequest, backend: Backend, pace: PacedKind | None) -> tuple[Unit, ...]:
    work = units(request.grid(is_accelerator=backend.is_accelerator))
    if pace is None:
        return work
    paced = tuple(unit for unit in work if has_pace(pace, unit))
    if not paced:
        raise InputError(
            f"the pace of device kind {pace.device} has no entry for any microbatch size and tp "
            "of this job"
        )
    if left_out := len(work) - len(paced):
        say(f"hetplan: {left_out} of {len(work)} shapes are left out: the pace has no times")
    if any(unit.kind is LayerKind.TRANSFORMER for unit in paced):
        return paced
    raise InputError(f"the pace of device kind {pace.device} has no transformer layer")


def _measure(
    request: ProfileRequest,
    profiler: LayerProfiler,
    work: tuple[Unit, ...],
    writer: LayerWriter,
    held: dict[Shape, LayerSample],
) -> list[LayerSample]:
    """What was measured now, each sample on disk before the next unit begins."""
    fresh: list[LayerSample] = []
    with ProgressLine("measuring") as line:
        for progress in profiler.run(
            work,
            measured=() if request.again else held.keys(),
            budget_seconds=request.budget or float("inf"),
        ):
            today = datetime.date.today().isoformat()
            for sample in (replace(each, measured_on=today) for each in progress.samples):
                # A unit that a kill cut in half has some of its samples already.
                if request.again or sample.shape not in held:
                    writer.append(sample)
                    fresh.append(sample)
            point = progress.unit.point
            line.show(
                progress.finished,
                progress.total,
                progress.left_seconds,
                f"{progress.unit.kind} hidden {point.model.hidden_size} "
                f"microbatch {point.microbatch_size} tp {point.tp}",
            )
    return fresh
