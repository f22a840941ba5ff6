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
    """Its options."""
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
class _Asked:
    """Which paths, at which prices."""

    prices: Floats
    allowed: Bools
    seconds: tuple[float, float]
    stages: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
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
        asked = _Asked(
            prices=prices,
            allowed=allowed,
            seconds=seconds,
            stages=(stages[0], rows),
        )
        known, mode = 1, None
        surcharge: tuple[float, ...] = ()
        if parent is not None:
            known, surcharge, mode = parent.microbatches, parent.surcharge, parent.mode
        if parent is None or most <= least * _NARROW or parent.microbatches == 1:
            known = self._fewest(asked, known, surcharge)
        if known == 0:
            return np.inf, None
        found = self._of_modes(asked, known, surcharge, mode)
        if found is not None:
            found = self._raised(asked, known, found)
        if found is None or found.weight * least >= self.limit:
            return np.inf, None
        return found.weight, self._path(found, least, known)

    def _of_modes(
        self,
        asked: _Asked,
        microbatches: int,
        surcharge: Sequence[float],
        likely: Mode | None,
    ) -> _Found | None:
        """By the mode that weighs most; None where no path is below the limit.

        In a wide interval by the likely one alone.
        """
        best, enough = None, self.limit / asked.seconds[0]
        modes = [mode for mode in self.modes if mode != likely]
        if likely is not None:
            wide = asked.seconds[1] > asked.seconds[0] * _NARROW
            modes = [likely] if wide else [likely, *modes]
        for mode in modes:
            found = self._weighed(asked, microbatches, mode, surcharge)
            if found is None or found.weight >= enough:
                return None
            if best is None or found.weight > best.weight:
                best = found
        return best

    def _weighed(
        self,
        asked: _Asked,
        microbatches: int,
        mode: Mode,
        surcharge: Sequence[float],
    ) -> _Found | None:
        """The path that weighs least at these surcharges."""
        prices, off = self._charged(asked, surcharge)
        least, most = asked.seconds
        # With fewer microbatches than stages, what is taken off may count more than they do.
        scale = 1.0 if self.options.enough_microbatches else most / least
        value, path = self._cheapest(
            asked,
            prices,
            microbatches,
            Mode(down=mode.down, bonus=mode.bonus * scale),
            asked.stages[0],
            least,
        )
        if value == np.inf:
            return None
        count = int(np.count_nonzero(np.cumprod(path[0] >= 0)))
        options = path[0, :count]
        use = self.options.use[options].sum(axis=0)
        return _Found(
            weight=value - off,
            without_price=value - off - float(use @ asked.prices),
            options=options,
            layers=path[1, :count],
            use=use,
            mode=mode,
            surcharge=tuple(surcharge) or (0.0,) * len(asked.prices),
        )

    def _charged(self, asked: _Asked, surcharge: Sequence[float]) -> tuple[Floats, float]:
        """(price of every option, what is taken off): a device of class k costs lambda_k more, and
        all that a pipeline may have of them are paid for already.
        """
        if not surcharge:
            return self.options.use @ asked.prices, 0.0
        more = np.array(surcharge)
        return self.options.use @ (asked.prices + more), float(more @ self._room)

    @property
    def _room(self) -> Floats:
        """[C] most devices that one sequence of a microbatch can occupy."""
        return self.options.devices / self.options.samples

    def _raised(self, asked: _Asked, microbatches: int, start: _Found) -> _Found | None:
        """With surcharges on classes of which the path has more devices than there are, and lower
        ones where it has fewer.
        """
        best, room, enough = start, self._room, self.limit / asked.seconds[0]
        for _ in range(_CLASSES_RAISED):
            over = best.use / room - 1
            charged = np.array(best.surcharge) > 0
            weigh = np.where(over > _FEW, over, np.where(charged & (over < -_FEW), -over, 0.0))
            place = int(np.argmax(weigh))
            if weigh[place] <= 0:
                return best
            low, high = best, None
            if over[place] <= 0:
                high, lower = best, _with(best.surcharge, place, 0.0)
                found = self._weighed(asked, microbatches, best.mode, lower)
                if found is None:
                    return None
                low = found
            raised = self._along(asked, microbatches, low, high, place)
            if raised is None or raised.weight >= enough:
                return None
            if raised.weight <= best.weight * (1 + _GAINED):
                return max(raised, best, key=lambda each: each.weight)
            best = raised
        return best

    def _along(
        self,
        asked: _Asked,
        microbatches: int,
        low: _Found,
        high: _Found | None,
        place: int,
    ) -> _Found | None:
        """The largest weight along one class's surcharge: between two paths, one that has too many
        devices of it and one that has not, at the surcharge at which both weigh the same.
        """
        room = float(self._room[place])
        enough = self.limit / asked.seconds[0]
        best = low if high is None or low.weight >= high.weight else high
        step = max(float(asked.prices.max()), 1e-6)
        for _ in range(_RAISES):
            over = float(low.use[place]) - room
            if over <= room * _FEW or best.weight >= enough:
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
            found = self._weighed(asked, microbatches, low.mode, _with(low.surcharge, place, at))
            if found is None:
                return None
            settled = high is not None and found.weight <= best.weight * (1 + _GAINED)
            if found.weight > best.weight:
                best = found
            if settled:
                break
            if found.use[place] > room * (1 + _FEW):
                low = found
            else:
                high = found
        return best

    def _cheapest(
        self,
        asked: _Asked,
        price: Floats,
        microbatches: int,
        mode: Mode,
        fewest: int,
        least: float,
    ) -> tuple[float, Ints]:
        self.calls += 1
        rows = asked.stages[1]
        path = np.empty((2, rows), dtype=np.int64)
        shape = (len(asked.allowed), 8, rows + 1, self.options.num_layers + 1)
        values, chosen = np.empty(shape), np.empty(shape, np.int64)
        weigh_turns(
            values,
            chosen,
            self.layer,
            self.wire,
            self.serial,
            self.most_layers(microbatches),
            price,
            asked.allowed,
            least,
            asked.seconds[1],
            mode.down,
            mode.bonus,
        )
        return cheapest_path(values, chosen, fewest, path), path

    def _fewest(self, asked: _Asked, known: int, surcharge: Sequence[float]) -> int:
        """Microbatches that a path whose stages take `most` seconds must do to be worth its price.

        0 where there is no such path. The price falls with fewer microbatches, for which more
        memory is left, so this climbs to the first number that holds itself up.
        """
        price, off = self._charged(asked, surcharge)
        while True:
            value, _ = self._cheapest(asked, price, known, NO_FILL, 1, np.inf)
            value -= off
            if (
                value > self.options.most_microbatches * (1 + 1e-9)
                or value * asked.seconds[0] >= self.limit
            ):
                return 0
            # A grid of few numbers, from below, so that few tables of memory are made.
            needed = int(1.06 ** np.floor(np.log(max(1.0, value * (1 - 1e-9))) / np.log(1.06)))
            if needed <= known:
                return known
            known = needed

    def _path(self, found: _Found, least: float, microbatches: int) -> Path:
        return Path(
            samples=self.options.samples,
            options=tuple(found.options.tolist()),
            layers=tuple(found.layers.tolist()),
            bottleneck_seconds=least,
            use=tuple(found.use.tolist()),
            weight_without_price=found.without_price,
            microbatches=microbatches,
            surcharge=found.surcharge,
            mode=found.mode,
        )


def _with(surcharge: tuple[float, ...], place: int, value: float) -> tuple[float, ...]:
    return (*surcharge[:place], value, *surcharge[place + 1 :])
