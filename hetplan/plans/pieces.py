"""Which layers do the same stages hold, and how many copies of their weights are there?

Pipelines may be cut differently; between the cuts of all of them lie pieces of layers that one
stage of each pipeline holds, whose gradients are reduced over the same devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetplan.plans.chosen import Shape
from hetplan.plans.plan import LayerRange, Replica, Stage


def data_ranks(stage: Stage) -> int:
    """Data-parallel degree of a stage: dp of all its replicas."""
    return sum(replica.dp for replica in stage.replicas)


def transformer_layers_of(stage: Stage, num_layers: int) -> int:
    """Transformer layers of a stage, of `num_layers` in the model; no others are counted."""
    # Position 0 is the embedding; head and multi-token prediction stand behind.
    stop = num_layers + 1
    return sum(max(0, min(chunk.stop, stop) - max(chunk.start, 1)) for chunk in stage.chunks)


def stage_copies(stage: Stage) -> int:
    """Copies of the weights that a stage's ranks hold: dp * cp of all its replicas."""
    return sum(replica.dp * replica.cp for replica in stage.replicas)


def stage_shards(optimizer_shards: int, stage: Stage) -> int:
    """Ranks of a stage over which `Plan.optimizer_shards` splits its optimizer state.

    Shards that divide the copies of every stage are groups of that size; the least common multiple
    of the copies of all stages means all ranks of each.
    """
    return math.gcd(optimizer_shards, stage_copies(stage))


def expert_copies(stage: Stage) -> int:
    """The same of one routed expert: dp * cp * tp / (ep * etp) of all its replicas."""
    return sum(each.num_devices // (each.ep * each.etp) for each in stage.replicas)


def experts_as_the_rest(replica: Replica | Shape) -> bool:
    """Whether each rank holds the same slice of every expert as of the other weights."""
    return replica.ep == 1 and replica.etp == replica.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """Neighbouring layers that the same stages hold, one stage of each pipeline."""

    layers: LayerRange
    stages: tuple[Stage, ...]

    @property
    def copies(self) -> int:
        """Copies of the weights, experts left out."""
        return sum(stage_copies(stage) for stage in self.stages)

    @property
    def expert_copies(self) -> int:
        """Copies of one routed expert."""
        return sum(expert_copies(stage) for stage in self.stages)

    @property
    def experts_apart(self) -> bool:
        """Whether experts are reduced by groups of their own."""
        return not all(
            experts_as_the_rest(replica) for stage in self.stages for replica in stage.replicas
        )


def holders(
    pipelines: Sequence[Sequence[Stage]], total: int, cuts: Sequence[int] = ()
) -> Iterator[Holders]:
    """Who holds which layers: pieces between the cuts of all pipelines, and these cuts, in order.

    Every pipeline must hold every one of the `total` layers once.
    """
    at = {0, total, *(cut for cut in cuts if 0 < cut < total)}
    owner: list[list[tuple[int, Stage]]] = []
    for stages in pipelines:
        chunks = sorted(
            ((chunk.start, stage) for stage in stages for chunk in stage.chunks),
            key=lambda pair: pair[0],
        )
        owner.append(chunks)
        at |= {start for start, _ in chunks}
    place = [0] * len(owner)
    for start, stop in pairwise(sorted(at)):
        for p, chunks in enumerate(owner):
            while place[p] + 1 < len(chunks) and chunks[place[p] + 1][0] <= start:
                place[p] += 1
        yield Holders(
            layers=LayerRange(start=start, stop=stop),
            stages=tuple(chunks[place[p]][1] for p, chunks in enumerate(owner)),
        )
