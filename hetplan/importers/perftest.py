"""What perftest (ib_write_bw, ib_read_lat, ...) prints, to figures of a path.

Bandwidth is printed in units of 2**20 bytes per second, which versions before 2024 call `MB/sec`,
or with --report_gbits in units of 1e9 bits (`perftest_parameters.c`: format_factor 0x100000 or
125000000). The JSON of --out_json names no unit and holds one size; it is not read.
Times are half a round trip of write and send and a whole one of read and atomic (rtt_factor there).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetplan.importers.lines import (
    Line,
    fault_at,
    finite_number,
    rounding_of,
    shown,
    text_lines,
    whole_number,
    without_rank_label,
)
from hetplan.importers.records import ImportContext, Imported, PathFigures
from hetplan.units import MEBIBYTE

_GIGABIT = 1e9 / 8
_MICROSECONDS = 1e6  # per second
_SLACK = 0.01  # MsgRate counts the same messages as BW average, over the same time

_SIGN = re.compile(r"RDMA_(?:Write|Read)|Send (?:BW|Latency|Post) |#bytes +#iterations")
_TITLE = re.compile(
    r"\s{0,40}((?:RDMA_)?(?:Send|Write|Read|Atomic)[A-Za-z_ ]{0,60}?) (BW|Latency) "
    r"(?:forwarding )?(?:Multicast )?Test\s{0,10}"
)
_SIDE = re.compile(r"\s{0,10}(Local|Remote) results:\s{0,10}")
_SETTING = re.compile(r"(Number of qps|Link type|Connection type|Mtu)\s{0,20}: (\S{1,20})")


@dataclass(slots=True)
class _Test:
    """A test while it is read."""

    title: str = ""
    latency: bool = False
    settings: dict[str, str] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)
    unit: float = 0.0
    side: str = ""
    """`local` or `remote` where rows are of one side of a bidirectional test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Numbers of one row, in base units."""

    message_bytes: int
    bytes_per_second: float | None = None
    seconds: float | None = None


def detect(text: str) -> bool:
    """Whether the text has a title or the columns of the programs."""
    return _SIGN.search(text) is not None


def parse(text: str, context: ImportContext) -> Imported:
    """One PathFigures per row of every test in the file.

    Raises InputError for rows without their header and for rows that contradict themselves.
    """
    paths: list[PathFigures] = []
    notes: list[str] = []
    test = _Test()
    for line in text_lines(text):
        row = _printed(line, test, context.file)
        if row is not None:
            paths.append(_figures(test, row, notes))
    if not paths:
        raise fault_at(
            context.file, 0, "no row of results found (#bytes, #iterations, ...); give the output"
        )
    return Imported(kind="perftest", paths=tuple(paths), notes=tuple(dict.fromkeys(notes)))


def _printed(line: Line, test: _Test, file: str) -> _Measured | None:
    """What a line says: nothing, something about the test, or a row."""
    text = without_rank_label(line.text)
    title = _TITLE.fullmatch(text)
    if title:
        test.title, test.latency = title.group(1), title.group(2) == "Latency"
        test.settings, test.columns, test.side = {}, [], ""
    elif side := _SIDE.fullmatch(text):
        # --report-both: what each side sent alone stands below the sum of both.
        test.side = side.group(1).lower()
    elif text.lstrip().startswith("#bytes"):
        test.columns = _columns(text, line.number, file)
        test.latency = bool({"t_avg", "t_typical"} & set(test.columns))
        test.unit = _unit(text, line.number, file, latency=test.latency)
    elif re.match(r"\s{0,40}\d{1,18}(?:\s|$)", text):
        return _row(line.number, text.split(), test, file)
    else:
        test.settings |= dict(_SETTING.findall(text))
        if re.match(r"\s{0,8}(?:Couldn't|Unable|Failed|Problems|Completion with error)", text):
            raise fault_at(file, line.number, f"perftest failed: {shown(text.strip())}")
    return None


def _columns(text: str, number: int, file: str) -> list[str]:
    # Names hold spaces (`BW average[MB/sec]`, `99% percentile[usec]`).
    names = re.findall(
        r"#\w{1,20}|t_\w{1,10}\[usec\]|\d{2}(?:\.\d)?% percentile\[usec\]|tps average|"
        r"BW (?:peak|average|Port[12])\[[^\]]{1,12}\]|MsgRate(?: Port[12])?\[Mpps\]|CPU_Util\[%+\]",
        text,
    )
    plain = [name.partition("[")[0] for name in names]
    if plain[:1] != ["#bytes"] or not {"BW average", "t_avg", "t_typical"} & set(plain):
        message = (
            f"the header names {shown(', '.join(plain))}; #bytes first and BW average or t_avg "
            "are expected"
        )
        raise fault_at(file, number, message)
    return plain


def _unit(text: str, number: int, file: str, *, latency: bool) -> float:
    if latency:
        return 1.0
    found = re.search(r"BW average\[([^\]]{1,12})\]", text)
    unit = found.group(1) if found else ""
    units = {"MB/sec": MEBIBYTE, "MiB/sec": MEBIBYTE, "Gb/sec": _GIGABIT}
    if unit not in units:
        raise fault_at(file, number, f"found the unit {shown(unit)}; one of {', '.join(units)} is")
    return float(units[unit])


def _row(number: int, tokens: Sequence[str], test: _Test, file: str) -> _Measured | None:
    if not test.columns:
        if len(tokens) < 4 or any(finite_number(token) is None for token in tokens):
            return None
        raise fault_at(file, number, "a row without the header `#bytes #iterations ...` before it")
    names = [name for name in test.columns if name != "CPU_Util"]
    if len(tokens) < len(names):
        message = f"the row has {len(tokens)} of {len(names)} columns; the output was cut off here"
        raise fault_at(file, number, message)
    cells = dict(zip(names, tokens, strict=False))
    values = {}
    for name, text in cells.items():
        value = finite_number(text)
        if value is None or value < 0:
            message = f"found {shown(text)}; a number from 0 is expected here"
            raise fault_at(file, number, message, name)
        values[name] = value
    size = whole_number(cells["#bytes"])
    if not size:
        raise fault_at(file, number, f"found {shown(cells['#bytes'])} bytes; 1 or more is expected")
    if test.latency:
        return _latency(values, size, file, number)
    rate = values["BW average"] * test.unit
    if rate <= 0:
        raise fault_at(file, number, "found a bandwidth of 0", "BW average")
    if "MsgRate" in cells:
        allowed = rounding_of(cells["BW average"]) * test.unit / 2
        allowed += rounding_of(cells["MsgRate"]) * 1e6 * size / 2
        _check_rate(rate, values["MsgRate"] * 1e6 * size, allowed, file, number)
    return _Measured(message_bytes=size, bytes_per_second=rate)


def _latency(values: dict[str, float], size: int, file: str, number: int) -> _Measured:
    name = "t_typical" if "t_typical" in values else "t_avg"
    if values[name] <= 0:
        raise fault_at(file, number, "found a time of 0", name)
    least, most = values.get("t_min", 0.0), values.get("t_max", float("inf"))
    # Each is rounded to 0.01 us on its own.
    if not least - 0.011 <= values[name] <= most + 0.011:
        message = f"{name} is {values[name]:g}, outside t_min {least:g} to t_max {most:g}"
        raise fault_at(file, number, message)
    return _Measured(message_bytes=size, seconds=values[name] / _MICROSECONDS)


def _check_rate(rate: float, other: float, allowed: float, file: str, line: int) -> None:
    if abs(rate - other) > allowed + _SLACK * rate:
        raise fault_at(
            file,
            line,
            f"BW average is {rate / 1e9:.6g} GB/s and #bytes * MsgRate is {other / 1e9:.6g} GB/s; "
            "a number or a unit was changed",
        )


def _figures(test: _Test, row: _Measured, notes: list[str]) -> PathFigures:
    title = test.title or ("Latency" if test.latency else "Bandwidth")
    what = title.removesuffix(" Bidirectional").removesuffix(" Post List")
    streams = whole_number(test.settings.get("Number of qps", ""))
    for name in ("Link type", "Connection type", "Mtu"):
        if name in test.settings:
            notes.append(f"{name.lower()}: {test.settings[name]}")
    if test.latency:
        return _latency_figures(what, row, streams or None, notes)
    rate = row.bytes_per_second
    if test.side:
        notes.append(f"rows of the {test.side} side are one direction while both were sent")
    elif rate is not None and "Bidirectional" in title:
        rate /= 2
        notes.append("both directions at the same time (-b); bandwidth is half of the printed sum")
    return PathFigures(
        measured=f"{what} bandwidth" if test.title else what,
        message_bytes=row.message_bytes,
        bandwidth_bytes_per_second=rate,
        streams=streams or None,
    )


def _latency_figures(
    what: str, row: _Measured, streams: int | None, notes: list[str]
) -> PathFigures:
    """Reads and atomics are timed there and back, the others by half of a ping-pong."""
    seconds = row.seconds or 0.0
    if what.startswith(("RDMA_Read", "Read", "Atomic")):
        return PathFigures(
            measured=f"{what} latency",
            message_bytes=row.message_bytes,
            round_trip_seconds=seconds,
            streams=streams,
        )
    if what == "Latency":
        notes.append("the output does not say which test; times are taken as one way")
    return PathFigures(
        measured="Latency" if what == "Latency" else f"{what} latency",
        message_bytes=row.message_bytes,
        latency_seconds=seconds,
        round_trip_seconds=2 * seconds,
        streams=streams,
    )
