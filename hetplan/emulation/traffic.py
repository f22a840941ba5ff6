"""Count the bytes on the links of an emulation, and tell whether it is up."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from hetplan.emulation import namespaces, state
from hetplan.emulation.relay import COUNTERS_PER_LINE
from hetplan.emulation.tools import require
from hetplan.emulation.values import CONTROL_INTERFACE, DATA_INTERFACE, Emulation

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
