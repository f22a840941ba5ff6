"""The provenance of what is measured now, which names the population that samples belong to."""

from __future__ import annotations

import datetime
import hashlib
import os

import torch

from hetplan.cluster.catalogue import kind_called, load_catalogue
from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.profiling.backends import Backend, use_threads
from hetplan.profiling.pacing import SCHEMA as PACE_SCHEMA
from hetplan.profiling.pacing import PacedKind
from hetplan.profiling.samples import Provenance
from hetplan.version import __version__


def provenance_here(
    backend: Backend,
    *,
    device: str | None = None,
    threads: int = 1,
    command: str = "",
    pace: PacedKind | None = None,
    together: int = 1,
) -> Provenance:
    """Where samples measured now come from; lets torch compute with `threads` threads.

    `device`: their device kind, by default the catalogue's; `together`: processes that measure at
    the same time.
    """
    check_threads(threads)
    use_threads(threads)
    notes = []
    if not backend.reset_peak_memory():
        notes.append("peak_memory_bytes is 0: the system does not tell")
    if not backend.clock_hertz():
        notes.append("clock_hertz is 0: the device does not tell")
    return Provenance(
        device=pace.device if pace else device or kind_here(backend),
        device_name=backend.device_name(),
        backend=backend.name,
        measured_on=datetime.date.today().isoformat(),
        hetplan_version=__version__,
        torch_version=torch.__version__,
        driver=backend.driver(),
        threads=threads,
        paced=paced_text(pace) if pace else "",
        together=together,
        clocks=backend.clocks(),
        command=command,
        notes="; ".join(notes),
    )


def kind_here(backend: Backend) -> str:
    """The catalogue's kind of the device, which cluster files name; else its driver's name."""
    if not backend.is_accelerator:
        return backend.kind()
    return kind_called(backend.device_name(), load_catalogue()) or backend.kind()


def check_threads(threads: int) -> None:
    """An InputError where this process may use fewer cores than that."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    if not 1 <= threads <= cores:
        raise InputError(
            f"--threads is {threads}, and this process may use {cores} cores; give 1 to {cores}"
        )


def paced_text(pace: PacedKind) -> str:
    """How the device is slowed down: the factor, and a hash of the times that are held."""
    digest = hashlib.sha256(encode(pace, schema=PACE_SCHEMA).encode()).hexdigest()
    jitter = f", jitter {pace.jitter:g}" if pace.jitter else ""
    return (
        f"layers held to the times of a pace (slow-down {pace.slow_down:g}{jitter}, {digest[:12]})"
    )
