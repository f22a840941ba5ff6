"""Random spaces for the tests of the search."""

from __future__ import annotations

import numpy as np

from hetplan.plans.build import Degrees
from hetplan.search.space import Floats, Links, Space


def random_space(
    rng: np.random.Generator,
    *,
    islands: int | None = None,
    layers: int | None = None,
    most_stages: int = 2,
    tight: bool | None = None,
    rendezvous: bool | None = None,
) -> Space:
    """A space with uneven islands, transfers, end-of-step times and, sometimes, tight memory."""
    count = islands or int(rng.integers(1, 4))
    total = layers or int(rng.integers(3, 9))
    microbatches = int(rng.choice([1, 2, 3, 4, 8]))
    stages = rng.integers(1, most_stages + 1, count)
    if tight is None:
        tight = bool(rng.random() < 0.4)
    if rendezvous is None:
        rendezvous = bool(rng.random() < 0.7)
    slots = min(int(stages.sum()), total)
    forward = rng.uniform(0.2, 1.0, count)
    backward = forward * rng.uniform(1.3, 2.6, count)
    wire = rng.uniform(0.0, rng.choice([0.02, 0.3, 1.0]), (count, count))
    wire = (wire + wire.T) / 2
    extra_post = rng.uniform(0.0, 0.05, (count, count))
    post = wire + (extra_post + extra_post.T) / 2
    extra_forward, extra_backward = np.zeros((4, count)), np.zeros((4, count))
    for role in range(4):
        extra_forward[role] = 0.1 * forward * (role & 1) + 0.7 * forward * (role >> 1)
        extra_backward[role] = 0.2 * backward * (role & 1) + 0.7 * backward * (role >> 1)
    most = np.full((4, count, slots + 1), total, dtype=np.int64)
    if tight:
        room = rng.integers(2, total + 2, count)
        for role in range(4):
            for w in range(1, slots + 1):
                held = (room / (0.6 + 0.2 * min(w, microbatches))).astype(np.int64) - (role > 1)
                most[role, :, w] = np.clip(held, 0, total)
    n = np.arange(total + 1)
    after = np.empty((4, count, total + 1))
    for role in range(4):
        for i in range(count):
            after[role, i] = 0.05 * forward[i] * n + 0.1 * (role & 1) + 0.1 * (role >> 1)
    return Space(
        degrees=Degrees(tp=1, dp=1, microbatch_size=1),
        num_layers=total,
        num_microbatches=microbatches,
        stages=0,
        stage_limit=total,
        rendezvous=rendezvous,
        islands=tuple(f"i{i}" for i in range(count)),
        max_stages=np.minimum(stages, total).astype(np.int64),
        forward=forward,
        backward=backward,
        extra_forward=extra_forward,
        extra_backward=extra_backward,
        links=_links(wire, post - wire),
        node_links=_links(np.diagonal(wire) * 1.7, np.diagonal(post - wire)),
        stages_per_node=rng.integers(1, 3, count),
        tied=rng.uniform(0.0, 0.3, (count, count)) * (rng.random() < 0.3),
        most_layers=most,
        after=after,
        may_be_first=np.ones(count, dtype=np.bool_),
        may_be_last=np.ones(count, dtype=np.bool_),
    )


def _links(wire: Floats, extra: Floats) -> Links:
    return Links(
        send_forward=wire * 0.8,
        send_backward=wire * 0.8,
        wire_latency=wire * 0.2,
        rendezvous_extra=extra.copy(),
    )
