"""Which kernels does a device kind lack that a job or a plan would run? The rules are data.

`configs/kernels.yaml` names for every feature the architectures without it, and the source. A
feature is a number format (`bfloat16`, `float8`, `mxfp8`, `nvfp4`), `context_parallel` or
`fused_attention`. Without the last a trainer keeps scores in memory, without the others it fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Cluster
from hetplan.files.quantities import FileForm, Name
from hetplan.files.reading import decode, read_document
from hetplan.files.shipped import shipped_folder
from hetplan.job.spec import Job
from hetplan.job.trainer import trainer_settings

SCHEMA = "hetplan.kernels/1"
CONTEXT_PARALLEL = "context_parallel"
FUSED_ATTENTION = "fused_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack(FileForm):
    """What some architectures have no kernel for."""

    feature: Name
    architectures: list[Name]
    why: str
    source: str
    targets: list[Name] = field(default_factory=list)
    """Trainers that would need the kernel; empty: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table(FileForm):
    lacks: list[Lack]


@lru_cache(maxsize=1)
def known_lacks() -> tuple[Lack, ...]:
    """Every rule."""
    document = read_document(shipped_folder("configs") / "kernels.yaml")
    return tuple(decode(document, _Table, schema=SCHEMA).lacks)


def kernel_fault(device: DeviceKind, feature: str, target: str) -> str:
    """Why a target cannot run the feature on this kind, in words; empty where it can."""
    for each in known_lacks():
        here = each.feature == feature and device.architecture in each.architectures
        if here and (not each.targets or target in each.targets):
            return f"{device.kind} ({device.architecture}) does not run {feature}: {each.why}"
    return ""


def job_on(device: DeviceKind, job: Job) -> Job:
    """The job as its trainer runs it on devices of this kind: one that lacks fused attention keeps
    the scores, whatever the others of the plan do.
    """
    lacks = kernel_fault(device, FUSED_ATTENTION, job.target)
    if not lacks or not trainer_settings(job).fused_attention:
        return job
    return replace(job, trainer=replace(job.trainer, fused_attention=False))


def used_kinds(cluster: Cluster, job: Job) -> tuple[DeviceKind, ...]:
    """Kinds of the islands that the job does not forbid."""
    used = (each for each in cluster.islands if each.name not in job.forbid.islands)
    return tuple(dict.fromkeys(island.device for island in used if island.usable_nodes))


def context_parallel_fault(kinds: Iterable[DeviceKind], target: str) -> str:
    """Why no plan on devices of these kinds is cut along its sequences; empty where one may be.

    One kind without the kernel is enough: cp is searched for all stages alike.
    """
    faults = (kernel_fault(each, CONTEXT_PARALLEL, target) for each in kinds)
    return next(filter(None, faults), "")
