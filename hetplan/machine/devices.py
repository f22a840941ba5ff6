"""Which accelerators are here, by their drivers' tools and by torch, and which kinds they are.

Each parser of a tool is `text -> devices`; text that it cannot read gives no devices, and the
report says so.

`python -m hetplan.machine.devices` prints what torch sees, as one line of JSON. It is a process of
its own, because importing torch or a vendor's plug-in can hang, crash or print: the caller sets a
time limit and reads the line that begins with TORCH_MARK (`find_torch`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hetplan.cluster.catalogue import kind_called, nearest_kinds
from hetplan.cluster.devices import DeviceKind
from hetplan.machine.host import TOOL_SECONDS, TORCH_SECONDS, AnswerState, Probe
from hetplan.machine.report import MachineDevice, MachineTorch

_MAX_DEVICES = 4096  # more in one node is garbage
_MIB = float(2**20)


TORCH_MARK = "hetplan-torch "


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenDevice:
    """One device that torch sees."""

    torch_device: str
    name: str
    memory_bytes: float


NO_TORCH = MachineTorch(version="", runtime="", backends=(), device_types=())


def find_torch(
    probe: Probe, python: str, problems: list[str]
) -> tuple[MachineTorch, tuple[SeenDevice, ...]]:
    """What the torch of this interpreter says about itself, and the devices that it sees."""
    answer = probe.run((python, "-m", "hetplan.machine.devices"), TORCH_SECONDS)
    seen = parse_torch(answer.text)
    if seen is not None:
        return seen
    reason = answer.reason or (
        "its answer was not understood" if answer.state is AnswerState.DONE else "it did not start"
    )
    problems.append(
        f"torch: cannot be imported or asked ({reason}); try `python -c 'import torch'`"
    )
    return NO_TORCH, ()


def parse_torch(text: str) -> tuple[MachineTorch, tuple[SeenDevice, ...]] | None:
    """The answer in this output; None where there is none or it is damaged."""
    line = next((line for line in text.splitlines() if line.startswith(TORCH_MARK)), "")
    try:
        data = json.loads(line.removeprefix(TORCH_MARK))
        devices = tuple(
            SeenDevice(torch_device=kind, name=_name(name), memory_bytes=float(memory))
            for kind, name, memory in data["devices"]
        )
        torch = MachineTorch(
            version=data["version"],
            runtime=data["runtime"],
            backends=tuple(data["backends"]),
            device_types=tuple(dict.fromkeys(device.torch_device for device in devices)),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return torch, devices


def print_torch() -> None:
    """Import torch and the plug-ins that are there, and print what they see."""
    import torch

    from hetplan.profiling.backends import PLUGINS

    for plugin in PLUGINS:
        for module in plugin.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)
    types = ("cuda", *(plugin.name for plugin in PLUGINS), "mps")
    runtime = f"hip {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}"
    found = {
        "version": torch.__version__,
        "runtime": runtime if torch.version.cuda or torch.version.hip else "cpu",
        "backends": sorted(_backends(torch)) if torch.distributed.is_available() else [],
        "devices": [device for name in types for device in _torch_devices(torch, name)],
    }
    print(TORCH_MARK + json.dumps(found), flush=True)


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


def _torch_devices(torch: Any, name: str) -> list[tuple[str, str, int]]:
    """Type, name and memory of every device of a torch device type."""
    module = getattr(torch, name, None)
    devices: list[tuple[str, str, int]] = []
    with contextlib.suppress(Exception):
        if module is None or not module.is_available():
            return devices
        for index in range(int(module.device_count())):
            memory, title = 0, name
            with contextlib.suppress(Exception):
                memory = int(module.get_device_properties(index).total_memory)
            with contextlib.suppress(Exception):
                title = str(module.get_device_name(index))
            devices.append((name, title, memory))
    return devices


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedDevice:
    """One device as a driver tool lists it."""

    name: str
    memory_bytes: float = 0.0
    driver: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverTool:
    """A driver's tool and how its list is read."""

    name: str
    vendor: str
    arguments: tuple[str, ...]
    parse: Callable[[str], tuple[ListedDevice, ...]]


def parse_query_csv(text: str) -> tuple[ListedDevice, ...]:
    """Devices of `--query-gpu=... --format=csv`: a header, then one line per device.

    Form of nvidia-smi, which ixsmi and hl-smi copy: `name, memory.total [MiB], driver_version`.
    """
    lines = [line for line in text.splitlines() if "," in line]
    if not lines:
        return ()
    header = [cell.split("[")[0].strip().lower() for cell in lines[0].split(",")]
    if "name" not in header:
        return ()
    devices = []
    for line in lines[1 : _MAX_DEVICES + 1]:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(header):
            continue
        row = dict(zip(header, cells, strict=True))
        devices.append(
            ListedDevice(
                name=_name(row["name"]),
                memory_bytes=_number(row.get("memory.total", "")) * _MIB,
                driver=_version(row.get("driver_version", "")),
            )
        )
    return tuple(device for device in devices if device.name)


def parse_rocm_smi(text: str) -> tuple[ListedDevice, ...]:
    """Devices of `rocm-smi --showproductname --showmeminfo vram --showdriverversion --json`."""
    cards = _json_object(text)
    system = cards.get("system")
    driver = _text(_first(system, ("driver version",))) if isinstance(system, dict) else ""
    devices = []
    for key in sorted(cards, key=lambda key: (len(key), key))[:_MAX_DEVICES]:
        card = cards[key]
        if not re.fullmatch(r"card\d+", key) or not isinstance(card, dict):
            continue
        name = _text(_first(card, ("card series", "card model", "device name")))
        memory = _number(_text(_first(card, ("vram total memory (b)",))))
        devices.append(ListedDevice(name=_name(name), memory_bytes=memory, driver=_version(driver)))
    return tuple(device for device in devices if device.name)


def parse_npu_smi(text: str) -> tuple[ListedDevice, ...]:
    """Devices of `npu-smi info`: two table rows per chip, the second ends with HBM used / total."""
    version = re.search(r"Version:\s*([\w.]+)", text)
    devices: list[ListedDevice] = []
    name = ""
    for line in text.splitlines()[: 4 * _MAX_DEVICES]:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3:
            continue
        first = re.fullmatch(r"\d+\s+([A-Za-z0-9][\w.-]*)", cells[0])
        if first and not re.search(r"[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:", cells[1]):
            name = first.group(1)
        elif name and re.match(r"\d+", cells[0]):
            totals = re.findall(r"\d+\s*/\s*(\d{1,9})", cells[2])
            memory = max((float(total) for total in totals), default=0.0) * _MIB
            devices.append(
                ListedDevice(
                    name=name if name.lower().startswith("ascend") else f"Ascend{name}",
                    memory_bytes=memory,
                    driver=_version(version.group(1)) if version else "",
                )
            )
    return tuple(devices)


_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv")
_ROCM = ("--showproductname", "--showmeminfo", "vram", "--showdriverversion", "--json")

DRIVER_TOOLS: tuple[DriverTool, ...] = (
    DriverTool(name="nvidia-smi", vendor="nvidia", arguments=_QUERY, parse=parse_query_csv),
    DriverTool(name="rocm-smi", vendor="amd", arguments=_ROCM, parse=parse_rocm_smi),
    DriverTool(name="npu-smi", vendor="huawei", arguments=("info",), parse=parse_npu_smi),
    DriverTool(name="ixsmi", vendor="iluvatar", arguments=_QUERY, parse=parse_query_csv),
    DriverTool(
        name="hl-smi",
        vendor="intel",
        arguments=("-Q", "name,memory.total,driver_version", "-f", "csv"),
        parse=parse_query_csv,
    ),
    DriverTool(name="hy-smi", vendor="hygon", arguments=_ROCM, parse=parse_rocm_smi),
)
"""Tools whose list is read."""

OTHER_TOOLS = (
    ("cnmon", "cambricon"),
    ("mthreads-gmi", "moore-threads"),
    ("xpu-smi", "intel"),
    ("mx-smi", "metax"),
    ("efsmi", "enflame"),
    ("brsmi", "biren"),
    ("neuron-ls", "aws"),
)
"""(tool, vendor) of tools that are only looked for: torch tells these vendors' devices."""


def _json_object(text: str) -> dict[str, object]:
    # Some versions print warnings before the object.
    start = text.find("{")
    try:
        data = json.loads(text[start:]) if start >= 0 else {}
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _first(entry: dict[str, object], names: tuple[str, ...]) -> object:
    """The value of the first of these keys, whatever their case."""
    folded = {key.lower(): value for key, value in entry.items()}
    found = (folded[name] for name in names if folded.get(name) not in (None, "", "N/A"))
    return next(found, "")


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _name(text: str) -> str:
    """A product name that may be printed: no more than its words."""
    plain = " ".join(re.sub(r"[^\w ()/.+-]", " ", text, flags=re.ASCII).split())[:60]
    return plain if re.search(r"[A-Za-z]", plain) else ""


def _number(text: str) -> float:
    """The first decimal number of the text; 0 where there is none."""
    found = re.search(r"\d{1,17}(?:\.\d{1,9})?", text)
    return float(found.group(0)) if found else 0.0


def _version(text: str) -> str:
    found = re.search(r"v?\d+(?:\.\w+)+", text, re.ASCII)
    return found.group(0)[:24] if found else ""


_MIN_MEMORY_SHARE = 0.5  # of the driver's figure; torch tells a little less than the driver


def find_devices(
    probe: Probe,
    seen: Sequence[SeenDevice],
    kinds: Sequence[DeviceKind],
    problems: list[str],
) -> tuple[MachineDevice, ...]:
    """Devices grouped by name: those that a tool lists, then those that only torch sees."""
    by_torch = Counter((device.torch_device, device.name) for device in seen)
    found: list[MachineDevice] = []
    for tool in DRIVER_TOOLS:
        if not probe.find(tool.name):
            continue
        listed = _ask(probe, tool, problems)
        for name, count in Counter(device.name for device in listed).items():
            first = next(device for device in listed if device.name == name)
            torch_device = _taken(by_torch, first, seen)
            found.append(_device(first, count, tool.name, torch_device, kinds))
    for name, vendor in OTHER_TOOLS:
        if probe.find(name) and not seen:
            problems.append(
                f"{name}: hetplan cannot read its list; only torch tells {vendor}'s devices"
            )
    for (torch_device, name), count in by_torch.items():
        memory = next(device.memory_bytes for device in seen if device.name == name)
        one = ListedDevice(name=name, memory_bytes=memory)
        found.append(_device(one, count, "", torch_device, kinds))
    return tuple(found)


def _ask(probe: Probe, tool: DriverTool, problems: list[str]) -> tuple[ListedDevice, ...]:
    answer = probe.run((tool.name, *tool.arguments), TOOL_SECONDS)
    devices = tool.parse(answer.text) if answer.state is AnswerState.DONE else ()
    if answer.state is not AnswerState.DONE:
        reason = answer.reason or "it cannot be started"
        problems.append(f"{tool.name}: {reason}; is the driver loaded and the device free?")
    elif not devices:
        problems.append(f"{tool.name}: it lists no device that could be understood")
    return devices


def _taken(
    by_torch: Counter[tuple[str, str]], listed: ListedDevice, seen: Sequence[SeenDevice]
) -> str:
    """Device type in torch of what the tool listed; what is found is taken out of `by_torch`."""
    for torch_device, name in list(by_torch):
        memory = next(device.memory_bytes for device in seen if device.name == name)
        same = name.lower().replace(" ", "") == listed.name.lower().replace(" ", "")
        # ROCm's tool and torch name one product differently; npu-smi leaves "Ascend" out.
        alike = memory and listed.memory_bytes * _MIN_MEMORY_SHARE < memory <= listed.memory_bytes
        if same or (alike and len(by_torch) == 1):
            del by_torch[torch_device, name]
            return torch_device
    return ""


def _device(
    listed: ListedDevice, count: int, tool: str, torch_device: str, kinds: Sequence[DeviceKind]
) -> MachineDevice:
    kind = kind_called(listed.name, kinds)
    return MachineDevice(
        name=listed.name,
        count=count,
        memory_bytes=listed.memory_bytes,
        driver=listed.driver,
        tool=tool,
        torch_device=torch_device,
        kind=kind,
        nearest=() if kind else nearest_kinds(listed.name, (each.kind for each in kinds)),
    )


if __name__ == "__main__":
    print_torch()
