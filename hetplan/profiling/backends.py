"""What measuring asks of a torch device, and how a CPU and a CUDA (or ROCm) device answer.

Nothing else in hetplan knows a device's library. Devices that torch knows through a vendor's
plug-in (an NPU, an XPU) are in `plugin_backend`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from hetplan.cluster.devices import CPU_KIND
from hetplan.errors import InputError
from hetplan.profiling.clocks import cpu_clocks, nvidia_clocks, rocm_clocks


class Backend(Protocol):
    """A torch device that can be measured."""

    @property
    def name(self) -> str:
        """Device type of torch, as in `torch.device(name)`."""
        ...

    @property
    def collectives(self) -> str:
        """torch.distributed backend that moves this device's memory."""
        ...

    @property
    def is_accelerator(self) -> bool:
        """Whether it boosts and throttles: then only sustained times mean anything."""
        ...

    def device(self) -> torch.device:
        """The device that tensors are put on."""
        ...

    def synchronise(self) -> None:
        """Wait until all queued work is done."""
        ...

    def mark(self) -> Any:
        """A point in the device's own order of work; may cost nothing until read."""
        ...

    def seconds_between(self, first: Any, second: Any) -> float:
        """Time between two marks; valid after `synchronise`."""
        ...

    def reset_peak_memory(self) -> bool:
        """Start watching memory; False where the device cannot tell."""
        ...

    def peak_memory_bytes(self) -> float:
        """Most memory in use since `reset_peak_memory`, above what was in use then."""
        ...

    def clock_hertz(self) -> float:
        """Clock at this moment; 0 where the device does not tell."""
        ...

    def temperature_celsius(self) -> float:
        """Temperature at this moment; 0 where the device does not tell."""
        ...

    def clocks(self) -> str:
        """Clock and power settings that somebody chose; empty: as it came, or not told."""
        ...

    def device_name(self) -> str:
        """What the driver or the operating system calls the device."""
        ...

    def driver(self) -> str:
        """Driver and runtime versions in one line."""
        ...

    def kind(self) -> str:
        """Device kind that samples get unless the user names one, in the catalogue's style."""
        ...


class CpuBackend:
    """CPU cores: wall clock, and the process's resident set for memory."""

    name = "cpu"
    collectives = "gloo"
    is_accelerator = False

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._resident_bytes = 0.0

    def device(self) -> torch.device:
        """The CPU."""
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
            # 5 resets VmHWM: proc_pid_clear_refs(5).
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        self._resident_bytes = _status_bytes("VmRSS")
        return True

    def peak_memory_bytes(self) -> float:
        """Growth of the resident set; exact to a few pages."""
        return max(0.0, _status_bytes("VmHWM") - self._resident_bytes)

    def clock_hertz(self) -> float:
        """Frequency of core 0 where Linux tells it; virtual machines mostly do not."""
        path = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq")
        try:
            return float(path.read_text()) * 1e3
        except (OSError, ValueError):  # `<unknown>` is what some drivers answer
            return 0.0

    def temperature_celsius(self) -> float:
        """Not told."""
        return 0.0

    def clocks(self) -> str:
        """Governor and frequency limits."""
        return cpu_clocks()

    def device_name(self) -> str:
        """Model name of the processor."""
        path = Path("/proc/cpuinfo")
        if path.exists():
            found = re.search(r"^model name\s*:\s*(.+)$", path.read_text(), re.MULTILINE)
            if found:
                return found.group(1).strip()
        return platform.processor() or platform.machine()

    def driver(self) -> str:
        """Release of the operating system's kernel."""
        return f"{platform.system()} {platform.release()}"

    def kind(self) -> str:
        """The kind of every CPU."""
        return CPU_KIND


class CudaBackend:
    """A CUDA device, or a ROCm one, which torch shows under the same name."""

    name = "cuda"
    collectives = "nccl"  # RCCL on ROCm, under the same name
    is_accelerator = True

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise InputError(
                "torch sees no cuda device; check the driver (nvidia-smi, rocm-smi) and that "
                f"torch {torch.__version__} is not a CPU build, or measure with --device cpu"
            )
        if index >= torch.cuda.device_count():
            raise InputError(
                f"there is no cuda device {index}; torch sees {torch.cuda.device_count()}"
            )
        self._index = index
        torch.cuda.set_device(index)
        self._allocated_bytes = 0

    def device(self) -> torch.device:
        """The device of this index."""
        return torch.device("cuda", self._index)

    def synchronise(self) -> None:
        """Wait for the device's queues."""
        torch.cuda.synchronize(self._index)

    def mark(self) -> torch.cuda.Event:
        """An event in the current stream: it times the device, not the launching thread."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds_between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """Time between two events."""
        return float(first.elapsed_time(second)) / 1e3

    def reset_peak_memory(self) -> bool:
        """Start a new peak in torch's allocator."""
        self.synchronise()
        torch.cuda.reset_peak_memory_stats(self._index)
        self._allocated_bytes = torch.cuda.memory_allocated(self._index)
        return True

    def peak_memory_bytes(self) -> float:
        """Growth of what torch's allocator handed out."""
        return float(torch.cuda.max_memory_allocated(self._index) - self._allocated_bytes)

    def clock_hertz(self) -> float:
        """Clock of the multiprocessors, where the vendor's management library is installed."""
        return 1e6 * _told_by_management_library(torch.cuda.clock_rate, self._index)

    def temperature_celsius(self) -> float:
        """Temperature, where the vendor's management library is installed."""
        return _told_by_management_library(torch.cuda.temperature, self._index)

    def clocks(self) -> str:
        """Application clocks and power limit; on ROCm the performance level."""
        if getattr(torch.version, "hip", None):
            return rocm_clocks(str(self._index))
        uuid = getattr(torch.cuda.get_device_properties(self._index), "uuid", None)
        if uuid is not None:
            return nvidia_clocks(f"GPU-{uuid}")
        # Without UUIDs (torch before 2.4) numbers agree only where no device is hidden.
        hidden = "CUDA_VISIBLE_DEVICES" in os.environ
        return "" if hidden else nvidia_clocks(str(self._index))

    def device_name(self) -> str:
        """Name from the driver."""
        return torch.cuda.get_device_name(self._index)

    def driver(self) -> str:
        """CUDA or HIP version torch was built with, and the driver's own where it is told.

        With them how torch multiplies float32, because TF32 is four times as fast as true float32.
        """
        hip = getattr(torch.version, "hip", None)
        runtime = f"hip {hip}" if hip else f"cuda {torch.version.cuda}"
        path = Path("/proc/driver/nvidia/version")
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", path.read_text()) if path.exists() else None
        products = f"float32 products {torch.get_float32_matmul_precision()}"
        driver = (f"driver {found.group(0)}",) if found else ()
        return ", ".join((runtime, *driver, products))

    def kind(self) -> str:
        """The name as a slug with the vendor first: `NVIDIA H200` -> `nvidia-h200`."""
        return cuda_kind(self._index)


def open_backend(name: str, *, index: int = 0) -> Backend:
    """The backend of this torch device type; an InputError for a type that hetplan cannot measure.

    `index` is the device's number among those of its type on this machine.
    """
    if name == "cpu":
        return CpuBackend()
    if name == "cuda":
        return CudaBackend(index)
    from hetplan.profiling.plugin_backend import PLUGINS, open_plugin

    if name in {plugin.name for plugin in PLUGINS}:
        return open_plugin(name, index)
    others = ", ".join(plugin.name for plugin in PLUGINS)
    raise InputError(
        f"device is {name}; hetplan can measure cpu, cuda (ROCm too), and with their vendor's "
        f"torch {others}"
    )


def default_backend() -> str:
    """An accelerator where torch sees one, the CPU elsewhere."""
    return CudaBackend.name if torch.cuda.is_available() else CpuBackend.name


def use_threads(threads: int) -> None:
    """Let torch compute with this many CPU threads."""
    torch.set_num_threads(threads)


def cuda_kind(index: int) -> str:
    """Device kind of the cuda (or ROCm) device of this number, as its driver's name has it."""
    vendor = "amd" if getattr(torch.version, "hip", None) else "nvidia"
    return slug(torch.cuda.get_device_name(index), vendor)


def slug(device_name: str, vendor: str) -> str:
    """Lower-case words joined by hyphens, the vendor's name first."""
    words = [word for word in re.split(r"[^a-z0-9]+", device_name.lower()) if word]
    return "-".join([vendor, *(word for word in words if word != vendor)])


def _status_bytes(field: str) -> float:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s*(\d+) kB$", text, re.MULTILINE)
    return float(found.group(1)) * 1024 if found else 0.0


def _told_by_management_library(question: Callable[[int], int], index: int) -> float:
    # torch raises ModuleNotFoundError without pynvml (amdsmi) and RuntimeError where the driver
    # refuses, as in some containers: then the device does not tell.
    try:
        return float(question(index))
    except (ModuleNotFoundError, RuntimeError):
        return 0.0
