"""Output of iperf3, printed or JSON (`-J`), to figures of a path: TCP or UDP, one way or both.

Fields as `src/iperf_api.c` and `src/iperf_tcp.c` of iperf 3.1 to 3.21 write them: rates in bits
per second, round trips in microseconds, windows in bytes. Bandwidth is what the receiver counted
(`sum_received`); loss of TCP is retransmitted segments over sent ones, as a sender counts them.
UDP has one `sum` until 3.10, of what was sent: less the loss it is what was received. Printed are

    [ ID] Interval           Transfer     Bitrate         Retr
    [  5]   0.00-10.00  sec  1.09 GBytes   936 Mbits/sec   12             sender
    [  5]   0.00-10.04  sec  1.09 GBytes   932 Mbits/sec                  receiver

with a `[SUM]` row where -P asks for several streams; prefixes of bits are of 1000 (`src/units.c`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from hetplan.files.reading import Document
from hetplan.importers import json_text
from hetplan.importers.lines import fault_at, finite_number, shown, text_lines, without_rank_label
from hetplan.importers.records import ImportContext, Imported, PathFigures

_MICROSECONDS = 1e6  # per second
# Written once per stream where -P asks for several; no figure depends on them.
_PER_STREAM = frozenset(
    ("start", name) for name in ("sock_bufsize", "sndbuf_actual", "rcvbuf_actual")
)
_SIGN = re.compile(
    r'"(?:sum_sent|sum_received|tcp_mss_default|test_start)"|'
    r"\[ ID\](?:\[Role\])? Interval +Transfer +B(?:andwidth|itrate)"
)
_ROW = re.compile(
    r"\s{0,20}\[\s{0,4}(\d{1,9}|SUM)\](?:\[([TR]X-[CS])\])?\s{1,9}[\d.]{1,20}-\s{0,4}[\d.]{1,20}"
    r"\s{0,4}sec\s{1,9}[\d.]{1,20} [KMGTP]?Bytes"
    r"\s{1,9}([\d.]{1,20}) ([KMGT]?)(bits|Bytes)/sec(.{0,120})",
    re.ASCII,
)
_LOST = re.compile(r"\b(\d{1,18})/(\d{1,18}) \(")
_PREFIXES = " KMGT"
_SIDES = ("sender", "receiver")


def detect(text: str) -> bool:
    """Whether the text has iperf3's keys or its heading."""
    return _SIGN.search(text) is not None


def parse(text: str, context: ImportContext) -> Imported:
    """One PathFigures per direction; also of what iperf3 prints without -J.

    Raises InputError where iperf3 itself reports an error, with its text.
    """
    if not json_text.looks_like_json(text):
        return _printed(text, context.file)
    document = json_text.json_document(context.file, text, _PER_STREAM)
    if not isinstance(document.root, dict):
        raise fault_at(context.file, 1, "found a list; the output of one iperf3 -J is an object")
    if json_text.has(document, "error"):
        problem = json_text.word(document, "error")
        line = document.line(("error",))
        raise fault_at(context.file, line, f"iperf3 failed: {shown(problem)}; run it again")
    protocol = _protocol(document)
    notes: list[str] = []
    paths = tuple(_directions(document, protocol, notes))
    if not paths:
        raise fault_at(
            context.file,
            document.line(("end",)),
            "there is no `end.sum_received`, so the run did not end; run it again",
        )
    return Imported(
        kind="iperf3",
        tool_version=json_text.optional_word(document, "start", "version").removeprefix("iperf "),
        paths=paths,
        notes=tuple(notes),
    )


def _protocol(document: Document) -> str:
    name = json_text.optional_word(document, "start", "test_start", "protocol").upper()
    if name in ("TCP", "UDP"):
        return name
    if name:
        raise json_text.wrong(document, ("start", "test_start", "protocol"), "TCP or UDP")
    # A file without its start still says by its fields what it measured.
    return "UDP" if json_text.has(document, "end", "sum", "lost_percent") else "TCP"


def _directions(document: Document, protocol: str, notes: list[str]) -> Iterator[PathFigures]:
    reverse = document.at("start", "test_start", "reverse") in (1, True)
    for suffix in ("", "_bidir_reverse"):
        received = ("end", f"sum_received{suffix}")
        if protocol == "UDP" and not json_text.has(document, *received):
            received = ("end", f"sum{suffix}")  # before iperf 3.8 UDP had one sum
        if not json_text.has(document, *received):
            continue
        if json_text.number(document, *received, "bits_per_second") == 0 and _sent(
            document, suffix
        ):
            # A client that was stopped never hears what the server received.
            received = ("end", f"sum_sent{suffix}")
            notes.append("the receiver reported nothing; bandwidth is what was sent")
        backwards = bool(suffix) or reverse
        yield _figures(document, protocol, received, suffix, backwards, notes)
    if json_text.has(document, "end", "sum_received_bidir_reverse"):
        notes.append("both directions at the same time (--bidir); each shares the path")


def _sent(document: Document, suffix: str) -> bool:
    path = ("end", f"sum_sent{suffix}")
    return json_text.has(document, *path) and (
        json_text.number(document, *path, "bits_per_second") > 0
    )


def _figures(
    document: Document,
    protocol: str,
    received: tuple[str, str],
    suffix: str,
    backwards: bool,
    notes: list[str],
) -> PathFigures:
    rate = json_text.number(document, *received, "bits_per_second") / 8
    if rate <= 0:
        raise json_text.wrong(document, (*received, "bits_per_second"), "a rate above 0")
    loss = _loss(document, protocol, received, suffix, notes)
    if received[1] == f"sum{suffix}" and loss is not None and 0 < loss < 1:
        rate *= 1 - loss
        notes.append("this version sums what was sent; bandwidth is that less the loss")
    streams = _streams(document, suffix)
    # What the sender counts is there only where the sender is the side that wrote the file.
    senders = [
        at for at in streams if document.at("end", "streams", at, "sender", "sender") is not False
    ]
    trips = [
        value
        for at in senders
        if (value := _positive(document, ("end", "streams", at, "sender", "mean_rtt"))) is not None
    ]
    windows = [
        value
        for at in senders
        if (value := _positive(document, ("end", "streams", at, "sender", "max_snd_cwnd")))
    ]
    count = json_text.optional_whole(document, "start", "test_start", "num_streams")
    return PathFigures(
        measured=f"{protocol} bandwidth" + (", server to client" if backwards else ""),
        message_bytes=json_text.optional_whole(document, "start", "test_start", "blksize") or None,
        bandwidth_bytes_per_second=rate,
        round_trip_seconds=sum(trips) / len(trips) / _MICROSECONDS if trips else None,
        streams=count or len(streams) or None,
        window_bytes=max(windows) if windows else None,
        loss_fraction=loss,
    )


def _streams(document: Document, suffix: str) -> list[int]:
    """Positions of the streams of this direction; --bidir lists both directions' together."""
    every = list(document.entries(("end", "streams")))
    if not json_text.has(document, "end", "sum_received_bidir_reverse"):
        return every
    forward = [at for at in every if document.at("end", "streams", at, "sender", "sender") is True]
    return [at for at in every if at not in forward] if suffix else forward


def _positive(document: Document, path: tuple[str | int, ...]) -> float | None:
    """The number above 0 at this path; systems that do not tell write 0 or nothing."""
    if not json_text.has(document, *path):
        return None
    value = json_text.number(document, *path)
    return value if value > 0 else None


def _loss(
    document: Document, protocol: str, received: tuple[str, str], suffix: str, notes: list[str]
) -> float | None:
    if protocol == "UDP":
        if not json_text.has(document, *received, "lost_percent"):
            return None
        percent = json_text.number(document, *received, "lost_percent")
        if percent < 0:
            raise json_text.wrong(document, (*received, "lost_percent"), "a number from 0 to 100")
        if percent > 100:
            # iperf 3.12 counts packets of the omitted seconds (-O) as lost.
            notes.append(f"iperf3 says {percent:g}% of the packets were lost; loss is left out")
            return None
        return percent / 100
    sent = ("end", f"sum_sent{suffix}")
    segment = _segment_bytes(document)
    if not segment or not json_text.has(document, *sent, "retransmits"):
        return None
    again = json_text.whole(document, *sent, "retransmits")
    carried = json_text.whole(document, *sent, "bytes")
    # Packets sent: the segments that carried the data once, and those that were sent again.
    first = -(-carried // segment)
    return again / (first + again) if first + again else None


def _segment_bytes(document: Document) -> int | None:
    for name in ("tcp_mss_default", "tcp_mss"):
        if json_text.has(document, "start", name):
            return json_text.whole(document, "start", name)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    line: int
    stream: str
    """Its number, or `SUM`."""
    direction: str
    rate: float
    """Bytes per second."""
    rest: str
    """What follows the rate."""


@dataclass(slots=True)
class _Run:
    """One test while it is read."""

    udp: bool = False
    reverse: bool = False
    summary: bool = False
    """Whether the rule that separates intervals from the summary was passed."""
    rows: list[_Row] = field(default_factory=list)


def _printed(text: str, file: str) -> Imported:
    """One PathFigures per direction of every test."""
    runs = [_Run()]
    for line in text_lines(text):
        content, run = without_rank_label(line.text), runs[-1]
        if "iperf3: error" in line.text:
            message = f"iperf3 failed: {shown(line.text.strip())}; run it again"
            raise fault_at(file, line.number, message)
        if content.startswith(("Connecting to host", "Accepted connection from")) and run.rows:
            runs.append(run := _Run())
        run.reverse |= content.startswith("Reverse mode")
        run.udp |= "Datagrams" in content
        if content.startswith("- - - -"):
            # It also separates the intervals of several streams: the last one counts.
            run.summary, run.rows = True, []
        found = _ROW.match(content)
        if found is not None and (run.summary or content.rstrip().endswith(_SIDES)):
            run.rows.append(_row(found, line.number, file))
    notes = ["printed rates have three digits; -J writes all of them, and the round trip"]
    paths = tuple(figures for run in runs for figures in _printed_figures(run, notes))
    if not paths:
        message = "neither JSON nor a printed summary with both sides; run iperf3 with -J"
        raise fault_at(file, 1, message)
    return Imported(kind="iperf3", paths=paths, notes=tuple(notes))


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


def _printed_figures(run: _Run, notes: list[str]) -> Iterator[PathFigures]:
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
