"""How does a plan get host names and launch domains that were written down after it was made?

Neither changes what a plan costs. The cluster file they come from must describe the same devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetplan.cluster.spec import Cluster, Island
from hetplan.errors import Fault, InputError
from hetplan.search.result import SearchResult


def with_hosts_of(result: SearchResult, cluster: Cluster, file: str) -> SearchResult:
    """The result with node names and launch domains of this cluster, which came from `file`.

    An InputError where its islands are not those of the plan.
    """
    mine = result.inputs.cluster
    faults = tuple(_differences(mine, cluster))
    if faults:
        raise InputError(*(Fault(file=file, message=message) for message in faults))
    islands = tuple(
        replace(own, node_names=other.node_names)
        for own, other in zip(mine.islands, cluster.islands, strict=True)
    )
    named = replace(mine, islands=islands, launch_domains=cluster.launch_domains)
    return replace(result, inputs=replace(result.inputs, cluster=named))


def _differences(mine: Cluster, other: Cluster) -> Iterator[str]:
    """Where device numbers of the plan would mean other devices."""
    own, new = [each.name for each in mine.islands], [each.name for each in other.islands]
    if own != new:
        yield (
            f"has the islands {', '.join(new)}, the plan's cluster {', '.join(own)}: the plan was "
            "made for another cluster"
        )
        return
    for one, two in zip(mine.islands, other.islands, strict=True):
        for what, before, after in zip(_WHAT, _facts(one), _facts(two), strict=True):
            if before != after:
                yield (
                    f"island {one.name} has {what} {after}, the plan's cluster {before}: plan again"
                )


_WHAT = ("nodes", "devices_per_node", "device", "region", "nodes_out")


def _facts(island: Island) -> tuple[object, ...]:
    return (
        island.nodes,
        island.devices_per_node,
        island.device.kind,
        island.region,
        list(island.nodes_out),
    )
