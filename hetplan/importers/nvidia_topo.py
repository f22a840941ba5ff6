"""Which devices and NICs a node has and by which path they reach each other: nvidia-smi topo -m.

Words for paths, from the legend that the tool prints: `NV#` is # bonded NVLinks, `PIX` at most one
PCIe bridge, `PXB` several bridges of PCIe, `PHB` the host bridge of a CPU, `NODE` the interconnect
of host bridges in one NUMA node, `SYS` (older drivers: `SOC`) the interconnect of NUMA nodes.
Columns of NICs are called `NIC0` and named by a second legend, or by older drivers `mlx5_0` itself.
"""

from __future__ import annotations

import re

from hetplan.errors import Fault, InputError
from hetplan.importers.records import (
    ImportContext,
    Imported,
    NodeTopology,
    TopologyDevice,
    TopologyNic,
    TopologyPath,
)
from hetplan.importers.topo_matrix import (
    Dialect,
    Matrix,
    Row,
    is_column_name,
    read_matrix,
)

KIND = "nvidia-topo"

DIALECT = Dialect(
    command="nvidia-smi topo -m",
    device=re.compile(r"GPU(\d{1,6})", re.ASCII),
    label=re.compile(r"NV\d{1,3}|NVL|PIX|PXB|PHB|NODE|SYS|SOC", re.ASCII),
    labels="X, NV1 and more, PIX, PXB, PHB, NODE, SYS",
    headings=("CPU Affinity", "NUMA Affinity", "GPU NUMA ID"),
)
_NUMBERED_NIC = re.compile(r"NIC\d{1,6}", re.ASCII)
_NUMBER = re.compile(r"\d{1,6}", re.ASCII)
_NUMBERS = re.compile(r"\d{1,6}(?:[-,]\d{1,6}){1,64}", re.ASCII)


def parse(text: str, context: ImportContext) -> Imported:
    """The node's devices, NICs and paths; an InputError where the matrix is not whole."""
    matrix = read_matrix(text, DIALECT, file=context.file)
    names = _legend(matrix, file=context.file)
    devices, nics, notes = [], [], []
    for row in matrix.rows:
        number = DIALECT.device.fullmatch(row.name)
        if number is not None:
            numa = _numa(row, matrix.headings)
            devices.append(
                TopologyDevice(index=int(number.group(1)), name=row.name, numa_node=numa)
            )
        else:
            nics.append(TopologyNic(name=names.get(row.name, row.name)))
    unnamed = [nic.name for nic in nics if _NUMBERED_NIC.fullmatch(nic.name)]
    if unnamed:
        which = ", ".join(unnamed[:8]) + (" and more" if len(unnamed) > 8 else "")
        notes.append(f"the NIC legend is missing: {which} are not the cards' own names")
    shared = [nic.name for at, nic in enumerate(nics) if nic in nics[:at]]
    if shared:
        raise InputError(
            Fault(
                file=context.file, message=f"two columns are the NIC {shared[0][:60]!a}; keep one"
            )
        )
    topology = NodeTopology(
        vendor="nvidia", devices=tuple(devices), nics=tuple(nics), paths=paths_of(matrix, names)
    )
    return Imported(kind=KIND, topology=topology, notes=tuple(notes))


def paths_of(matrix: Matrix, names: dict[str, str] | None = None) -> tuple[TopologyPath, ...]:
    """Every pair of the matrix once, under `names` where a column has another name there."""
    known = [(names or {}).get(name, name) for name in matrix.columns]
    return tuple(
        TopologyPath(between=(known[low], known[high]), path=matrix.rows[low].labels[high])
        for low in range(len(known))
        for high in range(low + 1, len(known))
    )


def _numa(row: Row, headings: tuple[str, ...]) -> int | None:
    """The device's NUMA node, where the row has every affinity and this one is one node.

    Where the driver gives the device's own memory a NUMA node (Grace Hopper and later), the list
    has such nodes too, behind the node of the cores: the lowest is the cores' (lscpu shows it).
    """
    if "NUMA Affinity" not in headings or len(row.affinities) != len(headings):
        return None
    cell = row.affinities[headings.index("NUMA Affinity")]
    own = row.affinities[headings.index("GPU NUMA ID")] if "GPU NUMA ID" in headings else ""
    if _NUMBER.fullmatch(own) and _NUMBERS.fullmatch(cell):
        cell = min(re.findall(r"\d+", cell), key=int)
    return int(cell) if _NUMBER.fullmatch(cell) else None


def _legend(matrix: Matrix, *, file: str) -> dict[str, str]:
    """What the legend of NICs calls each column; empty where there is no such legend."""
    names: dict[str, str] = {}
    legend = 0
    for line in matrix.rest:
        if line.words[:2] == ("NIC", "Legend:"):
            legend = line.number
        if not legend:
            continue
        # A terminal that redraws puts several entries on one line, or one on two.
        for key, name in zip(line.words, line.words[1:], strict=False):
            column, colon = key[:-1], key[-1]
            entry = colon == ":" and _NUMBERED_NIC.fullmatch(column) and column in matrix.columns
            if entry and names.get(column) != name:
                names[column] = _free_name(name, line.number, matrix, names, column, file=file)
    missing = [each for each in matrix.columns if _NUMBERED_NIC.fullmatch(each)]
    missing = [each for each in missing if each not in names]
    if legend and missing:
        which = ", ".join(missing[:8]) + (" and more" if len(missing) > 8 else "")
        message = f"the legend does not name {which}; the output was cut off"
        raise InputError(Fault(file=file, line=legend, message=message))
    return names


def _free_name(
    name: str, line: int, matrix: Matrix, names: dict[str, str], column: str, *, file: str
) -> str:
    """The name that the legend gives the column, which nothing else of the node may have."""
    if not is_column_name(name) or name in matrix.columns or name in names.values():
        message = f"{name[:60]!a} cannot name a NIC, or names another one; save the output again"
        raise InputError(Fault(file=file, line=line, message=message))
    if column in names:
        message = f"{column} is {name[:60]!a} here and {names[column]!a} above; keep one legend"
        raise InputError(Fault(file=file, line=line, message=message))
    return name
