"""What torch sees: `python -m hetplan.machine.torch_child` prints one line of JSON.

A process of its own, because importing torch or a vendor's plug-in can hang, crash or print; the
caller sets a time limit and reads the line that begins with MARK.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from typing import Any

MARK = "hetplan-torch "


def main() -> None:
    """Import torch and the plug-ins that are there, and print what they see."""
    import torch

    from hetplan.profiling.plugin_backend import PLUGINS

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


if __name__ == "__main__":
    main()
