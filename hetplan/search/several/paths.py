"""Which path of one pipeline weighs least, of those that have a bottleneck of about this time?

A path has one part per stage; its weight is a lower bound of its step over its bottleneck's time
where it does as many microbatches as the price of its devices (`hetplan.search.several.bound`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.search.families.space import FIRST, LAST, MIDDLE
from hetplan.search.several.options import Options
from hetplan.search.several.pricing import Bools, cheapest_path, weigh_turns
from hetplan.search.several.slanted import weigh_slanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Parts of the stages of one pipeline, last stage first, and where its bottleneck may be."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """Which of the inequalities a stage downstream of the bottleneck is weighed by."""

    down: float
    bonus: float


_NO_FILL = Mode(down=0.0, bonus=0.0)
"""(a) alone."""


def _modes(turn: float) -> tuple[Mode, ...]:
    """(c), (b), half of each, and (a); `turn`: the largest min(F, B) / C of a bottleneck."""
    return (
        Mode(down=2.0, bonus=1.0),
        Mode(down=1.0, bonus=turn),
        Mode(down=1.5, bonus=0.5 * (1.0 + turn)),
        _NO_FILL,
    )


@dataclass(slots=True)
class PathPricer:
    """Cheapest paths of one job's options at device prices."""

    options: Options
    layer: Floats
    wire: Floats
    serial: Floats
    modes: tuple[Mode, ...]
    early_sends: bool
    extra_depth: int
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
                self.options.stage_limit + self.extra_depth,
                # G m is at most the batch, and a stage has at most G data-parallel ranks.
                min(self.options.most_shards, max(1, self.options.batch // microbatches)),
                early_sends=self.early_sends,
            )
        return found

    @staticmethod
    def of(options: Options, *, early_sends: bool = False, extra_depth: int = 0) -> PathPricer:
        """Ready to price.

        `early_sends`: no send waits for its receiver; then warm-up may be deeper by `extra_depth`
        on all but the last mesh.
        """
        extra = options.extra_forward + options.extra_backward
        wire = extra.copy()
        for role in range(4):
            if not role & FIRST:
                wire[role] += options.arrive_forward
            if not role & LAST:
                wire[role] += options.arrive_backward
        waits = options.rendezvous and not early_sends
        return PathPricer(
            options=options,
            layer=options.forward + options.backward,
            wire=wire,
            serial=wire if waits else extra,
            modes=_modes(_largest_turn(options, waits=waits)),
            early_sends=early_sends,
            extra_depth=extra_depth,
            known={},
        )

    def least(
        self,
        prices: Floats,
        allowed: Bools,
        seconds: tuple[float, float],
        extra: tuple[int, int],
        stages: tuple[int, int],
        known: int = 1,
    ) -> tuple[float, Path | None]:
        """(least weight of a path, the path); infinite, too, where its step is not below the limit.

        `seconds`: least and most that the bottleneck takes; `extra`: fewest and most microbatches
        that it has in flight beyond its position; `stages`: fewest and most of the path;
        `known`: microbatches that no path worth its price has fewer of.
        """
        price = prices[self.options.place] * self.options.use
        if self.check is not None:
            self.check()
        least, most = seconds
        rows = min(stages[1], self.options.stage_limit)
        if self.options.enough_microbatches:
            rows = int(min(rows, self.limit / least))
        if rows < stages[0]:
            return np.inf, None
        microbatches = self._fewest(price, allowed, most, rows, known)
        if microbatches == 0:
            return np.inf, None
        # Fewer turns are taken off where the bottleneck takes less than `most`.
        scale = most / least if extra[1] else 1.0
        best, found = -np.inf, None
        for mode in self.modes:
            scaled = Mode(down=mode.down, bonus=mode.bonus * scale)
            value, path = self._cheapest(
                price, allowed, seconds, (stages[0], rows), microbatches, scaled, extra[0]
            )
            value -= scaled.bonus * extra[1]
            if value > best:
                best, found = value, path
            if best * least >= self.limit:
                return np.inf, None
        if extra[1]:
            done = min(float(self.options.batch), self.limit / least)
            for depth in sorted({1, min(stages[0], 8)}):
                value, path = self._slanted(
                    price, allowed, seconds, (stages[0], rows), microbatches, (depth, done)
                )
                if value > best:
                    best, found = value, path
        if found is None or best * least >= self.limit:
            return np.inf, None
        return best, self._path(found, best, price, least, microbatches)

    def _tables(self, allowed: Bools, rows: int) -> tuple[Floats, Ints]:
        shape = (len(allowed), 8, rows + 1, self.options.num_layers + 1)
        return np.empty(shape), np.empty(shape, np.int64)

    def _cheapest(
        self,
        price: Floats,
        allowed: Bools,
        seconds: tuple[float, float],
        stages: tuple[int, int],
        microbatches: int,
        mode: Mode,
        deeper: int = 0,
    ) -> tuple[float, Ints]:
        self.calls += 1
        path = np.empty((2, stages[1]), dtype=np.int64)
        values, chosen = self._tables(allowed, stages[1])
        weigh_turns(
            values,
            chosen,
            self.layer,
            self.wire,
            self.serial,
            self.most_layers(microbatches),
            price,
            allowed,
            *seconds,
            mode.down,
            mode.bonus,
            deeper,
        )
        return cheapest_path(values, chosen, stages[0], path), path

    def _slanted(
        self,
        price: Floats,
        allowed: Bools,
        seconds: tuple[float, float],
        stages: tuple[int, int],
        microbatches: int,
        mixture: tuple[int, float],
    ) -> tuple[float, Ints]:
        self.calls += 1
        path = np.empty((2, stages[1]), dtype=np.int64)
        values, chosen = self._tables(allowed, stages[1])
        weigh_slanted(
            values,
            chosen,
            self.layer,
            self.wire,
            self.serial,
            self.most_layers(microbatches),
            price,
            allowed,
            np.array(seconds),
            *mixture,
        )
        return cheapest_path(values, chosen, stages[0], path), path

    def _fewest(self, price: Floats, allowed: Bools, most: float, rows: int, known: int) -> int:
        """Microbatches that a path whose stages take `most` seconds must do to be worth its price.

        0 where there is no such path. The price falls with fewer microbatches, for which more
        memory is left, so this climbs to the first number that holds itself up.
        """
        while True:
            value, _ = self._cheapest(price, allowed, (np.inf, most), (1, rows), known, _NO_FILL)
            if value == np.inf or value > self.options.batch:
                return 0
            # A grid of few numbers, from below, so that few tables of memory are made.
            needed = int(1.06 ** np.floor(np.log(max(1.0, value * (1 - 1e-9))) / np.log(1.06)))
            if needed <= known:
                return known
            known = needed

    def _path(
        self, path: Ints, weight: float, price: Floats, least: float, microbatches: int
    ) -> Path:
        count = int(np.count_nonzero(np.cumprod(path[0] >= 0)))
        options = path[0, :count]
        use = np.bincount(
            self.options.place[options],
            weights=self.options.use[options],
            minlength=len(self.options.classes),
        )
        return Path(
            options=tuple(options.tolist()),
            layers=tuple(path[1, :count].tolist()),
            bottleneck_seconds=least,
            use=tuple(use.tolist()),
            weight_without_price=weight - float(price[options].sum()),
            microbatches=microbatches,
        )


def _largest_turn(options: Options, *, waits: bool) -> float:
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
