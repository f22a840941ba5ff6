"""What the tools print, from numbers: the other direction of the importers, for their tests.

Formats are those of the sources named in the importers; every number is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

BUS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "sendrecv": lambda n: 1.0,
}
REDUCES = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "gather", "reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One run of one program."""

    program: str
    ranks: int
    rows: tuple[tuple[int, int], ...]
    """(bytes, hundredths of a microsecond)."""
    hosts: int = 1
    iterations: int = 20
    wrong: tuple[int, ...] = ()
    """Wrong elements per row; none where the tuple ends."""
    device: str = "NVIDIA H100 80GB HBM3"


def seconds_of(hundredths: int) -> float:
    return hundredths / 100 / 1e6


def narrow(value: float, width: int) -> str:
    """As getFloatStr of nccl-tests: as many decimals as fit."""
    for decimals in (2, 1, 0):
        text = f"{value:{width}.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:{width}.1e}" if width >= 7 else f"{value:{width}.0e}"


def rank_lines(table: Table, group: bool = True) -> list[str]:
    each = table.ranks // table.hosts
    part = " Group  0" if group else ""
    return [
        f"#  Rank {rank:2d}{part} Pid {4100 + rank:6d} on {f'node{rank // each + 1}':>10} device "
        f"{rank % each:2d} [0000:{7 + 16 * (rank % each):02x}:00] {table.device}"
        for rank in range(table.ranks)
    ]


def half(table: Table, size: int, hundredths: int, wrong: str) -> str:
    seconds = seconds_of(hundredths)
    rate = size / 1e9 / seconds
    bus = rate * BUS[table.program](table.ranks)
    return f"  {narrow(hundredths / 100, 7)}  {narrow(rate, 6)}  {narrow(bus, 6)}  {wrong:>6}"


def row_line(table: Table, at: int, *, blank_operator: bool = False) -> str:
    size, hundredths = table.rows[at]
    wrong = str(table.wrong[at]) if at < len(table.wrong) else "0"
    redop = "" if blank_operator else "none"
    if table.program in (*REDUCES, "sendrecv"):  # sendrecv prints one and does not use it
        redop = "sum"
    root = 0 if table.program in ROOTED else -1
    in_place = "N/A" if table.program in ("alltoall", "sendrecv") else "0"
    return (
        f"{size:12d}  {size // 4:12d}  {'float':>8}  {redop:>6}  {root:6d}"
        + half(table, size, hundredths, wrong)
        + half(table, size, hundredths + 7, in_place)
    )


def header_lines() -> list[str]:
    halves = ("time", "algbw", "busbw", "#wrong")
    units = ("(us)", "(GB/s)", "(GB/s)", "")
    pattern = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}" + "  {:>7}  {:>6}  {:>6}  {:>6}" * 2
    return [
        "#",
        "# " + " " * 61 + "out-of-place                       in-place          ",
        pattern.format("size", "count", "type", "redop", "root", *halves, *halves),
        pattern.format("(B)", "(elements)", "", "", "", *units, *units),
    ]


def nccl_text(table: Table, *, names_program: bool = True) -> str:
    """A run as nccl-tests of 2025 prints it; without the program's name, as of August 2022.

    Programs that reduce nothing left the operator's column blank then.
    """
    smallest = min((size for size, _ in table.rows), default=8)
    largest = max((size for size, _ in table.rows), default=8)
    lines = [
        f"# nThread 1 nGpus {table.ranks // table.hosts} minBytes {smallest} maxBytes {largest} "
        f"step: 2(factor) warmup iters: 5 iters: {table.iterations} agg iters: 1 validation: 1 "
        "graph: 0",
        "#",
        "# Using devices",
        *rank_lines(table, group=names_program),
        *header_lines(),
        *(row_line(table, at, blank_operator=not names_program) for at in range(len(table.rows))),
        "# Out of bounds values : 0 OK",
        "# Avg bus bandwidth    : 12.5 ",
        "#",
    ]
    if names_program:
        lines.insert(0, f"# Collective test starting: {table.program}_perf")
        lines.insert(0, "# nccl-tests version 2.17.8 nccl-headers=22805 nccl-library=22805")
        lines.append(f"# Collective test concluded: {table.program}_perf")
    return "\n".join(lines) + "\n\n"
