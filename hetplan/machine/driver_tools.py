"""Which driver tools list a vendor's devices, and what their output says.

Each parser is `text -> devices`; text that it cannot read gives no devices, and the caller says
so. Tools whose output is not documented are only looked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from hetplan.machine.system_text import finite, number

_MAX_DEVICES = 4096  # more in one node is garbage
_MIB = float(2**20)


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
                memory_bytes=finite(number(row.get("memory.total", "")) * _MIB),
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
        memory = number(_text(_first(card, ("vram total memory (b)",))))
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


def parse_blocks(text: str) -> tuple[ListedDevice, ...]:
    """Devices of `cnmon info` and `mthreads-gmi -q`: blocks with `Product Name : ...`."""
    driver = re.search(r"^\s*Driver(?: Version)?\s*:\s*(\S+)", text, re.MULTILINE)
    pieces = re.split(r"^\s*Product Name\s*:\s*", text, flags=re.MULTILINE)[1:]
    devices = []
    for piece in pieces[:_MAX_DEVICES]:
        name = _name(piece.splitlines()[0] if piece else "")
        memory = re.search(
            r"^\s*(?:Physical Memory Usage|FB Memory Usage)\s*:?\s*\n\s*Total\s*:\s*(\d+)\s*MiB",
            piece,
            re.MULTILINE,
        )
        if name:
            devices.append(
                ListedDevice(
                    name=name,
                    memory_bytes=finite(number(memory.group(1)) * _MIB) if memory else 0.0,
                    driver=_version(driver.group(1)) if driver else "",
                )
            )
    return tuple(devices)


def parse_xpu_smi(text: str) -> tuple[ListedDevice, ...]:
    """Devices of `xpu-smi discovery -j`."""
    listed = _json_object(text).get("device_list")
    names = (
        _name(_text(entry.get("device_name")))
        for entry in (listed if isinstance(listed, list) else [])[:_MAX_DEVICES]
        if isinstance(entry, dict)
    )
    return tuple(ListedDevice(name=name) for name in names if name)


_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv")
_ROCM = ("--showproductname", "--showmeminfo", "vram", "--showdriverversion", "--json")

DRIVER_TOOLS: tuple[DriverTool, ...] = (
    DriverTool(name="nvidia-smi", vendor="nvidia", arguments=_QUERY, parse=parse_query_csv),
    DriverTool(name="rocm-smi", vendor="amd", arguments=_ROCM, parse=parse_rocm_smi),
    DriverTool(name="npu-smi", vendor="huawei", arguments=("info",), parse=parse_npu_smi),
    DriverTool(name="cnmon", vendor="cambricon", arguments=("info",), parse=parse_blocks),
    DriverTool(name="mthreads-gmi", vendor="moore-threads", arguments=("-q",), parse=parse_blocks),
    DriverTool(name="ixsmi", vendor="iluvatar", arguments=_QUERY, parse=parse_query_csv),
    DriverTool(
        name="hl-smi",
        vendor="intel",
        arguments=("-Q", "name,memory.total,driver_version", "-f", "csv"),
        parse=parse_query_csv,
    ),
    DriverTool(name="xpu-smi", vendor="intel", arguments=("discovery", "-j"), parse=parse_xpu_smi),
    DriverTool(name="hy-smi", vendor="hygon", arguments=_ROCM, parse=parse_rocm_smi),
)
"""Tools whose list can be read."""

OTHER_TOOLS = (("mx-smi", "metax"), ("efsmi", "enflame"), ("brsmi", "biren"), ("neuron-ls", "aws"))
"""(tool, vendor) of tools that are only looked for: the form of their list is not documented."""


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


def _version(text: str) -> str:
    found = re.search(r"v?\d+(?:\.\w+)+", text, re.ASCII)
    return found.group(0)[:24] if found else ""
