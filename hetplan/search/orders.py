"""How few seconds a candidate needs, over every order of islands and every number of stages.

The dynamic program of `hetplan.search.partition` does not care which slots it adds, so it can
choose them: the table [stages, layers] of least downstream seconds is kept per state (set of
islands placed, the one in front, the one that comes next), and states merge by the elementwise
least (Held and Karp's program for the travelling salesman). The island that comes next is part of
the state because the transfer from it belongs to the slot that receives. An island that is never
added stays unused.
"""

from __future__ import annotations

import numba
import numpy as np

from hetplan.search.partition import NONE, relax
from hetplan.search.space import BOTH, FIRST, LAST, MIDDLE, Floats, Ints, Space


@numba.njit(cache=True)
def _relax_rows(
    below: Floats,
    below_tag: Ints,
    out: Floats,
    out_tag: Ints,
    most: Ints,
    microbatches: int,
    limit: float,
    forward: float,
    backward: float,
    forward_dependency: float,
    backward_dependency: float,
    forward_serial: float,
    backward_serial: float,
    after: Floats,
    only_total: int,
    low: int,
    high: int,
) -> bool:
    """`relax` from every row of `low` <= row < `high` stages into the row of one stage more."""
    changed = False
    for row in range(low, high):
        in_flight = min(row + 1, microbatches)
        if relax(
            below[row],
            below_tag[row],
            out[row + 1],
            out_tag[row + 1],
            most[in_flight],
            in_flight,
            microbatches,
            limit,
            forward,
            backward,
            forward_dependency,
            backward_dependency,
            forward_serial,
            backward_serial,
            after,
            only_total,
        ):
            changed = True
    return changed


class _Table:
    """Least downstream seconds [stages, layers]; the tag names where an island's block began."""

    def __init__(self, rows: int, columns: int) -> None:
        self.value = np.full((rows, columns), NONE)
        self.tag = np.zeros((rows, columns), dtype=np.int64)

    def rows(self) -> tuple[int, int]:
        """First row with an entry and one past the last; equal where there is none."""
        held = np.nonzero((self.value < NONE).any(axis=1))[0]
        return (int(held[0]), int(held[-1]) + 1) if len(held) else (0, 0)


# (islands placed as bits, the one in front, the one that comes next; -1: none comes)
_State = tuple[int, int, int]


class OrderProgram:
    """The dynamic program of one candidate."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._rows = space.most_slots + 1
        self._columns = space.num_layers + 1
        self._nothing = np.zeros(self._columns)
        self._tables: dict[_State, _Table] = {}
        self._best: tuple[_State, int] | None = None

    def least(self, limit: float) -> float:
        """Least Sigma + after_0 over all slots and cuts with X at most `limit`; NONE if none."""
        count = len(self._space.islands)
        self._tables = {}
        for placed in range(1, 1 << count):
            for front in range(count):
                if placed >> front & 1:
                    self._add(placed, front, limit)
        return self._find_best()

    def slots(self) -> tuple[int, ...]:
        """Island of every slot, first to last, of the last call of `least` that found one."""
        if self._best is None:
            return ()
        state, stages = self._best
        layers = self._space.num_layers
        islands: list[int] = []
        while True:
            placed, front, _ = state
            tag = int(self._tables[state].tag[stages, layers])
            before, rest = divmod(tag, self._rows * self._columns)
            stages_below, layers_below = divmod(rest, self._columns)
            islands.extend([front] * (stages - stages_below))
            if stages_below == 0:
                return tuple(islands)
            state = (placed & ~(1 << front), before, front)
            stages, layers = stages_below, layers_below

    def _add(self, placed: int, front: int, limit: float) -> None:
        """Tables of all blocks of stages on island `front` before what the others hold."""
        count = len(self._space.islands)
        ahead = [-1] if self._space.may_be_first[front] else []
        ahead += [island for island in range(count) if not placed >> island & 1]
        out = {island: _Table(self._rows, self._columns) for island in ahead}
        block = _Table(self._rows, self._columns)
        for behind, table in self._below(placed, front):
            self._step(table, block, out, front, behind, limit)
        for _ in range(int(self._space.max_stages[front]) - 1):
            longer = _Table(self._rows, self._columns)
            if not self._step(block, longer, out, front, front, limit):
                break
            block = longer
        for island, table in out.items():
            if (table.value < NONE).any():
                self._tables[placed, front, island] = table

    def _below(self, placed: int, front: int) -> list[tuple[int, _Table]]:
        """What stages of island `front` can be put before: (island behind or -1, table)."""
        others = placed & ~(1 << front)
        if not others:
            if not self._space.may_be_last[front]:
                return []
            empty = _Table(self._rows, self._columns)
            empty.value[0, 0] = 0.0
            return [(-1, empty)]
        found = []
        for behind in range(len(self._space.islands)):
            held = self._tables.get((others, behind, front))
            if held is not None:
                table = _Table(self._rows, self._columns)
                table.value = held.value
                table.tag = behind * self._rows * self._columns + np.arange(
                    self._rows * self._columns
                ).reshape(self._rows, self._columns)
                found.append((behind, table))
        return found

    def _step(
        self,
        below: _Table,
        block: _Table,
        out: dict[int, _Table],
        island: int,
        behind: int,
        limit: float,
    ) -> bool:
        """One more stage of `island`, before every possible neighbour ahead; True if any fits."""
        low, high = below.rows()
        high = min(high, self._rows - 1)
        if low >= high:
            return False
        changed = self._relax(below, block, island, behind, island, limit, low, high)
        for ahead, table in out.items():
            self._relax(below, table, island, behind, ahead, limit, low, high)
        return changed

    def _relax(
        self,
        below: _Table,
        out: _Table,
        island: int,
        behind: int,
        ahead: int,
        limit: float,
        low: int,
        high: int,
    ) -> bool:
        space = self._space
        first = ahead < 0
        role = (FIRST if first else MIDDLE) if behind >= 0 else (BOTH if first else LAST)
        forward, backward = space.extra_forward[role, island], space.extra_backward[role, island]
        wire_in = post_in = wire_back = post_back = 0.0
        if not first:
            wire_in = space.forward_wire[ahead, island]
            post_in = space.forward_post[ahead, island]
        if behind >= 0:
            wire_back = space.backward_wire[island, behind]
            post_back = space.backward_post[island, behind]
        if first and space.stages:
            low, high = max(low, space.stages - 1), min(high, space.stages)
        return bool(
            _relax_rows(
                below.value,
                below.tag,
                out.value,
                out.tag,
                space.most_layers[role, island],
                space.num_microbatches,
                limit,
                space.forward[island],
                space.backward[island],
                forward + wire_in,
                backward + wire_back,
                forward + post_in,
                backward + post_back,
                space.after[role, island] if first else self._nothing,
                space.num_layers if first else -1,
                low,
                high,
            )
        )

    def _find_best(self) -> float:
        self._best = None
        least = NONE
        for state, table in self._tables.items():
            if state[2] >= 0:
                continue
            column = table.value[:, self._space.num_layers]
            stages = int(column.argmin())
            if column[stages] < least:
                least = float(column[stages])
                self._best = (state, stages)
        return least
