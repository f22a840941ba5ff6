"""When does a frame that enters a long link come out of it?

A `Line` is one direction of a link: a buffer that drops what finds it full, a line that sends one
frame after another at its rate, and a delay. A frame of b bytes that comes at t leaves at

    max(t, end of the frame before it) + b / rate + delay.

What waits at t is (end of the last frame - t) * rate bytes, so nothing needs to be counted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

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
