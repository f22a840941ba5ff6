"""A cluster that loses nodes and gains some: `node17`, and `2x8 h100 @A` or a host that is back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.hosts import find_node, part_back, part_left
from hetplan.cluster.load import load_cluster
from hetplan.cluster.names import meant_kind
from hetplan.cluster.spec import Cluster, Island
from hetplan.cluster.templates import node_called
from hetplan.drafting.draft import drafted_cluster
from hetplan.drafting.words import DEFAULT_REGION, NODES, NodesWords, nodes_words, wrong
from hetplan.errors import Fault, InputError
from hetplan.plans.pieces import stage_array
from hetplan.plans.plan import Plan

GAINED, LOST = "--gained", "--lost"


def without_lost(cluster: Cluster, plan: Plan, lost: Sequence[str]) -> Cluster:
    """The cluster without these hosts.

    InputError where one is not in the cluster or was out before, none is left, or the plan has a
    rank on none of them.
    """
    names = list(dict.fromkeys(name.strip() for each in lost for name in each.split(",")))
    if "" in names:
        raise InputError(Fault(field=LOST, message="an empty name; write as in node17,node18"))
    try:
        left = part_left(cluster, names)
    except InputError as error:
        raise InputError(*(replace(each, field=LOST) for each in error.faults)) from error
    for name in names:
        island, node = find_node(cluster, name)
        if island.is_out(node):
            raise InputError(Fault(field=LOST, message=f"{name} is out already in {cluster.name}"))
    if not any(island.usable_nodes for island in left.islands):
        message = "all nodes of the cluster are lost; no plan can go on"
        raise InputError(Fault(field=LOST, message=message))
    if not any(
        left.island_of_device(device).is_out(left.node_of_device(device))
        for stage in plan.stages
        for device in stage_array(stage).tolist()
    ):
        message = f"the plan has no rank on {', '.join(names)}: it goes on as it is"
        raise InputError(Fault(field=LOST, message=message))
    return left


def with_gained(cluster: Cluster, texts: Sequence[str]) -> Cluster:
    """The cluster with these nodes too; InputError names the words that are wrong.

    Nodes of a kind and size that an island has join it, and are numbered behind its own; otherwise
    they are an island of their own, in a region of the cluster, with the links of that region.
    """
    for text in texts:
        cluster = part_back(cluster, text.strip()) or _with_words(cluster, text)
    return cluster


def _with_words(cluster: Cluster, text: str) -> Cluster:
    try:
        words = nodes_words(text)
        said = words.region != DEFAULT_REGION or DEFAULT_REGION in cluster.regions
        same = [each for each in cluster.islands if _is_like(each, words, in_region=said)]
        new = None if same else load_cluster(drafted_cluster([text], []).document).islands[0]
    except InputError as error:
        raise InputError(
            *(replace(f, field=f.field.replace(NODES, GAINED, 1)) for f in error.faults)
        ) from error
    if len(same) > 1:
        regions = ", ".join(dict.fromkeys(island.region for island in same))
        names = ", ".join(island.name for island in same)
        hint = f"say which region, as in @{same[0].region}" if "," in regions else "give --cluster"
        raise wrong(GAINED, text, f"{names} all have such nodes: {hint}")
    if new is None:
        return cluster.with_island(_longer(same[0], words.nodes))
    known = ", ".join(cluster.regions)
    if not said and len(cluster.regions) == 1:
        new = replace(new, region=cluster.regions[0])
    elif new.region not in cluster.regions:
        message = f"say the region of {new.device.kind}, one of {known}, or give --cluster FILE"
        raise wrong(GAINED, text, message)
    taken = {island.name for island in cluster.islands}
    name = next(
        each
        for each in (new.name, *(f"{new.name}-{at}" for at in range(2, len(taken) + 3)))
        if each not in taken
    )
    grown = replace(cluster, islands=(*cluster.islands, replace(new, name=name)))
    try:
        for island in cluster.islands:
            grown.link_between(name, island.name)
    except InputError as error:
        raise wrong(GAINED, text, f"{error}: give --cluster FILE") from error
    return grown


def _is_like(island: Island, words: NodesWords, *, in_region: bool) -> bool:
    """Whether such nodes join the island; an InputError where nobody knows their kind."""
    template = node_called(words.what)
    devices = words.devices or (None if template is None else template.devices)
    kind = island.device.kind
    if words.what != kind:
        kind = meant_kind(template.device if template else words.what, load_catalogue()).kind
    return (
        (kind, devices or island.devices_per_node) == (island.device.kind, island.devices_per_node)
        and island.nodes > 1
        and (not in_region or island.region == words.region)
    )


def _longer(island: Island, more: int) -> Island:
    """The island with so many nodes more."""
    names = island.node_names
    if names:
        names = (*names, *(f"{island.name}-{island.nodes + at}" for at in range(more)))
    return replace(island, nodes=island.nodes + more, node_names=names)
