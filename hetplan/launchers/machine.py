"""What this machine is and has: for run logs, and to refuse what it cannot run."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from hetplan.cluster.devices import CPU_KIND
from hetplan.errors import Fault, InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where a run took place; nothing that names the machine itself."""

    cores: int
    """Cores that this process may use."""
    processor: str
    system: str
    python_version: str
    torch_version: str
    load_before: float
    """Average number of runnable processes over the minute before the run."""


def this_machine() -> Machine:
    """This machine at this moment."""
    return Machine(
        cores=usable_cores(),
        processor=_processor(),
        system=f"{platform.system()} {platform.release()}",
        python_version=platform.python_version(),
        torch_version=version("torch"),
        load_before=os.getloadavg()[0],
    )


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", path.read_text(), re.M) if path.exists() else None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


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
