"""How are the devices of a node joined, as its figures and sends say, and how far does that carry?

With F, the figure of one device's links together, and p, what they reach to one peer (the largest
measured send, over the part of a figure that sends reach: `links_prior.SEND_BYTES`):

    bus      F is no more than PCIe has: no fabric of the devices' own
    even     p is about F (a switch), or p to each peer of the group is no more than F (every pair
             has links of its own, equally many): a group of n uses min(1, (n - 1) p / F) of them
    uneven   everything else, as V100 in a hybrid mesh; and where no send was measured

The half-widths are 90 % (conformal rank) of |log(measured / predicted)| where one group size is
carried to another one, on published tables, every link weighing the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from hetplan.predict.laws import SizeTable
from hetplan.predict.links_prior import PCIE_MOST_BYTES_PER_SECOND, SEND_BYTES
from hetplan.profiling.samples import LinkOperation

_SLACK = 1.1  # GH200: 3 x 147 GB/s by its sends, 450 by its figures; V100: 3 x 81 against 150


class JointClass(StrEnum):
    """How devices are joined."""

    BUS = "bus"
    EVEN = "even"
    UNEVEN = "uneven"


ONE_GROUP_LOG_HALFWIDTHS = (
    (JointClass.BUS, 1.62),
    (JointClass.EVEN, 0.34),
    (JointClass.UNEVEN, 1.22),
)
"""Of a collective carried from the only group size that was measured to half or twice as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """What one node's figures and sends say."""

    fabric_bytes_per_second: float
    one_peer_bytes_per_second: float | None
    """None: no send was measured."""

    def kind(self, most_ranks: int) -> JointClass:
        """For groups of at most so many."""
        if self.fabric_bytes_per_second <= PCIE_MOST_BYTES_PER_SECOND:
            return JointClass.BUS
        peer = self.one_peer_bytes_per_second
        if peer is None:
            return JointClass.UNEVEN
        if peer * _SLACK >= self.fabric_bytes_per_second or self._own_links(most_ranks):
            return JointClass.EVEN
        return JointClass.UNEVEN

    def less_reach(self, ranks: int, others: int) -> float:
        """Of its links, how many times as much a group of `ranks` uses as one of `others`."""
        if self.kind(max(ranks, others)) is JointClass.EVEN and self._own_links(max(ranks, others)):
            return (ranks - 1) / (others - 1)
        return 1.0

    def log_halfwidth(self, most_ranks: int) -> float:
        """Of one group size carried to another, per doubling."""
        return dict(ONE_GROUP_LOG_HALFWIDTHS)[self.kind(most_ranks)]

    def _own_links(self, most_ranks: int) -> bool:
        peer = self.one_peer_bytes_per_second
        if peer is None:
            return False
        return (most_ranks - 1) * peer <= _SLACK * self.fabric_bytes_per_second


def joint_of(tables: Sequence[SizeTable], fabric_bytes_per_second: float) -> Joint | None:
    """By a link's tables; None where its figure is not known (0)."""
    if not fabric_bytes_per_second:
        return None
    sends = (t for t in tables if t.operation == LinkOperation.SEND_RECV and t.nodes == 1)
    table = next(sends, None)
    reached = None
    if table is not None:
        reached = SEND_BYTES * table.message_bytes[-1] / table.seconds[-1]
    return Joint(fabric_bytes_per_second=fabric_bytes_per_second, one_peer_bytes_per_second=reached)
