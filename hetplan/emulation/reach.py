"""Which addresses answer an emulated host.

The program `reach SECONDS ADDRESS...` (`hetplan.emulation.tools.program`), for a host, prints the
addresses that answered in this time, as one line of JSON. It asks for a connection on a port where
nothing listens: that the peer's system refuses it is an answer, so that nothing needs to run there,
and a host whose processes are stopped still answers.
"""

from __future__ import annotations

import errno
import json
import select
import socket
import time
from collections.abc import Sequence

SILENT_PORT = 1
"""tcpmux (RFC 1078), which no system of today serves."""
_ANSWERS = (0, errno.ECONNREFUSED)


def reached(addresses: Sequence[str], *, seconds: float) -> list[str]:
    """The addresses that answered in time; all connections are tried at once."""
    waiting: dict[int, tuple[socket.socket, str]] = {}
    answered = set()
    poll = select.poll()
    for address in addresses:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection.setblocking(False)
        code = connection.connect_ex((address, SILENT_PORT))
        if code == errno.EINPROGRESS:
            waiting[connection.fileno()] = (connection, address)
            poll.register(connection, select.POLLOUT)
            continue
        connection.close()
        if code in _ANSWERS:
            answered.add(address)
    limit = time.monotonic() + seconds
    while waiting and (left := limit - time.monotonic()) > 0:
        for handle, _ in poll.poll(1000 * left):
            connection, address = waiting.pop(handle)
            poll.unregister(handle)
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS:
                answered.add(address)
            connection.close()
    for connection, _ in waiting.values():
        connection.close()
    return [address for address in addresses if address in answered]


def main(words: list[str]) -> None:
    """As the module says."""
    seconds, *addresses = words
    print(json.dumps(reached(addresses, seconds=float(seconds))))
