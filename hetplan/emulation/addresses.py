"""Which 10.n.x.x can an emulation have?

Emulated hosts reach nothing outside, and the machine nothing inside, so a clash would break no
connection; it would confuse people, and programs that look at both. So a range is taken that
neither the machine's routes and addresses nor another emulation has.
"""

from __future__ import annotations

import ipaddress
import json
import subprocess
from collections.abc import Collection, Iterable

from hetplan.emulation.tools import TOOL_SECONDS, tool
from hetplan.errors import InputError

_TABLES = (("-4", "route", "show", "table", "all"), ("-4", "address", "show"))


def choose_network(key: str, taken: Collection[int]) -> int:
    """The n of 10.n.0.0/16: the first that is free, from a place on that the key determines."""
    start = int(key, 16) % 256
    for step in range(256):
        number = (start + step) % 256
        if number not in taken:
            return number
    raise InputError(
        "every 10.n.0.0/16 has a route or an emulation on this machine already; take an emulation "
        "down, or run under `unshare -n`, where there are no routes"
    )


def taken_networks(prefixes: Iterable[str]) -> frozenset[int]:
    """Every n for which one of these IPv4 prefixes overlaps 10.n.0.0/16.

    Those of 8 bits and less are left out: default routes, halves of them as VPNs set them, and a
    company's route to all of 10.0.0.0/8 leave no n at all, and hide nothing behind one.
    """
    taken: set[int] = set()
    for prefix in prefixes:
        try:
            network = ipaddress.IPv4Network(prefix, strict=False)
        except ValueError:
            continue  # `default`, or what a newer ip prints
        first, last = int(network.network_address), int(network.broadcast_address)
        if network.prefixlen > 8 and first >> 24 == 10:
            taken.update(range(first >> 16 & 0xFF, (last >> 16 & 0xFF) + 1))
    return frozenset(taken)


def machine_prefixes() -> tuple[str, ...]:
    """Destinations of this machine's IPv4 routes, and its addresses with their networks."""
    found: list[str] = []
    for arguments in _TABLES:
        done = subprocess.run(
            (tool("ip"), "-j", *arguments),
            capture_output=True,
            text=True,
            check=False,
            timeout=TOOL_SECONDS,
        )
        for entry in json.loads(done.stdout or "[]"):
            found.append(str(entry.get("dst", "default")))
            found += [
                f"{address['local']}/{address['prefixlen']}"
                for address in entry.get("addr_info", ())
                if "local" in address
            ]
    return tuple(found)
