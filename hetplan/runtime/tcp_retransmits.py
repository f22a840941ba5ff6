"""Addresses that this host sends to without an answer.

Linux says of every TCP connection how often its first unacknowledged bytes were sent again. A peer
that is alive acknowledges them in its kernel, also when its process is stopped or computes; so
bytes that are sent again and again for seconds mean that nothing passes.
"""

from __future__ import annotations

import ipaddress
import struct
from pathlib import Path

TABLE = Path("/proc/self/net/tcp")
"""Of the network namespace that this process is in (proc(5), proc_net_tcp.txt of the kernel)."""
_ESTABLISHED, _SYN_SENT = "01", "02"
_MIN_RESENT = 2
"""Once happens on any lossy link."""


def unanswered(table: Path = TABLE) -> tuple[str, ...]:
    """IPv4 addresses of peers that acknowledge nothing; empty where the system does not say."""
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
