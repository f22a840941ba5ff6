"""What must hold in a cluster file beyond keys and types: names, sizes, device kinds, sites.

The rules read the raw data and step over what is missing or has the wrong type, so that their
faults stand in one list with those of keys and types.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hetplan.cluster.catalogue import nearest_kinds
from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.places import island_paths, quantity, unknown
from hetplan.cluster.power import capped_clock_ratio
from hetplan.cluster.spec import MAX_DEVICES, too_many_devices
from hetplan.errors import Fault, InputError
from hetplan.files.nodes import Path
from hetplan.files.reading import Document
from hetplan.units import Dimension, format_bytes, format_power


def check_islands(document: Document, *, catalogue: Mapping[str, DeviceKind]) -> Iterator[Fault]:
    """Names are unique, device kinds known, memory within the device's."""
    paths = [path for _, path in island_paths(document)]
    yield from _unique(document, [("regions", at, "name") for at in document.entries(("regions",))])
    yield from _unique(document, [(*path, "name") for path in paths])
    yield from _unique(document, [("devices", at, "kind") for at in document.entries(("devices",))])
    yield from _unique(document, [("sites", at, "name") for at in document.entries(("sites",))])
    yield from _size(document, paths)
    own = _own_memory(document)
    boards = _board_powers(document, catalogue)
    known = {name: kind.memory_bytes or None for name, kind in catalogue.items()} | own
    said: dict[str, str] = {}
    for path in paths:
        device = document.word((*path, "device"))
        if device is None:
            continue
        if device not in known:
            if device not in said:
                said[device] = _unknown_kind(device, known)
            yield document.fault((*path, "device"), said[device])
            continue
        yield from _memory(document, path, device, known[device])
        yield from _power_cap(document, path, device, boards.get(device, 0.0))


def _size(document: Document, paths: list[Path]) -> Iterator[Fault]:
    counts = [
        (document.whole((*path, "nodes")) or 0) * (document.whole((*path, "devices_per_node")) or 0)
        for path in paths
    ]
    if sum(counts) > MAX_DEVICES:
        yield document.fault(("regions",), too_many_devices(sum(counts)))


def _unique(document: Document, paths: list[Path]) -> Iterator[Fault]:
    first: dict[str, Path] = {}
    for path in paths:
        name = document.word(path)
        if name is None:
            continue
        if name in first:
            line = document.line(first[name])
            yield document.fault(path, f"{name!a} is already the name on line {line}; rename one")
        first.setdefault(name, path)


def _own_memory(document: Document) -> dict[str, float | None]:
    """Memory of the device kinds that the file itself describes."""
    result: dict[str, float | None] = {}
    for at in document.entries(("devices",)):
        kind = document.word(("devices", at, "kind"))
        if kind is not None:
            result[kind] = quantity(document, ("devices", at, "memory"), Dimension.MEMORY)
    return result


def _unknown_kind(name: str, known: Mapping[str, object]) -> str:
    near = nearest_kinds(name, known)
    hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(sorted(known))}"
    more = "a kind of your own goes under `devices`"
    return f"unknown device kind {name[:60]!a}; {hint}; {more}"


def _memory(document: Document, path: Path, device: str, has: float | None) -> Iterator[Fault]:
    asked = quantity(document, (*path, "memory"), Dimension.MEMORY)
    if has is None and document.at(*path, "memory") is None:
        yield document.fault(
            (*path, "memory"),
            f"required for device kind {device}, whose memory differs from machine to machine; "
            'add what a job may use per device, such as memory: "8 GiB"',
        )
    elif has is not None and asked is not None and asked > has:
        yield document.fault(
            (*path, "memory"),
            f"{format_bytes(asked)} is more than the {format_bytes(has)} of {device}; "
            "give what a job may use, or leave it out",
        )


def _board_powers(
    document: Document, catalogue: Mapping[str, DeviceKind]
) -> dict[str | None, float]:
    """Limit of every kind's board in watts, the file's own kinds first; 0 where nobody says it."""
    boards: dict[str | None, float] = {
        name: kind.max_power_watts for name, kind in catalogue.items()
    }
    for at in document.entries(("devices",)):
        kind = document.word(("devices", at, "kind"))
        boards[kind] = quantity(document, ("devices", at, "max_power"), Dimension.POWER) or 0.0
    return boards


def _power_cap(document: Document, path: Path, device: str, board: float) -> Iterator[Fault]:
    """A cap above the board's limit caps nothing; without that limit its effect is not known."""
    cap = quantity(document, (*path, "power_cap"), Dimension.POWER)
    if cap is None:
        return
    if not board:
        yield document.fault(
            (*path, "power_cap"),
            f"the limit of {device}'s board is not known, so neither is what the cap costs; give "
            "max_power of the kind under `devices`, or clock_ratio instead of the cap",
        )
    elif cap > board:
        yield document.fault(
            (*path, "power_cap"),
            f"{format_power(cap)} is more than the {format_power(board)} of {device}'s board; "
            "give what the devices are limited to, or leave it out",
        )
    else:
        try:
            capped_clock_ratio(cap / board)
        except InputError as error:
            yield document.fault((*path, "power_cap"), str(error))


def check_sites(document: Document, *, catalogue: Mapping[str, DeviceKind]) -> Iterator[Fault]:
    """Regions name known sites, sites have regions, and their power feeds at least one node.

    A limit below the draw of all devices is no fault: it says how many may run (`power`).
    """
    names = {
        name: at
        for at in document.entries(("sites",))
        if (name := document.word(("sites", at, "name"))) is not None
    }
    regions: dict[str, list[int]] = {name: [] for name in names}
    for region in document.entries(("regions",)):
        site = document.word(("regions", region, "site"))
        if site is not None and site not in names:
            message = f"{unknown(site, names, 'site')}; sites are listed under `sites`"
            yield document.fault(("regions", region, "site"), message)
        elif site is not None:
            regions[site].append(region)
    for name, at in names.items():
        if not regions[name]:
            yield document.fault(
                ("sites", at, "name"), f"no region has `site: {name}`; add that, or remove the site"
            )
            continue
        limit = quantity(document, ("sites", at, "power_limit"), Dimension.POWER)
        nodes = list(_node_powers(document, set(regions[name]), catalogue))
        if limit is not None and nodes and min(nodes)[0] > limit:
            least = min(nodes)
            yield document.fault(
                ("sites", at, "power_limit"),
                f"{format_power(limit)} feeds no node of its regions, the least is one of "
                f"{least[1]} with {format_power(least[0])}; raise it, or correct the power of the "
                "islands",
            )


_DRAW_KEYS = ("power", "power_cap")
"""What says how much a device draws, the first that is given; else the limit of its board."""


def _node_powers(
    document: Document, regions: set[int], catalogue: Mapping[str, DeviceKind]
) -> Iterator[tuple[float, str]]:
    """(watts of one node, island) for every island of these regions; 0 where nothing says it."""
    boards = _board_powers(document, catalogue)
    for region, path in island_paths(document):
        name = document.word((*path, "name"))
        if region not in regions or name is None:
            continue
        given = (quantity(document, (*path, key), Dimension.POWER) for key in _DRAW_KEYS)
        board = boards.get(document.word((*path, "device")), 0.0)
        each = next((watts for watts in given if watts is not None), board)
        devices = document.whole((*path, "devices_per_node")) or 0
        if devices <= MAX_DEVICES:
            yield each * devices, name
