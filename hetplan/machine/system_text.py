"""What the texts of /proc and /sys say: pure functions, `text -> value`, that never raise.

A text that is not what it should be gives 0, an empty text or an empty tuple: not told.
"""

from __future__ import annotations

import math
import re

# Larger than any machine; a number of thousands of digits in a file is garbage, not a size.
_MAX_COUNT = 1e18


def number(text: str) -> float:
    """The first decimal number of the text; 0 where there is none."""
    found = re.search(r"\d{1,20}(?:\.\d{1,9})?", text)
    value = float(found.group(0)) if found else 0.0
    return value if value < _MAX_COUNT else 0.0


def cpu_list_length(text: str) -> int:
    """How many CPUs `0-3,8,10-11` names; 0 where it is no such list."""
    count = 0
    for part in text.strip().split(","):
        found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if found is None:
            return 0
        first, last = int(found.group(1)), int(found.group(2) or found.group(1))
        if last < first:
            return 0
        count += last - first + 1
    return count


def field_of(text: str, name: str) -> str:
    """What stands behind `name:` in a file of such lines, as in /proc/meminfo."""
    found = re.search(rf"^{re.escape(name)}[ \t]*:[ \t]*(.*)$", text, re.MULTILINE)
    return found.group(1).strip() if found else ""


def kilobytes(text: str, name: str) -> float:
    """Bytes of a line `name:   123 kB`."""
    return number(field_of(text, name)) * 1024


def processor_model(cpuinfo: str) -> str:
    """Model of the processor: x86 has `model name`, others `Model` or `Hardware`."""
    for name in ("model name", "Model", "Hardware", "cpu"):
        if value := field_of(cpuinfo, name):
            return " ".join(value.split())[:80]
    return ""


def limit_of(limits: str, name: str) -> tuple[float, bool]:
    """(soft limit, unlimited) of a line of /proc/self/limits."""
    found = re.search(rf"^{re.escape(name)}\s+(\S+)", limits, re.MULTILINE)
    if found is None:
        return 0.0, False
    return (0.0, True) if found.group(1) == "unlimited" else (number(found.group(1)), False)


def quota_cores(cpu_max: str) -> float:
    """Cores of a control group's cpu.max (`200000 100000`); 0 for `max` or anything else."""
    parts = cpu_max.split()
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
        return 0.0
    quota, period = number(parts[0]), number(parts[1])
    return quota / period if period else 0.0


def group_limit_bytes(text: str) -> float:
    """Bytes of a control group's memory.max; 0 for `max` and for version 1's huge default."""
    digits = text.strip()
    if not digits.isascii() or not digits.isdigit() or len(digits) > 19:
        return 0.0
    # Version 1 says "no limit" as the largest page-aligned 64-bit number.
    return float(digits) if float(digits) < 2.0**62 else 0.0


def port_state(text: str) -> str:
    """`ACTIVE` of `4: ACTIVE`."""
    found = re.fullmatch(r"\s*\d+:\s*([A-Z_]+)\s*", text)
    return found.group(1) if found else ""


def port_bits_per_second(text: str) -> float:
    """Rate of an RDMA port: `400 Gb/sec (4X NDR)`."""
    found = re.match(r"\s*(\d{1,6}(?:\.\d{1,3})?)\s*Gb/sec", text)
    return float(found.group(1)) * 1e9 if found else 0.0


def speed_bits_per_second(text: str) -> float:
    """Rate of a network interface, which the kernel tells in Mbit/s; -1 means unknown."""
    digits = text.strip()
    return number(digits) * 1e6 if re.fullmatch(r"\d{1,9}", digits, re.ASCII) else 0.0


def without_addresses(name: str) -> str:
    """An interface's name with what may be a hardware or IP address in it replaced."""
    name = re.sub(r"[0-9a-fA-F]{12,}", "*", name)
    return re.sub(r"\d{1,3}([._-]\d{1,3}){3}", "*", name)[:32]


def container_of(cgroup: str, *, docker_file: bool, podman_file: bool, kubernetes: bool) -> str:
    """Which kind of container this is; empty where nothing says so."""
    if kubernetes or "kubepods" in cgroup:
        return "kubernetes"
    if podman_file:
        return "podman"
    if docker_file or "docker" in cgroup:
        return "docker"
    return "container" if re.search(r"lxc|containerd|machine\.slice", cgroup) else ""


def module_loaded(modules: str, names: tuple[str, ...]) -> str:
    """The first of these kernel modules that /proc/modules lists; empty where none does."""
    loaded = {line.split()[0] for line in modules.splitlines() if line.split()}
    return next((name for name in names if name in loaded), "")


def finite(value: float) -> float:
    """The value, or 0 where it is no finite number."""
    return value if math.isfinite(value) and value > 0 else 0.0
