"""What stands in the tables that rocm-smi --showtopo prints without --json.

    ========= Link Type between two GPUs =========
           GPU0         GPU1
    GPU0   0            XGMI
    GPU1   XGMI         0
    ================= Numa Nodes =================
    GPU[0]          : (Topology) Numa Node: 0

`Weight` and `Hops` are tables of the same form. The diagonal is 0; `N/A` is what the tool could not
read, `XXXX` a link of no known type. Collectors of environments save the link types alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hetplan.errors import Fault
from hetplan.importers.lines import shown, text_lines
from hetplan.importers.topo_copied import without_escapes

_TITLE = re.compile(r"(Weight|Hops|Link [Tt]ype) between two GPUs", re.ASCII)
_GPU = re.compile(r"GPU(\d{1,6})", re.ASCII)
_NUMA = re.compile(
    r"GPU ?\[?(\d{1,6})\]?[\s\\t]{0,40}: \(Topology\) Numa (Node|Affinity): (-?\d{1,6})", re.ASCII
)
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_LINK_TYPES = ("XGMI", "PCIE", "XXXX")
_UNKNOWN = ("N/A", "None")
_MAX_DEVICES = 1024
_MAX_FAULTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One entry of one table."""

    line: int
    what: str
    """`Weight`, `Hops` or `Link type`."""
    pair: tuple[int, int]
    value: str | int


@dataclass(slots=True)
class Tables:
    """Everything that stands in the tables."""

    file: str
    devices: dict[int, None] = field(default_factory=dict)
    """In the order of the tables."""
    cells: list[Cell] = field(default_factory=list)
    numa_nodes: dict[int, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def fault(self, line: int, message: str) -> None:
        """Note what is wrong with a line; the first few say it."""
        if len(self.faults) < _MAX_FAULTS:
            self.faults.append(Fault(file=self.file, line=line, message=message))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    number: int
    text: str
    words: tuple[str, ...]


def has_tables(text: str) -> bool:
    """Whether the text has the title of a table."""
    return _TITLE.search(text) is not None


def read_tables(text: str, *, file: str) -> Tables:
    """All tables of the text, and a fault for each row that is cut off."""
    tables = Tables(file=file)
    lines = [_line(line.number, line.text) for line in text_lines(without_escapes(text))]
    for at, line in enumerate(lines):
        title = _TITLE.search(line.text)
        if title is not None:
            what = "Link type" if title.group(1).startswith("Link") else title.group(1)
            below = (lines[next_at] for next_at in range(at + 1, len(lines)))
            _read_table(tables, what, line.number, (each for each in below if each.words))
        numa = _NUMA.search(line.text)
        if numa is not None:
            device, node = int(numa.group(1)), int(numa.group(3))
            tables.devices.setdefault(device)
            if node >= 0 and (numa.group(2) == "Node" or device not in tables.numa_nodes):
                tables.numa_nodes[device] = node
    return tables


def _line(number: int, text: str) -> _Line:
    """The line without the `>` of a mail and the bars of the log that it was copied from."""
    words = text.split()
    while words and words[0] in (">", "|"):
        del words[0]
    return _Line(number=number, text=text, words=tuple(words))


def _read_table(tables: Tables, what: str, title: int, lines: Iterator[_Line]) -> None:
    """One table: names of columns, then one row per device; lines may be broken at a space."""
    columns: list[int] = []
    line = next(lines, None)
    while line is not None and all(_GPU.fullmatch(word) for word in line.words):
        columns += [int(word[3:]) for word in line.words]
        if len(line.words) == 1 and len(columns) > _MAX_DEVICES:
            break
        line = next(lines, None)
    if not columns or len(columns) > _MAX_DEVICES or len(set(columns)) < len(columns):
        tables.fault(title, "below this title the names of the devices should stand, each once")
        return
    for device in columns:
        tables.devices.setdefault(device)
    for device in columns:
        if line is None or line.words[0] != f"GPU{device}":
            number = title if line is None else line.number
            message = f"the row of GPU{device} should follow here; the output was cut off"
            tables.fault(number, message)
            return
        first, cells = line.number, list(line.words[1:])
        line = next(lines, None)
        while line is not None and len(cells) < len(columns) and not _ends_row(line):
            cells += line.words
            line = next(lines, None)
        _read_row(tables, what, first, device, columns, cells)


def _ends_row(line: _Line) -> bool:
    return _GPU.fullmatch(line.words[0]) is not None or line.words[0].startswith("==")


def _read_row(
    tables: Tables, what: str, line: int, device: int, columns: Sequence[int], cells: Sequence[str]
) -> None:
    if len(cells) != len(columns):
        message = f"GPU{device} has {len(cells)} entries for {len(columns)} devices; save it again"
        tables.fault(line, message)
        return
    for column, cell in zip(columns, cells, strict=True):
        if column == device:
            if cell not in ("0", "X", "N/A"):
                tables.fault(
                    line, f"found {shown(cell)} where GPU{device} meets itself; 0 is there"
                )
        elif what == "Link type" and cell in _LINK_TYPES:
            tables.cells.append(Cell(line=line, what=what, pair=(device, column), value=cell))
        elif what != "Link type" and _NUMBER.fullmatch(cell):
            tables.cells.append(Cell(line=line, what=what, pair=(device, column), value=int(cell)))
        elif what == "Link type" or cell not in _UNKNOWN:
            wanted = f"one of {', '.join(_LINK_TYPES)}" if what == "Link type" else "a number"
            message = f"{what} of GPU{device} and GPU{column}: found {shown(cell)}; {wanted}"
            tables.fault(line, f"{message} is expected")
