"""Which devices a node has and by which path they reach each other: rocm-smi --showtopo.

With --json the tool writes one flat object: under `system` a text per pair of devices, as in
`(Topology) Link type between DRM devices 0 and 1` with `XGMI`, `PCIE` or `XXXX` (not known), the
same for `Weight` and `Hops`; under `card0` the device's NUMA node. Lines of warnings often stand
around it. Without --json it prints tables, which rocm_topo_tables reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

from hetplan.errors import Fault, InputError
from hetplan.files.faults import describe
from hetplan.files.nodes import field_text, json_nodes, line_of, read_json
from hetplan.importers.lines import refuse_all
from hetplan.importers.records import (
    ImportContext,
    Imported,
    NodeTopology,
    TopologyDevice,
    TopologyPath,
)
from hetplan.importers.rocm_topo_tables import Tables, has_tables, read_tables

KIND = "rocm-topo"
COMMAND = "rocm-smi --showtopo --json"
_CARD = re.compile(r"card(\d{1,6})", re.ASCII)
_PAIR = re.compile(
    r"\(Topology\) (Weight|Hops|Link type) between DRM devices (\d{1,6}) and (\d{1,6})", re.ASCII
)
_LINK_TYPES = ("XGMI", "PCIE", "XXXX")
_NUMBER = re.compile(r"-?\d{1,9}", re.ASCII)
_NAMES = ("Card Series", "Card series", "Device Name")  # of --showproductname, by version
_MAX_FAULTS = 10
_MAX_NOTES = 5
_MAX_DEVICES = 1024  # the largest node has 64


@dataclass(slots=True)
class _Reading:
    """What was found so far."""

    file: str
    json: str
    values: dict[tuple[str, int, int], str | int] = field(default_factory=dict)
    """(what, earlier device, later device) -> value."""
    devices: dict[int, int | None] = field(default_factory=dict)
    """Device -> NUMA node."""
    names: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def fault(self, path: tuple[str, ...], message: str) -> None:
        line = line_of(json_nodes(self.json), path) if len(self.faults) < _MAX_FAULTS else 0
        place = field_text(path)
        self.faults.append(Fault(file=self.file, line=line, field=place, message=message))


def parse(text: str, context: ImportContext) -> Imported:
    """The node's devices and paths; an InputError where a pair is missing or contradicts itself."""
    if has_tables(text):
        return _of_tables(read_tables(text, file=context.file), context)
    beside, json = _split(text, file=context.file)
    root = read_json(context.file, json)
    if not isinstance(root, dict):
        message = f"found {describe(root)}; save the output of `{COMMAND}`"
        raise InputError(Fault(file=context.file, message=message))
    reading = _Reading(file=context.file, json=json)
    for key, value in root.items():
        card = _CARD.fullmatch(key)
        if card is not None and isinstance(value, dict):
            _read_card(reading, key, int(card.group(1)), value)
        elif key == "system" and isinstance(value, dict):
            _read_pairs(reading, value)
    topology = _topology(reading, "card")
    notes = [line if line.isprintable() else ascii(line) for line in beside[:_MAX_NOTES]]
    notes += _unknown(topology)
    return Imported(
        kind=KIND,
        device_name=reading.names[0] if len(set(reading.names)) == 1 else "",
        topology=topology,
        notes=tuple(notes),
    )


def _of_tables(tables: Tables, context: ImportContext) -> Imported:
    """The same of the tables, whose devices are called GPU0."""
    reading = _Reading(file=context.file, json="", faults=list(tables.faults))
    reading.devices = {device: tables.numa_nodes.get(device) for device in tables.devices}
    for cell in tables.cells:
        ends = (cell.what, min(cell.pair), max(cell.pair))
        if reading.values.setdefault(ends, cell.value) != cell.value:
            message = (
                f"{cell.what} of devices {ends[1]} and {ends[2]} is {cell.value} here, the other "
                f"direction says {reading.values[ends]}; save the output again"
            )
            reading.faults.append(Fault(file=context.file, line=cell.line, message=message))
    topology = _topology(reading, "GPU")
    return Imported(kind=KIND, topology=topology, notes=tuple(_unknown(topology)))


def _unknown(topology: NodeTopology) -> list[str]:
    unknown = [path for path in topology.paths if path.path == "XXXX"]
    return [f"{len(unknown)} pairs have no known link type (XXXX)"] if unknown else []


def _split(text: str, *, file: str) -> tuple[list[str], str]:
    """Lines around the JSON, and the JSON below as many empty lines: lines keep numbers."""
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    start = next((at for at, line in enumerate(lines) if line.lstrip().startswith("{")), None)
    if start is None:
        message = (
            f"there is neither JSON nor a table of link types here; save the output of `{COMMAND}`"
        )
        raise InputError(Fault(file=file, message=message))
    # Warnings stand behind the object where both outputs of the tool go to one file.
    end = max((at for at, line in enumerate(lines) if line.rstrip().endswith("}")), default=start)
    end = max(start, end) if any(line.strip() for line in lines[end + 1 :]) else len(lines)
    beside = [f"before the output: {line.strip()[:200]}" for line in lines[:start] if line.strip()]
    beside += [
        f"after the output: {line.strip()[:200]}" for line in lines[end + 1 :] if line.strip()
    ]
    return beside, "\n" * start + "\n".join(lines[start : end + 1])


def _read_card(reading: _Reading, key: str, device: int, values: Mapping[object, object]) -> None:
    for name in _NAMES:
        found = values.get(name)
        if isinstance(found, str) and found.isprintable():
            reading.names.append(found[:200])
            break
    topology = [str(name) for name in values if str(name).startswith("(Topology)")]
    if not topology:
        return  # of another option in the same output
    if device in reading.devices:
        reading.fault((key,), f"device {device} is there twice; keep one")
    reading.devices[device] = None
    for name in ("(Topology) Numa Node", "(Topology) Numa Affinity"):
        number = _number(values.get(name))
        if name in values and number is None and values[name] not in (None, "None", "N/A"):
            reading.fault((key, name), f"found {describe(values[name])}; a number is expected")
        if reading.devices[device] is None and number is not None and number >= 0:
            reading.devices[device] = number


def _read_pairs(reading: _Reading, values: Mapping[object, object]) -> None:
    for key, value in values.items():
        pair = _PAIR.fullmatch(str(key))
        if pair is None:
            continue
        what, low, high = pair.group(1), int(pair.group(2)), int(pair.group(3))
        place = ("system", str(key))
        if low == high:
            continue  # some versions list a device with itself
        entry: str | int | None
        if what == "Link type":
            entry = value if isinstance(value, str) and value in _LINK_TYPES else None
            wanted = f"one of {', '.join(_LINK_TYPES)}"
        else:
            if value in (None, "None", "N/A"):
                continue
            entry, wanted = _number(value), "a number of at least 0"
        if entry is None or (isinstance(entry, int) and entry < 0):
            reading.fault(place, f"found {describe(value)}; {wanted} is expected")
            continue
        ends = (what, min(low, high), max(low, high))
        if reading.values.setdefault(ends, entry) != entry:
            other = reading.values[ends]
            message = f"found {entry}, the other direction says {other}; save the output again"
            reading.fault(place, message)


def _number(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) < 10**9 else None
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        return int(value)
    return None


def _topology(reading: _Reading, name: str) -> NodeTopology:
    known = set(reading.devices) | {end for _, *ends in reading.values for end in ends}
    devices = sorted(known)
    if not devices and not reading.faults:
        message = f"there is no (Topology) entry; save the output of `{COMMAND}`"
        raise InputError(Fault(file=reading.file, message=message))
    if len(devices) > _MAX_DEVICES:
        message = f"{len(devices)} devices; no node has more than {_MAX_DEVICES}"
        raise InputError(Fault(file=reading.file, message=message))
    paths = []
    for low, high in combinations(devices, 2):
        path = reading.values.get(("Link type", low, high))
        if path is None:
            if not any(f"devices {low} and {high}" in each.field for each in reading.faults):
                message = f"the link type of devices {low} and {high} is missing; save it again"
                reading.faults.append(Fault(file=reading.file, field="system", message=message))
            if len(reading.faults) > _MAX_FAULTS:
                break
            continue
        weight = reading.values.get(("Weight", low, high))
        hops = reading.values.get(("Hops", low, high))
        paths.append(
            TopologyPath(
                between=(f"{name}{low}", f"{name}{high}"),
                path=str(path),
                hops=hops if isinstance(hops, int) else None,
                weight=weight if isinstance(weight, int) else None,
            )
        )
    refuse_all(reading.faults, most=_MAX_FAULTS)
    return NodeTopology(
        vendor="amd",
        devices=tuple(
            TopologyDevice(index=at, name=f"{name}{at}", numa_node=reading.devices.get(at))
            for at in devices
        ),
        paths=tuple(paths),
    )
