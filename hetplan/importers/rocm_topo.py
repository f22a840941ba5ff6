"""Devices of a node and the paths between them: `rocm-smi --showtopo --json`.

The tool writes one flat object: under `system` a text per pair of devices, as in
`(Topology) Link type between DRM devices 0 and 1` with `XGMI`, `PCIE` or `XXXX` (not known), the
same for `Weight` and `Hops`; under `card0` the device's NUMA node. The tables that it prints
without --json are recognised and refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations

from hetplan.errors import Fault, InputError
from hetplan.importers.json_text import json_document
from hetplan.importers.lines import fault_at, refuse_all, shown, whole_number
from hetplan.importers.records import (
    ImportContext,
    Imported,
    NodeTopology,
    TopologyDevice,
    TopologyPath,
)

_SIGN = re.compile(r'"\(Topology\) |ROCm System Management|between two GPUs =|"num_hops"')
_COMMAND = "rocm-smi --showtopo --json"
_CARD = re.compile(r"card(\d{1,6})", re.ASCII)
_PAIR = re.compile(
    r"\(Topology\) (Weight|Hops|Link type) between DRM devices (\d{1,6}) and (\d{1,6})", re.ASCII
)
_LINK_TYPES = ("XGMI", "PCIE", "XXXX")
_NOT_READ = ("None", "N/A")
_NUMA_KEYS = ("(Topology) Numa Node", "(Topology) Numa Affinity")
_NAME_KEYS = ("Card Series", "Card series", "Device Name")  # of --showproductname, by version
_MAX_FAULTS = 10
_MAX_DEVICES = 1024  # the largest node has 64


@dataclass(slots=True)
class _Node:
    """A node while its output is read."""

    file: str
    cells: dict[tuple[str, int, int], str | int] = field(default_factory=dict)
    """By figure, earlier device and later device."""
    numa_nodes: dict[int, int | None] = field(default_factory=dict)
    """Every device."""
    product_names: set[str] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)

    def fault(self, line: int, message: str) -> None:
        self.faults.append(Fault(file=self.file, line=line, message=message))

    def cell(self, line: int, figure: str, pair: tuple[int, int], text: str) -> None:
        """Note one figure of a pair, which the other direction must not contradict."""
        low, high = sorted(pair)
        value: str | int | None = text
        if figure != "Link type":
            if text in _NOT_READ:
                return
            value = whole_number(text)
        if (
            value is None
            or (isinstance(value, int) and value < 0)
            or (figure == "Link type" and text not in _LINK_TYPES)
        ):
            wanted = f"one of {', '.join(_LINK_TYPES)}" if figure == "Link type" else "a number"
            place = f"{figure} of devices {low} and {high}"
            self.fault(line, f"{place}: found {shown(text)}; {wanted} is expected")
        elif self.cells.setdefault((figure, low, high), value) != value:
            message = (
                f"{figure} of devices {low} and {high} is {value} here, the other direction says "
                f"{self.cells[figure, low, high]}; save the output again"
            )
            self.fault(line, message)


def detect(text: str) -> bool:
    """Whether the text has the tool's title or its keys."""
    return _SIGN.search(text) is not None


def parse(text: str, context: ImportContext) -> Imported:
    """The node's devices and paths; an InputError where a pair is missing or contradicts itself."""
    node = _Node(file=context.file)
    _read_json(node, text)
    topology = _topology(node)
    unknown = sum(path.path == "XXXX" for path in topology.paths)
    return Imported(
        kind="rocm-topo",
        device_name=next(iter(node.product_names)) if len(node.product_names) == 1 else "",
        topology=topology,
        notes=(f"{unknown} pairs have no known link type (XXXX)",) if unknown else (),
    )


def _read_json(node: _Node, text: str) -> None:
    # Warnings of the driver often stand around the object; empty lines keep its line numbers.
    begin, end = text.find("{"), text.rfind("}")
    if begin < 0:
        message = f"found no JSON; save the output of `{_COMMAND}`"
        raise InputError(Fault(file=node.file, message=message))
    above = "\n" * text.count("\n", 0, begin)
    document = json_document(node.file, above + text[begin : max(begin, end) + 1])
    if not isinstance(document.root, dict):
        raise fault_at(node.file, 0, f"found no object; save the output of `{_COMMAND}`")
    for key, value in document.root.items():
        card = _CARD.fullmatch(key)
        if not isinstance(value, dict):
            continue
        if card is not None and any(name.startswith("(Topology)") for name in value):
            node.numa_nodes[int(card.group(1))] = _numa(value.get(name) for name in _NUMA_KEYS)
        names = [value[name] for name in _NAME_KEYS if isinstance(value.get(name), str)]
        node.product_names.update(str(name)[:200] for name in names[:1])
        for name, entry in value.items() if key == "system" else ():
            pair = _PAIR.fullmatch(name)
            if pair is not None and pair.group(2) != pair.group(3):
                devices = (int(pair.group(2)), int(pair.group(3)))
                # A file has thousands of pairs; the line of a wrong one is looked for only then.
                before = len(node.faults)
                node.cell(0, pair.group(1), devices, str(entry))
                if len(node.faults) > before and before < _MAX_FAULTS:
                    message = node.faults.pop().message
                    node.faults.append(document.fault((key, name), message))


def _numa(texts: Iterable[object]) -> int | None:
    """The first number of 0 or more; the tool writes -1 where there is one NUMA node."""
    numbers = (whole_number(str(text).strip()) for text in texts if not isinstance(text, bool))
    return next((number for number in numbers if number is not None and number >= 0), None)


def _topology(node: _Node) -> NodeTopology:
    devices = sorted({*node.numa_nodes, *(end for _, *ends in node.cells for end in ends)})
    if not devices and not node.faults:
        message = f"there is no (Topology) entry; save the output of `{_COMMAND}`"
        raise InputError(Fault(file=node.file, message=message))
    if len(devices) > _MAX_DEVICES:
        message = f"{len(devices)} devices; no node has more than {_MAX_DEVICES}"
        raise InputError(Fault(file=node.file, message=message))
    refuse_all(node.faults, most=_MAX_FAULTS)
    paths = []
    for low, high in combinations(devices, 2):
        path = node.cells.get(("Link type", low, high))
        weight, hops = (node.cells.get((name, low, high)) for name in ("Weight", "Hops"))
        if path is None:
            node.fault(0, f"the link type of devices {low} and {high} is missing; save it again")
            continue
        paths.append(
            TopologyPath(
                between=(f"card{low}", f"card{high}"),
                path=str(path),
                hops=hops if isinstance(hops, int) else None,
                weight=weight if isinstance(weight, int) else None,
            )
        )
    refuse_all(node.faults, most=_MAX_FAULTS)
    return NodeTopology(
        vendor="amd",
        devices=tuple(
            TopologyDevice(index=at, name=f"card{at}", numa_node=node.numa_nodes.get(at))
            for at in devices
        ),
        paths=tuple(paths),
    )
