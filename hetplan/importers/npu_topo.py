"""Devices of a node and the paths between them: the matrix of `npu-smi info -t topo`.

Words for paths, from the legend that the tool prints: `HCCS` Huawei's link between devices,
`HCCS_SW` the same through a switch, `UB` the unified bus, `SIO` the two dies of one package, `PIX`
one PCIe switch, `PXB` several, `PHB` the host bridge of a CPU, `SYS` the interconnect of NUMA
nodes, `NA` not known. Devices are `NPU0`, on machines with two dies per package `Phy-ID0`.
"""

from __future__ import annotations

import re

from hetplan.errors import Fault, InputError
from hetplan.importers.lines import fault_at
from hetplan.importers.nvidia_topo import Dialect, paths_of, read_matrix
from hetplan.importers.records import ImportContext, Imported, NodeTopology, TopologyDevice

_SIGN = re.compile(r"^[ \t]*(?:NPU|Phy-ID)\d+[ \t]+\S", re.MULTILINE)
_ASCEND = Dialect(
    command="npu-smi info -t topo",
    device=re.compile(r"(?:NPU|Phy-ID)(\d{1,6})", re.ASCII),
    label=re.compile(r"HCCS|HCCS_SW|UB|SIO|PIX|PXB|PHB|SYS|NA"),
    labels="X, HCCS, HCCS_SW, UB, SIO, PIX, PXB, PHB, SYS, NA",
    headings=("CPU Affinity",),
)


def detect(text: str) -> bool:
    """Whether a line begins with a device of the tool."""
    return _SIGN.search(text) is not None


def parse(text: str, context: ImportContext) -> Imported:
    """The node's devices and paths; an InputError where the matrix is not whole."""
    if "does not support querying topo" in text:
        message = "the tool says that this device does not support querying topo"
        raise InputError(Fault(file=context.file, message=message))
    matrix = read_matrix(text, _ASCEND, file=context.file)
    devices = []
    for row in matrix.rows:
        number = _ASCEND.device.fullmatch(row.name)
        if number is None:
            message = f"{row.name[:60]!a} is no device; columns are called NPU0 or Phy-ID0"
            raise fault_at(context.file, row.line, message)
        devices.append(TopologyDevice(index=int(number.group(1)), name=row.name))
    topology = NodeTopology(vendor="huawei", devices=tuple(devices), paths=paths_of(matrix))
    unknown = [path for path in topology.paths if path.path == "NA"]
    notes = (f"{len(unknown)} pairs have no known path (NA)",) if unknown else ()
    return Imported(kind="npu-topo", topology=topology, notes=notes)
