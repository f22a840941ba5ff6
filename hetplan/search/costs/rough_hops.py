"""How slow is the slowest hop that a family's islands cannot do without? A guess, by bytes alone.

Whoever uses all islands crosses at least the slowest hop of the fastest tree over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hetplan.search.costs.placed import Placed
from hetplan.search.families.family import Mesh


@dataclass(frozen=True, slots=True)
class SlowestHops:
    """Keeps what families share."""

    placed: Placed
    _trees: dict[tuple[tuple[int, ...], int], tuple[tuple[float, float], ...]] = field(
        default_factory=dict, repr=False
    )

    def of(self, meshes: Sequence[Mesh]) -> float:
        """Seconds of one transfer of the first mesh's shape; 0 on one island."""
        job, shape = self.placed.job, meshes[0].shapes[0]
        islands = tuple(sorted({mesh.islands[0] for mesh in meshes}))
        key = (islands, shape.num_devices)
        tree = self._trees.get(key)
        if tree is None:
            tree = self._trees[key] = self._tree(*key)
        tokens = shape.microbatch_size * job.sequence_length / shape.cp
        size = tokens * self.placed.model.hidden_size * job.precision.bytes_per_element
        return max((latency + size / rate for latency, rate in tree), default=0.0)

    def _tree(self, islands: tuple[int, ...], senders: int) -> tuple[tuple[float, float], ...]:
        """(latency, bytes per second) of its hops; islands join by latency, then by rate."""
        cluster = self.placed.cluster
        names = [cluster.islands[at].name for at in islands]
        found, joined, left = [], names[:1], names[1:]
        while left:
            hops = []
            for one in joined:
                for two in left:
                    link = cluster.link_between(one, two).among(senders)
                    hops.append((link.latency_seconds, link.goodput_bytes_per_second, two))
            latency, rate, at = min(hops, key=lambda hop: (hop[0], -hop[1]))
            found.append((latency, rate))
            joined.append(at)
            left.remove(at)
        return tuple(found)
