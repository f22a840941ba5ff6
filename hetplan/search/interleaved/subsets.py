"""Compiled code of `hetplan.search.interleaved.island_bound`: a program over sets of islands.

Slots are filled in one direction. A state is the islands that are used up, the number k of slots
that are filled, and the mesh of the last of them; it keeps, for each number of layer units that
these slots may hold, the least sum of a cost per slot. A run of slots of one mesh is one step.

    most_behind   units that the slots from k on can hold on the islands that are left
    low .. high   units that matter here: enough with most_behind, at most what fits. At most WIDTH
                  of them are told apart; fewer units count as the least of those: the least sum
                  only falls by that, so it stays a bound.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.kernels import kernel
from hetplan.search.space.row import NEVER

WIDTH = 12


class Slots(NamedTuple):
    """Meshes and what their slots cost, in the direction of filling; M meshes, P slots."""

    masks: Ints
    """[M] islands as bits, without gaps."""
    most_stages: Ints
    region: Ints
    """[M] meshes of one region stand together; all of one region: no such rule."""
    begins: Ints
    """[M] 1 where the first slot may be of this mesh."""
    ends: Ints
    cost: Floats
    """[M, P, L + 1] of a slot with so many units."""
    chain: Floats
    """[M, P, L + 1] must stay below the limit, the sum so far besides where `adds`; `NEVER`: the
    slot cannot have so many units."""
    extra: Floats
    """[M, M] cost of a step from a mesh (row) to another (column)."""
    adds: bool


@kernel
def most_units(slots: Slots, limit: float, before: Floats) -> Ints:
    """[M, P] units for which a chain stays below the limit; `before` [P] is added to it."""
    meshes, count, width = slots.chain.shape
    found = np.zeros((meshes, count), np.int64)
    for j in range(meshes):
        for at in range(count):
            for n in range(width - 1, 0, -1):
                if before[at] + slots.chain[j, at, n] < limit:
                    found[j, at] = n
                    break
    return found


@kernel
def most_behind(slots: Slots, most: Ints, chunks: int) -> Ints:
    """[sets, P + 1] units that slots k .. P - 1 can hold on islands outside a set; -1: none can."""
    meshes, count = most.shape
    sets = 1
    for j in range(meshes):
        while sets <= slots.masks[j]:
            sets *= 2
    found = np.full((sets, count + 1), -1, np.int64)
    found[:, count] = 0
    for used in range(sets - 1, -1, -1):
        for j in range(meshes):
            if used & slots.masks[j]:
                continue
            behind = used | slots.masks[j]
            for k in range(count - 1, -1, -1):
                held = 0
                for end in range(k, min(count, k + slots.most_stages[j])):
                    if most[j, end] < chunks:
                        break
                    held += most[j, end]
                    if end == count - 1 and slots.ends[j] == 0:
                        continue
                    if found[behind, end + 1] >= 0:
                        found[used, k] = max(found[used, k], held + found[behind, end + 1])
    return found


@kernel
def most_before(slots: Slots, most: Ints, chunks: int, sets: int) -> Ints:
    """[sets, P + 1] units that the first k slots can hold on exactly these islands; -1: none."""
    meshes, count = most.shape
    found = np.full((sets, count + 1), -1, np.int64)
    found[0, 0] = 0
    for used in range(sets):
        for k in range(count):
            if found[used, k] < 0:
                continue
            for j in range(meshes):
                if used & slots.masks[j] or (k == 0 and slots.begins[j] == 0):
                    continue
                held = found[used, k]
                for end in range(k, min(count, k + slots.most_stages[j])):
                    if most[j, end] < chunks:
                        break
                    held += most[j, end]
                    now = used | slots.masks[j]
                    found[now, end + 1] = max(found[now, end + 1], held)
    return found


@kernel
def _stays(slots: Slots, used: int, last: int, new: int) -> bool:
    """Whether a mesh may follow the last one by the rule of regions."""
    if last < 0 or slots.region[last] == slots.region[new]:
        return True
    for j in range(slots.masks.shape[0]):
        if slots.region[j] == slots.region[new] and used & slots.masks[j]:
            return False
    return True


@kernel
def fill(
    slots: Slots, limit: float, most: Ints, units: int, chunks: int, room: int
) -> tuple[float, Floats, Ints]:
    """(least sum of all slots, [P + 1] least sum of the first k, [P] mesh of every slot).

    The sum is `NEVER` where the slots cannot hold the units; then the meshes say nothing. Where it
    takes more than `room` states, nothing is known: a sum of -1.
    """
    meshes, count = most.shape
    behind = most_behind(slots, most, chunks)
    sets = behind.shape[0]
    least = np.full(count + 1, NEVER)
    row = np.zeros(count, np.int64)
    if behind[0, 0] < units:
        return NEVER, least, row
    before = most_before(slots, most, chunks, sets)
    index = np.full((sets, count + 1), -1, np.int64)
    states = 0
    for used in range(sets):
        for k in range(count + 1):
            reached = before[used, k] >= 0 and behind[used, k] >= 0
            if reached and before[used, k] + behind[used, k] >= units:
                index[used, k] = states
                states += 1
    if states * meshes * WIDTH > room:
        return -1.0, least, row
    sums = np.full((states, meshes, WIDTH), NEVER)
    parent = np.full((states, meshes, WIDTH), -1, np.int64)
    low = np.zeros(states, np.int64)
    for used in range(sets):
        for k in range(count + 1):
            if index[used, k] >= 0:
                high = min(units, before[used, k])
                low[index[used, k]] = max(units - behind[used, k], high - WIDTH + 1, 0)
    least[0] = 0.0
    now, later = np.empty(WIDTH), np.empty(WIDTH)
    origin, origin_later = np.empty(WIDTH, np.int64), np.empty(WIDTH, np.int64)
    ahead = np.empty(count + 2, np.int64)
    for used in range(sets):
        for k in range(count):
            at = index[used, k]
            if at < 0:
                continue
            for j in range(meshes):
                if used & slots.masks[j] or (k == 0 and slots.begins[j] == 0):
                    continue
                taken = used | slots.masks[j]
                now[:] = NEVER
                if k == 0:
                    now[0], origin[0] = 0.0, 0
                for last in range(meshes):
                    if k == 0 or not _stays(slots, used, last, j):
                        continue
                    for w in range(WIDTH):
                        value = sums[at, last, w] + slots.extra[last, j]
                        if value < now[w]:
                            now[w] = value
                            origin[w] = (last * (count + 1) + k) * WIDTH + w
                longest = 0
                while (
                    k + longest < count
                    and longest < slots.most_stages[j]
                    and most[j, k + longest] >= chunks
                ):
                    longest += 1
                # What slots behind each end of the run can hold, the run's own among them.
                ahead[longest + 1] = -1
                for r in range(longest, 0, -1):
                    ahead[r] = -1
                    if k + r < count or slots.ends[j] == 1:
                        ahead[r] = behind[taken, k + r]
                    if r < longest and ahead[r + 1] >= 0:
                        ahead[r] = max(ahead[r], most[j, k + r] + ahead[r + 1])
                base, high = low[at], min(units, before[used, k])
                for r in range(1, longest + 1):
                    if ahead[r] < 0:
                        break
                    slot = k + r - 1
                    high = min(units, high + most[j, slot])
                    needed = units - ahead[r]
                    lowest = max(needed, high - WIDTH + 1, 0)
                    later[:] = NEVER
                    any_left = False
                    for w in range(WIDTH):
                        if now[w] >= NEVER:
                            continue
                        so_far = now[w] if slots.adds else 0.0
                        for n in range(most[j, slot], chunks - 1, -1):
                            held = min(units, base + w + n)
                            if held < needed:
                                break
                            if so_far + slots.chain[j, slot, n] >= limit:
                                continue
                            value = now[w] + slots.cost[j, slot, n]
                            to = max(held, lowest) - lowest
                            if value < later[to]:
                                later[to], origin_later[to] = value, origin[w]
                                any_left = True
                    if not any_left:
                        break
                    base = lowest
                    for w in range(WIDTH):
                        now[w], origin[w] = later[w], origin_later[w]
                        least[k + r] = min(least[k + r], now[w])
                    to_state = index[taken, k + r]
                    if to_state < 0 or (k + r == count and slots.ends[j] == 0):
                        continue
                    for w in range(WIDTH):
                        held = base + w
                        if now[w] >= NEVER or held < units - behind[taken, k + r]:
                            continue
                        to = min(max(held - low[to_state], 0), WIDTH - 1)
                        if now[w] < sums[to_state, j, to]:
                            sums[to_state, j, to] = now[w]
                            parent[to_state, j, to] = origin[w]
    best, best_set, best_mesh, best_w = NEVER, -1, -1, 0
    for used in range(sets):
        at = index[used, count]
        if at < 0:
            continue
        for j in range(meshes):
            for w in range(WIDTH):
                if low[at] + w == units and sums[at, j, w] < best:
                    best, best_set, best_mesh, best_w = sums[at, j, w], used, j, w
    if best_set < 0:
        return NEVER, least, row
    used, end, j, w = best_set, count, best_mesh, best_w
    while end > 0:
        key = parent[index[used, end], j, w]
        w = key % WIDTH
        k = key // WIDTH % (count + 1)
        for s in range(k, end):
            row[s] = j
        used ^= slots.masks[j]
        j, end = key // WIDTH // (count + 1), k
    return best, least, row
