"""A device that torch knows through its vendor's plug-in, such as an NPU, an MLU or an XPU.

Importing the plug-in adds a module of the device type's name to torch (`torch.npu`), which copies
the calls of `torch.cuda`. They do so to different degrees, so every call but the device itself is
looked for and has a fall-back: without timed events a mark waits for the device and reads the
clock; without memory counters memory is not told.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hetplan.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """How torch gets to know a device type."""

    name: str
    """torch device type."""
    vendor: str
    modules: tuple[str, ...]
    """Modules that make the type known when they are imported; those that exist are."""
    collectives: tuple[str, ...]
    """torch.distributed backends of the device's memory; the first that exists is used."""


# Backends as accelerate 1.x (state.py) opens them for these types; gcu: Enflame's own guide.
PLUGINS = (
    Plugin(name="npu", vendor="huawei", modules=("torch_npu",), collectives=("hccl",)),
    Plugin(name="mlu", vendor="cambricon", modules=("torch_mlu",), collectives=("cncl",)),
    Plugin(name="musa", vendor="moore-threads", modules=("torch_musa",), collectives=("mccl",)),
    Plugin(
        name="xpu",
        vendor="intel",
        # torch has xpu of its own from 2.4 and xccl from 2.8; before that both are Intel's.
        modules=("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"),
        collectives=("xccl", "ccl"),
    ),
    Plugin(
        name="hpu",
        vendor="intel",
        modules=("habana_frameworks.torch.core", "habana_frameworks.torch.distributed.hccl"),
        collectives=("hccl",),
    ),
    Plugin(name="gcu", vendor="enflame", modules=("torch_gcu",), collectives=("eccl",)),
)


def open_plugin(name: str, index: int = 0) -> PluginBackend:
    """The device of this type and number; an InputError where torch does not see it."""
    plugin = next(each for each in PLUGINS if each.name == name)
    for module in plugin.modules:
        try:
            importlib.import_module(module)
        except ImportError:
            continue
    library = getattr(torch, name, None)
    count = _told(library, "device_count", 0)
    if not _told(library, "is_available", False) or not count:
        raise InputError(
            f"torch {torch.__version__} sees no {name} device; run this inside the vendor's image "
            f"(it needs {' or '.join(plugin.modules)}), or choose another device"
        )
    if index >= count:
        raise InputError(f"there is no {name} device {index}; torch sees {count}")
    return PluginBackend(plugin, library, index)


class PluginBackend:
    """One device of a plug-in's type; a `Backend`."""

    is_accelerator = True

    def __init__(
        self,
        plugin: Plugin,
        library: Any,
        index: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = plugin.name
        self.collectives = _first_known(plugin.collectives)
        self._plugin, self._library, self._index, self._clock = plugin, library, index, clock
        self._allocated_bytes = 0.0
        _told(library, "set_device", None, index)
        self._event_type = self._timed_events()

    def device(self) -> torch.device:
        """The device of this index."""
        return torch.device(self.name, self._index)

    def synchronise(self) -> None:
        """Wait for the device's queues; without a call for it, by fetching a value."""
        wait = getattr(self._library, "synchronize", None)
        if wait is not None:
            wait()
        else:
            torch.zeros((), device=self.device()).item()

    def mark(self) -> Any:
        """An event in the device's order of work, or a reading of the clock after a wait."""
        if self._event_type is None:
            self.synchronise()
            return self._clock()
        event = self._event_type(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, first: Any, second: Any) -> float:
        """Time between two marks."""
        if self._event_type is None:
            return float(second - first)
        return float(first.elapsed_time(second)) / 1e3

    def reset_peak_memory(self) -> bool:
        """Start a new peak in the plug-in's allocator; False where it has no counters."""
        self.synchronise()
        names = ("reset_peak_memory_stats", "max_memory_allocated", "memory_allocated")
        if any(getattr(self._library, name, None) is None for name in names):
            return False
        try:
            self._library.reset_peak_memory_stats()
            self._allocated_bytes = float(self._library.memory_allocated())
        except (RuntimeError, NotImplementedError):
            return False
        return True

    def peak_memory_bytes(self) -> float:
        """Growth of what the allocator handed out."""
        return max(0.0, float(self._library.max_memory_allocated()) - self._allocated_bytes)

    def clock_hertz(self) -> float:
        """Not told."""
        return 0.0

    def temperature_celsius(self) -> float:
        """Not told."""
        return 0.0

    def clocks(self) -> str:
        """Not told."""
        return ""

    def device_name(self) -> str:
        """Name from the plug-in, or the device type."""
        return str(_told(self._library, "get_device_name", self.name, self._index)).strip()

    def driver(self) -> str:
        """Versions of the plug-in's modules."""
        versions = []
        for name in self._plugin.modules:
            try:
                version = getattr(importlib.import_module(name), "__version__", "")
            except ImportError:
                continue
            if version:
                versions.append(f"{name} {version}")
        return ", ".join(versions) or f"torch {torch.__version__}"

    def kind(self) -> str:
        """The name as a slug with the vendor first."""
        words = [word for word in re.split(r"[^a-z0-9]+", self.device_name().lower()) if word]
        return "-".join([self._plugin.vendor, *(word for word in words if word != self.vendor)])

    @property
    def vendor(self) -> str:
        """Vendor of the device."""
        return self._plugin.vendor

    def _timed_events(self) -> Any:
        """The plug-in's event type where it measures time; None where it does not."""
        event_type = getattr(self._library, "Event", None)
        if event_type is None:
            return None
        try:
            first, second = (event_type(enable_timing=True) for _ in range(2))
            first.record()
            second.record()
            self.synchronise()
            told = float(first.elapsed_time(second))
        except (RuntimeError, NotImplementedError, TypeError, AttributeError):
            return None
        return event_type if told >= 0 else None


def _told(library: Any, name: str, default: Any, *arguments: Any) -> Any:
    function = getattr(library, name, None)
    if function is None:
        return default
    try:
        return function(*arguments)
    except (RuntimeError, NotImplementedError, TypeError):
        return default


def _first_known(names: tuple[str, ...]) -> str:
    import torch.distributed as dist

    backends = getattr(getattr(dist, "Backend", None), "backend_list", ())
    return next((name for name in names if name in backends), names[0])
