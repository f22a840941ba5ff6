"""What devices draw by what they do, one at the wall with its part of the node and many at the
meter: the one law for energy, its price, the limits of sites and the checks of files.

    computing       inside a forward or backward pass, its collectives included
    communicating   elsewhere in the step: transfers between stages, reduction, update, every wait
    idle            unused, in a node of which other devices are used

Devices that wait and devices that communicate are one: both run the collectives' kernels, which
poll. Two numbers per device were fitted on power at the wall of eight H100 in nodes of two makers
(MLPerf Training v4.0 and v4.1, not verified by MLCommons Association); `python -m evaluation power`
makes them again, with their errors on systems left out. Other kinds scale them by their boards'
limit. Where an island says its `power`, that is what its devices draw computing, and the law says
only how much less they draw otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.cluster.devices import STATIC_POWER
from hetplan.cluster.spec import Cluster, Island
from hetplan.errors import InputError
from hetplan.files.quantities import NonNegative, Positive, Ratio, check_limits

FITTED_KIND, _FITTED_LIMIT_WATTS = "nvidia-h100-80gb-sxm", 700.0
COMPUTING_WATTS, COMMUNICATING_WATTS = 961.0, 498.0
"""Per H100 of 700 W at the wall, the mean of two makers' levels: `python -m evaluation power`."""
BOARD_SHARE = 0.985
"""Of its limit a board draws so much in large products: 690 of 700 W on H200, 985 of 1000 W on
B200 (medians of sustained bf16 products over 2e11 operations, AIConfigurator, Apache-2.0)."""
_IDLE_WATTS = COMPUTING_WATTS - (BOARD_SHARE - STATIC_POWER) * _FITTED_LIMIT_WATTS
"""The node's part stays, and of the board's what an idle one draws."""
_FITTED = "power at the wall of H100 nodes"

_FITTED_LOG_HALFWIDTH = 0.23
"""Of the 90 % interval on the node of an unseen maker: two makers' levels are 16 % apart, so that
of one maker's level around the mean of two the deviation is 0.162 / sqrt 2 x sqrt 1.5 = 0.14."""
_SCALED_LOG_HALFWIDTH = 0.35
"""Assumed, for kinds without a measurement: what the node adds to its boards differs (datasheets
rate DGX A100, H100 and B200 at 2.03, 1.82 and 1.79 times theirs), and B200 and GB200 drew 0.7 to
1.0 of their limit in large products of other libraries and formats (AIConfigurator)."""
_SAID_LOG_HALFWIDTH = 0.1
"""Assumed, where the cluster file says what a device draws under load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLaw:
    """Watts at the wall of one device with its part of the node, the site's overhead left out."""

    kind: str
    idle_watts: NonNegative
    communicating_watts: NonNegative
    computing_watts: Positive
    log_halfwidth: NonNegative
    """Of the 90 % interval."""
    source: str
    pue: Ratio = 1.0
    """Energy of the site over that of its nodes; 1 where the cluster file says none."""

    def __post_init__(self) -> None:
        check_limits(self)
        if not self.idle_watts <= self.communicating_watts <= self.computing_watts:
            raise InputError(
                f"{self.kind}: idle {self.idle_watts:g} W, communicating "
                f"{self.communicating_watts:g} W and computing {self.computing_watts:g} W; a "
                "device that does more draws no less"
            )

    def meter_watts(self, devices: int, load: float = 1.0, *, unused: int = 0) -> float:
        """Of devices that compute for this part of the time, and unused ones in their nodes."""
        each = self.computing_watts * load + self.communicating_watts * (1.0 - load)
        return self.pue * (devices * each + unused * self.idle_watts)


def power_law(cluster: Cluster, island: Island) -> PowerLaw | None:
    """What a device of the island draws; None where neither its power nor its board's limit is
    known.
    """
    kind, limit, said = island.device.kind, island.device.max_power_watts, island.power_watts
    cap = limit if island.power_cap_watts is None else island.power_cap_watts
    site = cluster.site_of(island.region)
    pue = 1.0 if site is None else site.pue
    if said is not None:
        # What is said holds the site's overhead already.
        scale, less = said / pue / COMPUTING_WATTS, 0.0
        source, halfwidth = "`power` of the cluster file", _SAID_LOG_HALFWIDTH
    elif limit:
        scale, less = limit / _FITTED_LIMIT_WATTS, max(0.0, BOARD_SHARE * limit - cap)
        source, halfwidth = _FITTED, _FITTED_LOG_HALFWIDTH
        if kind != FITTED_KIND:
            source, halfwidth = f"{_FITTED}, scaled by the board's limit", _SCALED_LOG_HALFWIDTH
    else:
        return None
    computing = COMPUTING_WATTS * scale - less
    communicating = min(COMMUNICATING_WATTS * scale, computing)
    return PowerLaw(
        kind=kind,
        idle_watts=min(_IDLE_WATTS * scale, communicating),
        communicating_watts=communicating,
        computing_watts=computing,
        log_halfwidth=halfwidth,
        source=source,
        pue=pue,
    )
