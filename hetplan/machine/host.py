"""Reads this machine: psutil, files of /proc and /sys under a root, programs with a time limit.

Tests give another root and another way to run programs. Nothing here raises for what a machine can
do wrong: what cannot be read is empty or 0, and programs answer with a state.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from hetplan.machine.report import (
    MachineInterface,
    MachineProcessor,
    MachineRdma,
)

TOOL_SECONDS = 5.0  # a driver's tool that takes longer hangs on a broken device
TORCH_SECONDS = 60.0  # importing torch takes seconds from a cold disk, more on a network disk
_MAX_BYTES = 1 << 20  # of a file or an output; nothing that is read here is as large
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """How a machine is looked at."""

    root: Path = Path("/")
    run: Callable[[Sequence[str], float], Answer]
    """Program with its arguments, and its time limit in seconds."""
    find: Callable[[str], bool] = lambda name: shutil.which(name) is not None
    """Whether a program is there."""

    def text(self, path: str) -> str:
        """The file's text; empty where it cannot be read."""
        # Some files of /sys refuse with EINVAL; a fake tree may hold anything, a pipe too.
        with contextlib.suppress(OSError, ValueError):
            file = self.root / path
            if file.is_file():
                with file.open("rb") as stream:
                    return stream.read(_MAX_BYTES).decode("utf-8", "replace").strip()
        return ""

    def names(self, path: str) -> tuple[str, ...]:
        """Names of a folder's entries, sorted; none where it cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            return tuple(sorted(entry.name for entry in (self.root / path).iterdir()))
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


def find_processor(probe: Probe) -> MachineProcessor:
    """Processor and memory, and what the control group (version 2, else 1) leaves of them."""
    memory = psutil.virtual_memory()
    process = psutil.Process()
    cores = psutil.cpu_count() or 0
    group = "sys/fs/cgroup"
    quota = " ".join(probe.text(f"{group}/cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    nodes = (name.removeprefix("node") for name in probe.names("sys/devices/system/node"))
    return MachineProcessor(
        model=processor_model(probe.text("proc/cpuinfo")),
        cores=cores,
        usable_cores=len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else cores,
        cpu_quota_cores=quota_cores(probe.text(f"{group}/cpu.max")) or quota_cores(quota),
        numa_nodes=sum(name.isdigit() for name in nodes),
        memory_bytes=float(memory.total),
        available_bytes=float(memory.available),
        memory_limit_bytes=group_limit_bytes(
            probe.text(f"{group}/memory.max") or probe.text(f"{group}/memory/memory.limit_in_bytes")
        ),
    )


_NET = "sys/class/net"
_RDMA = "sys/class/infiniband"


def find_interfaces(probe: Probe) -> tuple[MachineInterface, ...]:
    """Network interfaces without the loopback, the fastest first."""
    groups: dict[tuple[bool, str, float, str], list[str]] = {}
    for name, stats in sorted(psutil.net_if_stats().items()):
        if name == "lo" or "loopback" in stats.flags:
            continue
        key = (
            probe.exists(f"{_NET}/{name}/device"),
            "up" if stats.isup else "down",
            stats.speed * 1e6,
            probe.link_name(f"{_NET}/{name}/device/driver")[:32],
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


def find_rdma(probe: Probe) -> tuple[MachineRdma, ...]:
    """Ports of /sys/class/infiniband, the active and fast ones first."""
    groups: dict[tuple[str, float, str], list[tuple[str, str]]] = {}
    for device in probe.names(_RDMA):
        node = probe.text(f"{_RDMA}/{device}/device/numa_node")
        for port in probe.names(f"{_RDMA}/{device}/ports"):
            place = f"{_RDMA}/{device}/ports/{port}"
            key = (
                port_state(probe.text(f"{place}/state")),
                port_bits_per_second(probe.text(f"{place}/rate")),
                probe.text(f"{place}/link_layer")[:16],
            )
            groups.setdefault(key, []).append((without_addresses(device), node))
    found = (
        MachineRdma(
            devices=tuple(dict.fromkeys(device for device, _ in ports)),
            state=state,
            bits_per_second=speed,
            link_layer=layer,
            numa_nodes=tuple(sorted({int(node) for _, node in ports if node.isdecimal()})),
        )
        for (state, speed, layer), ports in groups.items()
    )
    return tuple(sorted(found, key=lambda each: (each.state != "ACTIVE", -each.bits_per_second)))


def processor_model(cpuinfo: str) -> str:
    """Model of the processor: x86 has `model name`, others `Model` or `Hardware`."""
    for name in ("model name", "Model", "Hardware", "cpu"):
        found = re.search(rf"^{name}[ \t]*:[ \t]*(\S.*)$", cpuinfo, re.MULTILINE)
        if found:
            return " ".join(found.group(1).split())[:80]
    return ""


def quota_cores(cpu_max: str) -> float:
    """Cores of a control group's cpu.max (`200000 100000`); 0 for `max` or anything else."""
    found = re.fullmatch(r"([0-9]{1,15}) ([1-9][0-9]{0,14})", cpu_max.strip())
    return int(found.group(1)) / int(found.group(2)) if found else 0.0


def group_limit_bytes(text: str) -> float:
    """Bytes of a control group's memory.max; 0 for `max` and for version 1's huge default."""
    found = re.fullmatch(r"[0-9]{1,19}", text.strip())
    # Version 1 says "no limit" as the largest page-aligned 64-bit number.
    return float(text) if found and float(text) < 2.0**62 else 0.0


def port_state(text: str) -> str:
    """`ACTIVE` of `4: ACTIVE`."""
    found = re.fullmatch(r"\s*\d+:\s*([A-Z_]+)\s*", text)
    return found.group(1) if found else ""


def port_bits_per_second(text: str) -> float:
    """Rate of an RDMA port: `400 Gb/sec (4X NDR)`."""
    found = re.match(r"\s*(\d{1,6}(?:\.\d{1,3})?)\s*Gb/sec", text)
    return float(found.group(1)) * 1e9 if found else 0.0


def without_addresses(name: str) -> str:
    """An interface's name with what may be a hardware or IP address in it replaced."""
    name = re.sub(r"[0-9a-fA-F]{12,}", "*", name)
    return re.sub(r"\d{1,3}([._-]\d{1,3}){3}", "*", name)[:32]
