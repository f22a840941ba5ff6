"""Telemetry of a run, window by window: what a rank's time went into, and what hosts sent.

The form `hetplan.telemetry/1` is CSV (the names of `Record` as header) or JSON (`records`, objects
of the same names). The reference trainer writes one CSV file per rank into the run's folder, all
records of a step in one append, so that a kill leaves whole steps.

A flow's busy time is what Linux counts for its TCP connections (`tcp_info`, linux/tcp.h): time in
which data was on its way, less the time in which the receiver took none or the sender had none at
hand. So a wait for a late partner is not in it.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetplan.runtime.loop import RankStep

SCHEMA = "hetplan.telemetry/1"
COMPUTE = "compute"
"""The part that judges a rank: forward and backward passes without communication."""
SMALL_BYTES = 16_384
"""Connections that carried less in a window are barriers and figures: what they wait for is a late
acknowledgement (up to 40 ms on Linux)."""
TICK_SECONDS = 0.004
"""Linux counts busy time in ticks, at 250 Hz as most distributions build it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One window of a flow (source and target), a port (one of them) or a rank's timer (rank,
    step, part, seconds). Ends are nodes, `NODE`, or NICs, `NODE/NUMBER`.
    """

    begin_seconds: float
    """On one clock for all records of a run."""
    window_seconds: float
    source: str = ""
    target: str = ""
    bytes: float | None = None
    busy_seconds: float | None = None
    """Of the window, with bytes on their way; None: not known. So what was lost and sent again."""
    resent_bytes: float | None = None
    rank: int | None = None
    """Of a flow: the rank that sent, where several share one."""
    step: int | None = None
    """From 0."""
    part: str = ""
    """`compute` is judged; waits, communication and others are not."""
    seconds: float | None = None

    @property
    def flow(self) -> tuple[str, str, int | None, str]:
        """What windows of one flow, port or timer have in common."""
        return (self.source, self.target, self.rank, self.part)

    @property
    def row(self) -> str:
        """Its line; names of hosts need no quotes."""
        return ",".join("" if each is None else str(each) for each in astuple(self))


COLUMNS = tuple(field.name for field in fields(Record))


def _host_names() -> dict[str, str]:
    """Names by address; no name server is asked."""
    with suppress(OSError):
        lines = [line.split("#")[0].split() for line in Path("/etc/hosts").read_text().splitlines()]
        return {words[0]: words[1] for words in reversed(lines) if len(words) > 1}
    return {}


def _counted() -> Iterator[tuple[int, str, tuple[int, int, int]]]:
    """(inode, address of the peer, (bytes acknowledged, busy microseconds, bytes sent again)) of
    every TCP connection over IPv4 to another host.
    """
    handles = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    for handle in map(int, handles):
        with suppress(OSError, struct.error):
            found = os.fstat(handle)
            if not stat.S_ISSOCK(found.st_mode):
                continue
            with socket.socket(fileno=os.dup(handle)) as one:
                if (one.family, one.type) != (socket.AF_INET, socket.SOCK_STREAM):
                    continue
                address, info = (
                    one.getpeername()[0],
                    one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216),
                )
                # bytes_acked; busy_time, rwnd_limited, sndbuf_limited; bytes_retrans
                acked, busy, full, starved, resent = struct.unpack_from("<Q40x3Q16xQ", info, 120)
                if not address.startswith("127."):
                    yield found.st_ino, address, (acked, busy - full - starved, resent)


class Recorder:
    """Writes one rank's records; a disk that takes no more ends the records, not the run."""

    def __init__(self, path: Path, rank: int, *, compute_apart: bool) -> None:
        """`compute_apart`: communication inside the passes is measured apart from them."""
        self._rank, self._compute = rank, COMPUTE if compute_apart else "passes"
        self._own, self._names = os.uname().nodename, _host_names()
        self._counts, self._since = {each[0]: each[2] for each in _counted()}, time.time()
        self._handle: int | None = None
        with suppress(OSError):
            self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._write([",".join(COLUMNS)])

    def __call__(self, step: int, measured: RankStep) -> None:
        """The records of a step that has just ended."""
        ended, length = time.time(), measured.seconds
        timer = partial(Record, begin_seconds=ended - length, window_seconds=length, step=step)
        parts = {
            self._compute: max(0.0, measured.busy_seconds - measured.tensor_parallel_seconds),
            "wait": measured.wait_seconds,
            "reduction": measured.reduction_seconds,
            "optimizer": measured.optimizer_seconds,
        }
        records = [timer(rank=self._rank, part=part, seconds=each) for part, each in parts.items()]
        self._write([each.row for each in (*records, *self._flows(ended))])

    def _flows(self, now: float) -> Iterator[Record]:
        """What went to each other host since the last step, by its name in /etc/hosts."""
        window, sent = now - self._since, dict[str, tuple[float, float, float]]()
        counted = {inode: (address, counts) for inode, address, counts in _counted()}
        for inode, (address, counts) in counted.items():
            before = self._counts.get(inode, (0, 0, 0))
            acked, busy, again = (one - other for one, other in zip(counts, before, strict=True))
            name = self._names.get(address, address)
            if acked >= SMALL_BYTES and name != self._own:
                one, two, three = sent.get(name, (0.0, 0.0, 0.0))
                seconds = max(busy / 1e6, TICK_SECONDS / 2)
                sent[name] = (one + acked, two + seconds, three + again)
        self._since, self._counts = now, {each: counts for each, (_, counts) in counted.items()}
        flow = partial(Record, begin_seconds=now - window, window_seconds=window, rank=self._rank)
        for name, (size, seconds, lost) in sent.items():
            way = flow(source=self._own, target=name, bytes=size, resent_bytes=lost)
            yield replace(way, busy_seconds=min(seconds, window))

    def _write(self, lines: list[str]) -> None:
        if self._handle is not None:
            data = "".join(f"{line}\n" for line in lines).encode()
            with suppress(OSError):
                if os.write(self._handle, data) == len(data):
                    return
            os.close(self._handle)
            self._handle = None
