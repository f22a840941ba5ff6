"""Transfers between neighbouring stages, and the wires that they share.

A microbatch's activations are [b, s / cp, h] on every rank of the receiving stage, 1 / tp of that
with sequence parallelism, or where the trainer scatters its sends: then the tensor-parallel ranks
that received the parts gather them before they go on (arXiv 2104.04473, section 4.1), and a
transfer has arrived when that is done. Every rank sends to the one of its position; where the two
stages have different numbers of ranks, a rank of the smaller one sends, or receives, for several,
one after the other. Where the samples of a microbatch cross unlike links, as those of a stage that
lies in two regions, every rank's messages are priced on their own links, and the stages wait for
the rank that takes longest (`hetplan.cost.step_model.pairs`). A capacity that the link's devices
share is divided among the ranks of the smaller stage (`Link.among`); where they are put on
equal-cost paths by hash, the mean of what collisions leave counts
(`hetplan.cost.network.hash_collisions`). Samples say what one pair reached with all of that to
itself: k senders that share reach what is there, each a k-th of it, and none more than alone.

Hops over one link that several hops cross, of any pipeline, share a wire where the link's common
capacity is known, and hops of several pipelines that leave a node by one NIC; the repeated hops of
an interleaved pipeline always do. A hop has one shared wire in each direction: of what it crosses
together with others, that which its messages occupy longest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetplan.cluster.spec import Cluster, Island, Link, Transport
from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.network.hash_collisions import link_collisions
from hetplan.cost.network.segments import (
    Segment,
    SegmentKind,
    host_bytes_per_second,
    nic_bytes_per_second,
    nics_crossed,
    shared_bytes_per_second,
    shared_link,
)
from hetplan.cost.step_model.groups import KnownCollectives, group_among
from hetplan.cost.step_model.pairs import Entry, Route, StagePart, Way, longest, routes_between
from hetplan.cost.terms import seconds_of
from hetplan.job.spec import Job
from hetplan.job.trainer import trainer_settings
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import neighbour_link
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import Pipeline, Replica, expand
from hetplan.plans.v_schedules import is_v, stage_of
from hetplan.predict.predictor import MEASURED, Predictor, SendLaw, link_cause
from hetplan.profiling.samples import LinkOperation


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """One thing of limited bandwidth, in one direction, that a hop's messages cross."""

    segment: Segment
    seconds: float
    """How long all devices' messages of one microbatch occupy it."""

    @property
    def is_link(self) -> bool:
        """Whether it is what two islands or regions share; otherwise a node's NIC."""
        return self.segment.kind in (SegmentKind.ISLAND_LINK, SegmentKind.REGION_LINK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """The NICs over which one device sends, which other devices send over at the same time."""

    senders: int
    bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Everything but the link that the transfers between two neighbouring stages depend on."""

    forward_bytes: float
    """Per device of the smaller stage."""
    backward_bytes: float
    senders: int
    """Devices that send at the same time."""
    islands: tuple[Island, Island] | None = None
    """The link's ends; None where they are not known."""
    gathering_seconds: float = 0.0
    """Gathering of scattered activations by the receivers, before a transfer counts as arrived."""
    ports: tuple[Port, ...] = ()
    """The NICs that the senders cross; none of a link inside a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One microbatch's transfers between two stages, activations there and gradients back."""

    link: str
    """Name under which the link's predictions err together."""
    path: Link
    """The link with its bandwidth per sender."""
    forward_bytes: float
    """Per device of the smaller stage."""
    backward_bytes: float
    senders: int
    send_forward_seconds: float
    """How long the activations occupy the wire."""
    send_backward_seconds: float
    wire_latency_seconds: float
    """From leaving the wire to having arrived, copies to and from host memory included, and the
    gathering of what was scattered."""
    rendezvous_extra_seconds: float
    """From the receiver's post to the first byte, where the sender waits for that."""
    law: SendLaw
    forward_crosses: tuple[Crossing, ...] = ()
    """What the activations cross that other hops may cross too."""
    backward_crosses: tuple[Crossing, ...] = ()
    divided: bool = False
    """Whether the link says what its devices share."""


def received_bytes(model: ModelSpec, job: Job, replica: Replica | Shape) -> float:
    """Activations of one microbatch on one rank of a stage that receives them."""
    tokens = replica.microbatch_size * job.sequence_length / replica.cp
    whole = tokens * model.hidden_size * job.precision.bytes_per_element
    scattered = trainer_settings(job).scattered_sends
    return whole / (replica.tp if replica.sequence_parallel or scattered else 1)


def gathered_seconds(
    model: ModelSpec, job: Job, island: Island, replica: Replica | Shape, predictor: Predictor
) -> float:
    """What the ranks of a receiving stage take to gather scattered activations of one microbatch.

    That of a tensor-parallel group on the island's first devices; 0 where nothing was scattered, or
    the passes themselves work on the parts (sequence parallelism).
    """
    if replica.tp == 1 or replica.sequence_parallel or not trainer_settings(job).scattered_sends:
        return 0.0
    cluster = Cluster(name=island.name, islands=(island,))
    devices = [
        node * island.devices_per_node + local
        for node in island.usable_nodes
        for local in range(island.devices_per_node)
    ]
    whole = received_bytes(model, job, replica) * replica.tp
    terms = KnownCollectives(cluster, predictor).of(
        group_among(cluster, (devices[: replica.tp],)),
        LinkOperation.ALL_GATHER,
        whole,
        "all_gather of scattered activations",
    )
    return seconds_of(terms)


def host_copies_seconds(
    link: Link, left: Island, right: Island, message_bytes: float, senders: int
) -> float:
    """What copies to and from host memory add to a transfer whose link was not measured.

    gloo copies a message whole, so copy, wire and copy follow each other, and the predictor prices
    the wire; devices at one PCIe switch share its uplink. Nothing is added where a kind's host
    interface is not known.
    """
    if link.transport is not Transport.HOST_STAGED or link.samples is not None:
        return 0.0
    return sum(message_bytes / _copy_rate(island, senders) for island in (left, right))


def _copy_rate(island: Island, senders: int) -> float:
    """Bytes per second of a device that copies beside so many; the fullest switch has the most."""
    fullest = min(senders, max(Counter(island.switch_of_device).values(), default=1))
    uplink = host_bytes_per_second(island)
    return min(uplink, uplink * senders / fullest / senders)


def hop_over(link: Link, sides: Sides, predictor: Predictor) -> Hop:
    """Transfers over this link between two stages."""
    senders, ends = sides.senders, sides.islands
    forward_bytes, backward_bytes = sides.forward_bytes, sides.backward_bytes
    alone, kept = link, link_collisions(link, senders)
    link = link.among(senders)
    # Between two islands of which nothing is said: between nodes.
    inside = ends is not None and ends[0] is ends[1] and alone == ends[0].intra_node
    nodes = 1 if inside else 2
    law = predictor.send(link, forward_bytes, nodes=nodes)
    copies = 0.0
    if ends is not None:
        copies = host_copies_seconds(link, *ends, max(forward_bytes, backward_bytes), senders)
    back = (
        law
        if backward_bytes == forward_bytes
        else predictor.send(link, backward_bytes, nodes=nodes)
    )
    return Hop(
        link=link_cause(link),
        path=link,
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        senders=senders,
        send_forward_seconds=forward_bytes * _among(law, alone, sides) / kept,
        send_backward_seconds=backward_bytes * _among(back, alone, sides) / kept,
        wire_latency_seconds=law.wire_latency_seconds + copies + sides.gathering_seconds,
        rendezvous_extra_seconds=max(
            0.0, law.rendezvous_latency_seconds - law.wire_latency_seconds
        ),
        law=law,
        divided=alone.shared_bandwidth_bytes_per_second is not None,
    )


def _among(law: SendLaw, link: Link, sides: Sides) -> float:
    """Seconds per byte of one of the senders; the bandwidth of an unmeasured link is a share.

    A rate above a figure of the cluster file shows that the figure is too low.
    """
    alone = law.seconds_per_byte
    if link.samples is None or law.source != MEASURED or alone <= 0:
        return alone
    shared = link.shared_bandwidth_bytes_per_second
    whole = () if shared is None else (Port(senders=sides.senders, bytes_per_second=shared),)
    slowest = alone
    for port in (*whole, *sides.ports):
        slowest = max(slowest, port.senders * min(alone, 1.0 / port.bytes_per_second))
    return slowest


def node_ports(island: Island, senders: int) -> tuple[Port, ...]:
    """The fullest NIC of a node where so many devices of one stage send, which fill nodes."""
    nics, each = island.nics, island.devices_per_node
    if nics is None:
        return ()
    used = Counter(nics.of(local, each) for local in range(min(senders, each)))
    found, most = max(used.items(), key=lambda item: item[1] / len(item[0]))
    return (Port(senders=most, bytes_per_second=nics.bandwidth_bytes_per_second * len(found)),)


def boundary_costs_over(
    link: Link,
    model: ModelSpec,
    job: Job,
    shape: Shape,
    predictor: Predictor,
    ends: tuple[Island, Island] | None = None,
) -> Hop:
    """Transfers between two stages of this shape over this link, which joins `ends`.

    Before anyone knows the plan, as where a search bounds every boundary that a stage can have.
    A capacity that the link shares is divided by the devices of a stage, which all send at once.
    """
    message = received_bytes(model, job, shape)
    gathering = max(
        (gathered_seconds(model, job, island, shape, predictor) for island in ends or ()),
        default=0.0,
    )
    senders = shape.num_devices
    # Two stages inside one node cross no NIC.
    apart = ends if ends and link != ends[0].intra_node else ()
    sides = Sides(
        forward_bytes=message,
        backward_bytes=message,
        senders=senders,
        islands=ends,
        gathering_seconds=gathering,
        ports=tuple(port for island in apart for port in node_ports(island, senders)),
    )
    return hop_over(link, sides, predictor)


def hop_between(
    cluster: Cluster,
    model: ModelSpec,
    job: Job,
    left: Sequence[Replica],
    right: Sequence[Replica],
    predictor: Predictor,
    *,
    nics: bool = False,
    scale: float = 1.0,
) -> Hop:
    """Transfers from the stage of replicas `left` to that of `right`.

    `nics`: with the NICs that they cross. `scale`: bytes on the wire over those in memory.
    """
    if len(left) + len(right) > 2:
        settings = cluster, model, job, predictor
        routes = routes_between(
            cluster, *(parts_of(settings, side, scale) for side in (left, right))
        )
        if len(routes) > 1:
            return over_several(routes, lambda link, sides: hop_over(link, sides, predictor))
    one, two = (
        [device for replica in side for device in expand(replica.devices)] for side in (left, right)
    )
    senders = min(len(one), len(two))
    link = neighbour_link(cluster, one, two)[0]
    islands = cluster.island_of_device(one[0]), cluster.island_of_device(two[0])
    ports: Counter[Segment] = Counter()
    if nics or link.samples is not None:
        ports = _nics_crossed(cluster, one, two, senders)
    forward = scale * max(received_bytes(model, job, replica) for replica in right)
    backward = scale * max(received_bytes(model, job, replica) for replica in left)
    sides = Sides(
        # One of few senders sends for several receivers; one of many gets by with one message.
        forward_bytes=forward * max(1.0, len(two) / len(one)),
        backward_bytes=backward * max(1.0, len(one) / len(two)),
        senders=senders,
        islands=islands,
        # Where the two sides take unlike times, the longer one counts in both directions.
        gathering_seconds=max(
            gathered_seconds(model, job, island, replica, predictor)
            for island, side in zip(islands, (left, right), strict=True)
            for replica in side
        ),
        ports=tuple(
            Port(senders=number, bytes_per_second=_nic_rate(cluster, port))
            for port, number in ports.items()
        ),
    )
    found = hop_over(link, sides, predictor)
    there, back = sides.forward_bytes, sides.backward_bytes
    return replace(
        found,
        forward_crosses=_crossed(cluster, one, two, there, senders, nics=nics),
        backward_crosses=_crossed(cluster, two, one, back, senders, nics=nics),
    )


def parts_of(
    settings: tuple[Cluster, ModelSpec, Job, Predictor], side: Sequence[Replica], scale: float = 1.0
) -> tuple[StagePart, ...]:
    """A stage's replica entries. `scale`: bytes on the wire over those in memory."""
    cluster, model, job, predictor = settings
    found, start = [], 0
    for each in side:
        island = cluster.island_of_device(each.devices[0].start)
        size, stop = each.microbatch_size, start + each.dp * each.microbatch_size
        received = scale * received_bytes(model, job, each)
        found.append(
            StagePart(
                island=island,
                entry=Entry(start, stop, size, each.tp * each.cp, received / size),
                ends=(min(x.start for x in each.devices), max(x.last for x in each.devices)),
                gathering_seconds=gathered_seconds(model, job, island, each, predictor),
            )
        )
        start = stop
    return tuple(found)


def over_several(routes: Sequence[Route], priced: Callable[[Link, Sides], Hop]) -> Hop:
    """Transfers of stages whose ranks send over unlike links: those of the rank that takes longest.

    `priced`: `hop_over`. NICs that several pipelines share are not told apart here.
    """
    hops = []
    for route in routes:
        senders = route.there.senders
        apart = [island for island in route.islands if route.link != island.intra_node]
        sides = Sides(
            forward_bytes=route.there.most_bytes,
            backward_bytes=route.back.most_bytes,
            senders=senders,
            islands=route.islands,
            gathering_seconds=route.gathering_seconds,
            ports=tuple(port for island in apart for port in node_ports(island, senders)),
        )
        hops.append(priced(route.link, sides))
    there, back = ([getattr(route, name) for route in routes] for name in ("there", "back"))
    return replace(
        max(hops, key=lambda hop: hop.send_forward_seconds + hop.wire_latency_seconds),
        send_forward_seconds=longest(
            there, [hop.send_forward_seconds / hop.forward_bytes for hop in hops]
        ),
        send_backward_seconds=longest(
            back, [hop.send_backward_seconds / hop.backward_bytes for hop in hops]
        ),
        wire_latency_seconds=max(hop.wire_latency_seconds for hop in hops),
        rendezvous_extra_seconds=max(hop.rendezvous_extra_seconds for hop in hops),
        forward_crosses=_crossed_by(routes, there, 0),
        backward_crosses=_crossed_by(routes, back, 1),
    )


def _crossed_by(
    routes: Sequence[Route], ways: Sequence[Way], direction: int
) -> tuple[Crossing, ...]:
    """The capacities that islands share, one for each."""
    return tuple(
        Crossing(segment=segment, seconds=way.whole_bytes / shared_bytes_per_second(route.link))
        for route, way in zip(routes, ways, strict=True)
        if (segment := route.segments[direction]) is not None
    )


def _nics_crossed(
    cluster: Cluster, sources: Sequence[int], targets: Sequence[int], senders: int
) -> Counter[Segment]:
    """How many of the senders each described NIC of either side carries."""
    count = max(len(sources), len(targets))
    found: Counter[Segment] = Counter()
    for at in range(0, count, count // senders):
        ends = (sources[at * len(sources) // count], targets[at * len(targets) // count])
        found.update(nics_crossed(cluster, *ends))
    return found


def _nic_rate(cluster: Cluster, nic: Segment) -> float:
    return nic_bytes_per_second(cluster, cluster.island(nic.place))


def _crossed(
    cluster: Cluster,
    sources: Sequence[int],
    targets: Sequence[int],
    message_bytes: float,
    senders: int,
    *,
    nics: bool,
) -> tuple[Crossing, ...]:
    """The common capacity between two islands, and the NICs of the senders' nodes."""
    one, two = cluster.island_of_device(sources[0]), cluster.island_of_device(targets[0])
    found = []
    if one.name != two.name:
        between = shared_link(cluster, one, two)
        shared = shared_bytes_per_second(cluster.link_between(one.name, two.name))
        if between is not None and shared < math.inf:
            seconds = message_bytes * senders / shared
            found.append(Crossing(segment=between, seconds=seconds))
    if nics and one.nics is not None:
        found += [
            Crossing(segment=port, seconds=message_bytes * number / _nic_rate(cluster, port))
            for port, number in _nics_crossed(cluster, sources, targets, senders).items()
            if port.outgoing
        ]
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class HopArrays:
    """A pipeline's hops as the replay takes them."""

    row: tuple[Hop | None, ...]
    """None where a chunk's next one is on the same stage."""
    send_forward: Floats
    send_backward: Floats
    wire_latency: Floats
    rendezvous_extra: Floats
    link_forward: Ints
    link_backward: Ints
    shared_forward: Floats
    shared_backward: Floats
    shares: bool

    @property
    def hops(self) -> tuple[Hop, ...]:
        """Those that cross something."""
        return tuple(hop for hop in self.row if hop is not None)


def hop_arrays(
    pipelines: Sequence[tuple[Hop | None, ...]], plan: Sequence[Pipeline]
) -> tuple[HopArrays, ...]:
    """Hops as arrays, with one number for each wire that more than one hop crosses.

    A hop has one wire in each direction: of what it crosses together with others, that which its
    messages occupy longest. NICs count where several pipelines cross them.
    """
    owners: dict[_Wire, set[tuple[int, int]]] = {}
    for p, hops in enumerate(pipelines):
        for k, hop in enumerate(hops):
            for wire, _ in _wires_crossed(p, k, hop, plan[p]):
                owners.setdefault(wire, set()).add((p, k if wire[0] != "NIC" else -1))
    numbers = {
        wire: number
        for number, wire in enumerate(wire for wire, hops in owners.items() if len(hops) > 1)
    }
    return tuple(
        _arrays_of(
            hops,
            [
                tuple(
                    _slowest(_wires_crossed(p, k, hop, plan[p], back), numbers)
                    for back in (False, True)
                )
                for k, hop in enumerate(hops)
            ],
        )
        for p, hops in enumerate(pipelines)
    )


_Wire = tuple[object, ...]


def _wires_crossed(
    p: int, k: int, hop: Hop | None, pipeline: Pipeline, back: bool | None = None
) -> list[tuple[_Wire, float]]:
    """(name, seconds) of what a hop crosses, in one direction or both."""
    if hop is None:
        return []
    schedule, num_stages = pipeline.schedule.name, len(pipeline.stages)
    found: list[tuple[_Wire, float]] = []
    for backward, crossed, own in (
        (False, hop.forward_crosses, hop.send_forward_seconds),
        (True, hop.backward_crosses, hop.send_backward_seconds),
    ):
        if back not in (None, backward):
            continue
        found += [
            (("link" if each.is_link else "NIC", each.segment), each.seconds) for each in crossed
        ]
        # The same two stages again, with virtual stages: the same way.
        up = stage_of(schedule, k, num_stages) > stage_of(schedule, k + 1, num_stages)
        if is_v(schedule) and up:
            found.append((("hop", p, 2 * num_stages - 2 - k, not backward), own))
        else:
            found.append((("hop", p, k % num_stages, backward), own))
    return found


def _slowest(
    crossed: Sequence[tuple[_Wire, float]], numbers: dict[_Wire, int]
) -> tuple[int, float]:
    """(number, seconds) of the wire that counts; -1 where nothing is shared."""
    shared = [(numbers[wire], seconds) for wire, seconds in crossed if wire in numbers]
    return max(shared, key=lambda each: each[1], default=(-1, 0.0))


def _arrays_of(
    hops: Sequence[Hop | None], wires: Sequence[tuple[tuple[int, float], ...]]
) -> HopArrays:
    def floats(name: str) -> Floats:
        return np.array([0.0 if hop is None else getattr(hop, name) for hop in hops])

    numbers = [np.array([pair[way][0] for pair in wires], dtype=np.int64) for way in (0, 1)]
    seconds = [np.array([pair[way][1] for pair in wires], dtype=np.float64) for way in (0, 1)]
    return HopArrays(
        tuple(hops),
        floats("send_forward_seconds"),
        floats("send_backward_seconds"),
        floats("wire_latency_seconds"),
        floats("rendezvous_extra_seconds"),
        numbers[0],
        numbers[1],
        seconds[0],
        seconds[1],
        bool((numbers[0] >= 0).any() or (numbers[1] >= 0).any()),
    )
