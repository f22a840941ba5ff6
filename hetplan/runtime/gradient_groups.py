"""Which ranks sum which gradients with each other, and in which order.

Copies of a weight lie on the data-parallel ranks of its stage and on those of the stages that hold
it in the other pipelines. The tensor-parallel ranks of all these copies are lined up by what they
hold: rank i of t has the part from i / t to (i + 1) / t, so with degrees that differ the parts meet
in the finest common slices, and a rank of a coarse cut takes part in several sums. What is the same
on all tensor-parallel ranks (norms, the biases of row-parallel products) is in each of them.

Routed experts that are dealt out (ep above 1) are summed apart from the other weights: each run of
experts that the same ranks hold, over these ranks.

Of local steps (`Plan.outer`) all this is about one site after the other; the averaging of sites is
among all copies again.

A tied matrix is then summed once more between the first and the last stage of each pipeline. All
exchanges of a plan have one order, so that no two ranks wait for each other in different ones.

`sums_of` gives the groups whose sums are made of the trainer's own messages, level by level: those
over several islands where `hetplan.cost.collectives.direct_levels` prices such messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetplan.cluster.spec import Cluster, Transport
from hetplan.cost.collectives import group_shape
from hetplan.cost.collectives.direct_levels import summed_by_messages
from hetplan.cost.collectives.rings import ISLAND, NODE
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.plan import LayerRange, Plan, ReductionGroup, expand
from hetplan.profiling.weights import ALL_EXPERTS, ExpertShare
from hetplan.runtime.communicator.levels import GroupSum
from hetplan.runtime.placement import RankPlace, place_ranks
from hetplan.runtime.weight_slices import ALL_WEIGHTS, ParameterPart, Summed, common_parts

_Column = tuple[RankPlace, ...]
"""The tensor-parallel ranks of one copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One sum over several ranks."""

    ranks: tuple[int, ...]
    """Each once; copies of a stage next to each other, pipeline by pipeline."""
    cuts: tuple[tuple[int, int], ...]
    """(tp, tp_index) of every different slice that one of the ranks holds: they sum what is common
    to all of these."""
    layers: tuple[LayerRange, ...]
    """Empty: of a tied matrix."""
    transport: str
    """A `hetplan.cluster.spec.Transport` value."""
    weights: Summed = ALL_WEIGHTS
    """Of the layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How all gradients of a plan are summed."""

    sums: tuple[Exchange, ...]
    """Over the copies."""
    tied: tuple[Exchange, ...]
    """Of a tied matrix between first and last stage: after the others, or before them where the
    optimizer is sharded, because no rank has the whole sum then."""
    shards: int
    """`Plan.optimizer_shards`."""
    outer: tuple[Exchange, ...] = ()
    """Of local steps: the averaging of sites."""
    sites: tuple[tuple[int, ...], ...] = ()
    """Of local steps: the ranks of each site, which clip by one norm."""

    def groups(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Who talks to whom by which transport, in an order that is the same on all ranks."""
        groups = [(exchange.ranks, exchange.transport) for exchange in self.tied]
        for exchange in self.sums:
            shard = shard_size(self.shards, exchange)
            ranks = [exchange.ranks] if shard == 1 else shard_groups(exchange, shard)
            groups += [(some, exchange.transport) for some in ranks]
        # Differences of weights lie in the host's memory.
        groups += [(exchange.ranks, Transport.HOST_STAGED.value) for exchange in self.outer]
        groups += [(ranks, "") for ranks in self.sites]
        return tuple(dict.fromkeys(exchange for exchange in groups if len(exchange[0]) > 1))


def shard_size(shards: int, exchange: Exchange) -> int:
    """Ranks that split one copy of the optimizer's state (`hetplan.plans.pieces.stage_shards`)."""
    return math.gcd(shards, len(exchange.ranks))


def shard_groups(exchange: Exchange, shard: int) -> list[tuple[int, ...]]:
    """Ranks that split one copy, copy by copy; then those with the same shard, shard by shard."""
    ranks = exchange.ranks
    blocks = [ranks[at : at + shard] for at in range(0, len(ranks), shard)]
    return [*blocks, *(ranks[at::shard] for at in range(shard))]


def reduction_of(plan: Plan, places: Sequence[RankPlace]) -> Reduction:
    """All sums of a plan."""
    outer, sites = plan.outer, dict.fromkeys(place.site for place in places)
    return Reduction(
        sums=exchanges(plan.reduction_groups, places),
        tied=tied_exchanges(plan, places),
        shards=plan.optimizer_shards,
        outer=() if outer is None else exchanges(outer.reduction_groups, places),
        sites=()
        if outer is None
        else tuple(tuple(each.rank for each in places if each.site == site) for site in sites),
    )


def exchanges(
    groups: Sequence[ReductionGroup], places: Sequence[RankPlace]
) -> tuple[Exchange, ...]:
    """The sums of these groups over the copies, in order; those of tied matrices left out.

    Layers that the same ranks hold are summed together.
    """
    layers_of_row: dict[tuple[_Column, str, Summed], list[LayerRange]] = {}
    for group in groups:
        members = {*expand(group.members)}
        here = [place for place in places if place.device in members]
        columns = [column for stage in _holders(here, group.layers) for column in _columns(stage)]
        for weights in _apart([column[0].experts for column in columns], expert=group.expert):
            holders = [each for each in columns if _holds(each[0], weights)]
            for row in _rows(holders):
                layers_of_row.setdefault((row, group.transport, weights), []).append(group.layers)
    return tuple(
        _exchange(row, transport, tuple(layers), weights)
        for (row, transport, weights), layers in layers_of_row.items()
    )


def _apart(held: Sequence[ExpertShare], *, expert: bool) -> Iterator[Summed]:
    """The weights that copies with these experts sum together."""
    if not expert:
        whole = all(share == ALL_EXPERTS for share in held)
        yield ALL_WEIGHTS if whole else Summed(experts=None)
        return
    cuts = sorted({end for share in held for end in share})
    yield from (Summed(dense=False, experts=ExpertShare(*ends)) for ends in pairwise(cuts))


def _holds(place: RankPlace, weights: Summed) -> bool:
    experts, held = weights.experts, place.experts
    return (
        weights.dense
        or experts is None
        or (held.start <= experts.start and experts.stop <= held.stop)
    )


def tied_exchanges(plan: Plan, places: Sequence[RankPlace]) -> tuple[Exchange, ...]:
    """The sums of a tied matrix between first and last stage, each copy with one of the other."""
    if not plan.tied_embedding_devices:
        return ()
    transport_of_row: dict[_Column, str] = {}
    for at, pipeline in enumerate(plan.pipelines):
        last = len(pipeline.stages) - 1
        mine = [place for place in places if place.pipeline == at]
        ends = [
            [*_columns([place for place in mine if place.position == end])] for end in (0, last)
        ]
        count = max(map(len, ends))
        for i in range(count):
            # The gradients of all copies of a stage are equal by now: one of each suffices.
            for row in _rows([columns[i * len(columns) // count] for columns in ends]):
                transport_of_row[row] = _slowest(
                    boundary.transport for boundary in pipeline.boundaries
                )
    return tuple(_exchange(row, transport, ()) for row, transport in transport_of_row.items())


def _slowest(transports: Iterator[str]) -> str:
    # The first and the last stage need not be neighbours; what one boundary between them cannot
    # do, their own connection is not taken to do either.
    return min(transports, key=lambda transport: transport != "host-staged")


def _holders(places: Sequence[RankPlace], layers: LayerRange) -> Iterator[list[RankPlace]]:
    stages: dict[int, list[RankPlace]] = {}
    for place in places:
        if any(chunk.start <= layers.start < chunk.stop for chunk in place.chunks):
            stages.setdefault(place.stage, []).append(place)
    yield from stages.values()


def _columns(stage: Sequence[RankPlace]) -> Iterator[_Column]:
    copies: dict[int, list[RankPlace]] = {}
    for place in stage:
        copies.setdefault(place.dp_index, []).append(place)
    yield from (tuple(copy) for copy in copies.values())


def _rows(columns: Sequence[_Column]) -> Iterator[_Column]:
    finest = math.lcm(*(len(column) for column in columns))
    rows = (tuple(column[i * len(column) // finest] for column in columns) for i in range(finest))
    yield from dict.fromkeys(rows)


def _exchange(
    row: _Column, transport: str, layers: tuple[LayerRange, ...], weights: Summed = ALL_WEIGHTS
) -> Exchange:
    return Exchange(
        ranks=tuple(place.rank for place in row),
        cuts=tuple(dict.fromkeys((place.tp, place.tp_index) for place in row)),
        layers=layers,
        transport=transport,
        weights=weights,
    )


def exchanged_parts(
    model: ModelSpec, exchange: Exchange, place: RankPlace
) -> Iterator[ParameterPart]:
    """What a rank puts into an exchange, in the order of all its ranks."""
    cuts = exchange.cuts
    if exchange.layers:
        for layers in exchange.layers:
            for position in range(layers.start, layers.stop):
                yield from common_parts(model, position, place.cut, cuts=cuts, of=exchange.weights)
        return
    for position, kind in enumerate(model.layers):
        if kind in (LayerKind.EMBEDDING, LayerKind.HEAD) and any(
            held.start <= position < held.stop for held in place.chunks
        ):
            for part in common_parts(model, position, place.cut, cuts=cuts):
                if part.name == "weight":
                    yield part


def sums_of(plan: Plan, cluster: Cluster) -> tuple[GroupSum, ...]:
    """The groups of this plan that sum level by level: of gradients, of tied matrices, and all
    ranks (the norm).
    """
    places = place_ranks(plan)
    groups = [ranks for ranks, _ in reduction_of(plan, places).groups()]
    groups.append(tuple(place.rank for place in places))
    sums = []
    for ranks in dict.fromkeys(groups):
        devices = [places[rank].device for rank in ranks]
        layout = summed_by_messages(cluster, group_shape(cluster, devices))
        if layout is not None:
            units = [_unit_of(cluster, low) for low, _ in layout.blocks[1:]]
            levels = tuple(_numbered([unit(device) for device in devices]) for unit in units)
            sums.append(GroupSum(ranks=ranks, levels=levels))
    return tuple(sums)


def _unit_of(cluster: Cluster, level: int) -> Callable[[int], tuple[str, int]]:
    """The unit of a level that a device lies in."""

    def unit(device: int) -> tuple[str, int]:
        island = cluster.island_of_device(device)
        if level == NODE:
            return island.name, cluster.node_of_device(device)
        return (island.name if level == ISLAND else island.region), 0

    return unit


def _numbered(units: list[tuple[str, int]]) -> tuple[int, ...]:
    numbers = {unit: at for at, unit in enumerate(dict.fromkeys(units))}
    return tuple(numbers[unit] for unit in units)
