"""Expected wall time of a run that saves, fails and starts again, in closed form.

Failures are a Poisson process of rate L that also strikes while the run saves, restarts or waits.
Work is done in segments of t seconds, each followed by a save for which training waits c seconds;
the save counts a seconds later (asynchronous saving; otherwise a = 0). A failure throws the run
back to the last save that counts, after R seconds, which start anew where another failure strikes.

Recovery. One try of R seconds succeeds with probability exp(-L R); the expected seconds until a
try succeeds are r = (exp(L R) - 1) / L.

From the moment a save counts, the next one counts p = t + c later if nothing fails. The
expected time until p seconds or a failure is (1 - exp(-L p)) / L, and a failure comes with
probability 1 - exp(-L p). Then recovery takes r, and the run needs p + a seconds without
failure (it is back at the snapshot, a seconds before that moment), which takes
exp(L R) (exp(L (p + a)) - 1) / L with every failure's recovery in between. All together:

    E = (exp(L p) - 1) exp(L (a + R)) / L                                            (segment)

With a = 0 this is Daly's complete model (Future Generation Computer Systems 22, 2006). E / t is
least where (1 - L t) exp(L (t + c)) = 1, that is

    t = (1 + W(-exp(-1 - L c))) / L                                                  (best)

with W the main branch of Lambert's function: neither a nor R matters. For small L c it is Young's
sqrt(2 c / L) (Communications of the ACM 17, 1974). A save that is still being written lets no other
one begin, so t >= a - c.

Parts of the whole time T, all exact. T L failures strike (Wald). At a moment the run has been
recovering for less than x seconds of R since the last failure with probability 1 - exp(-L x), so
steps of recovery that end x1 and x2 seconds after the failure are T (exp(-L x1) - exp(-L x2)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_HOPELESS = 7.0
"""Failures in a segment and its recovery with which the run takes 1,000 times its work: never."""
_RARE = 1e-9
"""Failures in a segment below which none are counted: (exp(x) - 1) / x is 1 to 9 digits."""
_HALVINGS = 50
"""To 15 digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """A run that saves, fails and starts again."""

    failures_per_second: float
    save_seconds: float
    """For which training waits at every save (c)."""
    delay_seconds: float
    """From then until the save counts (a)."""
    recovery_seconds: float
    """From a failure to the first step (R)."""

    def segment_seconds(self, work_seconds: float) -> float:
        """Expected wall time of so much work and its save; infinite where it never ends."""
        rate, whole = self.failures_per_second, work_seconds + self.save_seconds
        waits = rate * (self.delay_seconds + self.recovery_seconds)
        if rate * whole + waits > _HOPELESS:
            return math.inf
        if rate * whole < _RARE:
            return whole * math.exp(waits)
        return math.expm1(rate * whole) * math.exp(waits) / rate

    def stretch(self, work_seconds: float) -> float:
        """Wall time over work with segments of so much work."""
        return self.segment_seconds(work_seconds) / work_seconds

    @property
    def best_seconds(self) -> float:
        """Work of a segment that makes the run shortest; infinite where saving does not pay."""
        rate, save = self.failures_per_second, self.save_seconds
        if rate == 0.0:
            return math.inf
        if rate * save < _RARE:  # the branch point of W, where its argument has no digits left
            found = math.sqrt(2.0 * save / rate)
        else:
            # 1 + W by halving: scipy's takes longer to import than an estimate.
            low, high = 0.0, 1.0
            for _ in range(_HALVINGS):
                middle = (low + high) / 2.0
                above = math.log1p(-middle) + middle + rate * save > 0.0
                low, high = (middle, high) if above else (low, middle)
            found = low / rate
        return max(found, self.delay_seconds - save)

    def best_steps(self, step_seconds: float, most: float) -> int:
        """The best segment in whole steps, at most `most` of them."""
        steps = self.best_seconds / step_seconds
        if steps >= most:
            return max(1, round(most))
        least = max(1, math.floor(steps))
        if least * step_seconds < self.delay_seconds - self.save_seconds:
            return least + 1
        # E / t falls before its least point and rises after it: one of the two neighbours is best.
        return min(least, least + 1, key=lambda count: self.stretch(count * step_seconds))

    def share_before(self, seconds: float) -> float:
        """Part of all time that lies less than so many seconds after the last failure."""
        return -math.expm1(-self.failures_per_second * seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowing:
    """Parts that fail without ending the run: it waits, then is slower until they are repaired."""

    failures_per_second: float
    """Of all parts whose failure has this effect."""
    step_factor: float
    """The step on the backup path over the usual one."""


def speed(slowings: tuple[Slowing, ...], detection_seconds: float, repair_seconds: float) -> float:
    """Mean speed of a run whose failed paths fall back, over its usual one.

    Each failure stops the run for the detection, then slows it until the repair. Failures come
    independently, so none came in the last d seconds with probability exp(-rate d), and the slowest
    of the paths that are down decides (a synchronous step waits for it).
    """
    rate = math.fsum(each.failures_per_second for each in slowings)
    moving = math.exp(-rate * detection_seconds)
    mean, none_slower = 0.0, 1.0
    for each in sorted(slowings, key=lambda each: -each.step_factor):
        whole = math.exp(-each.failures_per_second * repair_seconds)
        mean += none_slower * (1.0 - whole) / each.step_factor
        none_slower *= whole
    return moving * (mean + none_slower)
