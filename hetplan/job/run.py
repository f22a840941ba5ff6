"""What the run meets beside its steps: storage, failures, detection, restarts (docs/days.md).

What is left out has a cited default (`hetplan.cost.goodput.assumed`), and reports say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import Field

from hetplan.errors import InputError
from hetplan.files.quantities import (
    Bandwidth,
    Count,
    FileForm,
    Fraction,
    Name,
    Positive,
    Seconds,
    check_limits,
)

MAX_WAIT_SECONDS = 366 * 86400.0
"""No restart, repair or start-up takes more than a year; more is a slip in a unit."""

Wait: TypeAlias = Annotated[float, Field(ge=0, le=MAX_WAIT_SECONDS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFailures(FileForm):
    """How often the devices of one kind fail."""

    kind: Name
    """Device kind."""
    probability: Fraction
    """That one fails within a year; from 0 to below 1."""

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings(FileForm):
    """What a job file and a `Run` say alike."""

    device_failures: Fraction | None = None
    """Probability that a device fails within a year. Those in kind_failures have their own."""
    kind_failures: tuple[KindFailures, ...] = ()
    """The same by device kind."""
    host_failures: Fraction | None = None
    """The same of a host, with its software."""
    nic_failures: Fraction | None = None
    """The same of a NIC."""
    link_failures: Fraction | None = None
    """The same of a NIC's cable and switch port."""
    line_failures: Fraction | None = None
    """The same of the line between two regions; left out: not counted."""
    failover: bool = False
    """Failed NICs, links and lines have another path; otherwise the run starts again."""
    kept_bandwidth: Annotated[float, Field(gt=0, le=1)] | None = None
    """Part of a node's bandwidth on the backup path. Left out: as measured with VCCL.
    """
    asynchronous_saving: bool = False
    """Devices wait for the copy to host memory alone; it is written beside the next steps."""
    one_reader: bool = False
    """One copy of a checkpoint is read and sent on; otherwise every rank reads its own part."""
    peer_recovery: bool = False
    """A restart copies lost state from ranks that hold it too. It repeats one step. Such are
    replicas, and shard groups smaller than all replicas (MiCS)."""
    data_readers: Count | None = None
    """Hosts that read all tokens. They pass them on; left out: every host reads its own."""
    compiles: bool = False
    """Every start compiles, or captures CUDA graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunForm(RunSettings):
    """The run around the steps, for its days."""

    storage: Bandwidth | None = None
    """Bandwidth of the checkpoints' storage, all hosts together."""
    start_up: Seconds | None = None
    """From the processes' start to the first step, as measured. Left out: by a law."""
    detection: Seconds | None = None
    """From a failure until it is noticed."""
    restart: Seconds | None = None
    """From a noticed failure until processes start again. Left out: none."""
    failover_detection: Seconds | None = None
    """Until a backup path takes over; training waits."""
    repair: Seconds | None = None
    """Until a failed path is back; training is slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunSettings):
    """The same in SI units; None: the default."""

    storage_bytes_per_second: Positive | None = None
    start_up_seconds: Wait | None = None
    detection_seconds: Wait | None = None
    restart_seconds: Wait | None = None
    failover_detection_seconds: Wait | None = None
    repair_seconds: Wait | None = None

    def __post_init__(self) -> None:
        check_limits(self)
        kinds = [each.kind for each in self.kind_failures]
        twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
        if twice is not None:
            raise InputError(f"kind_failures names {twice} twice; keep one of them")


def run_of(form: RunForm) -> Run:
    """The form's values in SI units."""
    settings = {name: getattr(form, name) for name in RunSettings.__dataclass_fields__}
    return Run(
        **settings,
        storage_bytes_per_second=form.storage,
        start_up_seconds=form.start_up,
        detection_seconds=form.detection,
        restart_seconds=form.restart,
        failover_detection_seconds=form.failover_detection,
        repair_seconds=form.repair,
    )
