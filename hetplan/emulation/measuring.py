"""Does an emulation that is up have the rates and round trips that its file asks for?

One connection and small datagrams, between the first hosts of every two ends: of each network
with two hosts, and of each long link. A link's rate counts the headers of its frames; of 1,514
bytes of a full frame TCP carries 1,448 (Ethernet 14, IPv4 20, TCP 20, its timestamps 12).
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hetplan.emulation.running import end, start
from hetplan.emulation.tools import program
from hetplan.emulation.values import EmulatedHost, Emulation
from hetplan.errors import HetplanError

PORT = 5301
ROUND_TRIPS = 50
PAYLOAD_SHARE = 1448 / 1514
SECONDS = 2.0
"""That a transfer is to take, at the link's rate."""
MAX_BYTES = 1_000_000_000
LIMIT_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """What was asked for and found between two hosts."""

    source: str
    destination: str
    over: str
    """The segment, or the two ends of the long link."""
    rate_bytes_per_second: float
    """Of the frames, as asked for."""
    payload_bytes_per_second: float
    """That one TCP connection reached."""
    round_trip_seconds: float
    """As asked for; 0 inside a segment, where the machine's own is all there is."""
    least_round_trip_seconds: float
    median_round_trip_seconds: float

    @property
    def rate_share(self) -> float:
        """Payload over what a full link would carry of it."""
        return self.payload_bytes_per_second / (PAYLOAD_SHARE * self.rate_bytes_per_second)


def measure(emulation: Emulation, *, seconds: float = SECONDS) -> tuple[MeasuredLink, ...]:
    """Every link of the emulation, one after another; `seconds` is for each transfer."""
    return tuple(_measure(emulation, *pair, seconds=seconds) for pair in _pairs(emulation))


def _pairs(
    emulation: Emulation,
) -> Iterator[tuple[EmulatedHost, EmulatedHost, str, float, float]]:
    """(source, destination, over what, rate, round trip) of every link."""
    for at, segment in enumerate(emulation.segments):
        hosts = [host for host in emulation.hosts if host.segment == at]
        if len(hosts) > 1:
            rate = min(host.nic_bytes_per_second for host in hosts[:2])
            yield hosts[0], hosts[1], segment.name, rate, 0.0
    first: dict[int, EmulatedHost] = {}
    for host in emulation.hosts:
        first.setdefault(host.island_number, host)
    for pipe in emulation.pipes:
        ends = [pair for pair in pipe.islands if pair[0] in first and pair[1] in first]
        if ends:
            one, two = (first[number] for number in ends[0])
            ports = (one.nic_bytes_per_second, two.nic_bytes_per_second)
            rate = min(pipe.rate_bytes_per_second, *ports)
            yield one, two, " - ".join(pipe.between), rate, 2 * pipe.delay_seconds


def _measure(
    emulation: Emulation,
    source: EmulatedHost,
    destination: EmulatedHost,
    over: str,
    rate: float,
    round_trip: float,
    *,
    seconds: float,
) -> MeasuredLink:
    size = round(min(rate * seconds, MAX_BYTES))
    with answering(emulation, destination.name):
        trips = ask(
            emulation, source.name, "round-trip", destination.data_address, PORT, ROUND_TRIPS
        )
        reached, _ = ask(emulation, source.name, "rate", destination.data_address, PORT, size)
    return MeasuredLink(
        source=source.name,
        destination=destination.name,
        over=over,
        rate_bytes_per_second=rate,
        payload_bytes_per_second=reached,
        round_trip_seconds=round_trip,
        least_round_trip_seconds=min(trips),
        median_round_trip_seconds=statistics.median(trips),
    )


@contextmanager
def answering(emulation: Emulation, *hosts: str) -> Iterator[None]:
    """These hosts answer on `PORT` while the block runs."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for host in hosts:
            command = _program("answer", PORT)
            started.append(start(emulation, host, command, stdout=subprocess.PIPE))
        for host, process in zip(hosts, started, strict=True):
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                raise HetplanError(f"host {host} does not answer on port {PORT}: is it in use?")
        yield
    finally:
        end(started)
        for process in started:
            assert process.stdout is not None
            process.stdout.close()


def ask(emulation: Emulation, host: str, *words: object) -> Any:
    """What `hetplan.emulation.sockets` finds out on a host."""
    process = start(emulation, host, _program(*words), stdout=subprocess.PIPE)
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        end((process,))
    if process.returncode:
        raise HetplanError(f"measuring from host {host} failed; see above")
    return json.loads(output)


def _program(*words: object) -> Sequence[str]:
    return program("sockets", *map(str, words))
