"""In which ways can the hosts of a small cluster be pipelines? Every one, as plain values.

A structure says which islands' hosts stand in which stage of which pipeline; layers, microbatches
and schedules are drawn for it elsewhere (`evaluation.closed_loop.pool`). Hosts of one
island are alike, so structures that differ only in which of them stands where are one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache

from hetplan.cluster.spec import Cluster
from hetplan.errors import InputError

StageHosts = tuple[str, ...]
"""Islands of the hosts of a stage, sorted; an island twice where two of its hosts are there."""
PipelineHosts = tuple[StageHosts, ...]
Structure = tuple[PipelineHosts, ...]
MAX_HOSTS_PER_STAGE = 2
MAX_HOSTS = 6
"""Of a cluster whose structures are all listed: there are thousands with six."""


def hosts_of(cluster: Cluster) -> tuple[str, ...]:
    """The island of every usable host; an InputError where hosts have several devices."""
    found: list[str] = []
    for island in cluster.islands:
        if island.devices_per_node != 1:
            raise InputError(
                f"island {island.name} has {island.devices_per_node} devices per node; the closed "
                "loop trains one rank per host: use a cluster with devices_per_node: 1"
            )
        found += [island.name] * len(island.usable_nodes)
    if not 2 <= len(found) <= MAX_HOSTS:
        raise InputError(
            f"{cluster.name} has {len(found)} hosts; the closed loop takes 2 to {MAX_HOSTS}"
        )
    return tuple(found)


def structures(hosts: Sequence[str], *, least_hosts: int = 2) -> tuple[Structure, ...]:
    """Every structure over at least so many of these hosts, in a fixed order."""
    found: dict[Structure, None] = {}
    for some in _choices(tuple(sorted(hosts))):
        if len(some) < least_hosts:
            continue
        for blocks in _partitions(some):
            for structure in _products([_pipelines(block) for block in blocks]):
                found.setdefault(tuple(sorted(structure)), None)
    return tuple(sorted(found))


def _choices(hosts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every choice of some of the hosts; alike ones once."""
    counts = sorted(Counter(hosts).items())

    def go(at: int, taken: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if at == len(counts):
            yield taken
            return
        name, count = counts[at]
        for number in range(count + 1):
            yield from go(at + 1, (*taken, *([name] * number)))

    yield from go(0, ())


@lru_cache(maxsize=256)
def _partitions(hosts: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Every way to deal the hosts out to pipelines; the order of pipelines does not matter."""
    if not hosts:
        return ((),)
    first, rest = hosts[0], hosts[1:]
    found: dict[tuple[tuple[str, ...], ...], None] = {}
    for others in _partitions(rest):
        for at in range(len(others)):
            joined = tuple(sorted((first, *others[at])))
            found[tuple(sorted((*others[:at], joined, *others[at + 1 :])))] = None
        found[tuple(sorted(((first,), *others)))] = None
    return tuple(found)


@lru_cache(maxsize=256)
def _pipelines(hosts: tuple[str, ...]) -> tuple[PipelineHosts, ...]:
    """Every order of stages of one or two hosts each that has all of these hosts."""
    if not hosts:
        return ((),)
    found: dict[PipelineHosts, None] = {}
    for stage in dict.fromkeys(
        tuple(sorted(some)) for some in _choices(hosts) if 1 <= len(some) <= MAX_HOSTS_PER_STAGE
    ):
        left = tuple(sorted((Counter(hosts) - Counter(stage)).elements()))
        for rest in _pipelines(left):
            found[stage, *rest] = None
    return tuple(found)


def _products(options: Sequence[Sequence[PipelineHosts]]) -> Iterator[Structure]:
    if not options:
        yield ()
        return
    for first in options[0]:
        for rest in _products(options[1:]):
            yield (first, *rest)
