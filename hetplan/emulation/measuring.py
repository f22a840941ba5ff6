"""Count the bytes on the links of an emulation, and measure rates against the cluster file.

Counted: bytes of every host and of every long link. Measured: one connection and small datagrams
between the first hosts of every two ends: of each network with two hosts, and of each long link. A
link's rate counts the headers of its frames; of 1,514 bytes of a full frame TCP carries 1,448
(Ethernet 14, IPv4 20, TCP 20, its timestamps 12).
"""

from __future__ import annotations

import json
import os
import statistics
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetplan.emulation import namespaces, state
from hetplan.emulation.relay import COUNTERS_PER_LINE
from hetplan.emulation.running import end, start
from hetplan.emulation.tools import program, require
from hetplan.emulation.values import CONTROL_INTERFACE, DATA_INTERFACE, EmulatedHost, Emulation
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
    """Wanted and measured figures between two hosts."""

    source: str
    destination: str
    over: str
    """The segment, or the two ends of the long link."""
    rate_bytes_per_second: float
    """Of the frames, in the cluster file."""
    payload_bytes_per_second: float
    """That one TCP connection reached."""
    round_trip_seconds: float
    """In the cluster file; 0 inside a segment, where the machine's own is all there is."""
    least_round_trip_seconds: float
    median_round_trip_seconds: float

    @property
    def rate_share(self) -> float:
        """Payload over what a full link would carry of it."""
        return self.payload_bytes_per_second / (PAYLOAD_SHARE * self.rate_bytes_per_second)


def measure(emulation: Emulation) -> tuple[MeasuredLink, ...]:
    """Every link of the emulation, one after another."""
    return tuple(_measure(emulation, *pair) for pair in _pairs(emulation))


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
) -> MeasuredLink:
    size = round(min(rate * SECONDS, MAX_BYTES))
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


def ask(
    emulation: Emulation, host: str, *words: object, limit_seconds: float = LIMIT_SECONDS
) -> Any:
    """The answer of `hetplan.emulation.probes` on a host; a HetplanError where there is none."""
    process = start(
        emulation, host, _program(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        output, errors = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        raise HetplanError(f"host {host} did not answer in {limit_seconds:g} s") from None
    finally:
        end((process,))
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    if process.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise HetplanError(f"measuring from host {host} failed: {last}")
    return json.loads(output)


def _program(*words: object) -> Sequence[str]:
    return program("probes", *map(str, words))


_RECEIVED, _SENT = 0, 8  # columns of /proc/net/dev after the interface's name: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBytes:
    """What a host has sent and received since it came up, headers included."""

    host: str
    sent_bytes: int
    received_bytes: int
    control_sent_bytes: int
    control_received_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeBytes:
    """What has crossed a long link in one direction, headers included."""

    source: str
    """Region, or island."""
    destination: str
    frames: int
    sent_bytes: int
    dropped_frames: int
    """That found its buffer full."""


def host_bytes(emulation: Emulation) -> tuple[HostBytes, ...]:
    """Of every host, in order."""
    counts = []
    for host in emulation.hosts:
        data, control = _interface_bytes(host.namespace)
        counts.append(
            HostBytes(
                host=host.name,
                sent_bytes=data[1],
                received_bytes=data[0],
                control_sent_bytes=control[1],
                control_received_bytes=control[0],
            )
        )
    return tuple(counts)


def _interface_bytes(namespace: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """(received, sent) of the shaped and of the unshaped interface."""
    text: list[str] = []
    # The thread's own view: /proc/net is that of the process.
    namespaces.inside(namespace, lambda: text.append(Path("/proc/thread-self/net/dev").read_text()))
    columns = {
        name.strip(): [int(number) for number in numbers.split()]
        for name, _, numbers in (line.partition(":") for line in text[0].splitlines()[2:])
    }
    data, control = columns[DATA_INTERFACE], columns[CONTROL_INTERFACE]
    return (data[_RECEIVED], data[_SENT]), (control[_RECEIVED], control[_SENT])


def pipe_bytes(emulation: Emulation) -> tuple[PipeBytes, ...]:
    """Of every long link, both ways."""
    data = (state.folder_of(emulation.name) / "relay.counters").read_bytes()
    numbers = struct.unpack(f"{len(data) // 8}Q", data)
    counts = []
    for at, pipe in enumerate(emulation.pipes):
        for back, (source, destination) in enumerate((pipe.between, pipe.between[::-1])):
            first = (2 * at + back) * COUNTERS_PER_LINE
            frames, size, dropped = numbers[first : first + COUNTERS_PER_LINE]
            counts.append(
                PipeBytes(
                    source=source,
                    destination=destination,
                    frames=frames,
                    sent_bytes=size,
                    dropped_frames=dropped,
                )
            )
    return tuple(counts)


def relay_runs(emulation: Emulation) -> bool:
    """Whether the long links carry anything; true where there are none."""
    if not emulation.pipes:
        return True
    inode = os.stat(namespaces.path_of(emulation.fabric)).st_ino
    for process in namespaces.processes_in({inode}):
        if b"hetplan.emulation.relay" in Path(f"/proc/{process}/cmdline").read_bytes():
            return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationStatus:
    """What there is of an emulation, and what has crossed its links."""

    emulation: Emulation
    up: bool
    """All of it was made."""
    relay_runs: bool
    hosts: tuple[HostBytes, ...]
    """Empty where it is not up; so are the pipes."""
    pipes: tuple[PipeBytes, ...]


def status_of(name: str) -> EmulationStatus:
    """The state of the emulation of this name; an InputError where there is none."""
    emulation = state.read(name)
    up = state.is_up(name)
    if up:
        require()
    return EmulationStatus(
        emulation=emulation,
        up=up,
        relay_runs=up and relay_runs(emulation),
        hosts=host_bytes(emulation) if up else (),
        pipes=pipe_bytes(emulation) if up else (),
    )
