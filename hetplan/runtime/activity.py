"""What a rank is doing right now, reported to its launcher at no cost inside a step.

The thread that trains reports what it begins and ends: it sets one attribute. A thread beside it
writes that down every `BEAT_SECONDS`, in place, in a record of fixed size with a checksum; so no
operation waits for a disk, a full disk stops no beat, and nobody reads half a record. As long as
the beats go on the process is alive, whatever it does.
"""

from __future__ import annotations

import ipaddress
import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

BEAT_SECONDS = 0.25
"""Rare enough to cost a rank nothing: a beat takes some 20 microseconds."""
LONG_SECONDS = 3.0
"""A wait of this long is looked into: whether the peers' hosts still answer."""
RECORD_BYTES = 4096
"""One page, which the system writes and reads as one."""
_MAX_OPERATION = 200
_MAX_PEERS = 256
_MAX_ADDRESSES = 32
TCP_TABLE = Path("/proc/self/net/tcp")
"""Of the network namespace that this process is in (proc(5), proc_net_tcp.txt of the kernel)."""
_ESTABLISHED, _SYN_SENT = "01", "02"
_MIN_RESENT = 2
"""Once happens on any lossy link."""


class ActivityKind(StrEnum):
    """The kind of operation, which decides how long it may take."""

    LOADING = "loading"
    """Loads libraries; the interpreter may let no other thread run meanwhile."""
    STARTING = "starting"
    """Waits for the others to do so, builds its layers."""
    CONNECTING = "connecting"
    """Opens connections to the others."""
    COMPUTING = "computing"
    COMMUNICATING = "communicating"
    """Sends, receives or sums: it waits for its peers."""
    SAVING = "saving"
    """Reads or writes a checkpoint."""
    ENDING = "ending"
    """Has trained all steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a rank did when it was last heard of."""

    seconds: float
    """On the machine's monotonic clock, when this was written."""
    done: int
    """Operations that it has finished."""
    kind: ActivityKind
    operation: str
    """In words, as in `forward pass of microbatch 3`; empty between two operations."""
    peers: tuple[int, ...]
    """Ranks that it waits for."""
    since_seconds: float
    """On the same clock, when the operation began."""
    unanswered: tuple[str, ...] = ()
    """Addresses that answer nothing, where it has waited for its peers for `LONG_SECONDS`."""


class Activity:
    """What the training thread is doing."""

    def __init__(self) -> None:
        self._done = 0
        self._now: tuple[int, ActivityKind, str, tuple[int, ...], float] = (
            0,
            ActivityKind.LOADING,
            "start of the process",
            (),
            time.monotonic(),
        )

    def begin(
        self, operation: str, peers: tuple[int, ...] = (), *, kind: ActivityKind | None = None
    ) -> None:
        """An operation begins and the one before it ends; with peers it waits for these."""
        kind = kind or (ActivityKind.COMMUNICATING if peers else ActivityKind.COMPUTING)
        self._done += 1
        self._now = (self._done, kind, operation, peers, time.monotonic())

    def end(self) -> None:
        """It has ended, and nothing else has begun."""
        self.begin("", kind=ActivityKind.COMPUTING)

    @contextmanager
    def within(self, operation: str, peers: tuple[int, ...]) -> Iterator[None]:
        """Something inside another operation, which then goes on. What raises stays as it was."""
        _, kind, outer, around, _ = self._now
        self.begin(f"{outer}: {operation}", peers)
        yield
        self.begin(outer, around, kind=kind)

    def beat(self) -> Beat:
        """What it does now."""
        done, kind, operation, peers, since = self._now
        return Beat(
            seconds=time.monotonic(),
            done=done,
            kind=kind,
            operation=operation,
            peers=peers,
            since_seconds=since,
        )


class Heartbeat:
    """Writes an activity down until it is stopped, or the process ends."""

    def __init__(self, activity: Activity, path: Path) -> None:
        """Starts at once. The file is made, and has its full size, before this returns."""
        self._activity = activity
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._over = threading.Event()
        self.write()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def write(self) -> None:
        """One beat, now."""
        beat = self._activity.beat()
        waits = beat.kind in (ActivityKind.COMMUNICATING, ActivityKind.CONNECTING)
        if waits and beat.seconds - beat.since_seconds >= LONG_SECONDS:
            beat = replace(beat, unanswered=unanswered())
        os.pwrite(self._handle, record_of(beat), 0)

    def stop(self) -> None:
        """One last beat."""
        self._over.set()
        self._thread.join()
        with suppress(OSError):
            self.write()
        os.close(self._handle)

    def _run(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            # The folder may be on a file system that is away for a moment: the next beat may come.
            with suppress(OSError):
                self.write()


def record_of(beat: Beat) -> bytes:
    """The beat as it is written."""
    fields = [
        beat.seconds,
        beat.done,
        beat.kind.value,
        beat.operation[:_MAX_OPERATION],
        list(beat.peers[:_MAX_PEERS]),
        beat.since_seconds,
        list(beat.unanswered[:_MAX_ADDRESSES]),
    ]
    text = json.dumps(fields).encode()
    return (b"%08x" % zlib.crc32(text) + text + b"\n").ljust(RECORD_BYTES)


def read_beat(path: Path) -> Beat | None:
    """The last beat; None where there is none yet, or it is being written right now."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    text = data[8:].rstrip()
    if len(data) != RECORD_BYTES or data[:8] != b"%08x" % zlib.crc32(text):
        return None
    seconds, done, kind, operation, peers, since, addresses = json.loads(text)
    return Beat(
        seconds=seconds,
        done=done,
        kind=ActivityKind(kind),
        operation=operation,
        peers=tuple(peers),
        since_seconds=since,
        unanswered=tuple(addresses),
    )


def unanswered(table: Path = TCP_TABLE) -> tuple[str, ...]:
    """IPv4 addresses of peers that acknowledge nothing; empty where the system does not say.

    Linux says of every TCP connection how often its first unacknowledged bytes were sent again. A
    peer that is alive acknowledges them in its kernel, also when its process is stopped or
    computes; bytes that are sent again and again for seconds mean that nothing passes.
    """
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return ()
    addresses = set()
    for line in lines:
        columns = line.split()
        remote, state, resent = columns[2], columns[3], int(columns[6], 16)
        if state in (_ESTABLISHED, _SYN_SENT) and resent >= _MIN_RESENT:
            # The kernel prints the four bytes as one number of the machine's byte order.
            packed = struct.pack("=I", int(remote.split(":")[0], 16))
            addresses.add(str(ipaddress.IPv4Address(packed)))
    return tuple(sorted(addresses))
