"""Which link bytes cross and what they are for: the names that costs, traffic and reports share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hetplan.cluster.hosts import place_of
from hetplan.cluster.spec import Cluster


class TrafficClass(StrEnum):
    """What bytes are for."""

    TENSOR_PARALLEL = "tp"
    CONTEXT_PARALLEL = "cp"
    EXPERT_PARALLEL = "ep"
    PIPELINE = "pp"
    DATA_PARALLEL = "dp"
    EMBEDDING = "embedding"
    """Sums of a tied matrix's gradient between first and last stage."""
    CHECKPOINT = "checkpoint"
    DATA = "data"
    """Training data."""


class LinkScope(StrEnum):
    """How far a link reaches."""

    NODE = "inside a node"
    ISLAND = "between nodes"
    ISLANDS = "between islands"
    STORAGE = "to storage"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LinkName:
    """All links of one kind: those inside the nodes of an island, between its nodes, or between
    two islands.
    """

    scope: LinkScope
    left: str
    """Island."""
    right: str
    """The other island, with `left` in order of the alphabet; `left` itself inside one."""

    def __str__(self) -> str:
        if self.scope is LinkScope.ISLANDS:
            return f"{self.left} to {self.right}"
        return f"{self.left}, {self.scope.value}"


def link_name(cluster: Cluster, left: int, right: int) -> LinkName:
    """Name of the link between two different devices."""
    one, two = place_of(cluster, left), place_of(cluster, right)
    if one.island.name != two.island.name:
        return between_islands(one.island.name, two.island.name)
    scope = LinkScope.NODE if one.node == two.node else LinkScope.ISLAND
    return island_link(one.island.name, scope)


def island_link(island: str, scope: LinkScope) -> LinkName:
    """Name of an island's own links: inside its nodes, between them, or to storage."""
    return LinkName(scope=scope, left=island, right=island)


def between_islands(left: str, right: str) -> LinkName:
    """Name of the link between two different islands."""
    first, second = sorted((left, right))
    return LinkName(scope=LinkScope.ISLANDS, left=first, right=second)
