"""What a collective over a link costs, by samples of some of its group sizes.

Host-staged: gloo's rings are as simple as their formula. A ring of n ranks takes steps(n) steps
that each carry 1 / n of the message, so the time of a step of x bytes, read off a table measured at
n0 ranks, gives

    T(n, S) = steps(n) / steps(n0) * T(n0, S * n0 / n)

Device-direct: a shape that was measured (operation, ranks, nodes) is read off its table. Another
one is carried by a law in the form of the algorithm (`link.shapes`), of which only ratios count.
With L, the law's latency or the time of the smallest message if that is less, and everything above
it due to bytes,

    T(n, S) = L(n0) * latency(n) / latency(n0) + (T(n0, S0) - L(n0)) * bytes(n, S) / bytes(n0, S0)

S0 of as many bytes per ring: so it rises with S as the table does. It is taken from the two
measured group sizes around n (geometric mean, the nearer one counting more), or from the nearest
one where n lies outside of them. The law is the link's own where several group sizes were measured,
else that of links of its class at the rate that the largest measured message had, with more or
fewer links by how the devices of a node are joined. With F, the figure of one device's links
together, and p, what they reach to one peer (the largest measured send, over the part of a figure
that sends reach: `prior.NODE_SEND`):

    bus      F is no more than PCIe has: no fabric of the devices' own
    even     p is about F (a switch), or p to each peer of the group is no more than F (every pair
             has links of its own, equally many): a group of n uses min(1, (n - 1) p / F) of them
    uneven   everything else, as V100 in a hybrid mesh; and where no send was measured

Half-widths are 90 % (conformal rank) of |log(measured / predicted)| where one group size is carried
to another one, on published tables, every link weighing the same. Whatever was not measured in the
shape of the question says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

from hetplan.predict.link.prior import (
    LINK_LOG_HALFWIDTH,
    NODE_SEND,
    PCIE_MOST_BYTES_PER_SECOND,
    class_law,
)
from hetplan.predict.link.shapes import (
    RELATIVES,
    LinkLaw,
    LinkShape,
    ShapeLaw,
    SizeTable,
    lane_bytes,
    lanes,
    outside_sizes,
    ring_shape,
    table_seconds,
)
from hetplan.predict.predictor import MEASURED, Prediction
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
"""Half-width of a collective carried from the only measured group size to half or twice it."""


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
        """Links that a group of `ranks` uses over those that a group of `others` uses."""
        if self.kind(max(ranks, others)) is JointClass.EVEN and self._own_links(max(ranks, others)):
            return (ranks - 1) / (others - 1)
        return 1.0

    def log_halfwidth(self, most_ranks: int) -> float:
        """Half-width of one group size carried to another, per doubling."""
        return dict(ONE_GROUP_LOG_HALFWIDTHS)[self.kind(most_ranks)]

    def _own_links(self, most_ranks: int) -> bool:
        peer = self.one_peer_bytes_per_second
        if peer is None:
            return False
        return (most_ranks - 1) * peer <= _SLACK * self.fabric_bytes_per_second


def joint_of(tables: Sequence[SizeTable], fabric_bytes_per_second: float) -> Joint | None:
    """How a link's devices are joined, by its tables; None where its figure is not known (0)."""
    if not fabric_bytes_per_second:
        return None
    sends = (t for t in tables if t.operation == LinkOperation.SEND_RECV and t.nodes == 1)
    table = next(sends, None)
    reached = None
    if table is not None:
        reached = NODE_SEND.bytes * table.message_bytes[-1] / table.seconds[-1]
    return Joint(fabric_bytes_per_second=fabric_bytes_per_second, one_peer_bytes_per_second=reached)


STAGED_LOG_PER_DOUBLING = 0.6
"""Growth of the half-width per doubling between the group size asked and the one measured: 90 %
of |log(measured / predicted)| of an A100 node's all_reduce among 2, 4 and 8, carried like this."""


def staged_collective(
    tables: Sequence[SizeTable], operation: str, group_size: int, message_bytes: float
) -> Prediction | None:
    """Time of a collective by a link's tables; None where none of them says anything about it."""
    own = [table for table in tables if table.operation == operation]
    if own:
        return _carried(_nearest(own, group_size), operation, group_size, message_bytes, 1.0, ())
    for relative in RELATIVES.get(operation, ()):
        kin = [table for table in tables if table.operation == relative]
        if kin:
            twice = 2.0 if operation == LinkOperation.ALL_REDUCE else 1.0
            half = 0.5 if relative == LinkOperation.ALL_REDUCE else 1.0
            note = (f"{operation} not measured: from {relative}",)
            table = _nearest(kin, group_size)
            return _carried(table, relative, group_size, message_bytes, twice * half, note)
    sends = [table for table in tables if table.operation == LinkOperation.SEND_RECV]
    if sends:
        return from_sends(sends[0], operation, group_size, message_bytes)
    return None


def _nearest(tables: Sequence[SizeTable], group_size: int) -> SizeTable:
    """The table whose group size is nearest by ratio; of two, the larger."""
    return min(
        tables,
        key=lambda table: (abs(math.log(table.group_size / group_size)), -table.group_size),
    )


def _carried(
    table: SizeTable,
    operation: str,
    group_size: int,
    message_bytes: float,
    factor: float,
    notes: tuple[str, ...],
) -> Prediction:
    """The table's time at another group size, by the algorithm's steps; exact at its own."""
    extra = LINK_LOG_HALFWIDTH if notes else 0.0
    equivalent = message_bytes
    if table.group_size != group_size:
        steps, share = ring_shape(operation, group_size)
        steps_measured, share_measured = ring_shape(operation, table.group_size)
        factor *= steps / steps_measured
        # The message that has, among the ranks measured, steps of as many bytes.
        equivalent = message_bytes * share / share_measured
        doublings = abs(math.log2(group_size / table.group_size))
        extra += STAGED_LOG_PER_DOUBLING * doublings
        notes = (*notes, f"{operation} group {group_size}, {table.group_size} measured")
    halfwidth, warnings = outside_sizes(table, operation, equivalent)
    return Prediction(
        seconds=factor * table_seconds(table, equivalent),
        log_halfwidth=halfwidth + extra,
        source=MEASURED,
        extrapolating=(*notes, *warnings),
    )


def from_sends(
    table: SizeTable, operation: str, group_size: int, message_bytes: float
) -> Prediction:
    """A collective as so many sends in a row."""
    steps, share = ring_shape(operation, group_size)
    halfwidth, warnings = outside_sizes(table, LinkOperation.SEND_RECV, share * message_bytes)
    return Prediction(
        seconds=steps * table_seconds(table, share * message_bytes),
        log_halfwidth=halfwidth + LINK_LOG_HALFWIDTH,
        source=MEASURED,
        extrapolating=(f"{operation} not measured: {steps} sends", *warnings),
    )


# all_reduce among 2, 4 and 8 devices, each carried to the other two, 1 MiB to 1 GiB: 90 % of
# |log(measured / predicted)| per doubling are below 0.19 on A100 with an NVLink switch.
CARRY_LOG_PER_DOUBLING = 0.19
"""Growth of the half-width per doubling between the group size asked and those measured."""

_MIN_BYTES_PART = 0.05
"""Part of the largest message's time that its bytes take at least, where a rate is read off it."""


def direct_collective(
    law: LinkLaw,
    operation: str,
    group_size: int,
    message_bytes: float,
    *,
    nodes: int = 1,
    groups: int = 1,
    fabric_bytes_per_second: float = 0.0,
) -> Prediction | None:
    """Time of a collective by a link's tables; None where none of them says anything about it.

    `fabric_bytes_per_second`: what one device's links together have by their figures; 0: unknown.
    """
    for measured in (operation, *RELATIVES.get(operation, ())):
        tables = _of_groups([each for each in law.tables if each.operation == measured], groups)
        if tables:
            shape = next((each for each in law.shapes if each.operation == measured), None)
            joint = joint_of(law.tables, fabric_bytes_per_second)
            return carried(tables, shape, operation, group_size, message_bytes, nodes, joint=joint)
    sends = [table for table in law.tables if table.operation == LinkOperation.SEND_RECV]
    if sends:
        lane = lane_bytes(operation, group_size, nodes, message_bytes)
        return from_sends(sends[0], operation, group_size, lane)
    return None


def _of_groups(tables: Sequence[SizeTable], groups: int) -> list[SizeTable]:
    """Those with as many groups at once, or the nearest number of them."""
    counts = {table.groups for table in tables}
    nearest = min(counts, key=lambda count: (abs(math.log(count / groups)), count), default=1)
    return [table for table in tables if table.groups == nearest]


def carried(
    tables: Sequence[SizeTable],
    shape: LinkShape | None,
    operation: str,
    group_size: int,
    message_bytes: float,
    nodes: int = 1,
    *,
    joint: Joint | None = None,
) -> Prediction:
    """A collective by tables of one operation: its own, or a relative's.

    `joint` says how devices of the node are joined; None: nothing is known of it.
    """
    lane = lane_bytes(operation, group_size, nodes, message_bytes)
    if all(table.nodes == 1 for table in tables):
        # Samples that say nothing of nodes: every rank as if in a node of its own.
        nodes = 1
    near = _around(tables, group_size, nodes)
    measured = near[0][0].operation
    notes: tuple[str, ...] = ()
    if measured != operation:
        notes = (f"{operation} not measured: from {measured}",)
    exact = len(near) == 1 and _fits(near[0][0], group_size, nodes)
    if not exact:
        notes = (*notes, _other_group(measured, group_size, nodes, near))
    asked = _Asked(operation=operation, group_size=group_size, nodes=nodes, lane_bytes=lane)
    moving = not exact or measured != operation
    answers = [_by_table(table, shape, asked, joint, moving=moving) for table, _ in near]
    halfwidth = max(answer.log_halfwidth for answer in answers)
    if not exact:
        halfwidth = _carried_halfwidth(shape, near, group_size, halfwidth, joint)
    if measured != operation:
        halfwidth += LINK_LOG_HALFWIDTH
    # Both neighbours mostly warn of the same size: the first one's words are enough.
    warnings = next((answer.extrapolating for answer in answers if answer.extrapolating), ())
    return Prediction(
        seconds=_between([answer.seconds for answer in answers], [weight for _, weight in near]),
        log_halfwidth=halfwidth,
        source=MEASURED,
        extrapolating=(*notes, *warnings),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A collective, with the bytes of one of its rings."""

    operation: str
    group_size: int
    nodes: int
    lane_bytes: float


def _by_table(
    table: SizeTable,
    shape: LinkShape | None,
    asked: _Asked,
    joint: Joint | None,
    *,
    moving: bool,
) -> Prediction:
    """The table's time; `moving`: changed by the law to the shape that is asked."""
    law = shape.law if shape is not None else table_class_law(table, joint)
    size = asked.lane_bytes * lanes(table.operation, table.group_size, table.nodes)
    latency = law.latency_seconds(table.operation, table.group_size, table.nodes)
    seconds = table_seconds(table, size, latency)
    halfwidth, warnings = outside_sizes(table, table.operation, size)
    if moving:
        fixed = min(latency, table.seconds[0], seconds)
        own = _ring_byte_seconds(law, table.operation, table.group_size, table.nodes)
        other = _ring_byte_seconds(law, asked.operation, asked.group_size, asked.nodes)
        moved = (seconds - fixed) * (other / own if own else 1.0)
        if shape is None and joint is not None and asked.nodes == 1 and table.nodes == 1:
            # A shape of the link's own group sizes has seen what its links do.
            moved *= joint.less_reach(table.group_size, asked.group_size)
        more = law.latency_seconds(asked.operation, asked.group_size, asked.nodes)
        seconds = fixed * (more / latency if latency else 1.0) + moved
    return Prediction(
        seconds=seconds, log_halfwidth=halfwidth, source=MEASURED, extrapolating=warnings
    )


def _ring_byte_seconds(law: ShapeLaw, operation: str, group_size: int, nodes: int) -> float:
    """Seconds of one byte per ring; ratios of it do not depend on the size."""
    return law.byte_seconds(operation, group_size, lanes(operation, group_size, nodes), nodes)


def _between(seconds: Sequence[float], weights: Sequence[float]) -> float:
    """Weighted geometric mean; a single time as it is."""
    if len(seconds) == 1:
        return seconds[0]
    if min(seconds) <= 0:
        return 0.0
    logs = (weight * math.log(each) for each, weight in zip(seconds, weights, strict=True))
    return math.exp(sum(logs))


def table_class_law(table: SizeTable, joint: Joint | None = None) -> ShapeLaw:
    """The law of links of the table's class, at the rate that the largest message had."""
    bus = joint is not None and joint.kind(table.group_size) is JointClass.BUS
    of_class = class_law(table.operation, nodes=table.nodes, bus=bus)
    unit = of_class.at(1.0)
    size = table.message_bytes[-1]
    latency = unit.latency_seconds(table.operation, table.group_size, table.nodes)
    bytes_at_one = unit.seconds(table.operation, table.group_size, size, table.nodes) - latency
    moving = max(table.seconds[-1] - latency, _MIN_BYTES_PART * table.seconds[-1])
    return of_class.at(bytes_at_one / moving)


def _fits(table: SizeTable, group_size: int, nodes: int) -> bool:
    """Whether a table is of this shape: ranks in one node, or one in each, or so many in each."""
    if table.group_size != group_size:
        return False
    return table.nodes == nodes or {table.nodes, nodes} == {1, group_size}


def _around(
    tables: Sequence[SizeTable], group_size: int, nodes: int
) -> tuple[tuple[SizeTable, float], ...]:
    """The table of this shape, or those it is carried from, with their weights (sum 1)."""
    for table in tables:
        if _fits(table, group_size, nodes):
            return ((table, 1.0),)
    ranks = group_size / nodes

    def apart(table: SizeTable) -> float:
        each = table.group_size / table.nodes if table.nodes > 1 else 1.0
        return abs(math.log(each / ranks)) if nodes > 1 else 0.0

    # As many ranks in each node first: how they share the way out of it is not the law's.
    least = min(map(apart, tables))
    alike = [table for table in tables if apart(table) <= least + 1e-9]
    below = max(
        (t for t in alike if t.group_size < group_size), key=attrgetter("group_size"), default=None
    )
    above = min(
        (t for t in alike if t.group_size > group_size), key=attrgetter("group_size"), default=None
    )
    if below is None or above is None:
        nearest = below or above
        if nearest is None:
            nearest = alike[0]
        return ((nearest, 1.0),)
    span = math.log(above.group_size / below.group_size)
    weight = math.log(group_size / below.group_size) / span
    return ((below, 1.0 - weight), (above, weight))


def _other_group(
    operation: str, group_size: int, nodes: int, near: Sequence[tuple[SizeTable, float]]
) -> str:
    """As in `all_reduce group 128, 16 measured`."""
    several = nodes > 1 and any(table.nodes > 1 for table, _ in near)
    where = f" in {nodes} nodes" if several else ""
    measured = " and ".join(
        f"{table.group_size}" + (f" in {table.nodes}" if several else "") for table, _ in near
    )
    return f"{operation} group {group_size}{where}, {measured} measured"


def _carried_halfwidth(
    shape: LinkShape | None,
    near: Sequence[tuple[SizeTable, float]],
    group_size: int,
    halfwidth: float,
    joint: Joint | None,
) -> float:
    """Wider by what left-out group sizes of the link show, and by the distance to them.

    Where one group size was measured: by what carrying one shows on other links of the class.
    """
    doublings = min(abs(math.log2(group_size / table.group_size)) for table, _ in near)
    if shape is None and joint is not None and all(table.nodes == 1 for table, _ in near):
        groups = (group_size, *(table.group_size for table, _ in near))
        return max(halfwidth, joint.log_halfwidth(max(groups)) * max(1.0, doublings))
    if shape is None or shape.log_halfwidth is None:
        return halfwidth + CARRY_LOG_PER_DOUBLING * doublings
    halfwidth = max(halfwidth, shape.log_halfwidth)
    if shape.least_group <= group_size <= shape.most_group:
        return halfwidth
    return halfwidth + CARRY_LOG_PER_DOUBLING * doublings
