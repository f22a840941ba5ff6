"""How nodes and links are said in one line.

- nodes, `4x8 h100 @A`: 4 nodes of 8 devices each; a device kind, or a node template, whose devices
  may be left out (`4 dgx-h100`); the region; last the NICs of a node, as in `8x400Gbit`, or only
  the rate of each
- between, `A B 10Gbit 30ms`: two regions or two islands, or none for all; a bandwidth, which all
  that send share unless `each` follows; a round trip
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hetplan.errors import Fault, InputError
from hetplan.units import NAME_PATTERN, Dimension, parse_quantity

NODES, BETWEEN = "--nodes", "--between"
NODES_EXAMPLE, BETWEEN_EXAMPLE = "4x8 h100 @A", "A B 10Gbit 30ms"
DEFAULT_REGION = "here"

_MAX_TEXT = 200
_COUNT = r"[1-9]\d{0,6}"
_UNIT = r"(?:[kKMGTPmgtp]?(?:bit|bps)|[kKMGTP]i?(?:B|bit)/s|B/s)"
_NICS = re.compile(rf"\s(?:({_COUNT})\s*[xX×]\s*)?(\d+(?:\.\d+)?\s*{_UNIT})$", re.ASCII)
_NODES = re.compile(
    rf"({_COUNT})(?:\s*[xX×*]\s*({_COUNT}))?\s+([^@]*[^@\s])\s*(?:@\s*(\S+))?",
    re.ASCII,
)
_APART = re.compile(rf"(?<=\d)\s+(?={_UNIT}\b|(?:ns|us|µs|ms|s|min)\b)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesWords:
    """Nodes of one kind, as they were said."""

    text: str
    nodes: int
    devices: int | None
    """Of one node; None: as the template has."""
    what: str
    """Device kind or node template, as it was said."""
    region: str
    nics_per_node: int | None = None
    """None: not said, which is one where no topology shows more."""
    nic_bytes_per_second: float = 0.0
    """Of one NIC; 0: no NICs were said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenWords:
    """A link, as it was said."""

    text: str
    ends: tuple[str, str] | None
    """Names of two regions or islands; None: all that are no others' ends."""
    bytes_per_second: float
    each: bool
    """The rate is every device's own; otherwise all that send share it."""
    round_trip_seconds: float


def wrong(option: str, text: str, message: str) -> InputError:
    """What is wrong with one value of an option."""
    return InputError(Fault(field=f"{option} {text[:80]!a}", message=message))


def nodes_words(text: str) -> NodesWords:
    """The nodes of one text; an InputError shows a right example."""
    said = text.strip() if len(text) <= _MAX_TEXT else ""  # the patterns are not for pages
    nics = _NICS.search(said)
    found = _NODES.fullmatch(said[: nics.start()].strip() if nics else said)
    if found is None:
        message = f'write nodes x devices of a node, kind and region, as in "{NODES_EXAMPLE}"'
        raise wrong(NODES, text, message)
    nodes, devices, what, region = found.groups()
    region = region or DEFAULT_REGION
    if not re.fullmatch(NAME_PATTERN, region) or len(region) > 100:
        message = "a region's name has letters, digits, '.', '_' and '-', as in @A"
        raise wrong(NODES, text, message)
    return NodesWords(
        text=text,
        nodes=int(nodes),
        devices=None if devices is None else int(devices),
        what=what,
        region=region,
        nics_per_node=int(nics[1]) if nics and nics[1] else None,
        nic_bytes_per_second=_parsed(NODES, text, nics[2], Dimension.BANDWIDTH) if nics else 0.0,
    )


def between_words(text: str) -> BetweenWords:
    """The link of one text; an InputError shows a right example."""
    said = text.strip() if len(text) <= _MAX_TEXT else ""
    words = _APART.sub("", said.replace(",", " ")).split()
    each = words[-1:] == ["each"]
    if words[-1:] in (["each"], ["shared"]):
        words.pop()
    names, quantities = [word for word in words[:-2] if word != "and"], words[-2:]
    if len(quantities) != 2 or len(names) not in (0, 2):
        message = (
            f'write two regions or islands, a bandwidth and a round trip, as in "{BETWEEN_EXAMPLE}"'
        )
        raise wrong(BETWEEN, text, message)
    rates = [word for word in quantities if _is(word, Dimension.BANDWIDTH)]
    rate, time = quantities if quantities[0] in rates or not rates else reversed(quantities)
    return BetweenWords(
        text=text,
        ends=(names[0], names[1]) if names else None,
        bytes_per_second=_parsed(BETWEEN, text, rate, Dimension.BANDWIDTH),
        each=each,
        round_trip_seconds=_parsed(BETWEEN, text, time, Dimension.TIME),
    )


def _is(word: str, dimension: Dimension) -> bool:
    try:
        parse_quantity(word, dimension)
    except InputError:
        return False
    return True


def _parsed(option: str, text: str, word: str, dimension: Dimension) -> float:
    try:
        return parse_quantity(word, dimension)
    except InputError as error:
        raise wrong(option, text, str(error)) from error
