"""What the tools print, from numbers: the other direction of the importers, for their tests.

Formats are those of the sources named in the importers; every number is the caller's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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


def nccl_json(table: Table) -> str:
    """The file of -J."""
    factor = BUS[table.program](table.ranks)

    def measured(size: int, hundredths: int, wrong: int) -> dict[str, object]:
        rate = size / 1e9 / seconds_of(hundredths)
        return {
            "time": round(hundredths / 100, 6),
            "alg_bw": round(rate, 6),
            "bus_bw": round(rate * factor, 6),
            "nwrong": float(wrong),
        }

    document = {
        "version": 2,
        "start_time": "2026-03-04 09:15:00",
        "args": [f"./build/{table.program}_perf", "-b", "1M", "-e", "64M", "-f", "4", "-g", "1"],
        "env": ["LANG=C"],
        "nccl_version": 22805,
        "config": {
            "nthreads": 1,
            "ngpus": 1,
            "iterations": table.iterations,
            "aggregated_iterations": 1,
            "validation": 1,
            "graph": 0,
            "blocking_collectives": "false",
            "devices": [
                {
                    "rank": rank,
                    "group": 0,
                    "pid": 4100 + rank,
                    "hostname": "node1",
                    "device": rank,
                    "device_hex": f"0000:{7 + rank:02x}:00",
                    "device_info": table.device,
                }
                for rank in range(table.ranks)
            ],
        },
        "results": [
            {
                "size": size,
                "count": size // 4,
                "type": "float",
                "redop": "sum" if table.program in (*REDUCES, "sendrecv") else "none",
                "root": f"{0 if table.program in ROOTED else -1:6d}",
                "out_of_place": measured(
                    size, hundredths, table.wrong[at] if at < len(table.wrong) else 0
                ),
                "in_place": measured(size, hundredths + 7, 0),
                "actual_iterations": table.iterations,
                "experiment_name": "",
            }
            for at, (size, hundredths) in enumerate(table.rows)
        ],
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 12.5, "okay": "unchecked"},
        "errors": [""],
        "end_time": "2026-03-04 09:15:09",
    }
    return json.dumps(document, indent=1) + "\n"


def rccl_json(tables: Sequence[Table]) -> str:
    """The file of rccl-tests -Z json."""
    rows = []
    for table in tables:
        for at, (size, hundredths) in enumerate(table.rows):
            rate = size / 1e9 / seconds_of(hundredths)
            wrong = table.wrong[at] if at < len(table.wrong) else 0
            for in_place in (0, 1):
                entry = {
                    "numCycle": 0,
                    "name": table.program.title().replace("_", ""),
                    "nodes": table.hosts,
                    "ranks": table.ranks,
                    "ranksPerNode": table.ranks // table.hosts,
                    "gpusPerRank": 1,
                    "size": size,
                    "type": "float",
                    "redop": "sum" if table.program in (*REDUCES, "sendrecv") else "none",
                    "inPlace": in_place,
                    "time": round(hundredths / 100, 6),
                    "algBw": round(rate, 6),
                    "busBw": round(rate * BUS[table.program](table.ranks), 6),
                    "wrong": str(wrong),
                }
                rows.append(json.dumps(entry))
    return "[\n" + ",\n".join(rows) + "\n]\n"


_RULE = "-" * 87


def perftest_bandwidth(
    rows: Sequence[tuple[int, int]], *, verb: str, queues: int, gbits: bool
) -> str:
    """ib_*_bw; rows are (bytes, hundredths of the printed unit)."""
    unit = 1e9 / 8 if gbits else 2**20
    name = "Gb/sec" if gbits else "MB/sec"
    lines = [
        _RULE,
        f"                    {verb} BW Test",
        " Dual-port       : OFF\t\tDevice         : mlx5_2",
        f" Number of qps   : {queues}\t\tTransport type : IB",
        " Connection type : RC\t\tUsing SRQ      : OFF",
        " CQ Moderation   : 100",
        " Mtu             : 4096[B]",
        " Link type       : IB",
        _RULE,
        " local address: LID 0x21 QPN 0x0146 PSN 0x7a3b21 RKey 0x1ffffa VAddr 0x007f3a9c",
        " remote address: LID 0x22 QPN 0x0147 PSN 0x11cc42 RKey 0x1ffffb VAddr 0x007f51b8",
        _RULE,
        f" #bytes     #iterations    BW peak[{name}]    BW average[{name}]   MsgRate[Mpps]",
    ]
    for size, hundredths in rows:
        rate = hundredths / 100
        messages = rate * unit / size / 1e6
        lines.append(
            f" {size:<7d}    {5000:<10d}       {rate + 0.5:<7.2f}            {rate:<7.2f}\t\t"
            f"     {messages:<7.6f}"
        )
    return "\n".join([*lines, _RULE]) + "\n"


def perftest_latency(rows: Sequence[tuple[int, int]], *, verb: str) -> str:
    """ib_*_lat; rows are (bytes, hundredths of t_typical)."""
    lines = [
        _RULE,
        f"                    {verb} Latency Test",
        " Number of qps   : 1\t\tTransport type : IB",
        " Link type       : Ethernet",
        _RULE,
        " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    "
        "t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] ",
    ]
    for size, hundredths in rows:
        time = hundredths / 100
        cells = (time * 0.9, time * 3 + 1, time, time * 1.02, time * 0.05, time * 1.2, time * 2)
        lines.append(f" {size:<7d} 1000          " + "        ".join(f"{x:<7.2f}" for x in cells))
    return "\n".join([*lines, _RULE]) + "\n"
