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
from dataclasses import dataclass, fields
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
    step, part, seconds).
    """

    begin_seconds: float
    """On any clock, the same one for all records of a file."""
    window_seconds: float
    source: str = ""
    """Node that sends; of a port it is the node, whose outgoing bytes are told."""
    source_nic: int | None = None
    target: str = ""
    target_nic: int | None = None
    bytes: float | None = None
    busy_seconds: float | None = None
    """Of the window, in which bytes were on their way; None: not known."""
    resent_bytes: float | None = None
    """Sent again because they were lost; None: not known."""
    rank: int | None = None
    """Of a flow: the rank that sent, where several share one."""
    step: int | None = None
    """From 0."""
    part: str = ""
    """`compute` is judged; waits, communication and others are not."""
    seconds: float | None = None

    @property
    def middle_seconds(self) -> float:
        """Of the window."""
        return self.begin_seconds + self.window_seconds / 2

    @property
    def flow(self) -> tuple[object, ...]:
        """What windows of one flow, port or timer have in common."""
        ends = (self.source, self.source_nic, self.target, self.target_nic)
        return (*ends, self.rank, self.part)


COLUMNS = tuple(field.name for field in fields(Record))


def row(record: Record) -> str:
    """The record's line; a name is written as the trainer has it, without commas or quotes."""
    values = (getattr(record, name) for name in COLUMNS)
    return ",".join(
        "" if value is None else repr(value) if isinstance(value, float) else str(value)
        for value in values
    )


class Connections:
    """What this process sends over TCP, host by host, since the last look."""

    def __init__(self) -> None:
        self._own, self._names = os.uname().nodename, _host_names()
        self._before: dict[int, tuple[int, int, int]] = {}
        self.look()

    def look(self) -> dict[str, tuple[float, float, float]]:
        """Bytes, busy seconds and bytes sent again by the host's name in /etc/hosts, or by its
        address where it has none. Empty where the system does not tell.
        """
        found: dict[str, tuple[float, float, float]] = {}
        now = {inode: (address, counts) for inode, address, counts in _counted()}
        for inode, (address, counts) in now.items():
            before = self._before.get(inode, (0, 0, 0))
            acked, busy, resent = (one - other for one, other in zip(counts, before, strict=True))
            name = self._names.get(address, address)
            if acked >= SMALL_BYTES and name != self._own:
                so_far = found.get(name, (0.0, 0.0, 0.0))
                seconds = max(busy / 1e6, TICK_SECONDS / 2)
                found[name] = (so_far[0] + acked, so_far[1] + seconds, so_far[2] + resent)
        self._before = {inode: counts for inode, (_, counts) in now.items()}
        return found


def _host_names() -> dict[str, str]:
    """Names by address; no name server is asked."""
    with suppress(OSError):
        lines = [line.split("#")[0].split() for line in Path("/etc/hosts").read_text().splitlines()]
        return {words[0]: words[1] for words in reversed(lines) if len(words) > 1}
    return {}


def _counted() -> Iterator[tuple[int, str, tuple[int, int, int]]]:
    """(inode, address of the peer, (bytes acknowledged, busy microseconds, bytes sent again)) of
    every TCP connection to another host.
    """
    try:
        handles = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return
    for handle in handles:
        with suppress(OSError, struct.error):
            found = os.fstat(handle)
            if not stat.S_ISSOCK(found.st_mode):
                continue
            with socket.socket(fileno=os.dup(handle)) as connection:
                if connection.family != socket.AF_INET or connection.type != socket.SOCK_STREAM:
                    continue
                address = connection.getpeername()[0]
                if not address.startswith("127."):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
                    (acked,) = struct.unpack_from("<Q", info, 120)
                    busy, full, starved = struct.unpack_from("<3Q", info, 168)
                    (resent,) = struct.unpack_from("<Q", info, 208)
                    yield found.st_ino, address, (acked, busy - full - starved, resent)


class Recorder:
    """Writes one rank's records; a disk that takes no more ends the records, not the run."""

    def __init__(self, path: Path, rank: int, *, compute_apart: bool) -> None:
        """`compute_apart`: communication inside the passes is measured apart from them."""
        self._rank, self._compute = rank, COMPUTE if compute_apart else "passes"
        self._handle: int | None = None
        with suppress(OSError):
            self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._write([",".join(COLUMNS)])
        self._connections, self._host = Connections(), os.uname().nodename
        self._since = time.time()

    def __call__(self, step: int, measured: RankStep) -> None:
        """The records of a step that has just ended."""
        if self._handle is None:
            return
        ended = time.time()
        parts = (
            (self._compute, measured.busy_seconds - measured.tensor_parallel_seconds),
            ("wait", measured.wait_seconds),
            ("reduction", measured.reduction_seconds),
            ("optimizer", measured.optimizer_seconds),
        )
        records = [
            Record(
                begin_seconds=ended - measured.seconds,
                window_seconds=measured.seconds,
                rank=self._rank,
                step=step,
                part=part,
                seconds=max(0.0, seconds),
            )
            for part, seconds in parts
        ]
        window = ended - self._since
        records += [
            Record(
                begin_seconds=self._since,
                window_seconds=window,
                source=self._host,
                target=name,
                bytes=sent,
                busy_seconds=min(busy, window),
                resent_bytes=resent,
                rank=self._rank,
            )
            for name, (sent, busy, resent) in self._connections.look().items()
        ]
        self._since = ended
        self._write([row(record) for record in records])

    def _write(self, lines: list[str]) -> None:
        if self._handle is None:
            return
        data = "".join(f"{line}\n" for line in lines).encode()
        try:
            whole = os.write(self._handle, data) == len(data)
        except OSError:
            whole = False
        if not whole:
            os.close(self._handle)
            self._handle = None
