"""All plans of a small space, their replays, and what the programs bound, spelled out in Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations, product

import numpy as np
from synthetic_chain import Chain, chain_of

from hetplan.cost.replay.ends import step_ends
from hetplan.cost.replay.kernel import replay_seconds
from hetplan.cost.replay.times import PipelineTimes
from hetplan.search.families.space import Space


@dataclass(frozen=True, kw_only=True)
class Row:
    """Slots, first to last, and what they hold."""

    meshes: tuple[int, ...]
    variants: tuple[int, ...]
    units: tuple[int, ...]
    extra: tuple[int, ...]


def sequences(space: Space, *, contiguous: bool = False) -> Iterator[tuple[int, ...]]:
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


def extras(space: Space, slots: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Extra depth of every slot: equal inside a mesh, none on the last, growing to the front."""
    blocks = [slots[0]] + [b for a, b in pairwise(slots) if a != b]
    for chosen in product(range(space.family.most_extra_depth + 1), repeat=len(blocks) - 1):
        if all(a >= b for a, b in pairwise(chosen)):
            by_mesh = dict(zip(blocks, (*chosen, 0), strict=True))
            yield tuple(by_mesh[i] for i in slots)


def rows(
    space: Space,
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


def every_row(space: Space, *, contiguous: bool = False) -> Iterator[Row]:
    for slots in sequences(space, contiguous=contiguous):
        for extra in extras(space, slots):
            yield from rows(space, slots, extra)


def chain_of_row(space: Space, row: Row) -> Chain:
    return chain_of(space, row.meshes, row.variants, row.extra)


def step_of(space: Space, row: Row) -> float:
    """Seconds of a step by replay."""
    chain = chain_of_row(space, row)
    at, n, v = np.arange(len(row.meshes)), np.array(row.units), np.array(row.variants)
    leaving = chain.leaving[at, n]
    arguments = (
        chain.extra_forward[v, at] + n * chain.forward[v, at],
        chain.extra_backward[v, at] + n * chain.backward[v, at],
        chain.links.send_forward,
        chain.links.send_backward,
        chain.links.wire_latency,
        chain.links.rendezvous_extra,
    )
    after = chain.after[at, n] - leaving
    step = replay_seconds(
        *arguments, chain.in_flight, space.num_microbatches, after, space.rendezvous
    )
    if not np.isfinite(step):
        # Depths that only the general replay can order, or nobody.
        try:
            none = np.zeros(len(at) - 1)
            times = PipelineTimes(
                schedule="1f1b",
                num_microbatches=space.num_microbatches,
                warmup=tuple(int(w) for w in chain.in_flight),
                forward=arguments[0].reshape(-1, 1),
                backward=arguments[1].reshape(-1, 1),
                weight=np.zeros((len(at), 1)),
                send_forward=arguments[2],
                send_backward=arguments[3],
                wire_latency=arguments[4],
                rendezvous_extra=arguments[5],
                link_forward=np.full(len(none), -1),
                link_backward=np.full(len(none), -1),
                shared_forward=none,
                shared_backward=none,
            )
            (ends,) = step_ends((times,), rendezvous=space.rendezvous)
            step = float((ends + after).max())
        except Exception:
            return float("inf")
    return float(step + leaving.max())


def sigma_and_x(
    space: Space,
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
