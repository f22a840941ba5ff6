"""What would the errors be if a cluster were read otherwise?

A cluster's description has lines that nothing but its runs says, or that are left out although
something is known of them. Each of these readings changes one such line, wherever it stands, and
everything else is as in the tables before it:

    rings by default    groups with several devices in a node use the NICs that the library uses
    rings by own NICs   every device of such a group uses its own NIC
    a NIC each          as many NICs as devices, where all ranks are taken to use one
    speed spread        no two devices are equally fast, in every cluster alike
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from evaluation.accuracy.clusters import ONE_NIC, network_of
from evaluation.accuracy.predict_run import PredictedRun, predict_run
from evaluation.accuracy.scores import Errors, errors_of
from hetplan.cluster.node import Nics, RingNics
from hetplan.cluster.spec import Cluster, Island
from hetplan.predict.fit import FittedPredictor

SPEED_SPREAD = 0.0148  # a reading of Sinha and others, Not All GPUs Are Created Equal (SC'22)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingErrors:
    """Figures of a data set as published here, and under another reading of its clusters."""

    reading: str
    data_set: str
    changed_rows: int
    """Rows whose cluster the reading changes."""
    as_published: Errors
    errors: Errors
    """Of all rows of the data set, intervals by the predictions alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    name: str
    of: Callable[[PredictedRun], Cluster]
    """The run's cluster; the same where the reading changes nothing."""


def other_readings(
    runs: Sequence[PredictedRun], predictor: FittedPredictor
) -> tuple[ReadingErrors, ...]:
    """Every reading on every data set of which it changes a row."""
    found = []
    for reading in _READINGS:
        for name in dict.fromkeys(run.row.data_set for run in runs):
            mine = [run for run in runs if run.row.data_set == name]
            clusters = [reading.of(run) for run in mine]
            changed = [new != run.run.cluster for run, new in zip(mine, clusters, strict=True)]
            if not any(changed):
                continue
            again = [
                predict_run(replace(run.run, cluster=new), predictor) if other else run
                for run, new, other in zip(mine, clusters, changed, strict=True)
            ]
            before, after = (errors_of([each.judged() for each in one]) for one in (mine, again))
            if before is not None and after is not None:
                found.append(
                    ReadingErrors(
                        reading=reading.name,
                        data_set=name,
                        changed_rows=sum(changed),
                        as_published=before,
                        errors=after,
                    )
                )
    return tuple(found)


def _with_rings(rings: RingNics | None) -> Callable[[PredictedRun], Cluster]:
    """Where the cluster says which NICs rings of strided groups use: these."""

    def changed(island: Island) -> Island:
        if island.nics is None or island.nics.rings is None:
            return island
        return replace(island, nics=replace(island.nics, rings=rings))

    return lambda run: _each_island(run.run.cluster, changed)


def _a_nic_each(run: PredictedRun) -> Cluster:
    network = network_of(run.row, needed=False)
    if network is None or network.inferred != ONE_NIC:
        return run.run.cluster
    return _each_island(run.run.cluster, _with_own_nics)


def _with_own_nics(island: Island) -> Island:
    if island.nics is None:
        return island
    nics = Nics(
        per_node=island.devices_per_node,
        bandwidth_bytes_per_second=island.nics.bandwidth_bytes_per_second,
        rings=island.nics.rings,
    )
    share = nics.share_bytes_per_second(island.devices_per_node)
    between = replace(island.inter_node, bandwidth_bytes_per_second=share)
    return replace(island, nics=nics, inter_node=between)


def _uneven(run: PredictedRun) -> Cluster:
    return _each_island(run.run.cluster, lambda island: replace(island, speed_spread=SPEED_SPREAD))


def _each_island(cluster: Cluster, changed: Callable[[Island], Island]) -> Cluster:
    return replace(cluster, islands=tuple(map(changed, cluster.islands)))


_READINGS = (
    _Reading(name="rings by the library's usual choice", of=_with_rings(None)),
    _Reading(name="rings by every device's own NIC", of=_with_rings(RingNics.OWN)),
    _Reading(name="a NIC for each device of a node", of=_a_nic_each),
    _Reading(name=f"speed_spread {SPEED_SPREAD} in every cluster", of=_uneven),
)
