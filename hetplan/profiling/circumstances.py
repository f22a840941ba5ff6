"""Under which circumstances something is measured: the provenance of a population."""

from __future__ import annotations

import datetime
import hashlib
from typing import TYPE_CHECKING

import torch

from hetplan.profiling.backends import Backend
from hetplan.profiling.samples import Provenance
from hetplan.version import __version__

if TYPE_CHECKING:
    from hetplan.profiling.pacing import PacedKind


def circumstances(
    backend: Backend,
    *,
    device: str,
    threads: int,
    command: str,
    date: datetime.date,
    pace: PacedKind | None = None,
    together: int = 1,
    tool: str = "hetplan",
) -> Provenance:
    """Where samples measured now come from.

    `threads` is set by the caller; `date` is today's.
    """
    notes = []
    if not backend.reset_peak_memory():
        notes.append("peak_memory_bytes is 0: the system does not tell")
    if not backend.clock_hertz():
        notes.append("clock_hertz is 0: the device does not tell")
    if temperature := backend.temperature_celsius():
        notes.append(f"{temperature:.0f} degrees Celsius at the start")
    return Provenance(
        device=device,
        device_name=backend.device_name(),
        backend=backend.name,
        measured_on=date.isoformat(),
        hetplan_version=__version__,
        torch_version=torch.__version__,
        driver=backend.driver(),
        threads=threads,
        paced=paced_text(pace) if pace else "",
        together=together,
        tool=tool,
        clocks=backend.clocks(),
        command=command,
        notes="; ".join(notes),
    )


def paced_text(pace: PacedKind) -> str:
    """How the device is slowed down: the factor, and a hash of the times, which are held."""
    from hetplan.files.encoding import encode
    from hetplan.profiling.pacing import SCHEMA

    digest = hashlib.sha256(encode(pace, schema=SCHEMA).encode()).hexdigest()
    jitter = f", jitter {pace.jitter:g}" if pace.jitter else ""
    return (
        f"layers held to the times of a pace (slow-down {pace.slow_down:g}{jitter}, {digest[:12]})"
    )
