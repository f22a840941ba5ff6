"""Which pipeline of these options weighs least, of those that have a bottleneck of about this time?

A path is the row of options of a pipeline's stages; its weight is a lower bound of its step over
its bottleneck's time where it does as many microbatches as the price of its devices
(`hetplan.search.multi_pipeline.bound`). A program over positions and layers finds the cheapest.

A path has one part per stage. Its bottleneck's stage time lies between `least` and `most` seconds;
stages upstream of it, itself and those downstream of it weigh

    price + C / least        price        price + down * C / least - bonus

(`multi_pipeline.bound` says why). Positions count from the last stage, as microbatches in flight
do: a stage at position r has r of them in flight. The options that a stage may have can differ
between the back of a path and its front (two phases).

    below[r][l]  least weight of stages 1 to r, all downstream of the bottleneck, with l layers
    above[r][l]  the same with the bottleneck among them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.kernels import kernel
from hetplan.search.multi_pipeline.stage_options import Bools, MeshOptions
from hetplan.search.space.stage_table import BOTH, FIRST, LAST, MIDDLE, ROLES

# ---- the program

BELOW, TURN, ABOVE, FIRST_TURN, FIRST_ABOVE, LAST_BELOW, LAST_TURN, ONLY = range(8)
"""Kinds of stages: downstream of the bottleneck, itself, upstream; the first, the last, both."""


class Stages(NamedTuple):
    """Numbers of O options, as kernels take them."""

    layer: Floats
    """[O] seconds per layer."""
    wire: Floats
    """[4, O] what a stage of this role has besides, as it counts for one microbatch's way."""
    serial: Floats
    """[4, O] the same in a stage's own turn."""
    most_layers: Ints
    """[4, O, W + 1]"""
    price: Floats
    """[O]"""
    allowed: Bools
    """[phase, O]"""


@kernel
def _table(
    weights: Floats,
    which: Ints,
    stages: Stages,
    phase: int,
    role: int,
    slope: float,
    bonus: float,
    least: float,
    most: float,
) -> None:
    """[r][n] least weight of a stage of n layers at position r, and whose option it is; of stages
    that take `least` to `most` seconds.
    """
    weights[:] = np.inf
    which[:] = -1
    rows, layers = weights.shape[0] - 1, weights.shape[1] - 1
    layer, wire, serial, most_layers, price, allowed = stages
    for o in range(layer.shape[0]):
        if not allowed[phase, o]:
            continue
        # A little more than fits: another order of additions must not leave a stage out.
        fits = int(np.floor((most * (1 + 1e-12) - serial[role, o]) / layer[o] * (1 + 1e-12)))
        row = rows
        for n in range(1, min(layers, fits) + 1):
            while row >= 1 and most_layers[role, o, row] < n:
                row -= 1
            if row < 1:
                break
            if (n * layer[o] + serial[role, o]) * (1 + 1e-12) < least:
                continue
            value = price[o] + slope * (n * layer[o] + wire[role, o]) - bonus
            if value < weights[row, n]:
                weights[row, n] = value
                which[row, n] = o
    for row in range(rows - 1, 0, -1):
        for n in range(1, layers + 1):
            if weights[row + 1, n] < weights[row, n]:
                weights[row, n] = weights[row + 1, n]
                which[row, n] = which[row + 1, n]


@kernel
def _longest(weights: Floats) -> int:
    """The most layers of such a stage; 0 where none fits."""
    for n in range(weights.shape[0] - 1, 0, -1):
        if weights[n] < np.inf:
            return n
    return 0


@kernel
def weigh_turns(
    values: Floats,
    chosen: Ints,
    stages: Stages,
    least: float,
    bottleneck: float,
    most: float,
    down: float,
    bonus: float,
) -> None:
    """Fill [phase, kind, r, n] with weights of stages, and with the options that have them."""
    rows = values.shape[2] - 1
    up = 1.0 / least
    slopes = (down * up, 0.0, up, 0.0, up, down * up, 0.0, 0.0)
    roles = (MIDDLE, MIDDLE, MIDDLE, FIRST, FIRST, LAST, LAST, BOTH)
    for phase in range(values.shape[0]):
        for kind in range(8):
            end = 2 if kind >= LAST_BELOW else rows + 1
            _table(
                values[phase, kind, :end],
                chosen[phase, kind, :end],
                stages,
                phase,
                roles[kind],
                slopes[kind],
                bonus if kind in (BELOW, LAST_BELOW) else 0.0,
                bottleneck if kind in (TURN, FIRST_TURN, LAST_TURN, ONLY) else 0.0,
                most,
            )


@kernel
def _lowest_below(values: Floats) -> float:
    """What one more stage downstream of the bottleneck can take off at most; not above 0."""
    return float(min(0.0, values[:, BELOW].min()))


@kernel
def _widest(values: Floats) -> int:
    """The most layers of any stage."""
    for n in range(values.shape[3] - 1, 0, -1):
        for phase in range(values.shape[0]):
            for kind in range(values.shape[1]):
                for r in range(1, values.shape[2]):
                    if values[phase, kind, r, n] < np.inf:
                        return n
    return 0


@kernel
def cheapest_path(values: Floats, chosen: Ints, fewest: int, path: Ints) -> float:
    """Least weight of a whole path of `fewest` or more stages, infinite where there is none.

    `values`, `chosen`: [phase, kind, rows + 1, layers + 1]. `path` [2, rows] is filled with
    (option, layers) by position from the back, from index 0 on; its end is marked by option -1.
    """
    # One function: forward through the positions, and back from the best end over what it came by.
    phases, rows, layers = values.shape[0], values.shape[2] - 1, values.shape[3] - 1
    # [bottleneck among them?, phase, r, l], and (layers, the same of what is downstream) as one.
    reached = np.full((2, phases, rows + 1, layers + 1), np.inf)
    came = np.zeros((2, phases, rows + 1, layers + 1), np.int64)
    best, best_row, best_came, best_kind, best_phase = np.inf, 0, 0, ONLY, 0
    for phase in range(phases):
        for n in range(1, layers + 1):
            reached[0, phase, 1, n], came[0, phase, 1, n] = values[phase, LAST_BELOW, 1, n], n * 4
            reached[1, phase, 1, n], came[1, phase, 1, n] = values[phase, LAST_TURN, 1, n], n * 4
        if fewest <= 1 and values[phase, ONLY, 1, layers] < best:
            best, best_row, best_came = values[phase, ONLY, 1, layers], 1, layers * 4
            best_phase = phase
    deepest, most = _lowest_below(values), _widest(values)
    for r in range(2, rows + 1):
        # Stages upstream of the bottleneck weigh nothing less than 0: nothing better follows.
        least = reached[0, :, r - 1].min() + deepest * (rows - r)
        if min(least, reached[1, :, r - 1].min()) >= best:
            break
        # What stages further upstream can hold.
        needed = layers - (rows - r) * most
        for phase in range(phases):
            for before in range(phase + 1):
                for k in range(2):
                    if r < fewest:
                        continue
                    ends = values[phase, FIRST_TURN + k, r]
                    for n in range(1, min(layers - 1, _longest(ends)) + 1):
                        value = reached[k, before, r - 1, layers - n] + ends[n]
                        if value < best:
                            best, best_row, best_phase = value, r, phase
                            best_kind, best_came = FIRST_TURN + k, n * 4 + 2 * k + before
                if r == rows:
                    continue
                for kind in range(3):
                    k, into = int(kind == ABOVE), int(kind != BELOW)
                    weights = values[phase, kind, r]
                    downstream, here = reached[k, before, r - 1], reached[into, phase, r]
                    last = _longest(downstream)
                    if last == 0:
                        continue
                    for n in range(1, _longest(weights) + 1):
                        for held in range(max(r - 1 + n, needed), min(last + n + 1, layers)):
                            value = downstream[held - n] + weights[n]
                            if value < here[held]:
                                here[held] = value
                                came[into, phase, r, held] = n * 4 + 2 * k + before
    path[0, :] = -1
    if best == np.inf:
        return float(best)
    left, kind, phase, code = layers, best_kind, best_phase, best_came
    for r in range(best_row, 0, -1):
        n = code // 4
        path[0, r - 1], path[1, r - 1] = chosen[phase, kind, r, n], n
        left -= n
        if r > 1:
            k, phase = code % 4 // 2, code % 2
            code = came[k, phase, r - 1, left]
            if r == 2:
                kind = LAST_TURN if k else LAST_BELOW
            elif k == 0:
                kind = BELOW
            else:
                kind = ABOVE if code % 4 // 2 else TURN
    return float(best)


# ---- paths of an interval of the bottleneck's time


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
    room: tuple[float, ...]
    """The same, of stages that take their part of the stages that their meshes can have."""
    weight: float
    """At prices and surcharges."""
    weight_without_price: float
    """Microbatches that the filling of the pipeline costs."""
    microbatches: int
    """No path of the same interval that is worth its price has fewer."""
    surcharge: tuple[float, ...]
    """[C] of a device, beside its price."""
    mode: Mode
    """By which it was weighed."""


_FEW = 1e-9
"""A path has more devices than there are where it has more by this part of them."""

_NARROW = 1.02
"""Where the bottleneck is known this well all modes are tried."""

_RAISES, _CLASSES_RAISED = 5, 4
"""Surcharges that are tried for one class, and classes."""

_GAINED = 1e-4
"""Surcharges that add no more than this are not followed."""


class PathPricer:
    """Cheapest paths of stages with so many samples per microbatch at device prices."""

    def __init__(self, options: MeshOptions) -> None:
        self.options = options
        self.limit = np.inf
        """Seconds of a step that is known: only shorter ones are looked at."""
        self.check: Callable[[], None] | None = None
        """Called now and then; raises where time is up."""
        self.modes = modes_of(options)
        extra = options.extra_forward + options.extra_backward
        wire = extra.copy()
        for role in range(ROLES):
            if not role & FIRST:
                wire[role] += options.arrive_forward
            if not role & LAST:
                wire[role] += options.arrive_backward
        self.layer = options.forward + options.backward
        self.wire, self.serial = wire, wire if options.rendezvous else extra

    def stages(self, microbatches: int, price: Floats, allowed: Bools) -> Stages:
        """Numbers of pipelines of so many microbatches; price: [O], allowed: [phase, O]."""
        most = self.options.memory.most_layers(microbatches, self.options.most_stages)
        return Stages(self.layer, self.wire, self.serial, most, price, allowed)

    def least(
        self,
        prices: Floats,
        allowed: Bools,
        least: float,
        most: float,
        parent: Path | None = None,
    ) -> Path | None:
        """The path that weighs least, by what it weighs most; None where its step is not below the
        limit.

        The bottleneck takes `least` to `most` seconds; `parent`: the path of a cell that holds
        this one.
        """
        if self.check is not None:
            self.check()
        rows = self.options.most_stages
        if self.options.enough_microbatches:
            rows = int(min(rows, self.limit / least, self.options.most_microbatches))
        if rows < self.options.fewest_stages:
            return None
        return _Interval(self, prices, allowed, least, most, rows).least_path(parent)


@dataclass(slots=True)
class _Interval:
    """Paths whose bottleneck takes `least` to `most` seconds, at prices."""

    pricer: PathPricer
    prices: Floats
    allowed: Bools
    least: float
    most: float
    most_stages: int
    microbatches: int = 1
    """No path that is worth its price has fewer."""

    def least_path(self, parent: Path | None) -> Path | None:
        """As `PathPricer.least`."""
        mode: Mode | None = None
        surcharge: tuple[float, ...] = ()
        if parent is not None:
            self.microbatches = parent.microbatches
            surcharge, mode = parent.surcharge, parent.mode
        if parent is None or self.most <= self.least * _NARROW or parent.microbatches == 1:
            self.microbatches = self._needed(surcharge)
        if self.microbatches == 0:
            return None
        best = self._of_modes(surcharge, mode)
        if best is not None:
            best = self._raised(best)
        if best is None or best.weight * self.least >= self.pricer.limit:
            return None
        return best

    @property
    def _enough(self) -> float:
        """Paths that weigh so much are not below the limit."""
        return self.pricer.limit / self.least

    @property
    def _room(self) -> Floats:
        """[C] most devices that one sequence of a microbatch can occupy."""
        return self.pricer.options.devices / self.pricer.options.samples

    def _of_modes(self, surcharge: Sequence[float], likely: Mode | None) -> Path | None:
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

    def _weighed(self, mode: Mode, surcharge: Sequence[float]) -> Path | None:
        """The path that weighs least at these surcharges."""
        prices, off = self._charged(surcharge)
        options = self.pricer.options
        # With fewer microbatches than stages, what is taken off may count more than they do.
        scale = 1.0 if options.enough_microbatches else self.most / self.least
        value, path = self._cheapest(
            prices,
            self.microbatches,
            Mode(down=mode.down, bonus=mode.bonus * scale),
            options.fewest_stages,
            self.least,
        )
        if value == np.inf:
            return None
        count = int(np.count_nonzero(np.cumprod(path[0] >= 0)))
        chosen = path[0, :count]
        use, room = options.use[chosen].sum(axis=0), options.room[chosen].sum(axis=0)
        return Path(
            samples=options.samples,
            options=tuple(path[0, :count].tolist()),
            layers=tuple(path[1, :count].tolist()),
            bottleneck_seconds=self.least,
            use=tuple(use.tolist()),
            room=tuple(room.tolist()),
            weight=value - off,
            weight_without_price=value - off - float(use @ self.prices),
            microbatches=self.microbatches,
            surcharge=tuple(surcharge) or (0.0,) * len(self.prices),
            mode=mode,
        )

    def _charged(self, surcharge: Sequence[float]) -> tuple[Floats, float]:
        """(price of every option, what is taken off): a counted device of class k costs lambda_k
        more, and all that a pipeline may have of them are paid for already.
        """
        priced = self.pricer.options.use @ self.prices
        if not surcharge:
            return priced, 0.0
        more = np.array(surcharge)
        return priced + self.pricer.options.room @ more, float(more @ self._room)

    def _raised(self, start: Path) -> Path | None:
        """With surcharges on classes of which the path has more devices than there are, and lower
        ones where it has fewer.
        """
        best, room = start, self._room
        for _ in range(_CLASSES_RAISED):
            over = np.array(best.room) / room - 1
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

    def _along(self, low: Path, high: Path | None, place: int) -> Path | None:
        """The largest weight along one class's surcharge: between two paths, one that has too many
        devices of it and one that has not, at the surcharge at which both weigh the same.
        """
        room = float(self._room[place])
        best = low if high is None or low.weight >= high.weight else high
        step = max(float(self.prices.max()), 1e-6)
        for _ in range(_RAISES):
            over = low.room[place] - room
            if over <= room * _FEW or best.weight >= self._enough:
                break
            if high is None:
                at = low.surcharge[place] + step
                step *= 4
            else:
                # Weights are linear in the surcharge, with the paths' devices beyond the room.
                spare = room - high.room[place]
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
            if weighed.room[place] > room * (1 + _FEW):
                low = weighed
            else:
                high = weighed
        return best

    def _cheapest(
        self, price: Floats, microbatches: int, mode: Mode, fewest: int, least: float
    ) -> tuple[float, Ints]:
        path = np.empty((2, self.most_stages), dtype=np.int64)
        layers = self.pricer.options.num_layers
        shape = (len(self.allowed), 8, self.most_stages + 1, layers + 1)
        values, chosen = np.empty(shape), np.empty(shape, np.int64)
        stages = self.pricer.stages(microbatches, price, self.allowed)
        weigh_turns(values, chosen, stages, least, self.least, self.most, mode.down, mode.bonus)
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
