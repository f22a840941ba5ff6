"""Seeded spaces of invented numbers for the tests of the search: small uneven ones, large ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    Sharding,
)
from hetplan.search.space.family import Family, Mesh
from hetplan.search.space.stage_table import MAX_FREE_ISLANDS, StageTable, num_islands


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a small space has; None leaves it to chance."""

    islands: int | None = None
    meshes_per_island: int = 1
    layers: int | None = None
    most_stages: int = 2
    microbatches: int | None = None
    variants: int = 1
    most_extra_depth: int = 0
    unions: bool = False
    regions: int = 1
    tight: bool | None = None
    rendezvous: bool | None = None
    long_links: bool | None = None
    norm: bool = False
    leaving: bool = False
    tied: bool | None = None
    forbidden_ends: bool = False
    """Some pairs of first and last mesh cannot be (an infinite `StageTable.tied`)."""
    pinned_stages: int = 0
    pinned_ends: bool = False


def small_space(rng: np.random.Generator, wanted: Wanted | None = None) -> StageTable:
    """A space with uneven meshes, transfers, end-of-step times and, sometimes, tight memory."""
    ask = wanted or Wanted()
    islands = ask.islands or int(rng.integers(1, 4))
    layers = ask.layers or int(rng.integers(3, 9))
    m = ask.microbatches or int(rng.choice([1, 2, 3, 4, 8]))
    tight = bool(rng.random() < 0.4) if ask.tight is None else ask.tight
    long_links = bool(rng.random() < 0.3) if ask.long_links is None else ask.long_links
    tied_too = bool(rng.random() < 0.3) if ask.tied is None else ask.tied
    masks, stages = _small_meshes(rng, ask, islands)
    count, v = len(masks), ask.variants
    forward = np.tile(rng.uniform(0.2, 1.0, count), (v, 1))
    backward = forward * rng.uniform(1.3, 2.6, count)
    # Recomputing more costs backward time and saves memory.
    for level in range(1, v):
        backward[level] += forward[level] * rng.uniform(0.3, 1.0)
    extra_forward, extra_backward = np.zeros((4, v, count)), np.zeros((4, v, count))
    for role in range(4):
        share = 0.1 * (role & 1) + 0.7 * (role >> 1)
        extra_forward[role], extra_backward[role] = share * forward[0], 2 * share * backward[0]
    widest = min(m, min(int(stages.sum()), layers) + ask.most_extra_depth)
    most = np.full((v, 4, count, widest + 1), layers, dtype=np.int64)
    if tight:
        room = rng.integers(2, layers + 2, count)
        for level in range(v):
            for role in range(4):
                for w in range(widest + 1):
                    held = room / (0.6 + 0.2 * w / (1 + level)) - (role > 1)
                    most[level, role, :, w] = np.clip(held.astype(np.int64), 0, layers)
    n = np.arange(layers + 1)
    after = np.empty((4, count, layers + 1))
    for role in range(4):
        after[role] = 0.05 * forward[0][:, None] * n + 0.1 * (role & 1) + 0.1 * (role >> 1)
    tied = rng.uniform(0.0, 0.3, (count, count)) * tied_too
    if ask.forbidden_ends:
        tied[rng.random((count, count)) < 0.4] = np.inf
    may_be_first = np.ones(count, dtype=np.bool_)
    may_be_last = np.ones(count, dtype=np.bool_)
    if ask.pinned_ends:
        may_be_first = rng.random(count) < 0.6
        may_be_last = rng.random(count) < 0.6
    wire = rng.uniform(0.0, rng.choice([0.02, 0.3, 1.0]), (count, count))
    if long_links:
        wire = np.where(rng.random((count, count)) < 0.5, wire * 0.05, wire + 1.5)
    regions = _regions(islands, ask.regions)
    links, node_links = _links(rng, wire), _links(rng, np.diagonal(wire) * 1.7)
    node_counts = rng.integers(1, 3, count)
    rendezvous = bool(rng.random() < 0.5) if ask.rendezvous is None else ask.rendezvous
    leaving = after * rng.uniform(0.0, 0.8) if ask.leaving else np.zeros_like(after)
    inside = rng.uniform(0.0, 0.05, count) * ask.norm
    norm_links = rng.uniform(0.01, 0.1, (count, count)) * ask.norm
    norm_node_links = rng.uniform(0.01, 0.1, count) * ask.norm
    return StageTable(
        num_layers=layers,
        layers_per_unit=1,
        front_layers=0,
        back_layers=0,
        num_microbatches=m,
        most_extra_depth=ask.most_extra_depth,
        stages=ask.pinned_stages,
        stage_limit=layers,
        regions_apart=num_islands(masks) > MAX_FREE_ISLANDS,
        rendezvous=rendezvous,
        clips_gradients=ask.norm,
        region=_region_of(masks, regions),
        island_mask=masks,
        max_stages=np.minimum(stages, layers),
        may_be_first=may_be_first,
        may_be_last=may_be_last,
        stages_per_node=node_counts,
        forward=forward,
        backward=backward,
        extra_forward=extra_forward,
        extra_backward=extra_backward,
        links=links,
        node_links=node_links,
        tied=tied,
        most_layers=most,
        after=after,
        leaving=leaving,
        norm_inside=inside - inside.min(),
        norm_links=norm_links,
        norm_node_links=norm_node_links,
    ).contiguous()


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A large space: islands of a few kinds in regions, stages shared out by their sizes."""

    islands: int = 8
    regions: int = 4
    meshes_per_island: int = 1
    stages: int = 64
    """Stages that the islands have room for together, with one mesh on each."""
    layers: int = 128
    microbatches: int = 256
    variants: int = 1
    most_extra_depth: int = 0
    rendezvous: bool = True
    region_wire: float = 0.06
    """Seconds of a transfer between regions; a unit takes about 0.3 on the mean mesh."""


def large_space(seed: int, scale: Scale) -> StageTable:
    """A space of the size of a real one: six kinds, memory that binds, meshes of unlike speed."""
    rng = np.random.default_rng(seed)
    kinds = np.array([0.6, 0.75, 1.0, 1.3, 1.7, 2.4])
    room = np.array([9.0, 7.0, 6.0, 5.0, 4.0, 3.0])
    kind = rng.integers(0, len(kinds), scale.islands)
    share = rng.dirichlet(np.full(scale.islands, 6.0)) * scale.stages
    masks, stages, speed, memory = [], [], [], []
    for island in range(scale.islands):
        for mesh in range(scale.meshes_per_island):
            # More devices a stage: fewer stages, faster, not in full proportion.
            width = 2.0 ** rng.integers(-2, 3) if mesh else 1.0
            masks.append(1 << island)
            stages.append(min(scale.layers, max(1, round(share[island] / width))))
            loss = 1.0 if mesh == 0 else rng.uniform(0.9, 1.25)
            speed.append(kinds[kind[island]] / width * loss)
            memory.append(room[kind[island]] * width * rng.uniform(0.9, 1.1))
    count = len(masks)
    forward = np.array([0.1 * np.array(speed)] * scale.variants)
    backward = 2.0 * forward
    for level in range(1, scale.variants):
        backward[level] += forward[level]
    regions = _regions(scale.islands, scale.regions)
    at = _region_of(np.array(masks), regions)
    wire = np.where(at[:, None] == at[None, :], 0.004, scale.region_wire)
    np.fill_diagonal(wire, 0.002)
    widest = min(scale.microbatches, min(sum(stages), scale.layers) + scale.most_extra_depth)
    most = np.zeros((scale.variants, 4, count, widest + 1), dtype=np.int64)
    for level in range(scale.variants):
        for w in range(widest + 1):
            held = np.array(memory) * (1.0 + level) / (0.5 + 0.5 * w / 16)
            for role in range(4):
                most[level, role, :, w] = np.clip(held - 0.5 * (role > 0), 0, scale.layers)
    n = np.arange(scale.layers + 1)
    after = np.empty((4, count, scale.layers + 1))
    after[:] = 0.02 * np.array(speed)[None, :, None] * n
    extra = np.zeros((4, scale.variants, count))
    extra[[1, 3]] += 0.1 * forward
    extra[[2, 3]] += 0.8 * forward
    every = np.ones(count, dtype=np.bool_)
    return StageTable(
        num_layers=scale.layers,
        layers_per_unit=1,
        front_layers=0,
        back_layers=0,
        num_microbatches=scale.microbatches,
        most_extra_depth=scale.most_extra_depth,
        stages=0,
        stage_limit=min(scale.layers, scale.microbatches),
        regions_apart=scale.islands > MAX_FREE_ISLANDS,
        rendezvous=scale.rendezvous,
        clips_gradients=False,
        region=at,
        island_mask=np.array(masks),
        max_stages=np.array(stages),
        may_be_first=every,
        may_be_last=every,
        stages_per_node=np.ones(count, dtype=np.int64),
        forward=forward,
        backward=backward,
        extra_forward=extra,
        extra_backward=2.0 * extra,
        links=_links(rng, wire),
        node_links=_links(rng, np.full(count, 0.003)),
        tied=np.zeros((count, count)),
        most_layers=most,
        after=after,
        leaving=np.zeros_like(after),
        norm_inside=np.zeros(count),
        norm_links=np.zeros((count, count)),
        norm_node_links=np.zeros(count),
    ).contiguous()


def _small_meshes(rng: np.random.Generator, ask: Wanted, islands: int) -> tuple[Ints, Ints]:
    masks = [1 << i for i in range(islands) for _ in range(ask.meshes_per_island)]
    if ask.unions and islands > 1:
        left, right = rng.choice(islands, 2, replace=False)
        masks.append(1 << int(left) | 1 << int(right))
    stages = rng.integers(1, ask.most_stages + 1, len(masks))
    return np.array(masks, dtype=np.int64), stages.astype(np.int64)


def _regions(islands: int, regions: int) -> Ints:
    return np.arange(islands) * regions // islands


def _region_of(masks: Ints, regions: Ints) -> Ints:
    found = []
    for mask in masks:
        over = {int(r) for i, r in enumerate(regions) if int(mask) >> i & 1}
        found.append(over.pop() if len(over) == 1 else -1)
    return np.array(found, dtype=np.int64)


def family_of(table: StageTable, *, virtual_stages: int = 1) -> Family:
    """A family whose meshes lie as those of the table do."""
    meshes = []
    for at, mask in enumerate(table.island_mask.tolist()):
        on = tuple(i for i in range(mask.bit_length()) if mask >> i & 1)
        shapes = (Shape(tp=1 + at, dp=1, microbatch_size=1),) * len(on)
        meshes.append(Mesh(islands=on, shapes=shapes, max_stages=int(table.max_stages[at])))
    return Family(
        samples=1,
        num_microbatches=table.num_microbatches,
        schedule="1f1b" if virtual_stages == 1 else "interleaved-1f1b",
        virtual_stages=virtual_stages,
        sharding=Sharding.NONE,
        recompute=(NO_RECOMPUTE, FULL_RECOMPUTE)[: len(table.forward)],
        meshes=tuple(meshes),
    )


def _links(rng: np.random.Generator, wire: Floats) -> Floats:
    """Transfers that take `wire` from end to end; what the receiver's notice takes is small."""
    mirrored = (wire + wire.T) / 2
    posted = mirrored * rng.uniform(0.0, 0.2)
    return np.stack((mirrored * 0.8, mirrored * 0.7, mirrored * 0.2, posted))
