"""Plain sockets between two emulated hosts.

The program `probes` (`hetplan.emulation.tools.program`), for a host:

    answer PORT                    answers datagrams and swallows connections until it is ended
    round-trip ADDRESS PORT COUNT  prints the seconds of each round trip of 4 bytes
    rate ADDRESS PORT BYTES        prints bytes per second of a connection: as the peer received
                                   them after a warm-up, and of all, from first to last moment
    reach SECONDS ADDRESS...       prints the addresses that answered in this time

It prints one line of JSON. `reach` asks for a connection on a port where nothing listens: that the
peer's system refuses it is an answer, so that nothing needs to run there, and a host whose
processes are stopped still answers.
"""

from __future__ import annotations

import errno
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence

SILENT_PORT = 1
"""tcpmux (RFC 1078), which no system of today serves."""
_ANSWERS = (0, errno.ECONNREFUSED)
WARM_UP_BYTES = 1 << 22
"""Received before the clock of a rate starts: windows open, the shapers' credit is spent."""


def answer(port: int) -> None:
    """Answer until the process is ended; says `ready` when it does."""
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("", port))
    listener = socket.create_server(("", port), backlog=64)
    threading.Thread(target=_swallow_all, args=(listener,), daemon=True).start()
    print("ready", flush=True)
    while True:
        data, sender = datagrams.recvfrom(2048)
        datagrams.sendto(data, sender)


def _swallow_all(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_swallow, args=(connection,), daemon=True).start()


def _swallow(connection: socket.socket) -> None:
    """Receive until the other side has sent all; tell it the rate after the warm-up."""
    with connection:
        received, warm_at, warm = 0, 0.0, 0
        while data := connection.recv(1 << 20):
            received += len(data)
            if not warm and received >= WARM_UP_BYTES:
                warm_at, warm = time.monotonic(), received
        seconds = time.monotonic() - warm_at
        connection.sendall(struct.pack("d", (received - warm) / seconds if warm else 0.0))


def round_trip(address: str, port: int, count: int) -> list[float]:
    """Seconds of each round trip."""
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.settimeout(10)
    seconds = []
    for number in range(count):
        began = time.monotonic()
        datagrams.sendto(number.to_bytes(4, "big"), (address, port))
        datagrams.recvfrom(2048)
        seconds.append(time.monotonic() - began)
    return seconds


def rate(address: str, port: int, size: int) -> tuple[float, float]:
    """Bytes per second after the warm-up as received, and of all bytes of the connection."""
    with socket.create_connection((address, port), timeout=60) as connection:
        block = bytes(1 << 18)
        began, left = time.monotonic(), WARM_UP_BYTES + size
        while left > 0:
            connection.sendall(block[:left])
            left -= len(block)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(8, socket.MSG_WAITALL)
        (received,) = struct.unpack("d", answer)
        return received, (WARM_UP_BYTES + size) / (time.monotonic() - began)


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
    verb, *rest = words
    if verb == "answer":
        answer(int(rest[0]))
    elif verb == "round-trip":
        print(json.dumps(round_trip(rest[0], int(rest[1]), int(rest[2]))))
    elif verb == "rate":
        print(json.dumps(rate(rest[0], int(rest[1]), int(rest[2]))))
    elif verb == "reach":
        print(json.dumps(reached(rest[1:], seconds=float(rest[0]))))
