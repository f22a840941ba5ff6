"""What iperf3 prints without -J: its summary rows to figures of a path.

    [ ID] Interval           Transfer     Bitrate         Retr
    [  5]   0.00-10.00  sec  1.09 GBytes   936 Mbits/sec   12             sender
    [  5]   0.00-10.04  sec  1.09 GBytes   932 Mbits/sec                  receiver

The receiver's row counts (`[SUM]` where -P asks for several streams); versions before 3.6 say
Bandwidth for Bitrate, and their UDP has one row without its side, of what was sent. Prefixes of
bits are of 1000 (`src/units.c`). --bidir names the directions [TX-C] and [RX-C].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hetplan.importers.lines import Line, fault_at, finite_number, shown, without_rank_label
from hetplan.importers.records import PathFigures

_ROW = re.compile(
    r"\s{0,20}\[\s{0,4}(\d{1,9}|SUM)\](?:\[([TR]X-[CS])\])?\s{1,9}[\d.]{1,20}-\s{0,4}[\d.]{1,20}"
    r"\s{0,4}sec\s{1,9}[\d.]{1,20} [KMGTP]?Bytes"
    r"\s{1,9}([\d.]{1,20}) ([KMGT]?)(bits|Bytes)/sec(.{0,120})",
    re.ASCII,
)
_LOST = re.compile(r"\b(\d{1,18})/(\d{1,18}) \(")
_PREFIXES = " KMGT"
_SIDES = ("sender", "receiver")
NOTE = "printed rates have three digits; -J writes all of them, and the round trip"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    line: int
    stream: str
    """Its number, or `SUM`."""
    direction: str
    rate: float
    """Bytes per second."""
    rest: str
    """What stands after the rate."""


@dataclass(slots=True)
class _Run:
    """One test while it is read."""

    udp: bool = False
    reverse: bool = False
    summary: bool = False
    """Whether the rule that separates intervals from the summary was passed."""
    rows: list[_Row] = field(default_factory=list)


def printed_figures(lines: Sequence[Line], file: str, notes: list[str]) -> list[PathFigures]:
    """One PathFigures per direction of every test; none where there is no summary."""
    runs = [_Run()]
    for line in lines:
        text, run = without_rank_label(line.text), runs[-1]
        if "iperf3: error" in line.text:
            message = f"iperf3 failed: {shown(line.text.strip())}; run it again"
            raise fault_at(file, line.number, message)
        if text.startswith(("Connecting to host", "Accepted connection from")) and run.rows:
            runs.append(run := _Run())
        run.reverse |= text.startswith("Reverse mode")
        run.udp |= "Datagrams" in text
        if text.startswith("- - - -"):
            # It also separates the intervals of several streams: the last one counts.
            run.summary, run.rows = True, []
        found = _ROW.match(text)
        if found is not None and (run.summary or text.rstrip().endswith(_SIDES)):
            run.rows.append(_row(found, line.number, file))
    return [figures for run in runs for figures in _figures(run, notes)]


def _row(found: re.Match[str], line: int, file: str) -> _Row:
    value = finite_number(found.group(3))
    if value is None:
        raise fault_at(file, line, f"found {shown(found.group(3))}; a rate is expected here")
    return _Row(
        line=line,
        stream=found.group(1),
        direction=found.group(2) or "",
        rate=value * _bytes_in(found.group(5), found.group(4)),
        rest=found.group(6).strip(),
    )


def _bytes_in(unit: str, prefix: str) -> float:
    """Bytes of one printed unit: -f M asks for bytes, whose prefixes are of 1024."""
    power = _PREFIXES.index(prefix or " ")
    return float(1024**power) if unit == "Bytes" else 1000.0**power / 8


def _figures(run: _Run, notes: list[str]) -> Iterator[PathFigures]:
    for direction in dict.fromkeys(row.direction for row in run.rows):
        rows = [row for row in run.rows if row.direction == direction]
        received = [row for row in rows if row.rest.endswith("receiver")]
        if received and not any(row.rate > 0 for row in received):
            # A client that was stopped never hears what the server received.
            received = [row for row in rows if row.rest.endswith("sender")]
            notes.append("the receiver reported nothing; bandwidth is what was sent")
        sided = any(row.rest.endswith(_SIDES) for row in rows)
        # UDP before 3.6 says no side; a TCP row without one is an interval of a run that was cut.
        counted = received if sided else [row for row in rows if run.udp]
        sums = [row for row in counted if row.stream == "SUM"]
        streams = len({row.stream for row in counted} - {"SUM"})
        if not counted or (streams > 1 and not sums):
            continue
        best = (sums or counted)[-1]
        found = _LOST.search(best.rest)
        loss = None
        if found is not None and 0 <= int(found.group(1)) <= int(found.group(2)) > 0:
            loss = int(found.group(1)) / int(found.group(2))
        rate = best.rate if sided or loss is None else best.rate * (1 - loss)
        if rate <= 0:
            continue
        backwards = run.reverse or direction in ("RX-C", "TX-S")
        yield PathFigures(
            measured=("UDP" if run.udp else "TCP")
            + " bandwidth"
            + (", server to client" if backwards else ""),
            bandwidth_bytes_per_second=rate,
            streams=streams or None,
            loss_fraction=loss,
        )
