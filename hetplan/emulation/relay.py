"""The long links: frames between segments, at the rate and delay of their link.

A program of its own, `relay` (`hetplan.emulation.tools.program`), because kernels without netem
cannot delay frames. It holds one TAP per segment, at whose bridge it is a port; a frame's fourth
address byte is the island's number, and the pair of islands says which link it takes. TAPs are
opened with checksum and segmentation offload, so that a TCP super-packet crosses in one read.
Of what is addressed to everybody only ARP requests cross, each to every other segment: hosts have
fixed neighbour entries, but lose them when somebody sets their interface down and up again.

A `Line` is one direction of a link: a buffer that drops what finds it full, a line that sends one
frame after another at its rate, and a delay. A frame of b bytes that comes at t leaves at

    max(t, end of the frame before it) + b / rate + delay.

What waits at t is (end of the last frame - t) * rate bytes, so nothing needs to be counted.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import mmap
import os
import select
import signal
import struct
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

MAX_HELD_BYTES = 256 * 2**20
"""Of frames, in one direction: whatever rate, delay and buffer a file asks for, the relay's memory
is bounded."""
FRAME_OVERHEAD_BYTES = 256
"""What Python keeps beside a frame's own bytes: the bytes object, a tuple, a float, its place in
the queue."""


@dataclass(slots=True, kw_only=True)
class Line:
    """One direction of a long link. Times are of one clock, in seconds."""

    rate_bytes_per_second: float
    delay_seconds: float
    buffer_bytes: float
    held: deque[tuple[float, int, bytes]] = field(default_factory=deque)
    """(time at which it comes out, where to, frame), in order."""
    held_bytes: int = 0
    free_at: float = 0.0
    """When the line has sent all that it has accepted."""

    def accept(self, now: float, wire_bytes: int, to: int, frame: bytes) -> bool:
        """Take a frame in, unless the buffer is full; whether it was taken."""
        begins = self.free_at if self.free_at > now else now
        kept = len(frame) + FRAME_OVERHEAD_BYTES
        if (begins - now) * self.rate_bytes_per_second + wire_bytes > self.buffer_bytes:
            return False
        if self.held_bytes + kept > MAX_HELD_BYTES:
            return False
        self.free_at = begins + wire_bytes / self.rate_bytes_per_second
        self.held.append((self.free_at + self.delay_seconds, to, frame))
        self.held_bytes += kept
        return True

    def due(self, now: float) -> tuple[int, bytes] | None:
        """(where to, frame) of the next frame if it is out by now."""
        if not self.held or self.held[0][0] > now:
            return None
        _, to, frame = self.held.popleft()
        self.held_bytes -= len(frame) + FRAME_OVERHEAD_BYTES
        return to, frame

    @property
    def next_at(self) -> float | None:
        """When the next frame comes out; None: the line is empty."""
        return self.held[0][0] if self.held else None


def wire_bytes(frame: bytes, header_bytes: int) -> int:
    """Bytes on the wire of a frame that the kernel hands over with its virtio-net header.

    One read may be a TCP super-packet of up to 64 KiB that a real port would send as many frames:
    each has the headers again (struct virtio_net_hdr: hdr_len at byte 2, gso_size at byte 4, both
    in the machine's order, which is little-endian for every header read here).
    """
    length = len(frame) - header_bytes
    segment = frame[4] | frame[5] << 8
    if not segment:
        return length
    headers = frame[2] | frame[3] << 8
    segments = -(-(length - headers) // segment)
    return length + (segments - 1) * headers


# linux/if_tun.h
TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x2, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x1, 0x2
HEADER_BYTES = 10
"""struct virtio_net_hdr without num_buffers."""
MAX_FRAME_BYTES = HEADER_BYTES + 14 + 4 + 65535
EVERYBODY, ETHERTYPE_ARP = b"\xff" * 6, b"\x08\x06"
FRAMES_PER_READ = 64
"""Read from one TAP before the others and what is due get their turn."""
EARLY_SECONDS = 2e-5
"""A frame goes out when it is due within this: no timer is finer."""
REALTIME_PRIORITY = 10
TAP_BUSY_SECONDS = 5.0
WATCH_SECONDS = 1.0
"""How often it looks whether its namespace still has its name; it ends when it has not."""
COUNTERS_PER_LINE = 3
"""Frames, bytes on the wire, frames dropped."""


def open_tap(name: str) -> int:
    """A TAP of this name with offloads; waits while an ending process still has it."""
    limit = time.monotonic() + TAP_BUSY_SECONDS
    while True:
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
        try:
            fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
            fcntl.ioctl(tap, TUNSETVNETHDRSZ, struct.pack("i", HEADER_BYTES))
            fcntl.ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
        except OSError as error:
            os.close(tap)
            if error.errno != errno.EBUSY or time.monotonic() > limit:
                raise
            time.sleep(0.05)
        else:
            return tap


class Relay:
    """The TAPs of all segments and the lines between their islands."""

    def __init__(self, config: dict[str, Any], counters: memoryview) -> None:
        """`config`: as `hetplan.emulation.recipe.relay_config` has it."""
        self._counters = counters
        self._taps: list[int] = [open_tap(name) for name in config["taps"]]
        self._segment_of: list[int] = config["segment_of_island"]
        segments = sorted(set(self._segment_of))
        self._first_islands = [self._segment_of.index(segment) for segment in segments]
        self._lines: list[Line] = []
        """Two per link: from the first to the second island of its pairs, and back."""
        self._line_of: dict[int, int] = {}
        """(from island) * 256 + (to island) -> position in the lines."""
        for pipe in config["pipes"]:
            for one, two in pipe.pop("islands"):
                self._line_of[one * 256 + two] = len(self._lines)
                self._line_of[two * 256 + one] = len(self._lines) + 1
            self._lines += [Line(**pipe), Line(**pipe)]

    def serve(self, name_of_namespace: str) -> None:
        """Relay until the namespace loses its name or a signal ends the process."""
        own = os.stat("/proc/self/ns/net").st_ino
        watched = time.monotonic()
        soonest: float | None = None
        while True:
            now = time.monotonic()
            if now - watched > WATCH_SECONDS:
                watched = now
                try:
                    if os.stat(name_of_namespace).st_ino != own:
                        return
                except FileNotFoundError:
                    return
            wait = WATCH_SECONDS if soonest is None else min(WATCH_SECONDS, max(0.0, soonest - now))
            # select takes microseconds where poll takes milliseconds.
            for tap in select.select(self._taps, (), (), wait)[0]:
                self._take_in(tap)
            soonest = self._put_out()

    def _take_in(self, tap: int) -> None:
        """Put what waits at a TAP on the lines."""
        for _ in range(FRAMES_PER_READ):
            try:
                frame = os.read(tap, MAX_FRAME_BYTES)
            except BlockingIOError:
                return
            # Ethernet: destination, source, type.
            to_island, from_island = frame[HEADER_BYTES + 3], frame[HEADER_BYTES + 9]
            if not frame[HEADER_BYTES] & 1:
                self._put(from_island, to_island, frame)
            elif frame[HEADER_BYTES : HEADER_BYTES + 6] == EVERYBODY and _is_arp(frame):
                for island in self._first_islands:
                    self._put(from_island, island, frame)

    def _put(self, from_island: int, to_island: int, frame: bytes) -> None:
        """Put a frame on the line between two islands, if there is one."""
        line = self._line_of.get(from_island * 256 + to_island)
        if line is None:
            return  # of one segment: its bridge has delivered it, and floods it here
        size = wire_bytes(frame, HEADER_BYTES)
        to = self._taps[self._segment_of[to_island]]
        at = line * COUNTERS_PER_LINE
        if self._lines[line].accept(time.monotonic(), size, to, frame):
            self._counters[at] += 1
            self._counters[at + 1] += size
        else:
            self._counters[at + 2] += 1

    def _put_out(self) -> float | None:
        """Deliver what has arrived; when the next frame does, None if no line holds any."""
        soonest: float | None = None
        for line in self._lines:
            while (arrived := line.due(time.monotonic() + EARLY_SECONDS)) is not None:
                # An interface that somebody set down loses frames, as a real one.
                with suppress(OSError):
                    os.write(arrived[0], arrived[1])
            at = line.next_at
            if at is not None and (soonest is None or at < soonest):
                soonest = at
        return soonest


def _is_arp(frame: bytes) -> bool:
    return frame[HEADER_BYTES + 12 : HEADER_BYTES + 14] == ETHERTYPE_ARP


def _first_among_processes() -> None:
    """Real-time where the system allows it: a busy machine must not make the link longer."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(REALTIME_PRIORITY))
    except OSError:
        with suppress(OSError):
            os.nice(-20)


def main(arguments: list[str]) -> None:
    """Enter the namespace, open the TAPs, say so on stdout, relay.

    Arguments: configuration file; file of counters; file of the namespace; file descriptor of the
    lock that is held until the namespace has been entered.
    """
    from hetplan.emulation.namespaces import enter_network

    config_file, counter_file, namespace, lock = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    enter_network(namespace)
    os.close(int(lock))
    os.chdir("/")  # the user's folder may be unmounted while this runs
    with open(config_file, encoding="utf-8") as stream:
        config = json.load(stream)
    with open(counter_file, "r+b") as stream:
        counters = memoryview(mmap.mmap(stream.fileno(), 0)).cast("Q")
    relay = Relay(config, counters)
    _first_among_processes()
    gc.disable()  # nothing here makes cycles
    print("ready", flush=True)
    relay.serve(namespace)
