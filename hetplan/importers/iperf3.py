"""JSON of iperf3 (`-J`) to figures of a path: TCP or UDP, one way or both.

Fields as `src/iperf_api.c` and `src/iperf_tcp.c` of iperf 3.1 to 3.21 write them: rates in bits
per second, round trips in microseconds, windows in bytes. Bandwidth is what the receiver counted
(`sum_received`); loss of TCP is retransmitted segments over sent ones, as a sender counts them.
UDP has one `sum` until 3.10, of what was sent: less the loss it is what was received.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hetplan.files.reading import Document
from hetplan.importers import json_text
from hetplan.importers.lines import fault_at, shown
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


def detect(text: str) -> bool:
    """Whether the text has iperf3's keys or its heading."""
    return _SIGN.search(text) is not None


def parse(text: str, context: ImportContext) -> Imported:
    """One PathFigures per direction.

    Raises InputError where iperf3 itself reports an error, with its text.
    """
    if not json_text.looks_like_json(text):
        message = "what iperf3 prints has three digits and no round trip; run it again with -J"
        raise fault_at(context.file, 1, message)
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
