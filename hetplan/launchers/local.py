"""Train a plan on this machine, or on the hosts of an emulation that is up: one process per rank,
watched, measured, compared with the prediction and, on demand, with one process.

Only plans for target `native` that this machine can run are started: not more ranks than allowed,
an accelerator of the right kind per rank (or cores, for kind `cpu` and for kinds that a pace file
plays), and memory for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hetplan.cluster.devices import CPU_KIND
from hetplan.cost.estimate_values import Component, Estimate
from hetplan.errors import Fault, InputError
from hetplan.files.locks import Lock
from hetplan.files.writing import make_folder
from hetplan.job.spec import Job, Precision
from hetplan.launchers.hosts import hosts_of_emulation, this_machine_hosts
from hetplan.launchers.ranks import LATE_SECONDS, OnStep, run_ranks
from hetplan.launchers.run_folder import START_SECONDS, RunFolder
from hetplan.launchers.run_log import LossCheck, RunLog, run_of, this_machine
from hetplan.launchers.watching import STALL_FACTOR, STALL_SECONDS, Patience
from hetplan.model.spec import ModelSpec
from hetplan.plans.check import check_plan
from hetplan.plans.plan import OuterSynchronisation
from hetplan.profiling.pacing import Pace
from hetplan.profiling.samples import Phase
from hetplan.runtime.checkpoints import check_loss_faults, settle
from hetplan.runtime.gradient_groups import sums_of
from hetplan.runtime.measured import StepRecord
from hetplan.runtime.placement import RankPlace, place_ranks, vocabulary_faults
from hetplan.runtime.training import NO_CHECKPOINTS, CheckpointRequest, Training
from hetplan.search.result import SearchResult
from hetplan.units import format_bytes

# Private memory of a worker before it has a model (torch 2.13 imported, Linux): 287 MB measured.
WORKER_BYTES = 300e6


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """How a plan is trained."""

    steps: int = 20
    """Of the whole training: those that a loaded checkpoint has done are counted."""
    warmup_steps: int = 1
    """First steps that no median counts. The first one opens connections; from the second on steps
    were equal within their noise."""
    pace: Pace | None = None
    """Nominal times of the device kinds that this machine's cores play."""
    log_folder: Path | None = None
    """For the ranks' logs; None: a temporary folder that is kept only if the run fails."""
    max_ranks: int = 16
    timeout_seconds: float = 300.0
    """Longest time without a finished step before the run is ended."""
    stall_seconds: float | None = None
    """Longest time without a finished operation of any rank; None: as `stall_of` has it."""
    check_loss: bool = False
    """Also train the model in one process and compare the losses."""
    emulation: str = ""
    """Name of an emulation that is up: each rank runs on its host that holds the rank's device, as
    fast as this machine's cores where no pace slows it down."""
    checkpoints: CheckpointRequest = NO_CHECKPOINTS

    def __post_init__(self) -> None:
        if self.stall_seconds is not None and not self.stall_seconds > 0:
            raise InputError(f"stall is {self.stall_seconds:g} s; it must be more than 0")


def launch(
    result: SearchResult,
    settings: LaunchSettings | None = None,
    *,
    on_step: OnStep | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> RunLog:
    """Train the plan and compare the measured step with the predicted one.

    `on_step` is called as steps finish, `tell` with what a person should know. InputError where
    this machine cannot run the plan or the run cannot resume from its checkpoint, RunFailed where
    a rank, a host or a link fails.
    """
    settings = settings or LaunchSettings()
    kinds, backend = _runnable(result, settings)
    with kept_folders(settings):
        return _train(result, settings, kinds, backend, on_step, tell)


@contextmanager
def kept_folders(settings: LaunchSettings) -> Iterator[None]:
    """No other process saves checkpoints or writes logs to the folders of these settings; none has
    written its logs there.
    """
    save, logs = settings.checkpoints.save, settings.log_folder
    with ExitStack() as stack:
        for folder in (Path(save) if save else None, logs):
            if folder is not None:
                make_folder(folder)
                stack.enter_context(Lock(folder).take())
        if logs is not None:
            RunFolder(logs).check_unused()
        yield


def launch_phase(
    result: SearchResult, settings: LaunchSettings, on_step: OnStep, tell: Callable[[str], None]
) -> RunLog:
    """The same for one of several in a row, whose folders are kept already."""
    return _train(result, settings, *_runnable(result, settings), on_step, tell)


def _train(
    result: SearchResult,
    settings: LaunchSettings,
    kinds: tuple[str, ...],
    backend: str,
    on_step: OnStep | None,
    tell: Callable[[str], None],
) -> RunLog:
    training, notes = _training(result, settings, kinds, backend)
    for note in notes:
        tell(note)
    places = place_ranks(result.plan)
    hosts = this_machine_hosts(len(places))
    if settings.emulation:
        devices = [place.device for place in places]
        hosts = hosts_of_emulation(settings.emulation, result.inputs.cluster, devices)
    machine, started = this_machine(), datetime.now(UTC)
    report = run_ranks(
        training,
        hosts,
        Patience(
            stall_seconds=settings.stall_seconds or stall_of(result.estimate, result.plan.outer),
            exact=settings.stall_seconds is not None,
            start_seconds=START_SECONDS,
            files_seconds=training.timeout_seconds + LATE_SECONDS,
        ),
        settings.log_folder,
        on_step or (lambda record: None),
    )
    loss_check = None
    if settings.check_loss:
        size = training.plan.pipelines[0].stages[0].replicas[0].microbatch_size
        loss_check = check_losses(training.model, training.job, report.steps, microbatch_size=size)
    return run_of(
        result,
        started=started,
        machine=machine,
        device_type=training.backend,
        paced=played_kinds(training.pace, training.device_kinds),
        steps=report.steps,
        warmup_steps=training.warmup_steps,
        ranks=report.ranks,
        loss_check=loss_check,
    )


def stall_of(estimate: Estimate, outer: OuterSynchronisation | None = None) -> float:
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
    averaging = [each.seconds for each in estimate.components if each.component is Component.OUTER]
    rounds = sum(averaging) * (0 if outer is None else outer.settings.sync_steps)
    return max(STALL_SECONDS, STALL_FACTOR * max(longest, rounds))


def _runnable(result: SearchResult, settings: LaunchSettings) -> tuple[tuple[str, ...], str]:
    """The ranks' device kinds and torch's device type; an InputError with every reason why this
    machine cannot run the plan.
    """
    plan, inputs, pace = result.plan, result.inputs, settings.pace
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
    backend = torch_backend(kinds, kinds if settings.emulation else played_kinds(pace, kinds))
    faults += vocabulary_faults(plan, inputs.model)
    faults += _size_faults(result, len(places), settings.max_ranks, backend)
    faults += precision_faults(inputs.job.precision, backend, check_loss=settings.check_loss)
    if settings.check_loss and plan.outer is not None:
        message = "sites of local steps drift apart as no single process does: no --check-loss"
        faults.append(Fault(field="outer", message=message))
    faults += () if pace is None else pace_faults(inputs.model, places, kinds, pace)
    if faults:
        raise InputError(*faults)
    return kinds, backend


def _training(
    result: SearchResult, settings: LaunchSettings, kinds: tuple[str, ...], backend: str
) -> tuple[Training, tuple[str, ...]]:
    """What the ranks do, and notes on it; an InputError where the checkpoints do not allow it."""
    inputs = result.inputs
    checkpoints, resume = settle(
        settings.checkpoints, inputs.model, inputs.job, steps=settings.steps
    )
    if settings.check_loss and (begun := check_loss_faults(resume)):
        raise InputError(*begun)
    training = Training(
        model=inputs.model,
        job=inputs.job,
        plan=result.plan,
        device_kinds=kinds,
        backend=backend,
        pace=settings.pace,
        steps=settings.steps,
        warmup_steps=settings.warmup_steps,
        timeout_seconds=settings.timeout_seconds,
        checkpoints=checkpoints,
        sums=sums_of(result.plan, inputs.cluster),
    )
    return training, () if resume is None else resume.notes


def _size_faults(
    result: SearchResult, num_ranks: int, max_ranks: int, backend: str
) -> Iterator[Fault]:
    """More ranks than allowed, or than this machine has memory for."""
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
    needed = num_ranks * WORKER_BYTES + sum(
        sum(replica.num_devices for replica in stage.replicas) * cost.memory.total_bytes
        for stage, cost in stages
    )
    if needed > free:
        yield Fault(
            field="plan",
            message=f"all ranks together need {format_bytes(needed)}, this machine has "
            f"{format_bytes(free)} free",
        )


def free_memory_bytes() -> float | None:
    """Memory that programs can still get without swapping; None where the system does not say."""
    path = Path("/proc/meminfo")
    match = (
        re.search(r"^MemAvailable:\s*(\d+) kB", path.read_text(), re.M) if path.exists() else None
    )
    return float(match.group(1)) * 1024 if match else None


def torch_backend(kinds: Sequence[str], paced: Sequence[str]) -> str:
    """The torch device type that runs one rank per entry of `kinds` on this machine.

    `cpu` where every kind is `cpu` or is played by a pace, `cuda` where torch sees as many
    accelerators as ranks and each is of the rank's kind; an InputError otherwise.
    """
    foreign = sorted({kind for kind in kinds if kind != CPU_KIND and kind not in paced})
    if not foreign:
        return "cpu"
    have = _accelerators()
    short = len(have) < len(kinds)
    wrong = [kind for kind, name in zip(kinds, have, strict=False) if not same_kind(kind, name)]
    if not short and not wrong:
        return "cuda"
    accelerators = ", ".join(f"{have.count(name)} x {name}" for name in dict.fromkeys(have))
    raise InputError(
        Fault(
            field="plan",
            message=f"the plan has {len(kinds)} ranks on {', '.join(sorted(set(kinds)))}; this "
            f"machine has {accelerators or 'no accelerator that torch can use'}; launch it where "
            f"one accelerator per rank is, or play {', '.join(foreign)} on this machine's cores "
            "with --pace FILE",
        )
    )


def _accelerators() -> list[str]:
    import torch

    from hetplan.profiling.backends import cuda_kind

    if not torch.cuda.is_available():
        return []
    return [cuda_kind(index) for index in range(torch.cuda.device_count())]


def same_kind(kind: str, name: str) -> bool:
    """Whether a catalogue name (`nvidia-a100-80gb-sxm`) and a driver's (`nvidia-a100-sxm4-80gb`)
    agree in vendor and model: catalogue names have these two first.
    """
    words = name.split("-")
    wanted = kind.split("-")[:2]
    return words[0] == wanted[0] and all(word in words for word in wanted)


def played_kinds(pace: Pace | None, kinds: Sequence[str]) -> tuple[str, ...]:
    """Those of these device kinds that the pace plays on this machine's cores, sorted."""
    played = set() if pace is None else {kind.device for kind in pace.kinds}
    return tuple(sorted(played & set(kinds)))


def pace_faults(
    model: ModelSpec, places: Sequence[RankPlace], kinds: Sequence[str], pace: Pace
) -> Iterator[Fault]:
    """Passes of the ranks, whose device kinds these are, for which their kind's pace has no time;
    kinds that the pace does not play run at their own speed.
    """
    played = {kind.device: kind for kind in pace.kinds}
    shapes = {
        (kind, model.layers[position], phase, place.microbatch_size, place.tp)
        for place, kind in zip(places, kinds, strict=True)
        if kind in played
        for chunk in place.chunks
        for position in range(chunk.start, chunk.stop)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    }
    for kind, layer, phase, microbatch_size, tp in sorted(shapes):
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


LOSS_TOLERANCE = 1e-4
"""float32 sums in another order differ by about 1e-7 each; over 20 steps 1e-7 was measured too."""


def check_losses(
    model: ModelSpec, job: Job, steps: Sequence[StepRecord], *, microbatch_size: int
) -> LossCheck:
    """These steps' losses against those of the same steps of the model trained in one process.

    That process trains from the beginning, also where these steps begin later, so many samples at a
    time: the losses do not depend on it.
    """
    import torch

    from hetplan.runtime.single import reference_losses

    threads = torch.get_num_threads()
    # As each rank had. For models of this size more threads gain nothing, and on cores that are
    # shared with other programs they lose a lot (35 times slower was seen).
    torch.set_num_threads(1)
    try:
        every = reference_losses(
            model,
            job,
            steps=max((step.step + 1 for step in steps), default=0),
            microbatch_size=microbatch_size,
        )
    finally:
        torch.set_num_threads(threads)
    reference = tuple(every[step.step] for step in steps)
    return LossCheck(
        reference_losses=reference,
        largest_relative_difference=largest_difference([step.loss for step in steps], reference),
        tolerance=LOSS_TOLERANCE,
    )


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Largest |loss / reference - 1|; infinite where a loss is not a number."""
    differences = [abs(one / other - 1.0) for one, other in zip(losses, reference, strict=True)]
    return max(
        (difference if difference == difference else float("inf") for difference in differences),
        default=0.0,
    )
