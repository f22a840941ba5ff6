"""Whether a site's power feeds its devices, how many it feeds where it does not, and what a cap on
each device's power leaves of its clock.

    P / P_max = s + (1 - s) f max(f, v)^2

with the clock f over the one at the board's limit, a static part s that does not fall with it, and
a voltage that is in proportion to the clock down to its least, v: dynamic power is f V^2.
"""

from __future__ import annotations

from hetplan.errors import InputError

STATIC_POWER = 0.1
"""Assumed: part of a board's limit that does not fall with the clock, about what idle boards draw.
McDonald et al. (arXiv 2205.09646) found language models trained under 150 of 250 W on average 6.8 %
slower; this law says 22 %, because it takes the work to draw all of the limit and to wait for the
clock only. Where a capped clock was read, `clock_ratio` without the cap is better."""
MIN_VOLTAGE = 0.6
"""Assumed: part of its voltage at the highest clock below which a chip's voltage does not go."""


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
