"""What a collective costs, as values: algorithm, seconds with their terms, bytes per link.

Bytes are counted only when they are asked for, of the algorithm that is chosen.

One part of a collective is a predicted collective or send over one link.

Devices that send over a link at the same time divide its shared capacity (`Link.among`); groups
beside this one leave it a `share` of what it would get alone. A measured curve knows nothing of
either, so there a message takes as long as one that is larger by what the bandwidth is smaller:

    T(S at a fraction f of the bandwidth) = T(S / f), which is alpha + S / (f B) for a law
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, lru_cache

from hetplan.cluster.spec import Island, Link
from hetplan.cost.network.segments import LinkName, uplinks_bytes_per_second
from hetplan.cost.terms import Term, seconds_of
from hetplan.predict.link.shapes import lanes
from hetplan.predict.predictor import MEASURED, Prediction, Predictor, SendLaw, link_cause
from hetplan.profiling.samples import LinkOperation


class Algorithm(StrEnum):
    """How the ranks of a group exchange their data."""

    RING = "ring"
    """Neighbours only, the message in as many chunks as there are ranks."""
    TREE = "tree"
    """Two binary trees with half of the message each."""
    TWO_LEVEL = "two-level"
    """Each node, island or region first reduces inside, then its shards cross the longer links."""
    DIRECT = "direct"
    """Every rank sends to every other what is for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes:
    """What one collective sends over all links of one name."""

    link: LinkName
    bytes: float
    """Of all devices and both directions."""


Sent = Iterable[tuple[LinkName, float]]
"""Links and bytes sent over them; a link may come several times."""


@dataclass(frozen=True, kw_only=True)
class CollectiveCost:
    """One collective by one form of one algorithm."""

    terms: tuple[Term, ...]
    """Parts that follow each other."""
    algorithm: Algorithm
    detail: str = ""
    """Which form of the algorithm, as in `inside nodes, across`."""
    sent: tuple[Sent, ...] = field(repr=False, compare=False)
    """Iterators, read once, by `traffic`."""

    @cached_property
    def seconds(self) -> float:
        """Until the last rank has its result, all ranks having started together."""
        return seconds_of(self.terms)

    @cached_property
    def traffic(self) -> tuple[LinkBytes, ...]:
        """In order of the links' names; none where nothing is sent.

        Counted when it is asked for: between n islands there are n (n - 1) / 2 links.
        """
        total: dict[LinkName, float] = defaultdict(float)
        for part in self.sent:
            for link, count in part:
                if count > 0:
                    total[link] += count
        return tuple(LinkBytes(link=link, bytes=total[link]) for link in sorted(total))


_SENDERS_SLACK = 1e-9
"""Rounding of sums of fractions before devices are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Where the tokens of a group's ranks go, each sent once to every place that it goes to.

    Every choice of `per_token` of `experts` is equally likely. A part that holds E / p of E experts
    has none of a token's k with the hypergeometric probability C(E - E / p, k) / C(E, k).
    """

    experts: int
    per_token: int

    def places(self, parts: int) -> float:
        """Mean number of equal parts of the group that hold experts of one token."""
        held = self.experts / parts
        missed = 1.0
        for drawn in range(self.per_token):
            missed *= max(0.0, 1.0 - held / (self.experts - drawn))
        return parts * (1.0 - missed)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """A link as one phase of a collective uses it."""

    link: Link
    senders: float = 1.0
    """Devices that send over it at the same time in one direction; a device that sends half of the
    time, or half as much, counts as half of one."""
    shared: bool = True
    """Whether the groups beside this one are on the link as well."""
    nodes: int = 1
    """Nodes that the phase goes over by this link; 1: the link is inside a node."""
    uplinks_bytes_per_second: float = math.inf
    """What the PCIe switches of a node leave each rank; samples of the link know it already."""


def inside_node(island: Island, ranks: int, *, shared: bool, every_pair: bool = False) -> LinkUse:
    """The link inside a node as so many ranks of it use it; `every_pair`: not as rings do."""
    return LinkUse(
        link=island.intra_node,
        shared=shared,
        uplinks_bytes_per_second=uplinks_bytes_per_second(island, ranks, every_pair=every_pair),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """The predictor, and what groups beside this one leave to it."""

    predictor: Predictor
    share: float

    def collective(
        self, use: LinkUse, operation: LinkOperation, ranks: int, message_bytes: float, what: str
    ) -> Term:
        """A collective of this many equal ranks over the link, which carries one ring of them.

        The predictor knows groups: where a node has several ranks, of as many rings side by side.
        """
        link, larger = self._priced(use)
        nodes = min(use.nodes, ranks)
        asked = message_bytes / (self.share if use.shared else 1.0)
        asked *= lanes(operation, ranks, nodes)
        found = self.predictor.collective(link, operation.value, ranks, asked, nodes=nodes)
        if larger > 1.0 and found.source == MEASURED:
            asked *= larger
            found = self.predictor.collective(link, operation.value, ranks, asked, nodes=nodes)
        return Term(what=what, cause=_cause(use.link), count=1, prediction=found)

    def send(
        self, use: LinkUse, message_bytes: float, what: str, *, together: bool = False
    ) -> Term:
        """One message: latency, then the bytes.

        The receiver has posted long before, as in the steps of a collective; or both sides post
        `together`, and the sender first learns that there is room.
        """
        law = self.law(use, message_bytes)
        latency = law.rendezvous_latency_seconds if together else law.wire_latency_seconds
        found = Prediction(
            seconds=latency + message_bytes * law.seconds_per_byte,
            log_halfwidth=law.log_halfwidth,
            source=law.source,
            extrapolating=law.extrapolating,
        )
        return Term(what=what, cause=_cause(use.link), count=1, prediction=found)

    def law(self, use: LinkUse, message_bytes: float) -> SendLaw:
        """Law of messages about this large."""
        link, larger = self._priced(use)
        slower = 1.0 / (self.share if use.shared else 1.0)
        law = self.predictor.send(link, message_bytes * slower, nodes=use.nodes)
        if larger > 1.0 and law.source == MEASURED:
            slower *= larger
            law = self.predictor.send(link, message_bytes * slower, nodes=use.nodes)
        return replace(law, seconds_per_byte=law.seconds_per_byte * slower)

    def _priced(self, use: LinkUse) -> tuple[Link, float]:
        """The link for one of the senders, and how many times less than alone the others leave."""
        link = use.link.among(max(1, math.ceil(use.senders - _SENDERS_SLACK)))
        larger = 1.0
        if link is not use.link:
            larger = use.link.bandwidth_bytes_per_second / link.bandwidth_bytes_per_second
        if use.uplinks_bytes_per_second < link.bandwidth_bytes_per_second:
            link = replace(link, bandwidth_bytes_per_second=use.uplinks_bytes_per_second)
        return link, larger


@lru_cache(maxsize=4096)
def _cause(link: Link) -> str:
    return link_cause(link)


def slowest(terms: Iterable[Term]) -> Term:
    """The term that takes longest, of at least one that run at the same time."""
    return max(terms, key=lambda term: term.seconds)


def only_measured(terms: Iterable[Term]) -> bool:
    """Whether every part rests on samples."""
    return all(term.prediction.source == MEASURED for term in terms)
