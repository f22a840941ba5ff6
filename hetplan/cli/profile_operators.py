"""`hetplan profile operators`: measure the operators of the layers, keep them, show them."""

from __future__ import annotations

import datetime
from dataclasses import replace

from hetplan.cli.options import say
from hetplan.cli.profile_layers import describe
from hetplan.cli.profile_request import ProfileRequest
from hetplan.cli.profile_tables import show_operators
from hetplan.cli.progress import ProgressLine
from hetplan.errors import InputError
from hetplan.job.trainer import trainer_settings
from hetplan.model.operators import Operator
from hetplan.profiling.backends import default_backend, open_backend
from hetplan.profiling.measure_operators import (
    OperatorProfiler,
    OperatorShape,
    OperatorUnit,
    operator_units,
    unit_shapes,
)
from hetplan.profiling.samples import OperatorSample, ProfileSet
from hetplan.profiling.store import OperatorWriter
from hetplan.profiling.timing import ACCELERATOR_LIMITS, CPU_LIMITS
from hetplan.profiling.together import processes_together


def profile_operators(request: ProfileRequest) -> None:
    """Measure what the store does not have yet; print everything that was asked for."""
    for name, given in (("--pace", request.pace), ("--link", request.link)):
        if given is not None:
            raise InputError(f"{name} has no operators: it is of whole layers or of links")
    if processes_together() > 1:
        raise InputError("operators are measured by one process; start it without torchrun")
    backend = open_backend(request.device or default_backend())
    work = _work(request, is_accelerator=backend.is_accelerator)
    provenance = describe(request, backend)
    profiler = OperatorProfiler(
        backend,
        device=provenance.device,
        limits=ACCELERATOR_LIMITS if backend.is_accelerator else CPU_LIMITS,
    )
    writer = OperatorWriter(request.store_folder, provenance)
    held = {sample.shape: sample for sample in writer.samples}
    fresh = _measure(request, profiler, work, writer, held)
    together = {**held, **{sample.shape: sample for sample in fresh}}
    wanted = {shape for unit in work for shape in unit_shapes(unit)}
    operators = tuple(sample for shape, sample in together.items() if shape in wanted)
    if missing := len(wanted) - len(operators):
        say(
            f"hetplan: {missing} of {len(wanted)} samples are missing; the same command goes on "
            "from there"
        )
    say(f"hetplan: {len(fresh)} samples measured, {len(operators)} in {writer.folder}")
    result = ProfileSet(layers=(), links=(), provenance=(provenance,), operators=operators)
    show_operators(result, as_json=request.as_json)


def _work(request: ProfileRequest, *, is_accelerator: bool) -> tuple[OperatorUnit, ...]:
    """Operators of the shapes that the job's plans can have, with the kernels of its trainer."""
    loaded = request.load()
    kernels = None if loaded is None else trainer_settings(loaded[1]).kernels
    return operator_units(request.grid(is_accelerator=is_accelerator), kernels)


def _measure(
    request: ProfileRequest,
    profiler: OperatorProfiler,
    work: tuple[OperatorUnit, ...],
    writer: OperatorWriter,
    held: dict[OperatorShape, OperatorSample],
) -> list[OperatorSample]:
    """What was measured now, each sample on disk before the next operator begins."""
    fresh: list[OperatorSample] = []

    def failed(unit: OperatorUnit, error: Exception) -> None:
        first = str(error).strip().partition("\n")[0][:200]
        words = f"{_words(unit.operator)} in {unit.precision}"
        say(f"hetplan: not measured: {words}: {first or type(error).__name__}")

    with ProgressLine("measuring") as line:
        for progress in profiler.run(
            work,
            measured=() if request.again else held.keys(),
            budget_seconds=request.budget or float("inf"),
            on_failure=failed,
        ):
            today = datetime.date.today().isoformat()
            for sample in (replace(each, measured_on=today) for each in progress.samples):
                # An operator that a kill cut in half has some of its samples already.
                if request.again or sample.shape not in held:
                    writer.append(sample)
                    fresh.append(sample)
            line.show(
                progress.finished,
                progress.total,
                progress.left_seconds,
                _words(progress.unit.operator),
            )
    return fresh


def _words(op: Operator) -> str:
    """As in `matrix_product 1 x [4096, 1024, 3072]`."""
    return f"{op.operator} {op.batch} x [{op.m}, {op.n}, {op.k}]"
