"""Rates and round trips between two emulated hosts, over plain sockets.

As a program, for a host:

    answer PORT                    answers datagrams and swallows connections until it is ended
    round-trip ADDRESS PORT COUNT  prints the seconds of each round trip of 4 bytes
    rate ADDRESS PORT BYTES        prints bytes per second of a connection, as the peer received
                                   them after a warm-up
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hetplan.emulation.running import end, start
from hetplan.emulation.values import Emulation

PORT = 5301
LIMIT_SECONDS = 120.0
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


def rate(address: str, port: int, size: int) -> float:
    """Bytes per second as they were received after the warm-up."""
    with socket.create_connection((address, port), timeout=60) as connection:
        block = bytes(1 << 18)
        left = WARM_UP_BYTES + size
        while left > 0:
            connection.sendall(block[:left])
            left -= len(block)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(8, socket.MSG_WAITALL)
        (received,) = struct.unpack("d", answer)
        return float(received)


# ---- of the tests


@contextmanager
def answering(emulation: Emulation, host: str) -> Iterator[None]:
    """The host answers on `PORT` while the block runs."""
    process = start(emulation, host, _program("answer", PORT), stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n", f"{host} does not answer on port {PORT}"
        yield
    finally:
        end((process,))
        process.stdout.close()


def ask(emulation: Emulation, host: str, *words: object) -> Any:
    """What this program prints on a host."""
    process = start(emulation, host, _program(*words), stdout=subprocess.PIPE)
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        end((process,))
    assert process.returncode == 0
    return json.loads(output)


def _program(*words: object) -> tuple[str, ...]:
    return (sys.executable, __file__, *map(str, words))


def main(words: list[str]) -> None:
    """As the module says."""
    verb, *rest = words
    if verb == "answer":
        answer(int(rest[0]))
    elif verb == "round-trip":
        print(json.dumps(round_trip(rest[0], int(rest[1]), int(rest[2]))))
    elif verb == "rate":
        print(json.dumps(rate(rest[0], int(rest[1]), int(rest[2]))))


if __name__ == "__main__":
    main(sys.argv[1:])
