"""What must hold for the links of a cluster file: their figures agree, and every pair has one.

As in `check` the rules read the raw data and step over what is missing or has the wrong type. Pairs
are counted by region, so that a thousand islands do not cost half a million steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, combinations, product

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.file_form import FIRST_SCHEMA
from hetplan.cluster.places import island_paths, kind_figures, quantity, unknown
from hetplan.cluster.spec import Transport
from hetplan.errors import Fault
from hetplan.files.nodes import Path
from hetplan.files.reading import Document
from hetplan.units import Dimension, format_bandwidth

_MAX_SECONDS = 3600.0  # light takes 2,500 s to Mars and back at its farthest
_MIN_BYTES_PER_SECOND = 1.0  # a slip in an exponent, not a link
_MAX_MISSING_LINKS = 10  # a hundred islands have 4,950 pairs, and one mend for all of them


def check_link_figures(document: Document) -> Iterator[Fault]:
    """Every link has a bandwidth and one of latency and round_trip, and its limits go together."""
    for _, path in island_paths(document):
        yield from _inside(document, path)
    between: Iterator[Path] = chain(
        (("links", at) for at in document.entries(("links",))),
        (("region_links", at) for at in document.entries(("region_links",))),
        (("links_default", key) for key in ("within_region", "across_regions")),
    )
    for path in between:
        if isinstance(document.at(*path), dict):
            yield from _bandwidth_between(document, path)
            yield from _figures(document, path)


def _inside(document: Document, path: Path) -> Iterator[Fault]:
    nodes = document.whole((*path, "nodes"))
    inter = document.at(*path, "inter_node")
    if inter is None and nodes != 1:
        # One node has no other node; where the count itself is missing, both are asked for.
        yield document.fault(
            (*path, "inter_node"), "this required key is missing for more than one node; add it"
        )
    for key in ("intra_node", "inter_node"):
        if not isinstance(document.at(*path, key), dict):
            continue
        shared = key == "inter_node" and isinstance(document.at(*path, "nics"), dict)
        if document.at(*path, key, "bandwidth") is None and not shared:
            more = ", or nics" if key == "inter_node" else ""
            message = f"this required key is missing; add it{more}"
            yield document.fault((*path, key, "bandwidth"), message)
        yield from _figures(document, (*path, key))


def _bandwidth_between(document: Document, path: Path) -> Iterator[Fault]:
    plain = document.at(*path, "bandwidth") is not None
    own = document.at(*path, "bandwidth_per_device") is not None
    shared = document.at(*path, "bandwidth_shared") is not None
    first_form = document.at("schema") == FIRST_SCHEMA
    if plain and not first_form:
        yield document.fault(
            (*path, "bandwidth"),
            "does not say whose it is; write bandwidth_per_device for what one device can count "
            "on, or bandwidth_shared for what all devices together can send",
        )
    elif plain and own:
        yield document.fault((*path, "bandwidth"), "is bandwidth_per_device; keep one of the two")
    elif first_form and not (plain or own or shared):
        yield document.fault((*path, "bandwidth"), "this required key is missing; add it")
    elif not (plain or own or shared):
        yield document.fault(
            (*path, "bandwidth_per_device"),
            "this required key is missing; add it for what one device can count on, or "
            "bandwidth_shared for what all devices together can send",
        )
    one = quantity(document, (*path, "bandwidth_per_device"), Dimension.BANDWIDTH)
    all_ = quantity(document, (*path, "bandwidth_shared"), Dimension.BANDWIDTH)
    if one is not None and all_ is not None and one > all_:
        yield document.fault(
            (*path, "bandwidth_per_device"),
            f"{format_bandwidth(one)} of one device is more than the {format_bandwidth(all_)} that "
            "all share; were they exchanged?",
        )


def _figures(document: Document, path: Path) -> Iterator[Fault]:
    for key in ("latency", "round_trip"):
        seconds = quantity(document, (*path, key), Dimension.TIME)
        if seconds is not None and seconds > _MAX_SECONDS:
            yield document.fault((*path, key), "more than an hour; check the number and its unit")
    for key in ("bandwidth", "bandwidth_per_device", "bandwidth_shared"):
        rate = quantity(document, (*path, key), Dimension.BANDWIDTH)
        if rate is not None and rate < _MIN_BYTES_PER_SECOND:
            yield document.fault(
                (*path, key), "less than a byte per second; check the number and its unit"
            )
    link = document.at(*path)
    given = (
        {key for key, value in link.items() if value is not None}
        if isinstance(link, dict)
        else set()
    )
    if given >= {"latency", "round_trip"}:
        yield document.fault(
            (*path, "round_trip"), "latency is given too, half of a round trip; keep one of the two"
        )
    elif not given & {"latency", "round_trip"}:
        yield document.fault(
            (*path, "latency"),
            "this required key is missing; add it (one way), or round_trip (there and back)",
        )
    limits = [key for key in ("window", "loss") if key in given]
    if limits and "streams" not in given:
        yield document.fault(
            (*path, limits[0]), "limits one stream; add streams, how many one device's transfer has"
        )
    elif "streams" in given and not limits:
        yield document.fault(
            (*path, "streams"), "limit nothing without window or loss; add one, or remove streams"
        )
    for key in ("segment", "loss_recovery"):
        if key in given and "loss" not in given:
            yield document.fault((*path, key), "counts only with loss; add that, or remove it")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """An island with a name."""

    name: str
    region: str
    vendor: str
    """Empty: not known."""


def _places(document: Document, catalogue: Mapping[str, DeviceKind]) -> dict[str, _Place]:
    kinds = kind_figures(document, catalogue)
    places: dict[str, _Place] = {}
    for region, path in island_paths(document):
        name = document.word((*path, "name"))
        if name is None or name in places:
            continue
        kind = kinds.get(document.word((*path, "device")) or "")
        # Two regions without a name are still two regions.
        label = document.word(("regions", region, "name")) or f"#{region}"
        places[name] = _Place(name=name, region=label, vendor=kind.vendor if kind else "")
    return places


_Pairs = dict[frozenset[str], Path]


def check_links(document: Document, *, catalogue: Mapping[str, DeviceKind]) -> Iterator[Fault]:
    """Links join two known islands or regions once, and every two islands have one."""
    places = _places(document, catalogue)
    by_region: dict[str, list[_Place]] = {}
    for place in places.values():
        by_region.setdefault(place.region, []).append(place)
    listed: _Pairs = {}
    yield from _pairs(document, "links", set(places), "island", listed)
    for path in listed.values():
        ends = [places[str(document.at(*path, "between", end))] for end in (0, 1)]
        yield from _direct(document, path, ends[0], ends[1])
    regional: _Pairs = {}
    yield from _pairs(document, "region_links", set(by_region), "region", regional)
    yield from _rest(document, by_region, listed, regional)


def _pairs(
    document: Document, key: str, known: set[str], what: str, pairs: _Pairs
) -> Iterator[Fault]:
    """Faults of the ends of a list of links; `pairs` takes up every right pair."""
    for at in document.entries((key,)):
        path: Path = (key, at, "between")
        ends = [document.word((*path, end)) for end in document.entries(path)]
        for position, end in enumerate(ends):
            if end is not None and end not in known:
                yield document.fault((*path, position), unknown(end, known, what))
        if len(ends) != 2 or ends[0] not in known or ends[1] not in known:
            continue
        left, right = str(ends[0]), str(ends[1])
        if left == right:
            inside = (
                "links inside an island are its inter_node and intra_node"
                if what == "island"
                else "links inside a region are those of links or links_default.within_region"
            )
            yield document.fault(path, f"both ends are {left}; {inside}")
            continue
        pair = frozenset((left, right))
        if pair in pairs:
            line = document.line((*pairs[pair], "between"))
            yield document.fault(path, f"{left} and {right} already have a link on line {line}")
        pairs.setdefault(pair, (key, at))


def _direct(document: Document, path: Path, left: _Place, right: _Place) -> Iterator[Fault]:
    direct = document.at(*path, "transport") == Transport.DEVICE_DIRECT
    if direct and _unlike(left, right):
        yield document.fault(
            (*path, "transport"),
            f"device-direct needs one library on both ends, {left.name} is {left.vendor} and "
            f"{right.name} is {right.vendor}; write host-staged",
        )


def _rest(
    document: Document, by_region: Mapping[str, list[_Place]], listed: _Pairs, regional: _Pairs
) -> Iterator[Fault]:
    """Pairs that no entry of `links` joins: without a link, or with one that cannot be direct."""
    count = _unlisted(by_region, listed)
    within: Path = ("links_default", "within_region")
    across: Path = ("links_default", "across_regions")
    missing, shown = 0, 0
    direct: set[Path] = set()
    for one, two in _region_pairs(by_region, count, document, regional):
        path = within if one == two else regional.get(frozenset((one, two)), across)
        if isinstance(document.at(*path), dict):
            if path not in direct and document.at(*path, "transport") == Transport.DEVICE_DIRECT:
                ends = _first_unlike(by_region, one, two, listed)
                if ends is not None:
                    direct.add(path)  # one pair is enough to say it
                    yield from _direct(document, path, *ends)
            continue
        absent = count(one, two)
        missing += absent
        pairs = _all_pairs(by_region, one, two)
        while absent and shown < _MAX_MISSING_LINKS:
            left, right = next(pairs)
            if frozenset((left.name, right.name)) not in listed:
                absent, shown = absent - 1, shown + 1
                yield document.fault(
                    ("links",),
                    f"no link between islands {left.name} and {right.name}; add "
                    f"`between: [{left.name}, {right.name}]` or links_default.{path[1]}",
                )
    if missing > shown:
        more = missing - shown
        message = f"{more} more pairs of islands have no link; links_default saves listing them"
        yield document.fault(("links",), message)


def _unlisted(by_region: Mapping[str, list[_Place]], listed: _Pairs) -> Callable[[str, str], int]:
    """How many pairs of islands of two regions `links` does not list."""
    home = {place.name: place.region for places in by_region.values() for place in places}
    with_link = Counter(frozenset(home[name] for name in pair) for pair in listed)

    def count(one: str, two: str) -> int:
        size, other = len(by_region[one]), len(by_region[two])
        pairs = size * (size - 1) // 2 if one == two else size * other
        return pairs - with_link[frozenset((one, two))]

    return count


def _region_pairs(
    by_region: Mapping[str, list[_Place]],
    count: Callable[[str, str], int],
    document: Document,
    regional: _Pairs,
) -> Iterator[tuple[str, str]]:
    """Every region with itself and every two regions that can have a fault."""
    yield from ((region, region) for region in by_region if count(region, region))
    default = document.at("links_default", "across_regions")
    if (
        isinstance(default, dict)
        and document.at("links_default", "across_regions", "transport") != Transport.DEVICE_DIRECT
    ):
        # Only listed pairs of regions can be wrong: all others have a link that always works.
        known = [tuple(sorted(pair)) for pair in regional]
        yield from ((pair[0], pair[1]) for pair in known)
        return
    yield from (pair for pair in combinations(by_region, 2) if count(*pair))


def _all_pairs(
    by_region: Mapping[str, list[_Place]], one: str, two: str
) -> Iterator[tuple[_Place, _Place]]:
    if one == two:
        return combinations(by_region[one], 2)
    return product(by_region[one], by_region[two])


def _unlike(left: _Place, right: _Place) -> bool:
    """Whether devices of two vendors are at the ends."""
    return bool(left.vendor and right.vendor) and left.vendor != right.vendor


def _first_unlike(
    by_region: Mapping[str, list[_Place]], one: str, two: str, listed: _Pairs
) -> tuple[_Place, _Place] | None:
    """Two islands of unlike vendors without a link of their own; None where there are none."""
    vendors = {place.vendor for place in (*by_region[one], *by_region[two]) if place.vendor}
    if len(vendors) < 2:
        return None
    for left, right in _all_pairs(by_region, one, two):
        if _unlike(left, right) and frozenset((left.name, right.name)) not in listed:
            return left, right
    return None
