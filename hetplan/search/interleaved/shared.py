"""What the families of one question share: makers of numbers, memory of chunks, spaces.

Interleaved families that differ in nothing but their chunks have one space.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol
from weakref import WeakValueDictionary

from hetplan.cost.replay.times import Exchange
from hetplan.cost.step_model.plan import exchange_of
from hetplan.search.costs.maker import SpaceMaker
from hetplan.search.families.family import Family
from hetplan.search.families.space import Space
from hetplan.search.interleaved.memory import ChunkMemory, MemoryRoom
from hetplan.search.solver import Rough


class Spaces(Protocol):
    """Where the numbers of families come from; `SpaceMaker` is one."""

    def space(self, family: Family) -> Space:
        """All numbers."""
        ...

    def rough(self, family: Family) -> Rough:
        """A valid bound and a guess."""
        ...

    def sharper_bound(self, family: Family, enough: float) -> float:
        """A valid bound that takes longer."""
        ...


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What the families of one question share: spaces that differ in nothing but chunks."""

    maker: Spaces
    room: MemoryRoom
    exchange: Exchange
    islands: tuple[str, ...]
    """Names, as the cluster has them."""
    _spaces: dict[tuple[object, ...], tuple[Family, Space]] = field(
        default_factory=dict, repr=False
    )

    def space(self, family: Family) -> Space:
        """The numbers of the family's meshes, as if its stages had one chunk each: memory, schedule
        and the limit of stages are the chunked family's own (`memory`, `orders`).
        """
        plain = replace(family, schedule="1f1b", virtual_stages=1, most_extra_depth=0)
        key = (
            id(family.meshes), plain.num_microbatches, plain.sharding, plain.recompute,
            plain.early_sends,
        )  # fmt: skip
        found = self._spaces.get(key)
        if found is None or found[0].meshes is not family.meshes:
            found = self._spaces[key] = (plain, self.maker.space(plain))
        return found[1]


_SHARED: WeakValueDictionary[int, Shared] = WeakValueDictionary()
"""By the maker's identity, which a value holds on to; as long as a solver has it."""


def shared_of(maker: SpaceMaker) -> Shared:
    """What all solvers of this maker's question share."""
    found = _SHARED.get(id(maker))
    if found is None:
        found = _SHARED[id(maker)] = Shared(
            maker=maker,
            room=ChunkMemory(
                model=maker.model, cluster=maker.cluster, job=maker.job, units=maker.units()
            ),
            exchange=exchange_of(maker.job),
            islands=tuple(island.name for island in maker.cluster.islands),
        )
    return found
