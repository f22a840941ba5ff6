"""A plan trained with megatron-core on this machine: its model, schedules, reduction, optimizer.

One process per rank, watched and measured as `hetplan.launchers.local` does it, from the same data
and the same initial weights as hetplan's own trainer. On CPU cores over gloo with
`megatron_core_shim`, on accelerators over nccl without it.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.cluster.devices import CPU_KIND
from hetplan.emitters.megatron.optimizer import optimizer_instances
from hetplan.emitters.megatron.parallel import degrees_of
from hetplan.errors import Fault, InputError
from hetplan.launchers.local import (
    DEFAULT_MAX_RANKS,
    DEFAULT_STEPS,
    DEFAULT_TIMEOUT_SECONDS,
    DEFAULT_WARMUP_STEPS,
    precision_faults,
    run_training,
    size_faults,
)
from hetplan.launchers.machine import torch_backend
from hetplan.launchers.megatron_core_plan import core_faults, core_places
from hetplan.launchers.ranks import OnStep, RankProgram
from hetplan.launchers.run_log import RunLog
from hetplan.model.layer_units import own_numerics_differences
from hetplan.search.result import SearchResult

if TYPE_CHECKING:
    from hetplan.runtime.training import Training

INSTALL = "pip install megatron-core"
# Private memory of a worker before it has a model (torch 2.13, megatron-core 0.16.1, Linux): 255 MB
# measured; torch's own thread pools and gloo's buffers come on top.
CORE_WORKER_BYTES = 350e6


def launch_with_core(
    result: SearchResult,
    *,
    steps: int = DEFAULT_STEPS,
    warmup_steps: int = DEFAULT_WARMUP_STEPS,
    out: Path | None = None,
    max_ranks: int = DEFAULT_MAX_RANKS,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    check_loss: bool = False,
    on_step: OnStep | None = None,
) -> RunLog:
    """Train the plan with megatron-core; arguments, result and faults as `local.launch`."""
    trainer = f"megatron-core {_installed_version()}"
    training = _training(
        result,
        steps=steps,
        warmup_steps=warmup_steps,
        max_ranks=max_ranks,
        timeout_seconds=timeout_seconds,
        check_loss=check_loss,
    )
    program = RankProgram(
        module="hetplan.launchers.megatron_core_worker",
        variables=_variables(training.backend),
        trainer=trainer,
    )
    return run_training(
        result,
        training,
        program=program,
        out=out,
        check_loss=check_loss,
        on_step=on_step,
        stages=[place.stage for place in core_places(result.plan)],
    )


def _installed_version() -> str:
    """Version of megatron-core; an InputError where there is none."""
    try:
        # The name before the dot may be another package's, or none's at all.
        found = find_spec("megatron") is not None and find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise InputError(f"megatron-core is not installed here; install it with {INSTALL}")
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        return "(a checkout)"


def _variables(backend: str) -> tuple[tuple[str, str], ...]:
    if backend == "cpu":
        from hetplan.launchers.megatron_core_shim import CPU_VARIABLES

        return CPU_VARIABLES
    # model_parallel_config.py: tensor parallelism before Blackwell wants one queue.
    return (("CUDA_DEVICE_MAX_CONNECTIONS", "1"),)


def _training(
    result: SearchResult,
    *,
    steps: int,
    warmup_steps: int,
    max_ranks: int,
    timeout_seconds: float,
    check_loss: bool,
) -> Training:
    """What the workers are told; an InputError with every reason why they cannot be."""
    from hetplan.runtime.training import Training

    plan, inputs = result.plan, result.inputs
    faults = list(core_faults(result))
    if faults:
        raise InputError(*faults)
    places = core_places(plan)
    kinds = tuple(inputs.cluster.island_of_device(place.device).device.kind for place in places)
    backend = _backend(kinds)
    faults += size_faults(result, len(places), max_ranks, backend, worker_bytes=CORE_WORKER_BYTES)
    faults += precision_faults(inputs.job.precision, backend, check_loss=check_loss)
    unlike = own_numerics_differences(inputs.model)
    if check_loss and unlike:
        message = (
            f"cannot be checked: the reference has {'; '.join(unlike)}; leave --check-loss out"
        )
        faults.append(Fault(field="losses", message=message))
    if backend == "cpu" and optimizer_instances(plan, degrees_of(plan)) > 1:
        # distributed/distributed_data_parallel.py makes a stream for them.
        message = f"{plan.optimizer_shards}; on CPU cores megatron-core shards over all of dp"
        faults.append(Fault(field="plan.optimizer_shards", message=message))
    if faults:
        raise InputError(*faults)
    return Training(
        model=inputs.model,
        # megatron-core clips gradients of accelerators only (its core/optimizer/clip_grads.py): the
        # reference must not clip either.
        job=replace(inputs.job, gradient_clipping=False),
        plan=plan,
        device_kinds=kinds,
        backend=backend,
        pace=None,
        steps=steps,
        warmup_steps=warmup_steps,
        timeout_seconds=timeout_seconds,
    )


def _backend(kinds: tuple[str, ...]) -> str:
    """The torch device type of the ranks; an InputError where this machine lacks their kinds."""
    try:
        return torch_backend(kinds, ())
    except InputError as error:
        message = error.faults[0].message.split("; launch it where")[0]
        raise InputError(
            Fault(
                field="plan",
                message=f"{message}; launch it where one accelerator per rank is, or plan for a "
                f"cluster of kind {CPU_KIND}",
            )
        ) from error
