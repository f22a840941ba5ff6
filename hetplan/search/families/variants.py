"""Which schedules does a family of meshes come with: chunks per stage, warm-up depth?

Interleaving is searched with 2 to `Target.most_virtual_stages` chunks of at least one layer per
stage, from 3 stages on, of which microbatches are a multiple. Deeper warm-up hides latency before a
boundary between meshes, so it needs two islands, and is no deeper than a step has microbatches. It
goes with sends that do not wait for their receivers: while they wait, more in flight is no use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetplan.job.check import MIN_INTERLEAVED_STAGES
from hetplan.plans.targets import Target
from hetplan.search.families.allowed import kept
from hetplan.search.families.family import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What is neither mesh nor sharding nor recomputation."""

    virtual_stages: int
    """1: plain 1F1B."""
    early_sends: bool = False
    most_extra_depth: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Variants:
    """What a target and a job's pins allow."""

    trainer: Target
    layers: int
    """Transformer layers of the model."""
    pinned_stages: int | None
    pinned_virtual_stages: int | None
    pinned_depth: int | None

    def of(self, num_microbatches: int, meshes: Sequence[Mesh]) -> Iterator[Variant]:
        """Every one, plain 1F1B first."""
        if self.pinned_virtual_stages in (None, 1):
            if not self.pinned_depth:
                yield Variant(virtual_stages=1)
            if self.trainer.most_extra_depth and self.pinned_depth != 0:
                depth = self._depth(num_microbatches, meshes)
                yield Variant(virtual_stages=1, early_sends=True, most_extra_depth=depth)
        if "interleaved-1f1b" not in self.trainer.schedules or self.pinned_depth:
            return
        pin = self.pinned_virtual_stages
        choices = range(2, self.trainer.most_virtual_stages + 1) if pin is None else [pin]
        stages = self._interleaved_stages(num_microbatches, meshes)
        for virtual in choices:
            if virtual > 1 and stages and stages * virtual <= self.layers:
                yield Variant(virtual_stages=virtual)

    def _depth(self, num_microbatches: int, meshes: Sequence[Mesh]) -> int:
        most = self.trainer.most_extra_depth
        if self.pinned_depth is not None:
            most = self.pinned_depth
        several = len({mesh.islands for mesh in meshes}) > 1
        # The first of two stages has 2 in flight by itself, and never more than all.
        return min(most, max(0, num_microbatches - 2)) if several else 0

    def _interleaved_stages(self, num_microbatches: int, meshes: Sequence[Mesh]) -> int:
        """Fewest stages of an interleaved pipeline that these meshes have room for; 0: none."""
        most: dict[int, int] = {}
        for mesh in meshes:
            for island in mesh.islands:
                most[island] = max(most.get(island, 0), mesh.max_stages)
        room = min(sum(most.values()), self.layers, num_microbatches)
        for stages in kept(self.pinned_stages, range(MIN_INTERLEAVED_STAGES, room + 1)):
            if num_microbatches % stages == 0:
                return stages
        return 0
