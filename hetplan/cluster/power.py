"""Whether a site's power feeds its devices, how many it feeds where it does not, and what a cap on
each device's power leaves of its clock.

    P / P_max = s + (1 - s) f max(f, v)^2

with the clock f over the one at the board's limit, a static part s that does not fall with it, and
a voltage that is in proportion to the clock down to its least, v: dynamic power is f V^2.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.cluster.spec import Cluster, Island
from hetplan.errors import InputError

STATIC_POWER = 0.1
"""Assumed: part of a board's limit that does not fall with the clock, about what idle boards draw.
McDonald et al. (arXiv 2205.09646) found language models trained under 150 of 250 W on average 6.8 %
slower; this law says 22 %, because it takes the work to draw all of the limit and to wait for the
clock only. Where a capped clock was read, `clock_ratio` without the cap is better."""
MIN_VOLTAGE = 0.6
"""Assumed: part of its voltage at the highest clock below which a chip's voltage does not go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandPower:
    """Draw of one island's usable devices."""

    island: str
    devices: int
    """Devices of nodes that may be used."""
    watts_per_device: float | None
    """The island's own figure, or the limit that is set, or its kind's; None: nobody says it."""
    fed: int
    """Devices, in whole nodes, that the site's limit feeds when no other island runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePower:
    """Draw of a site under full load against its limit."""

    site: str
    limit_watts: float | None
    """None: no limit is given."""
    draw_watts: float
    """Of all usable devices whose figure is known."""
    islands: tuple[IslandPower, ...]

    @property
    def feeds_all(self) -> bool:
        """Whether all devices whose figure is known can run at the same time."""
        return self.limit_watts is None or self.draw_watts <= self.limit_watts


def watts_per_device(island: Island) -> float | None:
    """What one device draws: the island's figure, else its limit; None where unknown.

    The limit is the one that is set, or the board's.
    """
    return island.power_watts or island.power_cap_watts or island.device.max_power_watts or None


def site_powers(cluster: Cluster) -> tuple[SitePower, ...]:
    """Every site, in file order."""
    found = []
    for site in cluster.sites:
        members = set(site.regions)
        limit = site.power_limit_watts
        islands = tuple(
            _island_power(island, limit) for island in cluster.islands if island.region in members
        )
        draw = sum((each.watts_per_device or 0.0) * each.devices for each in islands)
        found.append(SitePower(site=site.name, limit_watts=limit, draw_watts=draw, islands=islands))
    return tuple(found)


def _island_power(island: Island, limit_watts: float | None) -> IslandPower:
    each = watts_per_device(island)
    devices = island.num_usable_devices
    fed = devices
    if each is not None and limit_watts is not None:
        nodes = int(limit_watts / (each * island.devices_per_node) * (1 + 1e-12))
        fed = min(devices, nodes * island.devices_per_node)
    return IslandPower(island=island.name, devices=devices, watts_per_device=each, fed=fed)


def capped_clock_ratio(power_ratio: float) -> float:
    """Clock under a power cap over the clock at the limit of the board.

    A device that did not draw its limit anyway loses less: this is a lower bound of its clock. An
    InputError where the cap leaves nothing to compute with.
    """
    if power_ratio >= 1:
        return 1.0
    dynamic = (power_ratio - STATIC_POWER) / (1.0 - STATIC_POWER)
    if dynamic <= 0:
        raise InputError(
            f"a power cap of {power_ratio:.0%} of the board's limit is no more than the "
            f"{STATIC_POWER:.0%} that a device is taken to draw without computing; raise it"
        )
    scaled = float(dynamic ** (1.0 / 3.0))
    return scaled if scaled >= MIN_VOLTAGE else dynamic / MIN_VOLTAGE**2
