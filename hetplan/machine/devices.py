"""Which accelerators are here, by their driver's tool and by torch, and which kinds they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hetplan.cluster.catalogue import kind_called, nearest_kinds
from hetplan.cluster.devices import DeviceKind
from hetplan.machine.driver_tools import DRIVER_TOOLS, OTHER_TOOLS, DriverTool, ListedDevice
from hetplan.machine.probe import TOOL_SECONDS, AnswerState, Probe
from hetplan.machine.torch_text import SeenDevice
from hetplan.machine.values import MachineDevice

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
