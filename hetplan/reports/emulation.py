"""What `hetplan emulate show` prints: hosts, links, and the bytes that crossed them."""

from __future__ import annotations

from rich.table import Table

from hetplan.emulation.traffic import EmulationStatus, HostBytes, PipeBytes
from hetplan.emulation.values import Emulation
from hetplan.reports.terminal import new_table, print_table
from hetplan.units import format_bytes, format_rate, format_seconds


def show_emulation(status: EmulationStatus) -> None:
    """Hosts and long links with what has crossed them, and what is wrong."""
    emulation = status.emulation
    print_table(_host_table(emulation, status.hosts))
    if emulation.pipes:
        print_table(_pipe_table(emulation, status.pipes))
    for note in emulation.notes:
        print(f"note: {note}")
    if not status.up:
        print(f"half made: hetplan emulate down --name {emulation.name} removes what is there")
    elif not status.relay_runs:
        print("THE RELAY IS NOT RUNNING: nothing crosses between networks; take it down and up")


def _host_table(emulation: Emulation, hosts: tuple[HostBytes, ...]) -> Table:
    table = new_table(
        "host | region | island | device kind | >ranks | address | control | >rate | "
        ">sent | >received | >on control",
        title=f"Emulation {emulation.name}: hosts (the control network has no limit)",
    )
    counted = {each.host: each for each in hosts}
    for host in emulation.hosts:
        count = counted.get(host.name)
        table.add_row(
            host.name,
            host.region,
            host.island,
            host.device,
            str(host.devices),
            host.data_address,
            host.control_address,
            _bits(host.nic_bytes_per_second),
            format_bytes(count.sent_bytes) if count else "",
            format_bytes(count.received_bytes) if count else "",
            format_bytes(count.control_sent_bytes + count.control_received_bytes) if count else "",
        )
    return table


def _pipe_table(emulation: Emulation, pipes: tuple[PipeBytes, ...]) -> Table:
    table = new_table(
        "between | >rate | >round trip | >buffer | >sent | >frames | >dropped",
        title="Links between networks, each way (counted: there / back)",
    )
    for at, pipe in enumerate(emulation.pipes):
        both = pipes[2 * at : 2 * at + 2]
        table.add_row(
            f"{pipe.between[0]}, {pipe.between[1]}",
            _bits(pipe.rate_bytes_per_second),
            format_seconds(2 * pipe.delay_seconds),
            format_bytes(pipe.buffer_bytes),
            " / ".join(format_bytes(each.sent_bytes) for each in both),
            " / ".join(str(each.frames) for each in both),
            " / ".join(str(each.dropped_frames) for each in both),
        )
    return table


def _bits(bytes_per_second: float) -> str:
    """A rate as networks have it, in bits."""
    return format_rate(bytes_per_second * 8, "bit/s")
