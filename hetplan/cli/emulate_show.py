"""`hetplan emulate show` and `measure`: hosts, links, what has crossed them and what they reach."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hetplan.cli.options import emit

if TYPE_CHECKING:
    from rich.table import Table

    from hetplan.emulation.counting import HostBytes, PipeBytes
    from hetplan.emulation.values import Emulation

SHOW_SCHEMA, LIST_SCHEMA = "hetplan.emulate-show/1", "hetplan.emulate-list/1"
MEASURE_SCHEMA = "hetplan.emulate-measure/1"


def show(name: str | None, *, as_json: bool) -> None:
    """Of one emulation, or which there are."""
    from hetplan.emulation import state

    if name is None:
        found = state.all_written()
        if len(found) != 1:
            _list(found, as_json=as_json)
            return
        name = found[0].name
    _show(state.read(name), as_json=as_json)


def _list(found: tuple[Emulation, ...], *, as_json: bool) -> None:
    from hetplan.emulation import locks

    if as_json:
        entries = [
            {"name": each.name, "hosts": len(each.hosts), "up": locks.is_up(each.name)}
            for each in found
        ]
        emit(json.dumps({"schema": LIST_SCHEMA, "emulations": entries}, indent=2))
        return
    for each in found:
        how = "up" if locks.is_up(each.name) else "half made (hetplan emulate down removes it)"
        emit(f"{each.name}: {len(each.hosts)} hosts, {how}")
    if not found:
        emit("no emulation on this machine")


def _show(emulation: Emulation, *, as_json: bool) -> None:
    from hetplan.emulation import locks
    from hetplan.emulation.counting import host_bytes, pipe_bytes, relay_runs
    from hetplan.emulation.tools import require
    from hetplan.files.encoding import to_plain

    is_up = locks.is_up(emulation.name)
    if is_up:
        require()
    hosts = host_bytes(emulation) if is_up else ()
    pipes = pipe_bytes(emulation) if is_up else ()
    relay = is_up and relay_runs(emulation)
    if as_json:
        result = {
            "schema": SHOW_SCHEMA,
            "emulation": to_plain(emulation),
            "up": is_up,
            "relay_runs": relay,
            "hosts": [to_plain(each) for each in hosts],
            "pipes": [to_plain(each) for each in pipes],
        }
        emit(json.dumps(result, indent=2))
        return
    from hetplan.reports.terminal import print_table

    print_table(_host_table(emulation, hosts))
    if emulation.pipes:
        print_table(_pipe_table(emulation, pipes))
    for note in emulation.notes:
        emit(f"note: {note}")
    if not is_up:
        emit(f"half made: hetplan emulate down --name {emulation.name} removes what is there")
    elif not relay:
        emit("THE RELAY IS NOT RUNNING: nothing crosses between networks; take it down and up")


def _host_table(emulation: Emulation, hosts: tuple[HostBytes, ...]) -> Table:
    from rich.table import Table

    from hetplan.units import format_bytes

    table = Table(
        title=f"Emulation {emulation.name}: hosts (the control network has no limit)",
        title_justify="left",
    )
    for column in ("host", "region", "island", "device kind"):
        table.add_column(column)
    table.add_column("ranks", justify="right")
    for column in ("address", "control"):
        table.add_column(column)
    for column in ("rate", "sent", "received", "on control"):
        table.add_column(column, justify="right")
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
            bits(host.nic_bytes_per_second),
            format_bytes(count.sent_bytes) if count else "",
            format_bytes(count.received_bytes) if count else "",
            format_bytes(count.control_sent_bytes + count.control_received_bytes) if count else "",
        )
    return table


def _pipe_table(emulation: Emulation, pipes: tuple[PipeBytes, ...]) -> Table:
    from rich.table import Table

    from hetplan.units import format_bytes, format_seconds

    table = Table(
        title="Links between networks, each way (counted: there / back)", title_justify="left"
    )
    table.add_column("between")
    for column in ("rate", "round trip", "buffer", "sent", "frames", "dropped"):
        table.add_column(column, justify="right")
    for at, pipe in enumerate(emulation.pipes):
        both = pipes[2 * at : 2 * at + 2]
        table.add_row(
            f"{pipe.between[0]}, {pipe.between[1]}",
            bits(pipe.rate_bytes_per_second),
            format_seconds(2 * pipe.delay_seconds),
            format_bytes(pipe.buffer_bytes),
            " / ".join(format_bytes(each.sent_bytes) for each in both),
            " / ".join(str(each.frames) for each in both),
            " / ".join(str(each.dropped_frames) for each in both),
        )
    return table


def measure(name: str, *, as_json: bool) -> None:
    """Measure every link of an emulation and set it beside its figures."""
    from hetplan.emulation import state
    from hetplan.emulation.measuring import measure as measure_links
    from hetplan.emulation.tools import require
    from hetplan.files.encoding import to_plain

    emulation = state.read_up(name)
    require()
    found = measure_links(emulation)
    if as_json:
        links = [to_plain(each) for each in found]
        emit(json.dumps({"schema": MEASURE_SCHEMA, "links": links}, indent=2))
        return
    from rich.table import Table

    from hetplan.reports.terminal import print_table
    from hetplan.units import format_seconds, format_share

    table = Table(
        title="One TCP connection and datagrams of 4 bytes, link by link", title_justify="left"
    )
    for column in ("from", "to", "over"):
        table.add_column(column)
    for column in ("rate", "TCP payload", "of a full link", "round trip", "least", "median"):
        table.add_column(column, justify="right")
    for each in found:
        table.add_row(
            each.source,
            each.destination,
            each.over,
            bits(each.rate_bytes_per_second),
            bits(each.payload_bytes_per_second),
            format_share(each.rate_share),
            format_seconds(each.round_trip_seconds) if each.round_trip_seconds else "",
            format_seconds(each.least_round_trip_seconds),
            format_seconds(each.median_round_trip_seconds),
        )
    print_table(table)


def bits(bytes_per_second: float) -> str:
    """A rate as networks have it, in bits."""
    from hetplan.units import format_rate

    return format_rate(bytes_per_second * 8, "bit/s")
