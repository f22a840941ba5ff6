"""What the answer of `torch_child` says; an answer that is none gives None."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from hetplan.machine.torch_child import MARK
from hetplan.machine.values import MachineTorch

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
    devices = tuple(_devices(data.get("devices")))
    return TorchAnswer(
        torch=MachineTorch(
            version=_plain(data["version"]),
            runtime=_plain(data.get("runtime")),
            backends=tuple(filter(None, (_plain(name) for name in _list(data.get("backends"))))),
            device_types=tuple(dict.fromkeys(device.torch_device for device in devices)),
        ),
        devices=devices,
    )


def _devices(data: object) -> list[SeenDevice]:
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
