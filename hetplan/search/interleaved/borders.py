"""Which meshes can stand next to each other in an interleaved pipeline with a step below T?

m v messages cross the boundary between two stages each way, m (v - 1) of them the one that leads
from the last stage back to the first. One stage's messages to another leave one after the other, so
for every boundary

    messages * max(activation, gradient) < T

Where sends are batched (Exchange.MEGATRON, rendezvous) the slots on both sides wait for them too,
in all exchanges but one (`hetplan.search.costs.rough_crossings`). Both have a unit per chunk or
more, c is what these take, and `after` follows the last pass of a slot:

    m c + (messages - 1) max(wait + activation, gradient) + after < T         the slot below
    m c + (messages - 1) max(wait + gradient, activation) + after < T         the slot above

with latencies and waits of rendezvous sends on what is received.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetplan.cost.replay.times import Exchange
from hetplan.search.families.space import Floats, Space
from hetplan.search.single.replay import NEVER, Numbers


class Borders(NamedTuple):
    """Least steps of pipelines with a boundary; NEVER where two meshes cannot be beside."""

    between: Floats
    """[M, M] from mesh (row) to mesh (column); 0 for boundaries inside a mesh."""
    around: Floats
    """[M, M] from the last slot's mesh (row) back to the first one's."""

    def blocked(self, limit: float) -> npt.NDArray[np.bool_]:
        """[M, M] boundaries that no step below the limit has."""
        return np.asarray(self.between >= limit)

    def rings(self, limit: float) -> npt.NDArray[np.bool_]:
        """[M, M] ends of the pipeline that a step below the limit may have."""
        return np.asarray(self.around < limit)


def borders_of(
    space: Space, numbers: Numbers, chunks: int, exchange: Exchange, stages: int
) -> Borders:
    """Of interleaved pipelines of so many stages."""
    m = space.num_microbatches
    passes = m * chunks * (space.forward + space.backward).min(axis=0)
    least = passes + space.after[:, :, chunks:].min(axis=(0, 2))
    level = norm_levels(stages) * least_level(numbers)
    norm = np.maximum(level, norm_levels(stages) * numbers.norm_links)
    forward, backward, latency, posted = numbers.links
    below = np.maximum(posted + forward + latency, backward)
    above = np.maximum(posted + backward + latency, forward)
    found = []
    for messages, closing in ((m * chunks, norm), (m * (chunks - 1), level)):
        seconds = messages * np.maximum(forward, backward)
        if exchange is Exchange.MEGATRON and numbers.rendezvous:
            seconds = np.maximum(seconds, least[None, :] + (messages - 1) * below + closing)
            seconds = np.maximum(seconds, least[:, None] + (messages - 1) * above + closing)
        found.append(seconds)
    between, around = found
    masks = space.island_mask
    shared = (masks[:, None] & masks[None, :]) != 0
    for each in found:
        each[shared] = NEVER
        np.fill_diagonal(each, 0.0)
    around[~space.may_be_last, :] = NEVER
    around[:, ~space.may_be_first] = NEVER
    return Borders(between, around)


def norm_levels(stages: int) -> int:
    """Levels of the sum of norms over so many stages."""
    return (stages - 1).bit_length()


def least_level(numbers: Numbers) -> float:
    """Least seconds of one level of it."""
    return float(min(numbers.norm_links.min(), numbers.norm_node_links.min()))
