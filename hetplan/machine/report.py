"""What a look at a machine found, and its one screen of text (at most 40 lines of 80 columns).

Nothing here names the machine, its owner or its addresses. 0 and empty texts mean that the machine
did not tell. The JSON form is `hetplan.doctor/2`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetplan.units import format_bytes, format_rate

DOCTOR_SCHEMA = "hetplan.doctor/2"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineDevice:
    """Devices of one name."""

    name: str
    """What the driver or torch calls them."""
    count: int
    memory_bytes: float
    """Of one device, as its driver tells it."""
    driver: str
    """Version of the driver."""
    tool: str
    """Driver tool that lists them; empty: none does."""
    torch_device: str
    """torch's device type; empty: torch does not see them."""
    kind: str
    """Catalogue kind; empty: not in the catalogue."""
    nearest: tuple[str, ...]
    """Catalogue kinds that may be meant, where `kind` is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineTorch:
    """What torch can do here."""

    version: str
    """Empty: torch cannot be imported."""
    runtime: str
    """What it was built for: `cuda 12.8`, `hip 6.4`, `cpu`."""
    backends: tuple[str, ...]
    """torch.distributed backends that can be used."""
    device_types: tuple[str, ...]
    """Device types of which torch sees a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProcessor:
    """Processor and memory, and what of them this process may use."""

    model: str
    cores: int
    """Of the machine."""
    usable_cores: int
    """This process may run on (cpuset)."""
    cpu_quota_cores: float
    """The control group's limit in cores; 0: none."""
    numa_nodes: int
    memory_bytes: float
    available_bytes: float
    memory_limit_bytes: float
    """The control group's limit; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineInterface:
    """Network interfaces that look alike."""

    names: tuple[str, ...]
    """With hexadecimal addresses in them replaced."""
    state: str
    """`up`, `down` or what the kernel says."""
    bits_per_second: float
    driver: str
    physical: bool
    """False: a bridge, a tunnel or a virtual pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRdma:
    """RDMA ports that look alike."""

    devices: tuple[str, ...]
    state: str
    """`ACTIVE`, `DOWN`, `INIT`, ..."""
    bits_per_second: float
    link_layer: str
    """`InfiniBand` or `Ethernet` (RoCE)."""
    numa_nodes: tuple[int, ...]
    """Of the devices, each once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMeasurement:
    """Something that hetplan can or cannot measure here."""

    what: str
    possible: bool
    how: str
    """The command; or what is missing and how to get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """Everything that was found."""

    system: str
    """Operating system and kernel."""
    processor: MachineProcessor
    devices: tuple[MachineDevice, ...]
    torch: MachineTorch
    interfaces: tuple[MachineInterface, ...]
    rdma: tuple[MachineRdma, ...]
    measurements: tuple[MachineMeasurement, ...]
    problems: tuple[str, ...]
    """What could not be looked at, and why."""

    @staticmethod
    def from_older_form(data: dict[str, object]) -> dict[str, object]:
        """Number 1 had limits of the container, programs, stores and advice too."""
        gone = ("advice", "limits", "stores", "tools")
        return {key: value for key, value in data.items() if key not in gone}


COLUMNS = 80
LINES = 40
_LABEL = 11  # the longest label is "processor"
_MAX_PER_PART = 4


def screen(report: MachineReport, *, verbose: bool = True) -> str:
    """The report for a person at a terminal; not verbose: devices, torch and measurements."""
    devices = _part("devices", [_device(each) for each in report.devices] or ["none found"])
    head = [devices, _part("torch", [_torch(report.torch)])]
    if verbose:
        head = _whole(report, *head)
    lines = [line for part in head for line in part]
    lines += ["", "What hetplan can measure here"]
    lines += _measurements(report)
    if report.problems:
        lines += _part("problems", report.problems)
    if len(lines) > LINES:
        more = len(lines) - LINES + 1
        lines = [*lines[: LINES - 1], f"... {more} more lines; --json has everything"]
    return "\n".join(lines)


def _whole(report: MachineReport, devices: list[str], torch: list[str]) -> list[list[str]]:
    """All parts above the measurements."""
    return [
        _part("system", [report.system]),
        _part("processor", _processor(report.processor)),
        devices,
        torch,
        _part("network", [_interface(each) for each in report.interfaces] or ["none found"]),
        _part("RDMA", [_rdma(each) for each in report.rdma] or ["none found"]),
    ]


def _part(label: str, entries: Sequence[str]) -> list[str]:
    """The entries beside their label, the first few of them."""
    shown = list(entries[:_MAX_PER_PART])
    if len(entries) > len(shown):
        shown.append(f"and {len(entries) - len(shown)} more; --json has them all")
    lines: list[str] = []
    for entry in shown:
        first = f"{label:<{_LABEL}}" if not lines else " " * _LABEL
        lines += _wrapped(entry, first, " " * (_LABEL + 2))
    return lines


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        max_lines=3,
        placeholder=" ...",
    )


def _processor(processor: MachineProcessor) -> list[str]:
    parts = [processor.model or "model not told"]
    if processor.cores:
        parts.append(f"{processor.cores} cores, {processor.usable_cores} usable")
    if processor.cpu_quota_cores:
        parts.append(f"quota {processor.cpu_quota_cores:.3g} cores")
    if processor.numa_nodes:
        parts.append(f"{processor.numa_nodes} NUMA node{'s' * (processor.numa_nodes > 1)}")
    memory = "memory not told"
    if processor.memory_bytes:
        memory = f"{format_bytes(processor.memory_bytes)} of memory"
        memory += f", {format_bytes(processor.available_bytes)} available"
    if processor.memory_limit_bytes:
        memory += f", limit {format_bytes(processor.memory_limit_bytes)}"
    return [", ".join(parts), memory]


def _device(device: MachineDevice) -> str:
    parts = [f"{device.count} x {device.name}"]
    if device.memory_bytes:
        parts.append(format_bytes(device.memory_bytes))
    if device.driver:
        parts.append(f"driver {device.driver}")
    seen = [name for name in (device.tool, f"torch {device.torch_device}") if name.strip()]
    if not device.torch_device:
        seen = [f"{device.tool}, not by torch"]
    near = f" (nearest: {', '.join(device.nearest[:3])})" if device.nearest else ""
    kind = device.kind or f"not in the catalogue{near}"
    return f"{', '.join(parts)}: {kind}; seen by {', '.join(seen)}"


def _torch(torch: MachineTorch) -> str:
    if not torch.version:
        return "cannot be imported; pip install torch"
    backends = ", ".join(torch.backends) or "none"
    return f"{torch.version} for {torch.runtime}; backends {backends}"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} .. {names[-1]}"


def _interface(each: MachineInterface) -> str:
    speed = format_rate(each.bits_per_second, "bit/s") if each.bits_per_second else "speed not told"
    what = each.driver or ("wired" if each.physical else "virtual")
    return f"{len(each.names)} x {speed}, {each.state}, {what} ({_names(each.names)})"


def _rdma(each: MachineRdma) -> str:
    speed = format_rate(each.bits_per_second, "bit/s") if each.bits_per_second else "rate not told"
    numa = f", NUMA {', '.join(map(str, each.numa_nodes))}" if each.numa_nodes else ""
    state = each.state or "state not told"
    layer = each.link_layer or "link layer not told"
    return f"{len(each.devices)} x {speed}, {state}, {layer}{numa} ({_names(each.devices)})"


def _measurements(report: MachineReport) -> Iterable[str]:
    width = min(34, max((len(each.what) for each in report.measurements), default=0))
    for each in report.measurements:
        first = f"  {'yes' if each.possible else 'no ':<4}{each.what[:34]:<{width}}  "
        yield from _wrapped(each.how, first, " " * (width + 10))
