"""Which pipeline of these options weighs least, of those that have a bottleneck of about this time?

A path is the row of options of a pipeline's stages; its weight is a lower bound of its step over
its bottleneck's time where it does as many microbatches as the price of its devices
(`hetplan.search.multi_pipeline.bound`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.search.multi_pipeline.pricing import Bools, cheapest_path, weigh_turns
from hetplan.search.multi_pipeline.stage_options import MeshOptions
from hetplan.search.space.stage_table import FIRST, LAST, MIDDLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """Which of the inequalities a stage downstream of the bottleneck is weighed by."""

    down: float
    bonus: float


NO_FILL = Mode(down=0.0, bonus=0.0)
"""(a) alone."""


def modes_of(options: MeshOptions) -> tuple[Mode, ...]:
    """(c), (b), half of each, and (a) of `hetplan.search.multi_pipeline.bound`."""
    turn = _largest_turn(options, waits=options.rendezvous)
    return (
        Mode(down=2.0, bonus=1.0),
        Mode(down=1.0, bonus=turn),
        Mode(down=1.5, bonus=0.5 * (1.0 + turn)),
        NO_FILL,
    )


def _largest_turn(options: MeshOptions, *, waits: bool) -> float:
    """Of all stages but last ones, the largest part of a turn that its shorter pass takes."""
    layers = np.arange(1, options.num_layers + 1)
    largest = 0.0
    for role in (FIRST, MIDDLE):
        forward, backward = options.extra_forward[role], options.extra_backward[role]
        if waits:
            forward = forward + (0.0 if role == FIRST else options.arrive_forward)
            backward = backward + options.arrive_backward
        forward = forward[:, None] + options.forward[:, None] * layers
        backward = backward[:, None] + options.backward[:, None] * layers
        shorter = np.minimum(forward, backward)
        largest = max(largest, float((shorter / (forward + backward)).max()))
    return largest


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Stages of one pipeline, last stage first, and where its bottleneck may be."""

    samples: int
    """Sequences of a microbatch."""
    options: tuple[int, ...]
    layers: tuple[int, ...]
    bottleneck_seconds: float
    """Least stage time that was assumed of the bottleneck."""
    use: tuple[float, ...]
    """Devices of each class that one sequence of a microbatch occupies."""
    weight_without_price: float
    """Microbatches that the filling of the pipeline costs."""
    microbatches: int
    """No path of the same interval that is worth its price has fewer."""
    surcharge: tuple[float, ...]
    """[C] of a device, with which it weighs most."""
    mode: Mode
    """By which it weighs most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weighed:
    """The least path by one mode at surcharges."""

    weight: float
    without_price: float
    """The same without prices, at the surcharges."""
    options: Ints
    layers: Ints
    use: Floats
    mode: Mode
    surcharge: tuple[float, ...]


_FEW = 1e-9
"""A path has more devices than there are where it has more by this part of them."""

_NARROW = 1.02
"""Where the bottleneck is known this well all modes are tried."""

_RAISES, _CLASSES_RAISED = 5, 4
"""Surcharges that are tried for one class, and classes."""

_GAINED = 1e-4
"""Surcharges that add no more than this are not followed."""


@dataclass(slots=True)
class PathPricer:
    """Cheapest paths of stages with so many samples per microbatch at device prices."""

    options: MeshOptions
    layer: Floats
    wire: Floats
    serial: Floats
    modes: tuple[Mode, ...]
    known: dict[int, Ints]
    limit: float = np.inf
    """Seconds of a step that is known: only shorter ones are looked at."""
    check: Callable[[], None] | None = None
    """Called now and then; raises where time is up."""
    calls: int = 0

    def most_layers(self, microbatches: int) -> Ints:
        """[4, O, W + 1] units that fit in a pipeline of so many microbatches."""
        found = self.known.get(microbatches)
        if found is None:
            found = self.known[microbatches] = self.options.most_layers(
                microbatches,
                self.options.most_stages,
            )
        return found

    @staticmethod
    def of(options: MeshOptions) -> PathPricer:
        """Ready to price."""
        extra = options.extra_forward + options.extra_backward
        wire = extra.copy()
        for role in range(4):
            if not role & FIRST:
                wire[role] += options.arrive_forward
            if not role & LAST:
                wire[role] += options.arrive_backward
        waits = options.rendezvous
        return PathPricer(
            options=options,
            layer=options.forward + options.backward,
            wire=wire,
            serial=wire if waits else extra,
            modes=modes_of(options),
            known={},
        )

    def least(
        self,
        prices: Floats,
        allowed: Bools,
        seconds: tuple[float, float],
        stages: tuple[int, int],
        parent: Path | None = None,
    ) -> tuple[float, Path | None]:
        """(least weight of a path, the path); infinite, too, where its step is not below the limit.

        `seconds`: least and most that the bottleneck takes; `stages`: fewest and most of the path;
        `parent`: the path of a cell that holds this one.
        """
        if self.check is not None:
            self.check()
        least, most = seconds
        rows = min(stages[1], self.options.most_stages)
        if self.options.enough_microbatches:
            rows = int(min(rows, self.limit / least, self.options.most_microbatches))
        if rows < stages[0]:
            return np.inf, None
        return _Interval(self, prices, allowed, least, most, stages[0], rows).least_path(parent)


@dataclass(slots=True)
class _Interval:
    """Paths whose bottleneck takes `least` to `most` seconds, at prices."""

    pricer: PathPricer
    prices: Floats
    allowed: Bools
    least: float
    most: float
    fewest_stages: int
    most_stages: int
    microbatches: int = 1
    """No path that is worth its price has fewer."""

    def least_path(self, parent: Path | None) -> tuple[float, Path | None]:
        """As `PathPricer.least`."""
        mode: Mode | None = None
        surcharge: tuple[float, ...] = ()
        if parent is not None:
            self.microbatches = parent.microbatches
            surcharge, mode = parent.surcharge, parent.mode
        if parent is None or self.most <= self.least * _NARROW or parent.microbatches == 1:
            self.microbatches = self._needed(surcharge)
        if self.microbatches == 0:
            return np.inf, None
        best = self._of_modes(surcharge, mode)
        if best is not None:
            best = self._raised(best)
        if best is None or best.weight * self.least >= self.pricer.limit:
            return np.inf, None
        return best.weight, Path(
            samples=self.pricer.options.samples,
            options=tuple(best.options.tolist()),
            layers=tuple(best.layers.tolist()),
            bottleneck_seconds=self.least,
            use=tuple(best.use.tolist()),
            weight_without_price=best.without_price,
            microbatches=self.microbatches,
            surcharge=best.surcharge,
            mode=best.mode,
        )

    @property
    def _enough(self) -> float:
        """Paths that weigh so much are not below the limit."""
        return self.pricer.limit / self.least

    @property
    def _room(self) -> Floats:
        """[C] most devices that one sequence of a microbatch can occupy."""
        return self.pricer.options.devices / self.pricer.options.samples

    def _of_modes(self, surcharge: Sequence[float], likely: Mode | None) -> _Weighed | None:
        """By the mode that weighs most; None where no path is below the limit.

        In a wide interval by the likely one alone.
        """
        modes = [mode for mode in self.pricer.modes if mode != likely]
        if likely is not None:
            wide = self.most > self.least * _NARROW
            modes = [likely] if wide else [likely, *modes]
        best = None
        for mode in modes:
            weighed = self._weighed(mode, surcharge)
            if weighed is None or weighed.weight >= self._enough:
                return None
            if best is None or weighed.weight > best.weight:
                best = weighed
        return best

    def _weighed(self, mode: Mode, surcharge: Sequence[float]) -> _Weighed | None:
        """The path that weighs least at these surcharges."""
        prices, off = self._charged(surcharge)
        options = self.pricer.options
        # With fewer microbatches than stages, what is taken off may count more than they do.
        scale = 1.0 if options.enough_microbatches else self.most / self.least
        value, path = self._cheapest(
            prices,
            self.microbatches,
            Mode(down=mode.down, bonus=mode.bonus * scale),
            self.fewest_stages,
            self.least,
        )
        if value == np.inf:
            return None
        count = int(np.count_nonzero(np.cumprod(path[0] >= 0)))
        use = options.use[path[0, :count]].sum(axis=0)
        return _Weighed(
            weight=value - off,
            without_price=value - off - float(use @ self.prices),
            options=path[0, :count],
            layers=path[1, :count],
            use=use,
            mode=mode,
            surcharge=tuple(surcharge) or (0.0,) * len(self.prices),
        )

    def _charged(self, surcharge: Sequence[float]) -> tuple[Floats, float]:
        """(price of every option, what is taken off): a device of class k costs lambda_k more, and
        all that a pipeline may have of them are paid for already.
        """
        use = self.pricer.options.use
        if not surcharge:
            return use @ self.prices, 0.0
        more = np.array(surcharge)
        return use @ (self.prices + more), float(more @ self._room)

    def _raised(self, start: _Weighed) -> _Weighed | None:
        """With surcharges on classes of which the path has more devices than there are, and lower
        ones where it has fewer.
        """
        best, room = start, self._room
        for _ in range(_CLASSES_RAISED):
            over = best.use / room - 1
            charged = np.array(best.surcharge) > 0
            weigh = np.where(over > _FEW, over, np.where(charged & (over < -_FEW), -over, 0.0))
            place = int(np.argmax(weigh))
            if weigh[place] <= 0:
                return best
            low, high = best, None
            if over[place] <= 0:
                lower = self._weighed(best.mode, _with(best.surcharge, place, 0.0))
                if lower is None:
                    return None
                low, high = lower, best
            raised = self._along(low, high, place)
            if raised is None or raised.weight >= self._enough:
                return None
            if raised.weight <= best.weight * (1 + _GAINED):
                return max(raised, best, key=lambda each: each.weight)
            best = raised
        return best

    def _along(self, low: _Weighed, high: _Weighed | None, place: int) -> _Weighed | None:
        """The largest weight along one class's surcharge: between two paths, one that has too many
        devices of it and one that has not, at the surcharge at which both weigh the same.
        """
        room = float(self._room[place])
        best = low if high is None or low.weight >= high.weight else high
        step = max(float(self.prices.max()), 1e-6)
        for _ in range(_RAISES):
            over = float(low.use[place]) - room
            if over <= room * _FEW or best.weight >= self._enough:
                break
            if high is None:
                at = low.surcharge[place] + step
                step *= 4
            else:
                # Weights are linear in the surcharge, with the paths' devices beyond the room.
                spare = room - float(high.use[place])
                apart = high.surcharge[place] - low.surcharge[place]
                at = low.surcharge[place] + (high.weight - low.weight + spare * apart) / (
                    over + spare
                )
            weighed = self._weighed(low.mode, _with(low.surcharge, place, at))
            if weighed is None:
                return None
            settled = high is not None and weighed.weight <= best.weight * (1 + _GAINED)
            if weighed.weight > best.weight:
                best = weighed
            if settled:
                break
            if weighed.use[place] > room * (1 + _FEW):
                low = weighed
            else:
                high = weighed
        return best

    def _cheapest(
        self, price: Floats, microbatches: int, mode: Mode, fewest: int, least: float
    ) -> tuple[float, Ints]:
        pricer = self.pricer
        pricer.calls += 1
        path = np.empty((2, self.most_stages), dtype=np.int64)
        shape = (len(self.allowed), 8, self.most_stages + 1, pricer.options.num_layers + 1)
        values, chosen = np.empty(shape), np.empty(shape, np.int64)
        weigh_turns(
            values,
            chosen,
            pricer.layer,
            pricer.wire,
            pricer.serial,
            pricer.most_layers(microbatches),
            price,
            self.allowed,
            least,
            self.most,
            mode.down,
            mode.bonus,
        )
        return cheapest_path(values, chosen, fewest, path), path

    def _needed(self, surcharge: Sequence[float]) -> int:
        """Microbatches that a path whose stages take `most` seconds must do to be worth its price.

        0 where there is no such path. The price falls with fewer microbatches, for which more
        memory is left, so this climbs to the first number that holds itself up.
        """
        price, off = self._charged(surcharge)
        most, known = self.pricer.options.most_microbatches, self.microbatches
        while True:
            value, _ = self._cheapest(price, known, NO_FILL, 1, np.inf)
            value -= off
            if value > most * (1 + 1e-9) or value * self.least >= self.pricer.limit:
                return 0
            # A grid of few numbers, from below, so that few tables of memory are made.
            needed = int(1.06 ** np.floor(np.log(max(1.0, value * (1 - 1e-9))) / np.log(1.06)))
            if needed <= known:
                return known
            known = needed


def _with(surcharge: tuple[float, ...], place: int, value: float) -> tuple[float, ...]:
    return (*surcharge[:place], value, *surcharge[place + 1 :])
