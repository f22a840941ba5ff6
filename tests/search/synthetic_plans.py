"""All plans of a small space, their replays, and what the programs bound, spelled out in Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations, product

import numpy as np
import numpy.typing as npt
from replay_cases import one_pipeline

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.ends import step_ends
from hetplan.cost.replay.times import StageTimes, replay_seconds
from hetplan.search.space.stage_table import (
    FIRST,
    LAST,
    RENDEZVOUS_EXTRA,
    StageTable,
    backward_wires,
    forward_wires,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """P slots; stage arrays are [P], or [V, P] where the recomputation matters."""

    meshes: tuple[int, ...]
    """Mesh of every slot, first to last."""
    num_layers: int
    """L: layer units."""
    num_microbatches: int
    in_flight: Ints
    """W_s: the schedule's own microbatches in flight and the extra depth, at most m."""
    forward: Floats
    """[V, P] seconds of one layer unit."""
    backward: Floats
    forward_dependency: Floats
    """[V, P] constant part: embedding or head, and the transfer in."""
    backward_dependency: Floats
    forward_serial: Floats
    backward_serial: Floats
    most_layers: Ints
    """[V, P] units that fit; 0 where this variant is not allowed."""
    after: Floats
    """[P, L + 1] seconds after the last backward pass; of first and last slot with a tied matrix,
    of all with the sum of the norms."""
    leaving: Floats
    """[P, L + 1] what of `after` begins when all slots have reduced."""
    extra_forward: Floats
    """[V, P]"""
    extra_backward: Floats
    links: Floats
    """[4, P - 1]"""


def chain_of(
    space: StageTable,
    slots: Sequence[int],
    variants: Sequence[int] | None = None,
    extra: Sequence[int] | None = None,
) -> Chain:
    """The slots of a pipeline over these meshes, first to last.

    variants: recomputation of every slot, -1 where it is free; all are free where left out.
    extra: microbatches in flight beyond the schedule's own, of every slot; none where left out.
    """
    last = len(slots) - 1
    at = np.array(slots, dtype=np.int64)
    roles = np.zeros(last + 1, dtype=np.int64)
    roles[0] += FIRST
    roles[-1] += LAST
    extra_forward = _by_slot(space.extra_forward, roles, at)
    extra_backward = _by_slot(space.extra_backward, roles, at)
    links = boundaries(space, at)
    zero = np.zeros(1)
    held = float(space.rendezvous)
    wires_in = np.concatenate((zero, forward_wires(links)))
    wires_back = np.concatenate((backward_wires(links), zero))
    posts_in = held * (wires_in + np.concatenate((zero, links[RENDEZVOUS_EXTRA])))
    posts_back = held * (wires_back + np.concatenate((links[RENDEZVOUS_EXTRA], zero)))
    after = space.after[roles, at] + norm_seconds(space, at)
    if last > 0:
        after[[0, last]] += space.tied[at[0], at[-1]]
    depth = np.arange(last + 1, 0, -1) + np.array(extra or [0] * (last + 1), dtype=np.int64)
    in_flight = np.minimum(depth, space.num_microbatches)
    held_most = np.minimum(in_flight, space.most_layers.shape[3] - 1)
    most = space.most_layers[:, roles, at, held_most]
    if variants is not None:
        free = np.array(variants)
        allowed = (free < 0) | (free == np.arange(len(most))[:, None])
        most = np.where(allowed, most, 0)
    return Chain(
        meshes=tuple(int(i) for i in slots),
        num_layers=space.num_layers,
        num_microbatches=space.num_microbatches,
        in_flight=in_flight,
        forward=np.ascontiguousarray(space.forward[:, at]),
        backward=np.ascontiguousarray(space.backward[:, at]),
        forward_dependency=extra_forward + wires_in,
        backward_dependency=extra_backward + wires_back,
        forward_serial=extra_forward + posts_in,
        backward_serial=extra_backward + posts_back,
        most_layers=np.ascontiguousarray(most),
        after=after,
        leaving=space.leaving[roles, at],
        extra_forward=extra_forward,
        extra_backward=extra_backward,
        links=links,
    )


def _by_slot(values: Floats, roles: Ints, at: Ints) -> Floats:
    """[V, P] of [4, V, M]."""
    return np.ascontiguousarray(values[roles, :, at].T)


def norm_seconds(space: StageTable, at: Ints) -> float:
    """The sum of the norms beyond the least that `StageTable.after` has of it."""
    if not space.clips_gradients:
        return 0.0
    seconds = float(space.norm_inside[at].max())
    if len(at) > 1:
        hops = np.where(
            leaves_node(space, at),
            space.norm_node_links[at[:-1]],
            space.norm_links[at[:-1], at[1:]],
        )
        seconds += (len(at) - 1).bit_length() * float(hops.max())
    return seconds


def leaves_node(space: StageTable, at: Ints) -> npt.NDArray[np.bool_]:
    """Which neighbouring slots of one mesh lie in two nodes; stages fill nodes one by one."""
    placed = np.zeros(len(at), dtype=np.int64)
    for s in range(1, len(at)):
        placed[s] = placed[s - 1] + 1 if at[s] == at[s - 1] else 0
    node = placed // space.stages_per_node[at]
    left_node: npt.NDArray[np.bool_] = (at[:-1] == at[1:]) & (node[:-1] != node[1:])
    return left_node


def boundaries(space: StageTable, at: Ints) -> Floats:
    """[4, P - 1] transfers between neighbouring slots."""
    left, right = at[:-1], at[1:]
    return np.where(leaves_node(space, at), space.node_links[:, left], space.links[:, left, right])


@dataclass(frozen=True, kw_only=True)
class Row:
    """Slots, first to last, and what they hold."""

    meshes: tuple[int, ...]
    variants: tuple[int, ...]
    units: tuple[int, ...]
    extra: tuple[int, ...]


def sequences(space: StageTable, *, contiguous: bool = False) -> Iterator[tuple[int, ...]]:
    """Mesh of every slot, first to last."""
    count = len(space.max_stages)
    masks = [int(mask) for mask in space.island_mask]
    most = min(space.num_layers, space.stage_limit)
    for used in range(1, count + 1):
        for order in permutations(range(count), used):
            if sum(masks[i] for i in order) != np.bitwise_or.reduce([masks[i] for i in order]):
                continue
            if not space.may_be_first[order[0]] or not space.may_be_last[order[-1]]:
                continue
            regions = [int(space.region[i]) for i in order]
            blocks = [r for at, r in enumerate(regions) if r != (regions[at - 1] if at else None)]
            # Meshes over several regions stand anywhere.
            blocks = [r for r in blocks if r >= 0]
            if contiguous and len(blocks) != len(set(blocks)):
                continue
            for stages in product(*(range(1, int(space.max_stages[i]) + 1) for i in order)):
                slots = tuple(i for i, n in zip(order, stages, strict=True) for _ in range(n))
                ends = len(slots) == 1 or np.isfinite(space.tied[slots[0], slots[-1]])
                if ends and len(slots) <= most and len(slots) == (space.stages or len(slots)):
                    yield slots


def extras(space: StageTable, slots: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Extra depth of every slot: equal inside a mesh, none on the last, growing to the front."""
    blocks = [slots[0]] + [b for a, b in pairwise(slots) if a != b]
    for chosen in product(range(space.most_extra_depth + 1), repeat=len(blocks) - 1):
        if all(a >= b for a, b in pairwise(chosen)):
            by_mesh = dict(zip(blocks, (*chosen, 0), strict=True))
            yield tuple(by_mesh[i] for i in slots)


def rows(
    space: StageTable,
    slots: tuple[int, ...],
    extra: tuple[int, ...],
    variants: tuple[int, ...] | None = None,
) -> Iterator[Row]:
    """Everything that fits on these slots."""
    chain = chain_of(space, slots, variants, extra)
    for edges in combinations(range(1, space.num_layers), len(slots) - 1):
        units = tuple(b - a for a, b in pairwise((0, *edges, space.num_layers)))
        fitting = [
            [v for v in range(len(chain.forward)) if n <= chain.most_layers[v, s]]
            for s, n in enumerate(units)
        ]
        for chosen in product(*fitting):
            yield Row(meshes=slots, variants=chosen, units=units, extra=extra)


def every_row(space: StageTable, *, contiguous: bool = False) -> Iterator[Row]:
    for slots in sequences(space, contiguous=contiguous):
        for extra in extras(space, slots):
            yield from rows(space, slots, extra)


def chain_of_row(space: StageTable, row: Row) -> Chain:
    return chain_of(space, row.meshes, row.variants, row.extra)


def step_of(space: StageTable, row: Row) -> float:
    """Seconds of a step by replay."""
    chain = chain_of_row(space, row)
    at, n, v = np.arange(len(row.meshes)), np.array(row.units), np.array(row.variants)
    leaving = chain.leaving[at, n]
    chained = StageTimes(
        chain.extra_forward[v, at] + n * chain.forward[v, at],
        chain.extra_backward[v, at] + n * chain.backward[v, at],
        *chain.links.copy(),
        chain.in_flight,
        space.num_microbatches,
    )
    after = chain.after[at, n] - leaving
    step = replay_seconds(chained, after, space.rendezvous)
    if not np.isfinite(step):
        # Depths that only the general replay can order, or nobody.
        try:
            (ends,) = step_ends((one_pipeline(chained),), rendezvous=space.rendezvous)
            step = float((ends + after).max())
        except Exception:
            return float("inf")
    return float(step + leaving.max())


def sigma_and_x(
    space: StageTable,
    row: Row,
    *,
    together: tuple[int, ...] = (),
) -> tuple[float, float]:
    """Sigma + after_0 and the least X of one row, from the formulas of the programs.

    together: slots whose circuit with the next slot counts.
    """
    chain = chain_of_row(space, row)
    m, x, downstream = space.num_microbatches, 0.0, 0.0
    forward = [
        (
            row.units[s] * chain.forward[v, s] + chain.forward_dependency[v, s],
            row.units[s] * chain.backward[v, s] + chain.backward_dependency[v, s],
            row.units[s] * chain.forward[v, s] + chain.forward_serial[v, s],
            row.units[s] * chain.backward[v, s] + chain.backward_serial[v, s],
        )
        for s, v in enumerate(row.variants)
    ]
    for s in range(len(row.meshes) - 1, -1, -1):
        f_dep, b_dep, f, b = forward[s]
        w = int(chain.in_flight[s])
        x = max(x, (m - 1) * (f + b) - (w - 1) * min(f, b))
        for k in {1, (m - 1) // w} if m > w else ():
            x = max(x, (m - 1) * (f + b) + k * (downstream + b_dep + f - w * (f + b)))
        if s in together:
            f_next, _, _, b_next = forward[s + 1]
            turning = int(chain.in_flight[s + 1])
            ahead = w - turning + 1
            circuit = f + b_dep + f_next + b_next
            for k in range(1, (m - turning) // ahead + 1):
                rest = (m - turning - k * ahead) * (f + b) + (turning - 1) * max(f, b)
                x = max(x, rest + k * circuit)
            for k in range((m - 1 - w) // ahead + 1) if m > w else ():
                rest = (m - 1 - w - k * ahead) * (f + b)
                x = max(x, rest + downstream + b_dep + f + k * circuit)
        downstream += f_dep + b_dep
    return downstream + float(chain.after[0, row.units[0]]), x
