"""Which clock and power settings somebody chose for a device, in words that name a population.

Empty where the device runs as it came, and where the system does not tell. Read, never set. Words
depend on the settings alone, not on the moment: the clock itself goes up and down and is a column
of the samples.
"""

from __future__ import annotations

import csv
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

# A driver's tool answers within a second or two; one that hangs must not stop a measurement.
_PATIENCE_SECONDS = 20.0
# Clocks move by steps of 15 MHz (NVIDIA), limits by whole watts: below this nothing was chosen.
_SAME = 0.5

_CHOSEN_GOVERNORS = ("performance", "powersave", "userspace", "conservative")
_NVIDIA_QUESTIONS = (
    "clocks.applications.graphics",
    "clocks.default_applications.graphics",
    "clocks.applications.memory",
    "clocks.default_applications.memory",
    "power.limit",
    "power.default_limit",
)


def run_tool(command: Sequence[str]) -> str:
    """What the program prints; empty where it is missing, fails or does not answer."""
    try:
        done = subprocess.run(
            list(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def nvidia_clocks(device: str, ask: Callable[[Sequence[str]], str] = run_tool) -> str:
    """Application clocks and power limit that differ from the device's defaults.

    `device` is what `nvidia-smi --id` takes: a UUID, a PCI address or a number. Clocks that were
    locked with `nvidia-smi -lgc` cannot be asked for; they show in the samples' clock column.
    """
    question = ",".join(_NVIDIA_QUESTIONS)
    text = ask(
        ("nvidia-smi", f"--id={device}", f"--query-gpu={question}", "--format=csv,noheader,nounits")
    )
    rows = [row for row in csv.reader(text.splitlines()) if len(row) == len(_NVIDIA_QUESTIONS)]
    if len(rows) != 1:
        return ""
    core, core_default, memory, memory_default, power, power_default = map(_number, rows[0])
    return ", ".join(
        f"{name} {chosen:g} {unit}"
        for name, chosen, default, unit in (
            ("sm", core, core_default, "MHz"),
            ("memory", memory, memory_default, "MHz"),
            ("limit", power, power_default, "W"),
        )
        if chosen and default and abs(chosen - default) > _SAME
    )


def rocm_clocks(device: str, ask: Callable[[Sequence[str]], str] = run_tool) -> str:
    """The performance level, where it is not `auto`; `device` is rocm-smi's number."""
    text = ask(("rocm-smi", "-d", device, "--showperflevel", "--csv"))
    rows = [row for row in csv.reader(text.splitlines()) if len(row) > 1]
    if len(rows) != 2:
        return ""
    level = rows[1][1].strip().lower()
    return "" if level in ("", "auto", "n/a", "unknown") else f"performance level {level}"


def cpu_clocks(cpus: Path = Path("/sys/devices/system/cpu")) -> str:
    """Governor and highest frequency of the cores this process may use, where they were chosen.

    The governors that Linux starts with (schedutil, ondemand, and intel_pstate's and amd_pstate's
    powersave, which follows the load) are no choice; a limit counts where it is not the hardware's.
    """
    found: dict[str, None] = {}
    for core in _own_cores():
        folder = cpus / f"cpu{core}" / "cpufreq"
        governor = _word(folder / "scaling_governor")
        follows_load = "pstate" in _word(folder / "scaling_driver") and governor == "powersave"
        if governor in _CHOSEN_GOVERNORS and not follows_load:
            found.setdefault(f"governor {governor}")
        limit = _number(_word(folder / "scaling_max_freq"))
        hardware = _number(_word(folder / "cpuinfo_max_freq"))
        if limit and hardware and limit != hardware:
            found.setdefault(f"at most {limit / 1e3:g} MHz")
    off = (("intel_pstate/no_turbo", "1"), ("cpufreq/boost", "0"))
    if any(_word(cpus / path) == value for path, value in off):
        found.setdefault("boost off")
    return ", ".join(found)


def _own_cores() -> tuple[int, ...]:
    affinity = getattr(os, "sched_getaffinity", None)
    return tuple(sorted(affinity(0))) if affinity else tuple(range(os.cpu_count() or 1))


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _number(text: str) -> float:
    """0 where the tool says [N/A], or that it is not supported."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 < value < 1e9 else 0.0
