"""Devices and NICs of a node and the paths between them: the matrix of `nvidia-smi topo -m`.

Words for paths, from the legend that the tool prints: `NV#` is # bonded NVLinks, `PIX` at most one
PCIe bridge, `PXB` several bridges of PCIe, `PHB` the host bridge of a CPU, `NODE` the interconnect
of host bridges in one NUMA node, `SYS` (older drivers: `SOC`) the interconnect of NUMA nodes.
Columns of NICs are called `NIC0` and named by a second legend, or by older drivers `mlx5_0` itself.

`read_matrix` also reads the matrix of npu-smi, which has the same shape: a line of column names,
then one line per name with one word per column and, at the end, affinities. A matrix that is not
whole, or whose two halves differ, is refused: half of it would look like a node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetplan.errors import Fault, InputError
from hetplan.importers.lines import fault_at, refuse_all, shown, text_lines
from hetplan.importers.records import (
    ImportContext,
    Imported,
    NodeTopology,
    TopologyDevice,
    TopologyNic,
    TopologyPath,
)

_MAX_FAULTS = 10  # one mend usually serves them all
_MAX_COLUMNS = 1024  # the largest node has 64 devices and as many NICs
_COLUMN = re.compile(r"[A-Za-z0-9][\w.:+-]{0,63}", re.ASCII)  # GPU0, Phy-ID0, mlx5_0, rocep1s0f0
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # the tool underlines its header, also in a file
_SELF = "X"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one tool writes its matrix."""

    command: str
    """Command that prints it, for messages."""
    device: re.Pattern[str]
    """Name of a device; its first group is the device's number."""
    label: re.Pattern[str]
    """Word for a path; `X` is the diagonal of both tools."""
    labels: str
    """The words for paths, for messages."""
    headings: tuple[str, ...]
    """Headings that may follow the columns, as in `CPU Affinity`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRow:
    """One row of the matrix."""

    line: int
    name: str
    labels: tuple[str, ...]
    affinities: tuple[str, ...]
    """What follows the labels; empty where the tool leaves cells out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A whole, symmetric matrix."""

    headings: tuple[str, ...]
    rows: tuple[MatrixRow, ...]
    """In the order of the columns."""
    rest: tuple[tuple[int, list[str]], ...]
    """(line, words) below the matrix: legends."""


_NVIDIA = Dialect(
    command="nvidia-smi topo -m",
    device=re.compile(r"GPU(\d{1,6})", re.ASCII),
    label=re.compile(r"NV\d{1,3}|NVL|PIX|PXB|PHB|NODE|SYS|SOC", re.ASCII),
    labels="X, NV1 and more, PIX, PXB, PHB, NODE, SYS",
    headings=("CPU Affinity", "NUMA Affinity", "GPU NUMA ID"),
)
_SIGN = re.compile(r"^(?:\x1b\[[0-9;]*m)?[ \t]*GPU\d+(?:\s|\x1b|$)", re.MULTILINE)
_NUMBERED_NIC = re.compile(r"NIC\d{1,6}", re.ASCII)
_NUMBER = re.compile(r"\d{1,6}", re.ASCII)
_NUMBERS = re.compile(r"\d{1,6}(?:[-,]\d{1,6}){1,64}", re.ASCII)


def detect(text: str) -> bool:
    """Whether a line begins with a device of the tool."""
    return _SIGN.search(text) is not None


def parse(text: str, context: ImportContext) -> Imported:
    """The node's devices, NICs and paths; an InputError where the matrix is not whole."""
    matrix = read_matrix(text, _NVIDIA, file=context.file)
    nic_names = _legend(matrix, file=context.file)
    devices, nics, notes = [], [], []
    for row in matrix.rows:
        number = _NVIDIA.device.fullmatch(row.name)
        if number is None:
            nics.append(TopologyNic(name=nic_names.get(row.name, row.name)))
            continue
        numa = _numa(row, matrix.headings)
        devices.append(TopologyDevice(index=int(number.group(1)), name=row.name, numa_node=numa))
    unnamed = [nic.name for nic in nics if _NUMBERED_NIC.fullmatch(nic.name)]
    if unnamed:
        which = ", ".join(unnamed[:8]) + (" and more" if len(unnamed) > 8 else "")
        notes.append(f"the NIC legend is missing: {which} are not the cards' own names")
    shared = [nic.name for at, nic in enumerate(nics) if nic in nics[:at]]
    if shared:
        message = f"two columns are the NIC {shared[0][:60]!a}; keep one"
        raise InputError(Fault(file=context.file, message=message))
    topology = NodeTopology(
        vendor="nvidia",
        devices=tuple(devices),
        nics=tuple(nics),
        paths=paths_of(matrix, nic_names),
    )
    return Imported(kind="nvidia-topo", topology=topology, notes=tuple(notes))


def paths_of(matrix: Matrix, names: dict[str, str] | None = None) -> tuple[TopologyPath, ...]:
    """Every pair of the matrix once, under `names` where a column has another name there."""
    known = [(names or {}).get(row.name, row.name) for row in matrix.rows]
    return tuple(
        TopologyPath(between=(known[low], known[high]), path=matrix.rows[low].labels[high])
        for low in range(len(known))
        for high in range(low + 1, len(known))
    )


def _numa(row: MatrixRow, headings: tuple[str, ...]) -> int | None:
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
    columns = [row.name for row in matrix.rows]
    names: dict[str, str] = {}
    legend = 0
    for line, words in matrix.rest:
        if words[:2] == ["NIC", "Legend:"]:
            legend = line
        if not legend or len(words) != 2 or words[0].removesuffix(":") not in columns:
            continue
        column, name = words[0].removesuffix(":"), words[1]
        if not _COLUMN.fullmatch(name) or name in columns or name in names.values():
            message = f"{name[:60]!a} cannot name a NIC, or names another one"
            raise fault_at(file, line, f"{message}; save the output again")
        names[column] = name
    missing = [name for name in columns if _NUMBERED_NIC.fullmatch(name) and name not in names]
    if legend and missing:
        which = ", ".join(missing[:8]) + (" and more" if len(missing) > 8 else "")
        message = f"the legend does not name {which}; the output was cut off"
        raise fault_at(file, legend, message)
    return names


def read_matrix(text: str, dialect: Dialect, *, file: str) -> Matrix:
    """The matrix of the text; an InputError with every fault and its line otherwise."""
    lines = [(line.number, line.text.split()) for line in text_lines(_ESCAPE.sub("", text))]
    start = next(
        (at for at, (_, words) in enumerate(lines) if words and dialect.device.fullmatch(words[0])),
        None,
    )
    if start is None:
        message = f"there is no matrix here; save the whole output of `{dialect.command}`"
        raise InputError(Fault(file=file, message=message))
    columns, headings = _header(*lines[start], dialect, file=file)
    end = start + 1 + len(columns)
    rows, faults = [], []
    for name, (line, words) in zip(columns, lines[start + 1 : end], strict=False):
        if words[:1] != [name]:
            faults.append(_missing_row(file, line, name))
            break
        rows.append(
            MatrixRow(
                line=line,
                name=name,
                labels=tuple(words[1 : 1 + len(columns)]),
                affinities=tuple(words[1 + len(columns) :]),
            )
        )
        faults += _row_faults(rows[-1], columns, headings, dialect, file=file)
    if not faults and len(rows) < len(columns):
        faults.append(_missing_row(file, lines[-1][0], columns[len(rows)]))
    refuse_all(faults or list(_asymmetries(columns, rows, file=file)), most=_MAX_FAULTS)
    return Matrix(headings=headings, rows=tuple(rows), rest=tuple(lines[end:]))


def _missing_row(file: str, line: int, name: str) -> Fault:
    message = (
        f"the row of {name[:60]} should follow here; the output was cut off or its lines were "
        "wrapped: write it to a file with `>`"
    )
    return Fault(file=file, line=line, message=message)


def _header(
    line: int, words: list[str], dialect: Dialect, *, file: str
) -> tuple[list[str], tuple[str, ...]]:
    """Column names, and the headings behind them."""
    if len(words) > 1 and (words[1] == _SELF or dialect.label.fullmatch(words[1])):
        message = (
            "a row of the matrix without the line of column names above it; save the whole output "
            f"of `{dialect.command}`"
        )
        raise fault_at(file, line, message)
    first_words = {heading.split()[0] for heading in dialect.headings}
    size = next((at for at, word in enumerate(words) if word in first_words), len(words))
    columns, rest, headings = words[:size], " ".join(words[size:]), []
    while rest:
        heading = next((each for each in dialect.headings if rest.startswith(each)), None)
        if heading is None:
            known = ", ".join(dialect.headings)
            message = f"{rest[:60]!a} after the columns; {known} are known there"
            raise fault_at(file, line, f"{message}. Was the line of column names cut off?")
        headings.append(heading)
        rest = rest[len(heading) :].lstrip()
    if len(columns) > _MAX_COLUMNS:
        message = f"more than {_MAX_COLUMNS} columns; no node has so many devices and NICs"
        raise fault_at(file, line, message)
    for at, name in enumerate(columns):
        if not _COLUMN.fullmatch(name):
            raise fault_at(file, line, f"{name[:60]!a} is no name of a device or NIC")
        if name in columns[:at]:
            raise fault_at(file, line, f"column {name!a} is there twice; keep one")
    return columns, tuple(headings)


def _row_faults(
    row: MatrixRow, columns: list[str], headings: tuple[str, ...], dialect: Dialect, *, file: str
) -> list[Fault]:
    messages = []
    if len(row.labels) < len(columns):
        messages.append(
            f"{len(row.labels)} paths for {len(columns)} columns; the line was cut off: save the "
            "output again"
        )
    for column, label in zip(columns, row.labels, strict=False):
        if (label == _SELF) != (column == row.name):
            place = f"{shown(label)} in column {column}"
            messages.append(f"{place}; X is where a name meets itself: a cell was lost")
        elif label != _SELF and not dialect.label.fullmatch(label):
            place = f"{shown(label)} in column {column}"
            messages.append(f"{place} is no path; known: {dialect.labels}")
    if len(row.affinities) > len(headings):
        extra = row.affinities[len(headings)]
        messages.append(f"{shown(extra)} after the last column; a column has no name")
    # A lost cell shifts the whole row: the first two messages say it.
    return [Fault(file=file, line=row.line, field=row.name, message=each) for each in messages[:2]]


def _asymmetries(columns: list[str], rows: Sequence[MatrixRow], *, file: str) -> Iterator[Fault]:
    for low in range(len(columns)):
        for high in range(low + 1, len(columns)):
            there, back = rows[low].labels[high], rows[high].labels[low]
            if there != back:
                message = (
                    f"{columns[high]} to {columns[low]} is {back}, but line {rows[low].line} says "
                    f"{there} for {columns[low]} to {columns[high]}; save the output again, and if "
                    "it stays so, a link works in one direction only"
                )
                yield Fault(file=file, line=rows[high].line, message=message)
