"""Reads this machine: files of /proc and /sys under a root, psutil, and programs with a time limit.

Tests give another root and another way to run programs. Nothing here raises for what a machine can
do wrong: what cannot be read is empty or 0, and programs answer with a state.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hetplan.machine.values import (
    MachineInterface,
    MachineLimits,
    MachineProcessor,
    MachineRdma,
)

TOOL_SECONDS = 5.0  # a driver's tool that takes longer hangs on a broken device
TORCH_SECONDS = 60.0  # importing torch takes seconds from a cold disk, more on a network disk
_MAX_BYTES = 1 << 20  # of a file or an output; nothing that is read here is as large
_MAX_ENTRIES = 4096
_POLL_SECONDS = 0.01


class AnswerState(StrEnum):
    """How a program ended."""

    DONE = "done"
    MISSING = "missing"
    TIMEOUT = "timeout"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a program answered."""

    state: AnswerState
    text: str = ""
    """Of stdout; stderr is dropped, because it may name files and machines."""
    reason: str = ""
    """Why it failed, in a few words."""


Run = Callable[[Sequence[str], float], Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """How a machine is looked at."""

    root: Path = Path("/")
    run: Run
    """Program with its arguments, and its time limit in seconds."""
    find: Callable[[str], bool]
    """Whether a program is there."""
    space: Callable[[Path], float]
    """Size in bytes of the file system at this path; 0 where it is not told."""

    def text(self, path: str) -> str:
        """The file's text; empty where it cannot be read."""
        # Some files of /sys refuse with EINVAL; a fake tree may hold anything, a pipe too.
        with contextlib.suppress(OSError, ValueError):
            file = self.root / path
            if file.is_file():
                with file.open("rb") as stream:
                    return stream.read(_MAX_BYTES).decode("utf-8", "replace")
        return ""

    def names(self, path: str) -> tuple[str, ...]:
        """Names of a folder's entries, sorted; none where it cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            entries = sorted(entry.name for entry in (self.root / path).iterdir())
            return tuple(entries[:_MAX_ENTRIES])
        return ()

    def exists(self, path: str) -> bool:
        """Whether something is there."""
        with contextlib.suppress(OSError, ValueError):
            return (self.root / path).exists()
        return False

    def link_name(self, path: str) -> str:
        """Last part of what a symbolic link points to; empty where there is none."""
        with contextlib.suppress(OSError, ValueError):
            return Path(os.readlink(self.root / path)).name
        return ""


def this_machine_probe() -> Probe:
    """The machine that this process runs on."""
    return Probe(run=run_program, find=lambda name: shutil.which(name) is not None, space=_space)


def run_program(arguments: Sequence[str], seconds: float) -> Answer:
    """Run a program to its end or to its time limit; it gets no input and no terminal.

    Its output goes to a file: a child that holds a pipe open could not be waited for.
    """
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except FileNotFoundError:
            return Answer(state=AnswerState.MISSING)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it cannot be started"
            return Answer(state=AnswerState.FAILED, reason=str(reason))
        end = time.monotonic() + seconds
        try:
            while process.poll() is None and time.monotonic() < end:
                if os.fstat(output.fileno()).st_size > _MAX_BYTES:
                    break
                time.sleep(_POLL_SECONDS)
            is_ended = process.poll() is not None
        finally:
            # A program that a driver holds in the kernel is left.
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1.0)
        output.seek(0)
        text = output.read(_MAX_BYTES).decode("utf-8", "replace")
    if not is_ended:
        return Answer(
            state=AnswerState.TIMEOUT,
            reason=f"no end within {seconds:g} s or {_MAX_BYTES >> 20} MiB of output",
        )
    if process.returncode != 0:
        reason = f"exit code {process.returncode}"
        return Answer(state=AnswerState.FAILED, text=text, reason=reason)
    return Answer(state=AnswerState.DONE, text=text)


def _space(path: Path) -> float:
    with contextlib.suppress(OSError, AttributeError):
        state = os.statvfs(path)
        return float(state.f_blocks) * float(state.f_frsize)
    return 0.0


# nv_peer_mem is the older name of the same module.
_GPU_DIRECT = ("nvidia_peermem", "nv_peer_mem")


def find_processor(probe: Probe) -> MachineProcessor:
    """What /proc and /sys tell about processor and memory."""
    memory = probe.text("proc/meminfo")
    cores = cpu_list_length(probe.text("sys/devices/system/cpu/online"))
    usable = cpu_list_length(field_of(probe.text("proc/self/status"), "Cpus_allowed_list"))
    version_1 = _version_1_quota(probe)
    limit = group_limit_bytes(probe.text("sys/fs/cgroup/memory.max")) or group_limit_bytes(
        probe.text("sys/fs/cgroup/memory/memory.limit_in_bytes")
    )
    return MachineProcessor(
        model=processor_model(probe.text("proc/cpuinfo")),
        cores=cores,
        usable_cores=min(usable, cores) if cores else usable,
        cpu_quota_cores=quota_cores(probe.text("sys/fs/cgroup/cpu.max")) or version_1,
        numa_nodes=cpu_list_length(probe.text("sys/devices/system/node/online")),
        memory_bytes=kilobytes(memory, "MemTotal"),
        available_bytes=kilobytes(memory, "MemAvailable"),
        memory_limit_bytes=limit,
    )


def _version_1_quota(probe: Probe) -> float:
    quota = probe.text("sys/fs/cgroup/cpu/cpu.cfs_quota_us").strip()
    period = probe.text("sys/fs/cgroup/cpu/cpu.cfs_period_us").strip()
    return quota_cores(f"{quota} {period}")


def find_limits(probe: Probe) -> MachineLimits:
    """Limits that end a training run in the middle, and what RDMA needs."""
    limits = probe.text("proc/self/limits")
    locked, unlimited = limit_of(limits, "Max locked memory")
    files, _ = limit_of(limits, "Max open files")
    return MachineLimits(
        container=container_of(
            probe.text("proc/1/cgroup"),
            docker_file=probe.exists(".dockerenv"),
            podman_file=probe.exists("run/.containerenv"),
            kubernetes=probe.exists("var/run/secrets/kubernetes.io"),
        ),
        shared_memory_bytes=finite(probe.space(probe.root / "dev/shm"))
        if probe.exists("dev/shm")
        else 0.0,
        locked_memory_bytes=locked,
        locked_unlimited=unlimited,
        open_files=int(files),
        rdma_visible=any(name.startswith("uverbs") for name in probe.names("dev/infiniband")),
        gpu_direct=module_loaded(probe.text("proc/modules"), _GPU_DIRECT),
    )


_NET = "sys/class/net"
_RDMA = "sys/class/infiniband"
_LOOPBACK = "772"  # ARPHRD_LOOPBACK of linux/if_arp.h


def find_interfaces(probe: Probe) -> tuple[MachineInterface, ...]:
    """Interfaces of /sys/class/net without the loopback, the fastest first."""
    groups: dict[tuple[bool, str, float, str], list[str]] = {}
    for name in probe.names(_NET):
        place = f"{_NET}/{name}"
        if probe.text(f"{place}/type").strip() == _LOOPBACK or name == "lo":
            continue
        if not probe.exists(f"{place}/operstate"):
            continue  # bonding_masters is a file in that folder
        physical = probe.exists(f"{place}/device")
        key = (
            physical,
            probe.text(f"{place}/operstate").strip()[:16] or "unknown",
            speed_bits_per_second(probe.text(f"{place}/speed")),
            probe.link_name(f"{place}/device/driver")[:32],
        )
        groups.setdefault(key, []).append(without_addresses(name))
    found = (
        MachineInterface(
            names=tuple(names),
            state=state,
            bits_per_second=speed,
            driver=driver,
            physical=physical,
        )
        for (physical, state, speed, driver), names in groups.items()
    )
    return tuple(
        sorted(
            found,
            key=lambda each: (not each.physical, -each.bits_per_second, each.state, each.names),
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Port:
    device: str
    state: str
    bits_per_second: float
    link_layer: str
    numa_node: int


def find_rdma(probe: Probe) -> tuple[MachineRdma, ...]:
    """Ports of /sys/class/infiniband, the active and fast ones first."""
    groups: dict[tuple[str, float, str], list[_Port]] = {}
    for port in _ports(probe):
        groups.setdefault((port.state, port.bits_per_second, port.link_layer), []).append(port)
    found = (
        MachineRdma(
            devices=tuple(dict.fromkeys(port.device for port in ports)),
            state=state,
            bits_per_second=speed,
            link_layer=layer,
            numa_nodes=tuple(sorted({port.numa_node for port in ports if port.numa_node >= 0})),
        )
        for (state, speed, layer), ports in groups.items()
    )
    return tuple(sorted(found, key=lambda each: (each.state != "ACTIVE", -each.bits_per_second)))


def _ports(probe: Probe) -> Iterable[_Port]:
    for device in probe.names(_RDMA):
        place = f"{_RDMA}/{device}"
        node = probe.text(f"{place}/device/numa_node").strip()
        for port in probe.names(f"{place}/ports"):
            yield _Port(
                device=without_addresses(device),
                state=port_state(probe.text(f"{place}/ports/{port}/state")),
                bits_per_second=port_bits_per_second(probe.text(f"{place}/ports/{port}/rate")),
                link_layer=probe.text(f"{place}/ports/{port}/link_layer").strip()[:16],
                numa_node=int(number(node)) if node and not node.startswith("-") else -1,
            )


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
