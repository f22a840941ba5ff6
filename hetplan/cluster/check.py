"""What must hold in a cluster file beyond keys and types.

The rules read the raw data and step over what is missing or has the wrong type, so that their
faults stand in one list with those of keys and types.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import combinations

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import MOST_DEVICES, Transport, too_many_devices
from hetplan.errors import Fault, InputError
from hetplan.files.nodes import Path
from hetplan.files.reading import Document
from hetplan.units import Dimension, format_bytes, parse_quantity

_MOST_MISSING_LINKS = 10  # a hundred islands have 4,950 pairs, and one mend for all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """An island with a name, and where it stands in the file."""

    name: str
    region: str
    path: Path
    vendor: str | None


def _island_paths(document: Document) -> Iterator[tuple[int, Path]]:
    for region in document.entries(("regions",)):
        for island in document.entries(("regions", region, "islands")):
            yield region, ("regions", region, "islands", island)


def check_islands(document: Document, *, catalogue: Mapping[str, DeviceKind]) -> Iterator[Fault]:
    """Names are unique, device kinds known, memory within the device's, nodes_out exist."""
    yield from _unique(document, [("regions", at, "name") for at in document.entries(("regions",))])
    yield from _unique(document, [(*path, "name") for _, path in _island_paths(document)])
    yield from _unique(document, [("devices", at, "kind") for at in document.entries(("devices",))])
    yield from _size(document)
    own = _own_memory(document)
    known = {name: kind.memory_bytes or None for name, kind in catalogue.items()} | own
    for _, path in _island_paths(document):
        yield from _nodes_out(document, path)
        device = document.word((*path, "device"))
        if device is None:
            continue
        if device not in known:
            yield document.fault((*path, "device"), _unknown(device, known, "device kind"))
            continue
        yield from _memory(document, path, device, known[device])


def _size(document: Document) -> Iterator[Fault]:
    counts = [
        (document.whole((*path, "nodes")) or 0) * (document.whole((*path, "devices_per_node")) or 0)
        for _, path in _island_paths(document)
    ]
    if sum(counts) > MOST_DEVICES:
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


def _quantity(document: Document, path: Path, dimension: Dimension) -> float | None:
    try:
        return parse_quantity(document.at(*path), dimension)
    except InputError:
        return None  # reported where the field itself is read


def _own_memory(document: Document) -> dict[str, float | None]:
    """Memory of the device kinds that the file itself describes."""
    result: dict[str, float | None] = {}
    for at in document.entries(("devices",)):
        kind = document.word(("devices", at, "kind"))
        if kind is not None:
            result[kind] = _quantity(document, ("devices", at, "memory"), Dimension.MEMORY)
    return result


def _unknown(name: str, known: Mapping[str, object] | set[str], what: str) -> str:
    near = get_close_matches(name, sorted(known), n=3, cutoff=0.4)
    hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(sorted(known))}"
    more = "; a kind of your own goes under `devices`" if what == "device kind" else ""
    return f"unknown {what} {name[:60]!a}; {hint}{more}"


def _memory(document: Document, path: Path, device: str, has: float | None) -> Iterator[Fault]:
    asked = _quantity(document, (*path, "memory"), Dimension.MEMORY)
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


def _nodes_out(document: Document, path: Path) -> Iterator[Fault]:
    nodes = document.whole((*path, "nodes"))
    if nodes is None:
        return
    out: set[int] = set()
    for at in document.entries((*path, "nodes_out")):
        number = document.at(*path, "nodes_out", at)
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            continue
        place = (*path, "nodes_out", at)
        if number >= nodes:
            last = nodes - 1
            yield document.fault(place, f"there is no node {number}; the island has 0 to {last}")
        elif number in out:
            yield document.fault(place, f"node {number} is listed twice; remove one")
        out.add(number)
    if len({number for number in out if number < nodes}) == nodes:
        yield document.fault(
            (*path, "nodes_out"), "every node is out; leave the island out instead"
        )


def _places(document: Document, catalogue: Mapping[str, DeviceKind]) -> dict[str, _Place]:
    own = {
        document.word(("devices", at, "kind")): document.word(("devices", at, "vendor"))
        for at in document.entries(("devices",))
    }
    places: dict[str, _Place] = {}
    for region, path in _island_paths(document):
        name = document.word((*path, "name"))
        if name is None or name in places:
            continue
        device = document.word((*path, "device"))
        kind = catalogue.get(device or "")
        vendor = own.get(device, kind.vendor if kind else None)
        # Two regions without a name are still two regions.
        label = document.word(("regions", region, "name")) or f"#{region}"
        places[name] = _Place(name=name, region=label, path=path, vendor=vendor)
    return places


def check_links(document: Document, *, catalogue: Mapping[str, DeviceKind]) -> Iterator[Fault]:
    """Links join two known islands once, and every two islands have one."""
    places = _places(document, catalogue)
    seen: dict[frozenset[str], Path] = {}
    for at in document.entries(("links",)):
        path: Path = ("links", at, "between")
        ends = [document.word((*path, end)) for end in document.entries(path)]
        for position, end in enumerate(ends):
            if end is not None and end not in places:
                message = _unknown(end, set(places), "island")
                yield document.fault((*path, position), message)
        if len(ends) != 2 or ends[0] not in places or ends[1] not in places:
            continue
        left, right = str(ends[0]), str(ends[1])
        if left == right:
            yield document.fault(
                path,
                f"both ends are {left}; links inside an island are its inter_node and intra_node",
            )
            continue
        pair = frozenset((left, right))
        if pair in seen:
            line = document.line(seen[pair])
            yield document.fault(path, f"{left} and {right} already have a link on line {line}")
        seen.setdefault(pair, path)
        yield from _direct(document, ("links", at), places[left], places[right])
    yield from _missing(document, places, set(seen))


def _direct(document: Document, path: Path, left: _Place, right: _Place) -> Iterator[Fault]:
    direct = document.at(*path, "transport") == Transport.DEVICE_DIRECT
    if direct and left.vendor and right.vendor and left.vendor != right.vendor:
        yield document.fault(
            (*path, "transport"),
            f"device-direct needs one library on both ends, {left.name} is {left.vendor} and "
            f"{right.name} is {right.vendor}; write host-staged",
        )


def _missing(
    document: Document, places: Mapping[str, _Place], seen: set[frozenset[str]]
) -> Iterator[Fault]:
    default = {
        same: isinstance(document.at("links_default", key), dict)
        for same, key in ((True, "within_region"), (False, "across_regions"))
    }
    missing = 0
    for left, right in combinations(places.values(), 2):
        pair = frozenset((left.name, right.name))
        same = left.region == right.region
        if pair not in seen and not default[same]:
            missing += 1
            key = "within_region" if same else "across_regions"
            if missing > _MOST_MISSING_LINKS:
                continue
            yield document.fault(
                ("links",),
                f"no link between islands {left.name} and {right.name}; add "
                f"`between: [{left.name}, {right.name}]` or links_default.{key}",
            )
        elif pair not in seen:
            yield from _direct(
                document,
                ("links_default", "within_region" if same else "across_regions"),
                left,
                right,
            )
    if missing > _MOST_MISSING_LINKS:
        more = missing - _MOST_MISSING_LINKS
        message = f"{more} more pairs of islands have no link; links_default saves listing them"
        yield document.fault(("links",), message)
