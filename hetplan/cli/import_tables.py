"""Tables of `hetplan import`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from rich.markup import escape
from rich.table import Table

from hetplan.cli.options import emit_lines
from hetplan.cluster.catalogue import load_catalogue
from hetplan.importers.records import Imported, NodeTopology, PathFigures
from hetplan.importers.topology import nearest_nics, pcie_switches
from hetplan.reports.terminal import print_small, small_table
from hetplan.trainers.training_log import TrainingLog
from hetplan.units import format_bandwidth, format_bytes, format_seconds

_MAX_HOSTS = 20


def show_all(imported: Sequence[Imported]) -> None:
    """Every record of every file; notes that all the files share come once, at the end."""
    notes = [each.notes for each in imported]
    shared = tuple(note for note in notes[0] if all(note in each for each in notes[1:]))
    for each in imported:
        own = tuple(note for note in each.notes if note not in shared)
        show_imported(replace(each, notes=own))
    emit_lines(f"note: {note}" for note in shared)


def show_imported(imported: Imported) -> None:
    """Every record that was read, what the tool skipped, and what to know about it."""
    if imported.links:
        _links(imported)
    if imported.operator_samples:
        _products(imported)
    if imported.paths:
        _paths(imported.paths)
    if imported.topology is not None:
        _topology(imported.topology)
    if imported.hosts:
        _hosts(imported)
    emit_lines(f"skipped: {line}" for line in imported.skipped)
    emit_lines(f"note: {note}" for note in imported.notes)


def _links(imported: Imported) -> None:
    """One row per operation and group size: the range of messages, the ends of its times."""
    table = small_table("link | operation | backend | >ranks | >rows | >from | >to | >time | >")
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
    print_small(table)


_LARGE_FLOPS = 2e10
"""Products from which rates compare: smaller ones show launches and few tiles."""


def _products(imported: Imported) -> None:
    """One row per kind and format: shapes, and the rates that large ones reach, so that a wrong
    unit or device shows.
    """
    table = small_table("device | products in | >rows | >least m | >most m | >TFLOP/s | >of peak")
    peaks = {each.kind: dict(each.peak_flops_per_second) for each in load_catalogue()}
    for device, name in dict.fromkeys((s.device, s.precision) for s in imported.operator_samples):
        rows = [s for s in imported.operator_samples if (s.device, s.precision) == (device, name)]
        work = [(2.0 * s.m * s.n * s.k, s.median_seconds) for s in rows]
        rates = [done / seconds for done, seconds in work if done >= _LARGE_FLOPS]
        peak = peaks.get(device, {}).get(name)
        ends = (median(rates), max(rates)) if rates else ()
        sizes = [each.m for each in rows]
        table.add_row(
            escape(device), name, str(len(rows)), str(min(sizes)), str(max(sizes)),
            " to ".join(f"{rate / 1e12:.4g}" for rate in ends),
            " to ".join(f"{rate / peak:.0%}" for rate in ends) if peak else "",
        )  # fmt: skip
    print_small(table)


def _paths(paths: tuple[PathFigures, ...]) -> None:
    rows = [
        (
            path.measured,
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
        for path in paths
    ]
    told = [at for at in range(len(_PATH_COLUMNS)) if any(row[at] for row in rows)]
    table = small_table("|".join(_PATH_COLUMNS[at] for at in told))
    for row in rows:
        table.add_row(*(escape(row[at]) for at in told))
    print_small(table)


_PATH_COLUMNS = (
    "measured", ">message", ">bandwidth", ">one way", ">round trip", ">streams", ">window", ">loss",
)  # fmt: skip
"""Those without a figure are left out."""


def _topology(topology: NodeTopology) -> None:
    """One row per device: its NUMA node, its paths to the others, its nearest NICs."""
    table = small_table("device | NUMA | to the others | nearest NICs | behind one switch")
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
    print_small(table)


def _hosts(imported: Imported) -> None:
    """One row per type and number of slots."""
    table = small_table("type | slots | hosts | names")
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
    print_small(table)


def log_table(log: TrainingLog) -> Table:
    """One row per restart: its steps, and the median of those without marks."""
    table = small_table(
        "trainer | >restart | >steps | >counted | >median step | >tokens/s | >memory"
    )
    for attempt in sorted({step.attempt for step in log.steps}):
        steps = [step for step in log.steps if step.attempt == attempt]
        plain = [step for step in steps if not step.marks] or steps
        seconds = [step.seconds for step in plain if step.seconds is not None]
        tokens = [step.tokens_per_second for step in plain if step.tokens_per_second]
        memory = log.peak_memory_bytes
        table.add_row(
            log.trainer.value, str(attempt), str(steps[-1].iteration), str(len(plain)),
            format_seconds(median(seconds)) if seconds else "",
            f"{median(tokens):.4g}" if tokens else "",
            format_bytes(memory) if memory else "",
        )  # fmt: skip
    return table
