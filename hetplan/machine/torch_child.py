"""What torch sees: `python -m hetplan.machine.torch_child` prints one line of JSON.

A process of its own, because importing torch or a vendor's plug-in can hang, crash or print; the
caller sets a time limit and reads the line that begins with MARK (`parse_torch`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from dataclasses import dataclass
from typing import Any

from hetplan.machine.values import MachineTorch

MARK = "hetplan-torch "


def main() -> None:
    """Import torch and the plug-ins that are there, and print what they see."""
    import torch

    from hetplan.profiling.backends import PLUGINS

    backends: set[str] = set()
    for plugin in PLUGINS:
        for module in plugin.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)
    if torch.distributed.is_available():
        backends |= _backends(torch)
    types = ("cuda", *(plugin.name for plugin in PLUGINS), "mps")
    runtime = f"hip {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}"
    found = {
        "version": torch.__version__,
        "runtime": runtime if torch.version.cuda or torch.version.hip else "cpu",
        "backends": sorted(backends),
        "devices": [device for name in types for device in _devices(torch, name)],
    }
    print(MARK + json.dumps(found), flush=True)


def _backends(torch: Any) -> set[str]:
    found = set()
    for name in ("gloo", "nccl", "mpi", "ucc", "xccl"):
        available = getattr(torch.distributed, f"is_{name}_available", None)
        with contextlib.suppress(Exception):
            if available is not None and available():
                found.add(name)
    # What plug-ins registered; torch lists its own there too, built or not.
    own = {"undefined", "gloo", "nccl", "mpi", "ucc", "xccl", "fake"}
    return found | {
        name for name in torch.distributed.Backend.backend_list if name.lower() not in own
    }


def _devices(torch: Any, name: str) -> list[dict[str, object]]:
    module = getattr(torch, name, None)
    devices: list[dict[str, object]] = []
    with contextlib.suppress(Exception):
        if module is None or not module.is_available():
            return devices
        for index in range(int(module.device_count())):
            memory = 0
            with contextlib.suppress(Exception):
                memory = int(module.get_device_properties(index).total_memory)
            title = name
            with contextlib.suppress(Exception):
                title = str(module.get_device_name(index))
            devices.append({"type": name, "name": title, "memory": memory})
    return devices


NO_TORCH = MachineTorch(version="", runtime="", backends=(), device_types=())


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenDevice:
    """One device that torch sees."""

    torch_device: str
    name: str
    memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchAnswer:
    """What torch told about itself and the devices it sees."""

    torch: MachineTorch
    devices: tuple[SeenDevice, ...]


def parse_torch(text: str) -> TorchAnswer | None:
    """The answer in this output; None where there is none or it is damaged."""
    line = next((line for line in text.splitlines() if line.startswith(MARK)), "")
    try:
        data = json.loads(line.removeprefix(MARK)) if line else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not isinstance(data.get("version"), str):
        return None
    devices = tuple(_read_devices(data.get("devices")))
    return TorchAnswer(
        torch=MachineTorch(
            version=_plain(data["version"]),
            runtime=_plain(data.get("runtime")),
            backends=tuple(filter(None, (_plain(name) for name in _list(data.get("backends"))))),
            device_types=tuple(dict.fromkeys(device.torch_device for device in devices)),
        ),
        devices=devices,
    )


def _read_devices(data: object) -> list[SeenDevice]:
    found = []
    for entry in _list(data):
        if not isinstance(entry, dict):
            continue
        kind, name, memory = (
            _plain(entry.get("type")),
            _plain(entry.get("name")),
            entry.get("memory"),
        )
        right = isinstance(memory, int) and not isinstance(memory, bool) and 0 <= memory < 2**60
        if kind and name:
            memory_bytes = float(memory) if right and isinstance(memory, int) else 0.0
            found.append(SeenDevice(torch_device=kind, name=name, memory_bytes=memory_bytes))
    return found


def _list(data: object) -> list[object]:
    return data if isinstance(data, list) else []


def _plain(value: object) -> str:
    text = value if isinstance(value, str) else ""
    return " ".join(re.sub(r"[^\w ()/.+-]", " ", text, flags=re.ASCII).split())[:60]


if __name__ == "__main__":
    main()
