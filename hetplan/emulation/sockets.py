"""What do plain sockets find between two emulated hosts?

The program `sockets` (`hetplan.emulation.tools.program`), for a host:

    answer PORT                    answers datagrams and swallows connections until it is ended
    round-trip ADDRESS PORT COUNT  prints the seconds of each round trip of 4 bytes
    rate ADDRESS PORT BYTES        prints bytes per second of a connection: as the peer received
                                   them after a warm-up, and of all, from first to last moment
    reach PORT SECONDS ADDRESS...  prints of each whether a connection is made in that time

What is printed is one line of JSON.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time

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


def reach(port: int, seconds: float, addresses: list[str]) -> list[bool]:
    """Whether a connection to each is made in time."""
    return [_connects(address, port, seconds) for address in addresses]


def _connects(address: str, port: int, seconds: float) -> bool:
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except OSError:
        return False
    return True


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
        print(json.dumps(reach(int(rest[0]), float(rest[1]), rest[2:])))
