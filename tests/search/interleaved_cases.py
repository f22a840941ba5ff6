"""Random interleaved families for tests, and their best plans by listing every one, apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations, product

import numpy as np
from replay_cases import over_own_wires
from search_jobs import job as small_job
from synthetic_spaces import Wanted, family_of, small_space

from hetplan.cost.arrays import Ints
from hetplan.cost.replay.ends import step_ends
from hetplan.cost.replay.times import Exchange
from hetplan.job.spec import Job
from hetplan.search.solver import OrderFreeBound
from hetplan.search.space.family import Family
from hetplan.search.space.stage_table import StageTable
from hetplan.search.table_maker import Kept


@dataclass(frozen=True, kw_only=True)
class Case:
    """A family with its numbers and what fits by position; v chunks."""

    space: StageTable
    family: Family
    room: Ints
    """[V, M, P] units that fit on a slot of this mesh, by its distance from the last slot."""
    exchange: Exchange
    kept: Kept = field(default_factory=lambda: Kept(10**8), repr=False, compare=False)
    kept_rows: Kept = field(default_factory=lambda: Kept(10**6), repr=False, compare=False)

    def most_units(self, mesh: Sequence[int]) -> Ints:
        """As `hetplan.search.space.chunk_memory.ChunkMemory`."""
        last = len(mesh) - 1
        return np.array([self.room[:, at, last - s] for s, at in enumerate(mesh)])

    def order_free(self, family: Family) -> OrderFreeBound:
        """Nothing is known."""
        return OrderFreeBound(bound_seconds=0.0, estimate_seconds=0.0)

    def crossing_bound(self, family: Family, enough: float) -> float:
        """Neither."""
        return 0.0

    def unchunked_space(self, family: Family, *, ends: bool = True) -> StageTable:
        """The case is the `TableMaker` of its solver: the same for all."""
        space = self.space
        if ends:
            return space
        return space._replace(after=0.0 * space.after, leaving=0.0 * space.leaving)

    def chunk_memory(self, family: Family) -> Case:
        """See `most_units`."""
        return self

    @property
    def job(self) -> Job:
        """A trainer that hides nothing beside compute."""
        return small_job(target="megatron")

    @property
    def island_names(self) -> tuple[str, ...]:
        """Of islands enough."""
        return tuple(f"i{at}" for at in range(8))


def random_case(seed: int, *, most_layers: int = 11) -> Case:
    """A small family: 1 to 3 islands, 3 to 5 stages, 2 or 3 chunks, one or two recomputations."""
    rng = np.random.default_rng(seed)
    chunks = int(rng.integers(2, 4))
    layers = int(rng.integers(3 * chunks, most_layers + 1))
    microbatches = int(rng.choice([3, 4, 6, 8, 9, 12, 15, 24]))
    variants = int(rng.integers(1, 3)) if layers < 9 else 1
    space = small_space(
        rng,
        Wanted(
            islands=int(rng.integers(1, 4)),
            layers=layers,
            most_stages=4,
            microbatches=microbatches,
            variants=variants,
            rendezvous=True,
            tight=False,
            norm=bool(rng.random() < 0.3),
            leaving=bool(rng.random() < 0.3),
            pinned_ends=bool(rng.random() < 0.2),
        ),
    )
    if rng.random() < 0.6:  # stages enough for an interleaved pipeline, and calmer transfers
        scale = float(rng.choice([0.0, 0.02, 0.2]))
        space = space._replace(links=scale * space.links, node_links=scale * space.node_links)
    space = space._replace(max_stages=np.maximum(space.max_stages, 2))
    count, width = len(space.max_stages), layers + 1
    room = np.full((variants, count, width), layers, dtype=np.int64)
    if rng.random() < 0.4:
        base = rng.integers(chunks, layers + 2, count)
        for v, at, back in product(range(variants), range(count), range(width)):
            room[v, at, back] = max(0, min(layers, int(base[at] * (1 + v) - 0.7 * back)))
    return Case(
        space=space,
        family=family_of(space, virtual_stages=chunks),
        room=room,
        exchange=Exchange.MEGATRON if rng.random() < 0.7 else Exchange.TORCH,
    )


def every_row(case: Case) -> Iterator[tuple[int, ...]]:
    """Meshes of every slot: orders of meshes on islands of their own, runs of stages."""
    space, family = case.space, case.family
    meshes = range(len(space.max_stages))
    for count in range(1, len(meshes) + 1):
        for order in permutations(meshes, count):
            if len({i for at in order for i in family.meshes[at].islands}) < sum(
                len(family.meshes[at].islands) for at in order
            ):
                continue
            if not (space.may_be_first[order[0]] and space.may_be_last[order[-1]]):
                continue
            for runs in product(*[range(1, int(space.max_stages[at]) + 1) for at in order]):
                row = tuple(at for at, run in zip(order, runs, strict=True) for _ in range(run))
                if (
                    len(row) >= 3
                    and family.num_microbatches % len(row) == 0
                    and len(row) * family.virtual_stages <= space.num_layers
                ):
                    yield row


def cuts(total: int, slots: int, least: int) -> Iterator[tuple[int, ...]]:
    """Every way to deal units to slots, `least` to each at least."""
    if slots == 1:
        if total >= least:
            yield (total,)
        return
    for first in range(least, total - least * (slots - 1) + 1):
        for rest in cuts(total - first, slots - 1, least):
            yield (first, *rest)


def step_of(case: Case, row: Sequence[int], variants: Sequence[int], units: Sequence[int]) -> float:
    """One step by the general replay and `StageTable`'s rules, without the search's own code."""
    space, v, slots = case.space, case.family.virtual_stages, len(row)
    last = slots - 1
    roles = [(s == 0) + 2 * (s == last) for s in range(slots)]
    forward, backward = np.zeros((slots, v)), np.zeros((slots, v))
    for s, at in enumerate(row):
        for c in range(v):
            held = units[s] // v + (c < units[s] % v)
            ends = (1 if s == 0 and c == 0 else 0) + (2 if s == last and c == v - 1 else 0)
            choice = variants[s]
            forward[s, c] = held * space.forward[choice, at]
            backward[s, c] = held * space.backward[choice, at]
            if ends:
                forward[s, c] += space.extra_forward[ends, choice, at]
                backward[s, c] += space.extra_backward[ends, choice, at]
    hops = [_hop(space, row, k % slots) for k in range(slots * v - 1)]
    times = over_own_wires(
        forward,
        backward,
        np.array([hop[:4] for hop in hops]).T,
        space.num_microbatches,
        schedule="interleaved-1f1b",
        exchange=case.exchange,
    )
    ends_at = step_ends((times,), rendezvous=True)[0]
    arrived = [
        ends_at[s]
        + space.after[role, at, n]
        - space.leaving[role, at, n]
        + (space.tied[row[0], row[-1]] if s in (0, last) else 0.0)
        for s, (role, at, n) in enumerate(zip(roles, row, units, strict=True))
    ]
    leaving = [space.leaving[role, at, n] for role, at, n in zip(roles, row, units, strict=True)]
    step = max(arrived) + max(leaving)
    if space.clips_gradients:
        step += max(space.norm_inside[list(row)])
        step += (slots - 1).bit_length() * max(hop[4] for hop in hops)
    return float(step)


def _hop(space: StageTable, row: Sequence[int], s: int) -> tuple[float, ...]:
    """Send, send of a gradient, latency, wait and norm's level from slot s to the next one."""
    left, right = row[s], row[(s + 1) % len(row)]
    before = sum(1 for at in row[: s + 1] if at == left)  # runs: all stages of the mesh so far
    per_node = int(space.stages_per_node[left])
    if s == len(row) - 1:
        crosses = left == right and len(row) > per_node
    else:
        crosses = left == right and before % per_node == 0
    if crosses:
        return (*space.node_links[:, left].tolist(), float(space.norm_node_links[left]))
    return (*space.links[:, left, right].tolist(), float(space.norm_links[left, right]))


def every_plan(
    case: Case,
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], float]]:
    """Row, recomputation, units and step of every plan that fits."""
    chunks, choices = case.family.virtual_stages, range(case.room.shape[0])
    for row in every_row(case):
        most = case.most_units(row)
        for units in cuts(case.space.num_layers, len(row), chunks):
            for variants in product(choices, repeat=len(row)):
                if all(n <= most[s, variants[s]] for s, n in enumerate(units)):
                    yield row, variants, units, step_of(case, row, variants, units)
