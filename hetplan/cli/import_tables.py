"""What an importer read, as tables for a person."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich import box
from rich.markup import escape
from rich.table import Table

from hetplan.cli.options import emit
from hetplan.importers.node_places import nearest_nics, pcie_switches
from hetplan.importers.records import Imported, NodeTopology, PathFigures
from hetplan.reports.terminal import print_table
from hetplan.units import (
    format_bandwidth,
    format_bytes,
    format_flops,
    format_seconds,
)

_MAX_HOSTS = 20


def show_all(imported: Sequence[Imported]) -> None:
    """Every record of every file; notes that all the files share stand once, at the end."""
    notes = [each.notes for each in imported]
    shared = tuple(note for note in notes[0] if all(note in each for each in notes[1:]))
    for each in imported:
        own = tuple(note for note in each.notes if note not in shared)
        show_imported(replace(each, notes=own))
    for note in shared:
        emit(f"note: {note}")


def show_imported(imported: Imported) -> None:
    """Every record that was read, what the tool skipped, and what to know about it."""
    if imported.links:
        _links(imported)
    if imported.layers:
        _layers(imported)
    if imported.operators:
        _operators(imported)
    if imported.paths:
        _paths(imported.paths)
    if imported.topology is not None:
        _topology(imported.topology)
    if imported.hosts:
        _hosts(imported)
    if imported.devices:
        _devices(imported)
    for line in imported.skipped:
        emit(f"skipped: {line}")
    for note in imported.notes:
        emit(f"note: {note}")


def _table(*columns: str, left: int = 1) -> Table:
    """A table whose first `left` columns are words and whose others are numbers."""
    table = Table(box=box.SIMPLE)
    for at, name in enumerate(columns):
        table.add_column(name, justify="left" if at < left else "right", no_wrap=True)
    return table


def _links(imported: Imported) -> None:
    """One row per operation and group size: the range of messages, the ends of its times."""
    table = _table(
        "link", "operation", "backend", "ranks", "rows", "from", "to", "time", "", left=3
    )
    groups: dict[tuple[str, str, str, int], list[tuple[int, float]]] = {}
    for each in imported.links:
        key = (each.link, each.operation, each.backend, each.group_size)
        groups.setdefault(key, []).append((each.message_bytes, each.median_seconds))
    for (link, operation, backend, ranks), rows in groups.items():
        least, most = min(rows), max(rows)
        table.add_row(
            escape(link), operation, escape(backend), str(ranks), str(len(rows)),
            format_bytes(least[0]), format_bytes(most[0]),
            format_seconds(least[1]), format_seconds(most[1]),
        )  # fmt: skip
    print_table(table)


def _layers(imported: Imported) -> None:
    table = _table("device", "layer", "phase", "rows", "microbatch", "tp", "time", "", left=3)
    groups: dict[tuple[str, str, str], list[tuple[int, int, float]]] = {}
    for each in imported.layers:
        key = (each.device, each.layer, each.phase)
        row = (each.microbatch_size, each.tp, each.median_seconds)
        groups.setdefault(key, []).append(row)
    for (device, layer, phase), rows in groups.items():
        microbatches, degrees, seconds = (list(column) for column in zip(*rows, strict=True))
        table.add_row(
            escape(device), escape(layer), escape(phase), str(len(rows)),
            _range(microbatches), _range(degrees),
            format_seconds(min(seconds)), format_seconds(max(seconds)),
        )  # fmt: skip
    print_table(table)


def _operators(imported: Imported) -> None:
    """One row per operator and pass: the ends of its times."""
    table = _table("device", "operator", "pass", "precision", "rows", "time", "", left=4)
    groups: dict[tuple[str, str, str, str], list[float]] = {}
    for each in imported.operators:
        words = each.precision
        if each.output_precision != each.precision:
            words += f" to {each.output_precision}"
        key = (each.device, each.operator, each.phase, words)
        groups.setdefault(key, []).append(each.median_seconds)
    for (device, operator, phase, words), seconds in groups.items():
        table.add_row(
            escape(device), operator, phase, words, str(len(seconds)),
            format_seconds(min(seconds)), format_seconds(max(seconds)),
        )  # fmt: skip
    print_table(table)


def _range(numbers: list[int] | list[float]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _paths(paths: tuple[PathFigures, ...]) -> None:
    table = _table(
        "measured", "message", "bandwidth", "one way", "round trip", "streams", "window", "loss"
    )
    for path in paths:
        table.add_row(
            escape(path.measured),
            "" if path.message_bytes is None else format_bytes(path.message_bytes),
            ""
            if path.bandwidth_bytes_per_second is None
            else format_bandwidth(path.bandwidth_bytes_per_second),
            "" if path.latency_seconds is None else format_seconds(path.latency_seconds),
            "" if path.round_trip_seconds is None else format_seconds(path.round_trip_seconds),
            "" if path.streams is None else str(path.streams),
            "" if path.window_bytes is None else format_bytes(path.window_bytes),
            "" if path.loss_fraction is None else f"{path.loss_fraction:.2g}",
        )
    print_table(table)


def _topology(topology: NodeTopology) -> None:
    """One row per device: its NUMA node, its paths to the others, its nearest NICs."""
    table = _table("device", "NUMA", "to the others", "nearest NICs", "behind one switch", left=5)
    near = {place.device: place for place in nearest_nics(topology)}
    switches = {name: each for each in pcie_switches(topology) for name in each.devices}
    names = {device.name for device in topology.devices}
    for device in topology.devices:
        words: dict[str, int] = {}
        for path in topology.paths:
            if device.name in path.between and set(path.between) <= names:
                words[path.path] = words.get(path.path, 0) + 1
        place = near.get(device.name)
        switch = switches.get(device.name)
        others = (
            [name for name in (*switch.devices, *switch.nics) if name != device.name]
            if switch
            else []
        )
        table.add_row(
            device.name,
            "" if device.numa_node is None else str(device.numa_node),
            ", ".join(f"{count} x {word}" for word, count in words.items()),
            f"{', '.join(place.nics)} ({place.path})" if place else "",
            ", ".join(others),
        )
    print_table(table)


def _hosts(imported: Imported) -> None:
    """One row per type and number of slots."""
    table = _table("type", "slots", "hosts", "names", left=4)
    groups: dict[tuple[str, int | None], list[str]] = {}
    for host in imported.hosts:
        groups.setdefault((host.device or "", host.slots), []).append(host.name)
    for (device, slots), names in groups.items():
        shown = " ".join(names[:_MAX_HOSTS])
        more = f" and {len(names) - _MAX_HOSTS} more" if len(names) > _MAX_HOSTS else ""
        table.add_row(
            escape(device), "" if slots is None else str(slots), str(len(names)),
            escape(shown) + more,
        )  # fmt: skip
    print_table(table)


def _devices(imported: Imported) -> None:
    table = _table("kind", "memory", "its bandwidth", "scale-up", "rates", left=1)
    for kind in imported.devices:
        table.add_row(
            escape(kind.kind),
            format_bytes(kind.memory_bytes) if kind.memory_bytes else "",
            format_bandwidth(kind.memory_bandwidth_bytes_per_second)
            if kind.memory_bandwidth_bytes_per_second
            else "",
            format_bandwidth(kind.scale_up.bandwidth_bytes_per_second) if kind.scale_up else "",
            ", ".join(f"{name} {format_flops(rate)}" for name, rate in kind.peak_flops_per_second),
        )
    print_table(table)
