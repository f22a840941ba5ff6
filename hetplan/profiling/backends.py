"""The torch devices that can be measured: CPU cores, CUDA (ROCm too) and vendors' plug-ins.

A plug-in adds a module such as `torch.npu` that copies `torch.cuda`, to different degrees: every
call is looked up and has a fall-back. Without timed events a mark waits for the device and reads
the clock. Only the CPU has been run yet: no accelerator was at hand.

Part of the stand-alone measure.py: Python 3.8 and torch 2.1 only.
"""

from __future__ import annotations

import csv
import ctypes
import importlib
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import torch
import torch.distributed as dist

from hetplan.errors import InputError


@dataclass(frozen=True)
class Plugin:
    """How torch gets to know a device type."""

    name: str
    """torch device type."""
    vendor: str
    modules: tuple[str, ...]
    """Imported where they exist; they make the type known."""
    collectives: tuple[str, ...]
    """torch.distributed backends of the device's memory; the first that exists is used."""


# Backends as accelerate 1.x (state.py) opens them for these types; gcu: Enflame's own guide.
PLUGINS = (
    Plugin("npu", "huawei", ("torch_npu",), ("hccl",)),
    Plugin("mlu", "cambricon", ("torch_mlu",), ("cncl",)),
    Plugin("musa", "moore-threads", ("torch_musa",), ("mccl",)),
    Plugin(
        "xpu",
        "intel",
        ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"),
        ("xccl", "ccl"),
    ),
    Plugin(
        "hpu",
        "intel",
        ("habana_frameworks.torch.core", "habana_frameworks.torch.distributed.hccl"),
        ("hccl",),
    ),
    Plugin("gcu", "enflame", ("torch_gcu",), ("eccl",)),
)


class CpuBackend:
    """CPU cores: wall clock, and the process's resident set for memory."""

    name = "cpu"
    collectives = "gloo"
    is_accelerator = False

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._resident_bytes = clock, 0.0

    def device(self) -> torch.device:
        """The device that tensors are put on."""
        return torch.device("cpu")

    def synchronise(self) -> None:
        """Nothing is queued on a CPU."""

    def mark(self) -> float:
        """Reading of the clock."""
        return self._clock()

    def seconds_between(self, first: float, second: float) -> float:
        """Difference of two readings."""
        return second - first

    def reset_peak_memory(self) -> bool:
        """Reset the kernel's high-water mark; False where it cannot be (not Linux, or denied)."""
        # Memory that was freed but kept by malloc would hide what the next pass allocates.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM: proc_pid_clear_refs(5)
        except OSError:
            return False
        self._resident_bytes = _status_bytes("VmRSS")
        return True

    def peak_memory_bytes(self) -> float:
        """Growth of the resident set since `reset_peak_memory`; exact to a few pages."""
        return max(0.0, _status_bytes("VmHWM") - self._resident_bytes)

    def clock_hertz(self) -> float:
        """Frequency of core 0; 0 where Linux does not tell, as on most virtual machines."""
        return 1e3 * _number(_read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq"))

    def clocks(self) -> str:
        """Not told."""
        return ""

    def device_name(self) -> str:
        """Model name of the processor."""
        match = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
        return match.group(1).strip() if match else platform.processor() or platform.machine()

    def driver(self) -> str:
        """Release of the operating system's kernel."""
        return f"{platform.system()} {platform.release()}"

    def kind(self) -> str:
        """The kind of every CPU."""
        return "cpu"


class AcceleratorBackend:
    """One device of a torch device type: CUDA (ROCm too), or a type of `PLUGINS`."""

    is_accelerator = True

    def __init__(
        self,
        name: str,
        index: int = 0,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        plugins = [each for each in PLUGINS if each.name == name]
        self.modules = plugins[0].modules if plugins else ()
        for module in self.modules:
            try:
                importlib.import_module(module)
            except ImportError:
                continue
        self._library: Any = getattr(torch, name, None)
        count = self._ask("device_count", 0) if self._ask("is_available", False) else 0
        if index >= count:
            needs = f"this needs {' or '.join(self.modules)}" if plugins else "is it a CPU build?"
            raise InputError(
                f"torch {torch.__version__} sees {count} {name} devices, and device {index} was "
                f"to be measured; {needs}; check the driver, or measure with --device cpu"
            )
        is_hip = bool(getattr(torch.version, "hip", None))
        self.vendor = plugins[0].vendor if plugins else "amd" if is_hip else "nvidia"
        names = plugins[0].collectives if plugins else ("nccl",)  # RCCL too, under this name
        known = getattr(getattr(dist, "Backend", None), "backend_list", ())
        self.collectives = next((each for each in names if each in known), names[0])
        self.name, self._index, self._clock, self._allocated_bytes = name, index, clock, 0.0
        self._ask("set_device", None, index)
        self._event = self._timed_event()

    def _ask(self, function: str, default: Any, *arguments: Any) -> Any:
        call = getattr(self._library, function, None)
        try:
            return default if call is None else call(*arguments)
        except (RuntimeError, NotImplementedError, TypeError, ImportError):
            return default  # as torch.cuda.clock_rate without pynvml, or in some containers

    def _timed_event(self) -> Any:
        """The device's event type; None where it does not measure time."""
        event: Any = getattr(self._library, "Event", None)
        try:
            first, second = event(enable_timing=True), event(enable_timing=True)
            first.record()
            second.record()
            self.synchronise()
            return event if float(first.elapsed_time(second)) >= 0 else None
        except (RuntimeError, NotImplementedError, TypeError, AttributeError):
            return None

    def device(self) -> torch.device:
        """The device that tensors are put on."""
        return torch.device(self.name, self._index)

    def synchronise(self) -> None:
        """Wait for the device's queues; without a call for it, by fetching a value."""
        if hasattr(self._library, "synchronize"):
            self._library.synchronize()
        else:
            torch.zeros((), device=self.device()).item()

    def mark(self) -> Any:
        """An event in the device's order of work; without one, the clock after a wait."""
        if self._event is None:
            self.synchronise()
            return self._clock()
        event = self._event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, first: Any, second: Any) -> float:
        """Time between two marks; valid after `synchronise`."""
        return float(second - first if self._event is None else first.elapsed_time(second) / 1e3)

    def reset_peak_memory(self) -> bool:
        """Start a new peak in torch's allocator; False where it has no counters."""
        self.synchronise()
        allocated = self._ask("memory_allocated", None)
        if allocated is None or self._ask("max_memory_allocated", None) is None:
            return False
        self._ask("reset_peak_memory_stats", None)
        self._allocated_bytes = float(allocated)
        return hasattr(self._library, "reset_peak_memory_stats")

    def peak_memory_bytes(self) -> float:
        """Growth of what the allocator handed out since `reset_peak_memory`."""
        return max(0.0, float(self._library.max_memory_allocated()) - self._allocated_bytes)

    def clock_hertz(self) -> float:
        """Clock at this moment; 0 where the device does not tell."""
        return 1e6 * float(self._ask("clock_rate", 0.0, self._index))

    def clocks(self) -> str:
        """Clock and power settings that somebody chose; empty: as it came, or not told."""
        if self.name != "cuda" or self.vendor == "amd":
            return ""
        properties = self._ask("get_device_properties", None, self._index)
        if hasattr(properties, "uuid"):
            return nvidia_clocks(f"GPU-{properties.uuid}")
        # Without UUIDs (torch before 2.4) numbers agree only where no device is hidden.
        hidden = "CUDA_VISIBLE_DEVICES" in os.environ
        return "" if hidden else nvidia_clocks(str(self._index))

    def device_name(self) -> str:
        """Name from the driver, or the device type."""
        return str(self._ask("get_device_name", self.name, self._index)).strip()

    def driver(self) -> str:
        """Versions of runtime and driver, and how float32 is multiplied: TF32 is 4 times faster."""
        if self.name != "cuda":
            loaded = [(name, sys.modules[name]) for name in self.modules if name in sys.modules]
            versions = [f"{name} {getattr(module, '__version__', '')}" for name, module in loaded]
            return ", ".join(versions) or f"torch {torch.__version__}"
        hip = getattr(torch.version, "hip", None)
        text = f"hip {hip}" if hip else f"cuda {torch.version.cuda}"
        match = re.search(r"\b\d+\.\d+(\.\d+)?\b", _read("/proc/driver/nvidia/version"))
        text += f", driver {match.group(0)}" if match else ""
        return f"{text}, float32 products {torch.get_float32_matmul_precision()}"

    def kind(self) -> str:
        """The name as a slug with the vendor first."""
        return slug(self.device_name(), self.vendor)


Backend = Union[CpuBackend, AcceleratorBackend]  # noqa: UP007 (evaluated on Python 3.8)


def open_backend(name: str | None = None, *, index: int = 0) -> Backend:
    """The backend of this torch device type; None: the first accelerator here, else the CPU.

    `index` is the device's number among those of its type.
    """
    types = ("cuda", *(plugin.name for plugin in PLUGINS))
    if name == "cpu":
        return CpuBackend()
    if name in types:
        return AcceleratorBackend(name, index)
    if name is not None:
        raise InputError(f"device is {name}; hetplan can measure cpu, {', '.join(types)}")
    for each in types:
        try:
            return AcceleratorBackend(each, index)
        except InputError:
            continue
    return CpuBackend()


def use_threads(threads: int) -> None:
    """Let torch compute with this many CPU threads."""
    torch.set_num_threads(threads)


def cuda_kind(index: int) -> str:
    """Device kind of this cuda (or ROCm) device, as its driver's name has it."""
    vendor = "amd" if getattr(torch.version, "hip", None) else "nvidia"
    return slug(torch.cuda.get_device_name(index), vendor)


def slug(device_name: str, vendor: str) -> str:
    """Lower-case words joined by hyphens, the vendor first: `NVIDIA H200` is `nvidia-h200`."""
    words = re.split(r"[^a-z0-9]+", device_name.lower())
    return "-".join([vendor, *(word for word in words if word not in ("", vendor))])


def _status_bytes(field: str) -> float:
    match = re.search(rf"^{field}:\s*(\d+) kB$", _read("/proc/self/status"), re.MULTILINE)
    return float(match.group(1)) * 1024 if match else 0.0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(text: str) -> float:
    """0 where a tool writes [N/A] or <unknown>."""
    try:
        return float(text) if 0 < float(text) < 1e9 else 0.0
    except ValueError:
        return 0.0


def run_tool(command: Sequence[str]) -> str:
    """What the program prints; empty where it is missing, fails or does not answer."""
    try:
        done = subprocess.run(list(command), capture_output=True, timeout=20.0, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def nvidia_clocks(device: str, ask: Callable[[Sequence[str]], str] = run_tool) -> str:
    """Application clocks and power limit that differ from the defaults.

    `nvidia-smi -lgc` locks cannot be queried; they show in the samples' clock column.
    """
    query = (
        "clocks.applications.graphics,clocks.default_applications.graphics,"
        "clocks.applications.memory,clocks.default_applications.memory,"
        "power.limit,power.default_limit"
    )
    text = ask(
        ("nvidia-smi", f"--id={device}", f"--query-gpu={query}", "--format=csv,noheader,nounits")
    )
    rows = [row for row in csv.reader(text.splitlines()) if len(row) == 6]
    if len(rows) != 1:
        return ""
    values = [_number(cell.strip()) for cell in rows[0]]
    settings = zip(("sm", "memory", "limit"), values[::2], values[1::2], ("MHz", "MHz", "W"))  # noqa: B905
    return ", ".join(
        f"{name} {chosen:g} {unit}"
        for name, chosen, default, unit in settings
        if chosen and default and abs(chosen - default) > 0.5  # steps are 15 MHz and whole watts
    )
