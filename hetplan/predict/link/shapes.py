"""The form of a collective's law, and tables of measured times by message size.

    T = base + steps(n) * step + steps(k) * crossing
      + steps(n) * share(n) * lane bytes * (per byte + per byte and rank / n)

n ranks in k nodes (crossing: what a step from node to node takes longer; k = 1: none). The library
runs as many rings side by side as a node has ranks of the group, so that each carries the part k /
n of the message: the lane bytes. steps and share are `ring_shape`. The form is that of a ring in
NCCL's own model (src/graph/tuning.cc: base latency, latency per step inside and between nodes,
bytes over the bus bandwidth); per byte and rank / n: small groups reach less of a fabric's rate.

Between two measured sizes of a table time is linear in bytes; measured sizes are met exactly.
Beyond the largest size the last segment goes on: alpha + bytes * beta of the largest messages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from hetplan.errors import InputError
from hetplan.predict.law_parts import MeasuredRange, Validation, outside
from hetplan.predict.regression import interpolate
from hetplan.profiling.samples import LinkOperation

# Other operations from which one can be derived when it was not measured, best first: an
# all_reduce is a reduce_scatter and an all_gather of the same message, which mirror each other.
RELATIVES: dict[str, tuple[str, ...]] = {
    LinkOperation.ALL_REDUCE: (LinkOperation.REDUCE_SCATTER, LinkOperation.ALL_GATHER),
    LinkOperation.REDUCE_SCATTER: (LinkOperation.ALL_GATHER, LinkOperation.ALL_REDUCE),
    LinkOperation.ALL_GATHER: (LinkOperation.REDUCE_SCATTER, LinkOperation.ALL_REDUCE),
    LinkOperation.ALL_TO_ALL: (),
    LinkOperation.BROADCAST: (),
}


def ring_shape(operation: str, group_size: int) -> tuple[int, float]:
    """(steps, bytes of one step per byte of message) of an operation among n >= 2 ranks.

    Rings for all_reduce (2 (n - 1) steps of 1/n), reduce_scatter and all_gather (n - 1 steps of
    1/n); pairwise exchange for all_to_all (n - 1 steps of 1/n); a binomial tree for broadcast
    (ceil(log2 n) steps of the whole message). A send is one step.
    """
    if operation == LinkOperation.ALL_REDUCE:
        return 2 * (group_size - 1), 1.0 / group_size
    if operation == LinkOperation.BROADCAST:
        return (group_size - 1).bit_length(), 1.0
    if operation in (LinkOperation.SEND_RECV, LinkOperation.SEND_RECV_LATE):
        return 1, 1.0
    return group_size - 1, 1.0 / group_size


def lane_bytes(operation: str, group_size: int, nodes: int, message_bytes: float) -> float:
    """What one of the rings side by side carries; a tree's copy is cut alike.

    In an all_to_all the message is every rank's own, so nothing is cut.
    """
    return message_bytes / lanes(operation, group_size, nodes)


def lanes(operation: str, group_size: int, nodes: int) -> float:
    """Rings side by side: ranks of a node where there are several nodes."""
    if nodes == 1 or operation == LinkOperation.ALL_TO_ALL:
        return 1.0
    return group_size / nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeLaw:
    """Coefficients of the formula above; none is negative."""

    base_seconds: float
    step_seconds: float
    crossing_seconds: float
    seconds_per_byte: float
    seconds_per_byte_over_ranks: float

    def __post_init__(self) -> None:
        for value in self.coefficients:
            if not 0 <= value < math.inf:
                raise InputError(
                    f"a link's law has the coefficient {value}; time cannot fall with more steps "
                    "or bytes: fit again"
                )

    @property
    def coefficients(self) -> tuple[float, ...]:
        """In the order of `shape_columns`."""
        return (
            *(self.base_seconds, self.step_seconds, self.crossing_seconds),
            *(self.seconds_per_byte, self.seconds_per_byte_over_ranks),
        )

    def latency_seconds(self, operation: str, group_size: int, nodes: int = 1) -> float:
        """What an empty message takes."""
        steps, _ = ring_shape(operation, group_size)
        crossings = ring_shape(operation, nodes)[0] if nodes > 1 else 0
        return self.base_seconds + steps * self.step_seconds + crossings * self.crossing_seconds

    def seconds(
        self, operation: str, group_size: int, message_bytes: float, nodes: int = 1
    ) -> float:
        """Time of a collective of this many ranks in so many nodes."""
        return self.latency_seconds(operation, group_size, nodes) + self.byte_seconds(
            operation, group_size, message_bytes, nodes
        )

    def byte_seconds(
        self, operation: str, group_size: int, message_bytes: float, nodes: int = 1
    ) -> float:
        """The part that the bytes take; proportional to them."""
        steps, share = ring_shape(operation, group_size)
        carried = steps * share * lane_bytes(operation, group_size, nodes, message_bytes)
        return carried * (self.seconds_per_byte + self.seconds_per_byte_over_ranks / group_size)


def shape_columns(
    operation: str, group_size: int, message_bytes: float, nodes: int = 1
) -> tuple[float, ...]:
    """What the coefficients of `ShapeLaw` are multiplied by, in its order."""
    steps, share = ring_shape(operation, group_size)
    carried = steps * share * lane_bytes(operation, group_size, nodes, message_bytes)
    crossings = ring_shape(operation, nodes)[0] if nodes > 1 else 0
    return 1.0, float(steps), float(crossings), carried, carried / group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShape:
    """The law of one operation of one link, fitted to all group sizes that were measured."""

    operation: str
    """A `LinkOperation` value."""
    backend: str
    law: ShapeLaw
    least_group: int
    most_group: int
    log_halfwidth: float | None
    """Half-width at a group size that was not measured, between those that were; None:
    too few left-out rows."""
    rows: int
    validation: Validation
    """Each group size in turn left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeTable:
    """Measured times of one operation among one number of ranks, by message size."""

    operation: str
    """A `LinkOperation` value."""
    backend: str
    group_size: int
    message_bytes: tuple[float, ...]
    """Rising."""
    seconds: tuple[float, ...]
    """Medians, made non-decreasing in size."""
    log_halfwidth: float
    calibration: str
    rows: int
    validation: Validation
    nodes: int = 1
    """As in `LinkSample`."""
    groups: int = 1
    """As in `LinkSample`."""

    def __post_init__(self) -> None:
        sizes, seconds = self.message_bytes, self.seconds
        if not sizes or len(sizes) != len(seconds) or sizes[0] <= 0 or min(seconds) <= 0:
            raise InputError(
                f"the {self.operation} table has {len(sizes)} sizes and {len(seconds)} times; it "
                "needs one positive time per positive size, and at least one: fit again"
            )
        if any(left >= right for left, right in pairwise(sizes)) or any(
            left > right for left, right in pairwise(seconds)
        ):
            raise InputError(
                f"the {self.operation} table does not rise with the message size: fit again"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLaw:
    """Everything measured under one link name."""

    link: str
    tables: tuple[SizeTable, ...]
    shapes: tuple[LinkShape, ...] = ()
    """Shapes of operations of which several group sizes were measured."""


def table_seconds(table: SizeTable, message_bytes: float, floor_seconds: float = 0.0) -> float:
    """Time of a message of this size by the table.

    `floor_seconds`: what any message takes at least, as far as the smallest measured one does.
    """
    seconds = interpolate(table.message_bytes, table.seconds, message_bytes)
    if message_bytes < table.message_bytes[0]:
        return max(seconds, min(floor_seconds, table.seconds[0]))
    return seconds


def outside_sizes(
    table: SizeTable, operation: str, message_bytes: float
) -> tuple[float, tuple[str, ...]]:
    """Half-width at this size, and a warning where it was not measured."""
    measured = MeasuredRange(
        quantity=f"{operation} message", least=table.message_bytes[0], most=table.message_bytes[-1]
    )
    return outside((measured,), (max(message_bytes, 1.0),), table.log_halfwidth)
