"""What does a row of published times of collectives (unit/collectives.csv) say, for all who use it?

The sources write operations, failures and sizes in their own ways. `accuracy.unit_collectives`
(samples of links, where each source is described), `cost_collectives` (algorithms against what was
measured) and `cost_collectives_laws` (the laws of links without samples) read them here, so that a
row means the same to all three.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from evaluation.accuracy.unit_notes import Notes, read_rows
from hetplan.errors import InputError
from hetplan.lint.rows import CollectiveRow
from hetplan.profiling.samples import LinkOperation

FILE = Path("unit") / "collectives.csv"
"""In the folder of reference data."""

AVERAGED_BYTES = 64 << 20
"""Galvatron's bandwidths are averages over 16 to 256 MB in factors of 2: the geometric middle."""

# Marks of failures: 1e12 us, and 1e9 us (106 rows of exactly that; no time without a mark is above
# 12 seconds).
_FAILED_SECONDS = (("1e12", 1e6), ("1e9", 1e3))

_OPERATIONS = {
    "all_reduce": LinkOperation.ALL_REDUCE,
    "allreduce": LinkOperation.ALL_REDUCE,
    "all_gather": LinkOperation.ALL_GATHER,
    "reduce_scatter": LinkOperation.REDUCE_SCATTER,
    "all_to_all": LinkOperation.ALL_TO_ALL,
    "all2all": LinkOperation.ALL_TO_ALL,
    "p2p": LinkOperation.SEND_RECV,
}
_AVERAGED = re.compile(r"allreduce_bandwidth_(\d+)nodes_\d+gpus_per_node \(consec=([01])\)")
_NODES = re.compile(r"(\d+)Node-(\d+)GPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragedGroup:
    """Which ranks formed the group of one of Galvatron's averages of all_reduce."""

    nodes: int
    """Of the run; a group of consecutive ranks may need fewer."""
    consecutive: bool
    """Neighbouring ranks, which fill a node first; otherwise as far apart as there are groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NicRatio:
    """A ring over nodes, by SimAI: its bus bandwidth over that of all NICs of a node."""

    nodes: int
    ranks: int
    message_bytes: float
    ratio: float

    def seconds(self, nic_bytes_per_second: float, nics: int) -> float:
        """Of an all_reduce in nodes with so many NICs of this rate."""
        rate = self.ratio * nic_bytes_per_second * nics
        return bus_factor(self.ranks) * self.message_bytes / rate


def published(folder: Path) -> tuple[CollectiveRow, ...]:
    """All rows; an InputError where the file is not there or cells are wrong."""
    material = read_rows(folder / FILE, Notes())
    if material is None:
        raise InputError(f"{folder / FILE} is not there; name the folder of reference data")
    return material.collectives


def operation_of(row: CollectiveRow) -> LinkOperation | None:
    """What was measured; None for a word that is not known."""
    return _OPERATIONS.get(row.operation)


def ranks_of(row: CollectiveRow) -> int:
    """Ranks of the group; 0 where the row does not say them as a number."""
    return int(row.ranks) if row.ranks.isdecimal() else 0


def failure_of(row: CollectiveRow) -> str:
    """The mark that stands for a time where the measurement failed; empty: it did not."""
    seconds = row.seconds or 0.0
    return next((mark for mark, least in _FAILED_SECONDS if seconds >= least), "")


def seconds_of(row: CollectiveRow, size_bytes: float | None) -> float | None:
    """The time of a message of this size; None where neither time nor bus bandwidth says it.

    Bus bandwidth to time (doc/PERFORMANCE.md of nccl-tests) for all_reduce and sends: only these
    come without a time.
    """
    if row.seconds is not None:
        return row.seconds
    bandwidth, operation = row.bus_bytes_per_second, operation_of(row)
    if not bandwidth or size_bytes is None:
        return None
    if operation is LinkOperation.ALL_REDUCE:
        return bus_factor(ranks_of(row)) * size_bytes / bandwidth
    return size_bytes / bandwidth if operation is LinkOperation.SEND_RECV else None


def bus_factor(ranks: int) -> float:
    """Bus bandwidth of an all_reduce is 2 (n - 1) / n bytes per byte of message over time."""
    return 2.0 * (ranks - 1) / ranks


def averaged_group(row: CollectiveRow) -> AveragedGroup | None:
    """Of a row of Galvatron's averages of all_reduce; None for any other."""
    found = _AVERAGED.search(row.source)
    return AveragedGroup(nodes=int(found[1]), consecutive=found[2] == "1") if found else None


def nic_ratio(row: CollectiveRow) -> NicRatio | None:
    """Of a row of SimAI's ratios to a NIC's bandwidth; None for any other.

    The column of bus bandwidths holds ratios there, read as GB/s like all others.
    """
    nodes = _NODES.match(row.ranks)
    said = row.size_bytes, row.bus_bytes_per_second
    if "nic_ratio" not in row.source or not nodes or said[0] is None or said[1] is None:
        return None
    return NicRatio(
        nodes=int(nodes[1]), ranks=int(nodes[2]), message_bytes=said[0], ratio=said[1] / 1e9
    )
