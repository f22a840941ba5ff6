"""Whether a site's power feeds its devices, and how many it feeds where it does not."""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.cluster.spec import Cluster, Island


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandPower:
    """Draw of one island's usable devices."""

    island: str
    devices: int
    """Devices of nodes that may be used."""
    watts_per_device: float | None
    """The island's own figure, or the limit of its kind's board; None: nobody says it."""
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
    """What one device draws: the island's figure, else its board's limit; None where unknown."""
    return island.power_watts or island.device.max_power_watts or None


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
