"""How few seconds a family needs, over all orders of meshes, numbers of stages, cuts, depths.

`OrderProgram.least(x)` is the least Sigma + after_0 of any pipeline whose X is at most x; symbols
and inequalities are those of `hetplan.search.single.inequalities`. It is exact for what is added up
there, with three relaxations: inside a mesh a boundary costs what the faster of its two kinds
does, unless all are of one kind; a tied matrix costs what it costs at least, and the sum of norms
what it does in the fastest order of the islands that are used (`order_norms`);
and below a long boundary the passes of a slot are known by bucket, lower edge (eager sends; with
rendezvous sends (b) of the two slots implies their circuit).

Extra depth grows towards the first stage; levels of it may be joined: bounds then assume the
deepest, memory the flattest of a level, which both only help a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hetplan.search.families.space import Space
from hetplan.search.single.inequalities import NONE
from hetplan.search.single.order_kernel import Goal, run
from hetplan.search.single.order_numbers import OrderNumbers, order_numbers
from hetplan.search.single.order_outline import Outline, outline
from hetplan.search.single.order_tables import Pool, Work, work_of
from hetplan.search.single.order_trace import Slot, Tracer, empty_goal

_FEW_ROWS = 40
"""Stages up to which every extra depth is a level of its own; more stages join them."""

_SLICE = 5_000_000
"""Operations between two looks at the clock: some hundredths of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A pipeline with everything decided; entries by slot, first to last."""

    meshes: tuple[int, ...]
    variants: tuple[int, ...]
    units: tuple[int, ...]
    extra: tuple[int, ...]
    """Microbatches in flight beyond the schedule's own (of a joined level the least)."""


def depth_levels(most_extra: int, stages: int) -> tuple[tuple[int, int], ...]:
    """(extra depth that bounds assume, that memory assumes) by level."""
    if stages <= _FEW_ROWS:
        return tuple((extra, extra) for extra in range(most_extra + 1))
    edges = [0, 1, 2, 4, most_extra + 1]
    return tuple(
        (min(top, most_extra + 1) - 1, low) for low, top in pairwise(edges) if low <= most_extra
    )


class OrderProgram:
    """The dynamic program of one space.

    contiguous: whether meshes of one region stand next to each other; by the number of islands
    where left out. prune: whether entries that cannot end below a cutoff are dropped (the results
    are the same). levels: see `depth_levels`.
    """

    def __init__(
        self,
        space: Space,
        *,
        contiguous: bool | None = None,
        levels: tuple[tuple[int, int], ...] | None = None,
        prune: bool = True,
    ) -> None:
        self._prune = prune
        depth = levels or depth_levels(space.family.most_extra_depth, space.num_layers)
        self.parts = [
            order_numbers(space, depth, contiguous=contiguous, last=last)
            for last in _last_groups(space)
        ]
        self._levels = depth
        self._works: list[Work | None] = [None] * len(self.parts)
        states, classes = len(self.parts[0].state_blocked), len(self.parts[0].slices)
        self._pool = Pool(
            np.empty(1 << 16),
            np.full((states, classes), -1, dtype=np.int64),
            np.zeros((states, classes, 4), dtype=np.int64),
        )
        self._best: Order | None = None
        self._best_limit = NONE
        self.operations = 0
        """Additions and comparisons of table entries so far: what a budget counts."""

    def free(self, limit: float) -> float:
        """At most `least(limit)`, without regard to order or places; NONE where it is NONE."""
        return min(NONE, *(self._outline(part, limit).free for part in self.parts))

    def least(
        self,
        limit: float,
        cutoff: float = NONE,
        *,
        keep: bool = True,
        check: Callable[[], None] | None = None,
    ) -> float:
        """Least Sigma + after_0 with X at most `limit`; NONE where no plan has less than `cutoff`.

        keep: whether `order` can be asked for afterwards. check is called now and then and may
        raise; the program can be asked again then.
        """
        self._best = None
        least = NONE
        for at, part in enumerate(self.parts):
            out = self._outline(part, limit)
            top = min(cutoff, least) * (1.0 + 1e-12)
            if out.free > top:
                continue
            goal = empty_goal()
            work = self._run(at, limit, top, out, goal, check)
            value = float(goal.seconds[0])
            if value < min(least, cutoff):
                least = value
                if keep:
                    tracer = Tracer(part, limit, top, out, self._pool, work)
                    slots = tracer.slots(goal)
                    self._best, self._best_limit = self._order(slots), tracer.limit(slots)
        return least

    def _run(
        self,
        at: int,
        limit: float,
        top: float,
        out: Outline,
        goal: Goal,
        check: Callable[[], None] | None,
    ) -> Work:
        """The program of one part, slice by slice."""
        part, work = self.parts[at], self._works[at]
        if work is None:
            work = work_of(part)
        # Broken off, the working space is left as it is and made anew.
        self._works[at] = None
        place = np.zeros(3, dtype=np.int64)
        self.operations += out.need.size
        while place[0] < len(part.state_blocked):
            if check is not None:
                check()
            self._pool, done = run(part, limit, top, out, self._pool, work, goal, place, _SLICE)
            self.operations += int(done)
        self._works[at] = work
        return work

    def order(self) -> Order | None:
        """The pipeline of the last call of `least` that found one."""
        return self._best

    def limit_of_order(self) -> float:
        """The X of that pipeline; `least` is the same from here up to the limit asked for.

        Below long boundaries buckets depend on the limit, so that there it may be larger: the
        bound of a lower limit is then the better one.
        """
        return self._best_limit

    def _outline(self, part: OrderNumbers, limit: float) -> Outline:
        return outline(part, limit, self._prune)

    def _order(self, slots: tuple[Slot, ...]) -> Order:
        return Order(
            meshes=tuple(slot.mesh for slot in slots),
            variants=tuple(slot.variant for slot in slots),
            units=tuple(slot.units for slot in slots),
            extra=tuple(self._levels[slot.level][1] for slot in slots),
        )


def _last_groups(space: Space) -> list[npt.NDArray[np.bool_] | None]:
    """Last meshes that can stand behind the same first ones; None: all of them."""
    allowed = np.isfinite(space.tied)
    if allowed.all():
        return [None]
    columns = [tuple(bool(x) for x in column) for column in allowed.T]
    return [np.array([column == key for column in columns]) for key in sorted(set(columns))]
