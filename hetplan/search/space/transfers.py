"""Transfers between the stages of all meshes of a family, as arrays.

The first stages of two meshes stand for all: what a transfer costs depends on the link, on how many
send how much, and on the NICs that they cross (`hetplan.cost.step_model.hops`). Stages on several
islands differ where a part fills no node: now one part and now another sends within one. The least
of these stands for all, so that no plan costs less than the search says. Of many pairs of meshes
few differ in all that, so each different one is priced once and kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hetplan.cluster.spec import Island, Link
from hetplan.cost.arrays import Floats
from hetplan.cost.network.segments import shared_link
from hetplan.cost.step_model.end_of_step import tied_embedding_parts
from hetplan.cost.step_model.hops import (
    Hop,
    Sides,
    gathered_seconds,
    hop_between,
    hop_over,
    over_several,
    parts_of,
    received_bytes,
)
from hetplan.cost.step_model.pairs import StagePart, routes_between
from hetplan.cost.step_model.step import norm_depth, norm_rounds, scalar_term
from hetplan.cost.terms import seconds_of_parts
from hetplan.plans.build import replica_of
from hetplan.plans.formats import reduction_precision
from hetplan.search.space.family import Mesh
from hetplan.search.space.stage_pricer import StagePricer
from hetplan.search.space.stage_table import FIRST, LAST

_FEW_MESHES = 16
"""Up to so many every pair is priced by itself."""

_NORM = 4
"""Behind the four times of `StageTable.links`."""


@dataclass(frozen=True, slots=True)
class Side:
    """What of a mesh's stages their transfers depend on."""

    island: int
    """Of the first part."""
    devices: int
    received_bytes: float
    """On one rank, one microbatch; the largest of the parts."""
    gathering_seconds: float
    """After it has been received."""
    stages_per_node: int
    """1 for stages on several islands."""


_Row = tuple[float, float, float, float, float]
"""Seconds: forward, backward, latency, rendezvous extra, a scalar over the link."""

_NEVER = (math.nan,) * 5


@dataclass(frozen=True, slots=True)
class Transfers:
    """Transfers of a job's meshes; keeps what it has priced."""

    placed: StagePricer
    check: Callable[[], None] = lambda: None
    """Called now and then; may raise."""
    _rows: dict[tuple[object, ...], _Row] = field(default_factory=dict, repr=False, compare=False)
    _links: dict[tuple[tuple[int, ...], tuple[int, ...]], bool] = field(
        default_factory=dict, repr=False, compare=False
    )
    _hops: dict[tuple[object, ...], Hop] = field(default_factory=dict, repr=False, compare=False)
    _parted: dict[Mesh, tuple[StagePart, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _sides: dict[Mesh, Side] = field(default_factory=dict, repr=False, compare=False)
    _tied: dict[tuple[int, ...], float] = field(default_factory=dict, repr=False, compare=False)
    _inside: dict[tuple[object, ...], float] = field(
        default_factory=dict, repr=False, compare=False
    )

    def side(self, mesh: Mesh) -> Side:
        """What transfers of the mesh's stages depend on."""
        if mesh not in self._sides:
            self._sides[mesh] = self._side(mesh)
        return self._sides[mesh]

    def _side(self, mesh: Mesh) -> Side:
        placed = self.placed
        island = placed.cluster.islands[mesh.islands[0]]
        devices = sum(each.num_devices for each in mesh.shapes)
        parts = [replica_of(shape, ()) for shape in mesh.shapes]
        model, job = placed.model, placed.job
        alone = len(mesh.islands) == 1
        return Side(
            island=mesh.islands[0],
            devices=devices,
            received_bytes=max(received_bytes(model, job, each) for each in parts),
            gathering_seconds=max(
                gathered_seconds(model, job, island, each, placed.predictor) for each in parts
            ),
            stages_per_node=max(1, island.filled_node // devices) if alone else 1,
        )

    def between(self, meshes: Sequence[Mesh]) -> tuple[Floats, Floats, Floats, Floats]:
        """(links [4, M, M], node links [4, M], norm levels over both).

        On the diagonal of the first: between stages of one node; of meshes whose stages fill nodes,
        or span islands, between nodes. An island is in one mesh of a pipeline: of two meshes that
        share one, and of which one has several, no stages are neighbours; those are given the
        largest seconds of all.
        """
        sides = [self.side(mesh) for mesh in meshes]
        count = len(meshes)
        nodes = np.empty((count, 5))
        firsts = alike = np.arange(count)
        if count > _FEW_MESHES:
            # Of many meshes few differ in what counts.
            _, firsts, alike = np.unique(
                _keys(meshes, sides), axis=0, return_index=True, return_inverse=True
            )
        each = firsts.tolist()
        priced = np.array([self._pairs(meshes, sides, i, each) for i in each])
        priced = np.where(np.isnan(priced), np.nanmax(priced, axis=(0, 1)), priced)
        alike = alike.reshape(-1)
        rows = priced[alike[:, None], alike]
        for i, (mesh, side) in enumerate(zip(meshes, sides, strict=True)):
            nodes[i] = self._own(mesh, side, inside=False)
            rows[i, i] = nodes[i]
            if side.stages_per_node > 1:
                rows[i, i] = self._own(mesh, side, inside=True)
        links, node_links = (np.moveaxis(each[..., :_NORM], -1, 0) for each in (rows, nodes))
        return links, node_links, rows[..., _NORM], nodes[..., _NORM]

    def _pairs(
        self, meshes: Sequence[Mesh], sides: Sequence[Side], i: int, others: Sequence[int]
    ) -> list[_Row]:
        """From mesh i to others; not a number where no stages of theirs are neighbours."""
        self.check()
        one, found = meshes[i], []
        for j in others:
            two = meshes[j]
            never = i != j and len(one.islands) + len(two.islands) > 2 and one.mask & two.mask
            found.append(_NEVER if never else self._pair(meshes, sides, i, j))
        return found

    def _pair(self, meshes: Sequence[Mesh], sides: Sequence[Side], i: int, j: int) -> _Row:
        one, two = sides[i], sides[j]
        islands = self.placed.cluster.islands
        ends = islands[one.island], islands[two.island]
        link = self.placed.cluster.link_between(ends[0].name, ends[1].name)
        waits = max(one.gathering_seconds, two.gathering_seconds)
        bytes_of, devices = (one.received_bytes, two.received_bytes), (one.devices, two.devices)
        key: tuple[object, ...] = (one.island, two.island, *devices, *bytes_of, waits)
        # The NICs that are crossed are those of these very devices; parts have links of their own.
        several = self._unlike_links(meshes[i].islands, meshes[j].islands)
        exact = _needs_devices(link, ends) and one.island != two.island
        if several or exact:
            key = (meshes[i].islands, meshes[j].islands, meshes[i].shapes, meshes[j].shapes)
        if key not in self._rows:
            hop = None
            if several and one.island != two.island:
                hop = self._of_parts(meshes[i], meshes[j])
            if hop is None and exact:
                hop = self._of_devices(meshes[i], meshes[j], 0, 0)
            self._rows[key] = self._row(hop or self._hop(link, one, two, ends))
        return self._rows[key]

    def _own(self, mesh: Mesh, side: Side, *, inside: bool) -> _Row:
        """Between neighbouring stages of one mesh, in one node or in two.

        Where parts on several islands take turns at being in one node, the least of each number.
        """
        island = self.placed.cluster.islands[side.island]
        link = island.intra_node if inside else island.inter_node
        key: tuple[object, ...] = (
            *(side.island, side.devices, side.received_bytes, side.gathering_seconds, inside),
        )
        turns = self._turns(mesh)
        several = turns > 1 or self._unlike_links(mesh.islands, mesh.islands)
        exact = mesh.max_stages > 1 and (several or _needs_devices(link, (island, island)))
        if exact:
            key = (mesh.islands, mesh.shapes, inside, min(turns, mesh.max_stages))
        if key not in self._rows:
            # Whether the island has both of these stages.
            if exact and (inside or mesh.max_stages > side.stages_per_node):
                last = 0 if inside else side.stages_per_node - 1
                numbers = range(last, last + min(turns, mesh.max_stages - 1))
                hops = [self._of_devices(mesh, mesh, at, at + 1) for at in numbers]
                self._rows[key] = _least([self._row(hop) for hop in hops])
            else:
                self._rows[key] = self._row(self._hop(link, side, side, (island, island)))
        return self._rows[key]

    def _turns(self, mesh: Mesh) -> int:
        """Stages of a mesh on several islands until its parts lie in their nodes as at first."""
        if len(mesh.islands) == 1:
            return 1
        places = [self.placed.cluster.islands[at] for at in mesh.islands]
        return math.lcm(
            *(
                max(1, place.filled_node // shape.num_devices)
                for place, shape in zip(places, mesh.shapes, strict=True)
            )
        )

    def _unlike_links(self, left: tuple[int, ...], right: tuple[int, ...]) -> bool:
        """Whether stages on these islands may reach each other over several links."""
        if len(left) + len(right) == 2:
            return False
        found = self._links.get((left, right))
        if found is None:
            cluster = self.placed.cluster
            ends = [(cluster.islands[i], cluster.islands[j]) for i in left for j in right]
            links = {
                (a.inter_node, None) if a is b else (cluster.link_between(a.name, b.name), shared)
                for a, b in ends
                for shared in [None if a is b else shared_link(cluster, a, b)]
            }
            found = self._links[left, right] = len(links) > 1
        return found

    def _hop(self, link: Link, one: Side, two: Side, ends: tuple[Island, Island]) -> Hop:
        sides = Sides(
            forward_bytes=two.received_bytes * max(1.0, two.devices / one.devices),
            backward_bytes=one.received_bytes * max(1.0, one.devices / two.devices),
            senders=min(one.devices, two.devices),
            islands=ends,
            gathering_seconds=max(one.gathering_seconds, two.gathering_seconds),
        )
        return hop_over(link, sides, self.placed.predictor)

    def _of_parts(self, left: Mesh, right: Mesh) -> Hop | None:
        """Between stages on different islands; None where all samples cross one link."""
        one, two = self._parts(left), self._parts(right)
        routes = routes_between(self.placed.cluster, one, two)
        return over_several(routes, self._kept_hop) if len(routes) > 1 else None

    def _kept_hop(self, link: Link, sides: Sides) -> Hop:
        key = (link, sides.forward_bytes, sides.backward_bytes, sides.senders)
        ends = sides.islands
        names = None if ends is None else (ends[0].name, ends[1].name)
        found = self._hops.get((*key, names, sides.gathering_seconds))
        if found is None:
            found = hop_over(link, sides, self.placed.predictor)
            self._hops[(*key, names, sides.gathering_seconds)] = found
        return found

    def _parts(self, mesh: Mesh) -> tuple[StagePart, ...]:
        found = self._parted.get(mesh)
        if found is None:
            placed = self.placed
            replicas = [
                placed.replica(island, shape, 0)
                for island, shape in zip(mesh.islands, mesh.shapes, strict=True)
            ]
            settings = placed.cluster, placed.model, placed.job, placed.predictor
            found = parts_of(settings, replicas)
            self._parted[mesh] = found
        return found

    def _of_devices(self, left: Mesh, right: Mesh, number: int, other: int) -> Hop:
        """Between the stages of these numbers, device by device."""
        placed = self.placed
        one, two = (
            [
                placed.replica(island, shape, at)
                for island, shape in zip(mesh.islands, mesh.shapes, strict=True)
            ]
            for mesh, at in ((left, number), (right, other))
        )
        return hop_between(placed.cluster, placed.model, placed.job, one, two, placed.predictor)

    def _row(self, hop: Hop) -> _Row:
        placed = self.placed
        norm = norm_rounds(placed.job) * scalar_term(hop.path, placed.predictor).seconds
        return (
            hop.send_forward_seconds,
            hop.send_backward_seconds,
            hop.wire_latency_seconds,
            hop.rendezvous_extra_seconds,
            norm,
        )

    def norm_inside(self, mesh: Mesh) -> float:
        """The sum of the norms among the ranks of a stage."""
        placed = self.placed
        devices = sum(each.num_devices for each in mesh.shapes)
        worst = 0.0
        for at, shape in zip(mesh.islands, mesh.shapes, strict=True):
            island = placed.cluster.islands[at]
            between = shape.num_devices > island.filled_node
            key = (at, between)
            if key not in self._inside:
                link = island.inter_node if between else island.intra_node
                self._inside[key] = scalar_term(link, placed.predictor).seconds
            worst = max(worst, self._inside[key])
        return norm_rounds(placed.job) * norm_depth(devices) * worst

    def tied(self, meshes: Sequence[Mesh], waited_for: Sequence[npt.NDArray[np.bool_]]) -> Floats:
        """[M, M] sum of a tied matrix's gradients between first (row) and last stage (column).

        `waited_for`: [parts, 4, L + 1] of every mesh, who may be the part that sums; the least.
        """
        count = len(meshes)
        found = np.zeros((count, count))
        if not self.placed.model.tied_embeddings:
            return found
        ends = [
            [np.flatnonzero(each[:, role, 1:].any(axis=1)).tolist() for each in waited_for]
            for role in (FIRST, LAST)
        ]
        for i, first in enumerate(meshes):
            for j, last in enumerate(meshes):
                found[i, j] = min(
                    self._tied_pair(first, last, one, two)
                    for one in ends[0][i]
                    for two in ends[1][j]
                )
        return found

    def _tied_pair(self, first: Mesh, last: Mesh, one: int, two: int) -> float:
        shapes = first.shapes[one], last.shapes[two]
        tp, padded_for = min(shape.tp for shape in shapes), max(shape.tp for shape in shapes)
        senders = min(shape.num_devices for shape in shapes)
        key = (first.islands[one], last.islands[two], tp, senders, padded_for)
        if key not in self._tied:
            placed = self.placed
            islands = placed.cluster.islands
            parts = tied_embedding_parts(
                placed.padded(padded_for),
                placed.cluster,
                islands[key[0]],
                islands[key[1]],
                reduction_precision(placed.job),
                tp,
                tp * max(1, senders // tp),
                placed.known,
            )
            self._tied[key] = seconds_of_parts(parts)
        return self._tied[key]


def _least(rows: Sequence[_Row]) -> _Row:
    forward, backward, latency, extra, norm = (min(each) for each in zip(*rows, strict=True))
    return forward, backward, latency, extra, norm


def _needs_devices(link: Link, ends: tuple[Island, Island]) -> bool:
    """Whether a measured link's rate depends on which NICs are crossed."""
    return link.samples is not None and any(each.nics is not None for each in ends)


def _keys(meshes: Sequence[Mesh], sides: Sequence[Side]) -> Floats:
    """[M, 5] what transfers of a mesh depend on; one of several islands on all."""
    return np.array(
        [
            (
                *(side.island, side.devices, side.received_bytes, side.gathering_seconds),
                at if len(mesh.islands) > 1 else -1,
            )
            for at, (mesh, side) in enumerate(zip(meshes, sides, strict=True))
        ]
    )
