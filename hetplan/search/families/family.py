"""What a family of plans is: all that the stages of a pipeline share, and the meshes to choose.

A mesh is one way to run stages on one island, or on several that share every stage. A family has
one tick (sequences per microbatch), one schedule and one way to shard; its plans differ in which
meshes they use, in their order, the number of stages on each, and the layers and the recomputation
of every stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.plans.chosen import Shape
from hetplan.plans.plan import RecomputeGranularity, Sharding


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Mesh:
    """Stages of one kind: how many devices each takes of which islands."""

    islands: tuple[int, ...]
    """Positions in the cluster's islands, increasing; of several every stage has a part on each."""
    shapes: tuple[Shape, ...]
    """One per island."""
    max_stages: int
    """How many such stages these islands have room for."""

    @property
    def mask(self) -> int:
        """The islands as bits."""
        return sum(1 << island for island in self.islands)

    @property
    def samples(self) -> int:
        """Sequences of one microbatch."""
        return sum(shape.samples for shape in self.shapes)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Family:
    """Plans of one pipeline that share tick, schedule and sharding."""

    samples: int
    """Sequences of one microbatch over all data-parallel ranks of a stage, the same for all."""
    num_microbatches: int
    schedule: str
    """`1f1b` or `interleaved-1f1b`."""
    virtual_stages: int = 1
    sharding: Sharding
    recompute: tuple[RecomputeGranularity, ...]
    """What every stage may choose by itself; one entry where all stages must do the same."""
    early_sends: bool = False
    """Sends do not wait for their receivers (`OverlapSettings.send`)."""
    most_extra_depth: int = 0
    """Most microbatches in flight beyond the schedule's own, which only early sends make use of."""
    meshes: tuple[Mesh, ...]
    """Every one has `samples`; where the target needs equal degrees they have one shape."""
