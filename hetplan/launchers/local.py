"""A plan trained for real on this machine, or on the hosts of an emulation that is up on it: one
process per rank, watched, measured, compared.

Only plans for target `native` that this machine can run are started: not more ranks than allowed,
an accelerator of the right kind per rank (or cores, for kind `cpu` and for kinds that a pace file
plays), and memory for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.cost.estimate_values import Estimate
from hetplan.errors import Fault, InputError
from hetplan.job.spec import Precision
from hetplan.launchers.hosts import Hosts, hosts_of_emulation, this_machine_hosts
from hetplan.launchers.losses import check_losses
from hetplan.launchers.machine import free_memory_bytes, this_machine, torch_backend
from hetplan.launchers.ranks import OWN_PROGRAM, OnStep, RankProgram, Watching, run_ranks
from hetplan.launchers.run_log import RunLog, run_of
from hetplan.launchers.watching import STALL_FACTOR, STALL_SECONDS
from hetplan.model.spec import ModelSpec
from hetplan.plans.check import check_plan
from hetplan.profiling.samples import Phase
from hetplan.runtime.checkpoints import NO_CHECKPOINTS, CheckpointRequest
from hetplan.runtime.placement import RankPlace, place_ranks, vocabulary_faults
from hetplan.search.result import SearchResult
from hetplan.units import format_bytes

if TYPE_CHECKING:
    from hetplan.profiling.pacing import Pace
    from hetplan.runtime.training import Training

DEFAULT_STEPS = 20
DEFAULT_WARMUP_STEPS = 1
"""The first step opens connections; from the second on steps were equal within their noise."""
DEFAULT_MAX_RANKS = 16
DEFAULT_TIMEOUT_SECONDS = 300.0
# Private memory of a worker before it has a model (torch 2.13 imported, Linux): 287 MB measured.
WORKER_BYTES = 300e6


def launch(
    result: SearchResult,
    *,
    steps: int = DEFAULT_STEPS,
    warmup_steps: int = DEFAULT_WARMUP_STEPS,
    pace: Pace | None = None,
    out: Path | None = None,
    max_ranks: int = DEFAULT_MAX_RANKS,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    check_loss: bool = False,
    on_step: OnStep | None = None,
    emulation: str = "",
    checkpoints: CheckpointRequest = NO_CHECKPOINTS,
    stall_seconds: float | None = None,
) -> RunLog:
    """Train the plan for `steps` steps and compare the measured step with the predicted one.

    `out` is a folder for the ranks' logs; without it they are kept only if the run fails.
    `timeout_seconds` is the longest time without a finished step before the run is ended.
    `check_loss` also trains the whole model in one process and compares the losses; whether they
    agree is in the run log. `on_step` is called as steps finish. `emulation` is the name of one
    that is up: each rank runs on its host that holds the rank's device, as fast as this machine's
    cores where no pace slows it down. With `checkpoints` that go on from one, `steps` counts those
    that it has done. Where no rank finishes an operation for `stall_seconds`, by itself for as long
    as `stall_of` says, the run is ended. InputError where this machine cannot run the plan or the
    run cannot go on from that checkpoint, RunFailed where a rank, a host or a link fails.
    """
    if stall_seconds is not None and not stall_seconds > 0:
        raise InputError(f"stall is {stall_seconds:g} s; it must be more than 0")
    training = _training(
        result,
        steps=steps,
        warmup_steps=warmup_steps,
        pace=pace,
        max_ranks=max_ranks,
        timeout_seconds=timeout_seconds,
        check_loss=check_loss,
        emulated=bool(emulation),
        checkpoints=checkpoints,
    )
    hosts = None
    if emulation:
        devices = [place.device for place in place_ranks(result.plan)]
        hosts = hosts_of_emulation(emulation, result.inputs.cluster, devices)
    return run_training(
        result,
        training,
        hosts=hosts,
        out=out,
        check_loss=check_loss,
        on_step=on_step,
        stall_seconds=stall_seconds,
    )


def run_training(
    result: SearchResult,
    training: Training,
    *,
    program: RankProgram = OWN_PROGRAM,
    hosts: Hosts | None = None,
    out: Path | None = None,
    check_loss: bool = False,
    on_step: OnStep | None = None,
    stages: Sequence[int] | None = None,
    stall_seconds: float | None = None,
) -> RunLog:
    """Run the training of this result, one process per rank; arguments and faults as `launch`.

    Without `hosts` on this machine; `stages` of each rank, without them those of hetplan's trainer.
    """
    machine = this_machine()
    started = datetime.now(UTC)
    report = run_ranks(
        training,
        program,
        hosts or this_machine_hosts(len(training.device_kinds)),
        Watching(
            stages=tuple(stages or [place.stage for place in place_ranks(result.plan)]),
            stall_seconds=stall_seconds or stall_of(result.estimate),
            exact=stall_seconds is not None,
        ),
        out,
        on_step or (lambda record: None),
    )
    loss_check = None
    if check_loss:
        size = training.plan.pipelines[0].stages[0].replicas[0].microbatch_size
        loss_check = check_losses(training.model, training.job, report.steps, microbatch_size=size)
    return run_of(
        result,
        started=started,
        machine=machine,
        device_type=training.backend,
        paced=_paced_kinds(training),
        steps=report.steps,
        warmup_steps=training.warmup_steps,
        ranks=report.ranks,
        loss_check=loss_check,
        trainer=program.trainer,
    )


def stall_of(estimate: Estimate) -> float:
    """Seconds without a finished operation after which ranks are taken to hang."""
    longest = max(
        max(
            stage.forward_seconds,
            stage.backward_seconds,
            stage.reduction_seconds,
            stage.optimizer_seconds,
            # What a microbatch's transfers expose, at most.
            stage.wait_seconds / estimate.num_microbatches,
        )
        for stage in estimate.stages
    )
    return max(STALL_SECONDS, STALL_FACTOR * longest)


def _training(
    result: SearchResult,
    *,
    steps: int,
    warmup_steps: int,
    pace: Pace | None,
    max_ranks: int,
    timeout_seconds: float,
    check_loss: bool,
    emulated: bool,
    checkpoints: CheckpointRequest,
) -> Training:
    """What the workers are told; an InputError with every reason why they cannot be."""
    from hetplan.runtime.checkpoints_checks import check_loss_faults, settle
    from hetplan.runtime.summing import sums_of
    from hetplan.runtime.training import Training

    plan, inputs = result.plan, result.inputs
    if plan.target != "native":
        raise InputError(
            Fault(
                field="plan.target",
                message=f"the plan is for {plan.target}; hetplan launch runs plans for target "
                "native: plan again with --target native",
            )
        )
    faults = list(check_plan(plan, inputs.model, inputs.cluster, inputs.job))
    if faults:
        raise InputError(*faults)
    places = place_ranks(plan)
    kinds = tuple(inputs.cluster.island_of_device(place.device).device.kind for place in places)
    # An emulated device is a core of this machine, paced or not.
    played = kinds if emulated else [] if pace is None else [each.device for each in pace.kinds]
    backend = torch_backend(kinds, played)
    faults += vocabulary_faults(plan, inputs.model)
    faults += size_faults(result, len(places), max_ranks, backend, worker_bytes=WORKER_BYTES)
    faults += precision_faults(inputs.job.precision, backend, check_loss=check_loss)
    faults += () if pace is None else pace_faults(inputs.model, places, kinds, pace)
    if faults:
        raise InputError(*faults)
    checkpoints, resume = settle(checkpoints, inputs.model, inputs.job, steps=steps)
    if check_loss and (begun := check_loss_faults(resume)):
        raise InputError(*begun)
    return Training(
        model=inputs.model,
        job=inputs.job,
        plan=plan,
        device_kinds=kinds,
        backend=backend,
        pace=pace,
        steps=steps,
        warmup_steps=warmup_steps,
        timeout_seconds=timeout_seconds,
        checkpoints=checkpoints,
        sums=sums_of(plan, inputs.cluster),
    )


def size_faults(
    result: SearchResult, num_ranks: int, max_ranks: int, backend: str, *, worker_bytes: float
) -> Iterator[Fault]:
    """More ranks than allowed, or than this machine has memory for; `worker_bytes` is that of a
    rank's process without a model.
    """
    if num_ranks > max_ranks:
        yield Fault(
            field="plan",
            message=f"the plan has {num_ranks} ranks, one process each; the limit is {max_ranks} "
            "(--max-ranks)",
        )
    free = free_memory_bytes()
    if backend != "cpu" or free is None:
        return
    every = [stage for pipeline in result.plan.pipelines for stage in pipeline.stages]
    stages = zip(every, result.estimate.stages, strict=True)
    needed = num_ranks * worker_bytes + sum(
        sum(replica.num_devices for replica in stage.replicas) * cost.memory.total_bytes
        for stage, cost in stages
    )
    if needed > free:
        yield Fault(
            field="plan",
            message=f"all ranks together need {format_bytes(needed)}, this machine has "
            f"{format_bytes(free)} free",
        )


def pace_faults(
    model: ModelSpec, places: Sequence[RankPlace], kinds: Sequence[str], pace: Pace
) -> Iterator[Fault]:
    """Passes of the ranks, whose device kinds these are, for which their kind's pace has no time;
    kinds that the pace does not play run at their own speed.
    """
    played = {kind.device: kind for kind in pace.kinds}
    asked = {
        (kind, model.layers[position], phase, place.microbatch_size, place.tp)
        for place, kind in zip(places, kinds, strict=True)
        if kind in played
        for chunk in place.chunks
        for position in range(chunk.start, chunk.stop)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    }
    for kind, layer, phase, microbatch_size, tp in sorted(asked):
        try:
            played[kind].seconds(layer, phase, microbatch_size, tp)
        except InputError as error:
            yield Fault(field="pace", message=str(error))


def precision_faults(precision: Precision, backend: str, *, check_loss: bool) -> Iterator[Fault]:
    """A precision that the trainers lack on such a device, or whose losses cannot be checked."""
    allowed = (Precision.FLOAT32,) if backend == "cpu" else (Precision.FLOAT32, Precision.BFLOAT16)
    if precision not in allowed:
        yield Fault(
            field="job.precision",
            message=f"{precision}; the trainer has {' and '.join(allowed)} on a {backend} device: "
            "plan the job with one of these",
        )
    elif check_loss and precision is not Precision.FLOAT32:
        yield Fault(
            field="job.precision",
            message=f"{precision}; losses can be checked in float32 only, because other precisions "
            "round differently in every plan",
        )


def _paced_kinds(training: Training) -> tuple[str, ...]:
    if training.pace is None:
        return ()
    played = {kind.device for kind in training.pace.kinds}
    return tuple(sorted(played & set(training.device_kinds)))
