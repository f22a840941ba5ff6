"""Published times of collectives (unit/collectives.csv) as samples of links.

Four sources, and how each is read:

    vTrain        nccl-tests inside a node of 8: all_reduce by size
    Aceso         torch collectives inside a node, of the sizes that its models have; the same
                  measurement stands under several models and counts once. send_recv: `busbw_GBps`
                  is GB/s (at 1 GiB it is what NVLink or PCIe of the device does; as Gbit/s it
                  would be an eighth of what all_reduce reaches there). all_gather: the size is what
                  each rank gives, a message is what all have then (times the ranks its bandwidth is
                  that of reduce_scatter on all six devices, 89 and 91 GB/s between two GH200, 251
                  and 247 among four; and the largest size is that of reduce_scatter over the
                  ranks). Its `inter` rows lie on
                  Sailor's fitted curve to all digits: no single measurements.
    Galvatron     sp_time: collectives inside a node by size. allreduce_bandwidth, p2p_bandwidth:
                  nccl-tests' average bus bandwidth over messages of 16 to 256 MB in factors of 2,
                  one group at a time (its profile_hardware scripts of 2023-11 to 2024-07), so the
                  middle one, 64 MiB, has about that bandwidth. consec=0 over two nodes: half of
                  the group in each.
    SimAI         ratios to a link's bandwidth that is not named: no times, so no samples. The law
                  between nodes rests on the nic_ratio rows (`predict.link.prior`)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from evaluation.accuracy.unit_data import Notes, is_there, population
from hetplan.errors import Fault, InputError
from hetplan.files.reading import read_text
from hetplan.lint.rows import CollectiveRow
from hetplan.lint.tables import COLUMNS, columns_of
from hetplan.lint.tables import read_collectives as read_table
from hetplan.profiling.samples import LinkOperation, LinkSample, ProfileSet

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
    """Nodes of the run; a group of consecutive ranks may need fewer."""
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
        """Seconds of an all_reduce in nodes with so many NICs of this rate."""
        rate = self.ratio * nic_bytes_per_second * nics
        return bus_factor(self.ranks) * self.message_bytes / rate


def published(folder: Path) -> tuple[CollectiveRow, ...]:
    """All rows; an InputError where the file is not there or cells are wrong."""
    path = folder / FILE
    if not path.exists():
        raise InputError(f"{path} is not there; name the folder of reference data")
    text = read_text(path)
    if not columns_of(text.partition("\n")[0].rstrip("\r")) >= COLUMNS:
        message = "the header is of no table of measurements that is known; restore the columns"
        raise InputError(Fault(file=str(path), line=1, message=message))
    return read_table(str(path), text)


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
    """The group of a row of Galvatron's averages of all_reduce; None for any other row."""
    found = _AVERAGED.search(row.source)
    return AveragedGroup(nodes=int(found[1]), consecutive=found[2] == "1") if found else None


def nic_ratio(row: CollectiveRow) -> NicRatio | None:
    """The ratio in a row of SimAI's ratios to a NIC's bandwidth; None for any other row.

    The column of bus bandwidths holds ratios there, read as GB/s like all others.
    """
    nodes = _NODES.match(row.ranks)
    said = row.size_bytes, row.bus_bytes_per_second
    if "nic_ratio" not in row.source or not nodes or said[0] is None or said[1] is None:
        return None
    return NicRatio(
        nodes=int(nodes[1]), ranks=int(nodes[2]), message_bytes=said[0], ratio=said[1] / 1e9
    )


_AVERAGES = "galvatron, averages over sizes"


def node_link(kind: str) -> str:
    """Name of the samples of one device kind inside a node."""
    return f"{kind} intra-node"


def nodes_link(kind: str) -> str:
    """Name of the samples of one device kind between nodes."""
    return f"{kind} inter-node"


VTRAIN_A100_NODE = node_link("nvidia-a100-80gb-sxm")
"""NVSwitch node of 8 A100, nccl-tests."""
VTRAIN_V100_NODE = node_link("vtrain v100")
"""Node of 8 V100 whose table does not say which."""
SAILOR_A100_NODES = nodes_link("nvidia-a100-40gb-sxm")
GALVATRON_NODE = node_link("galvatron a100-class")
GALVATRON_NODES = nodes_link("galvatron a100-class")
"""Two nodes of 8, two NICs each (NCCL_IB_HCA of its scripts)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Which samples one row gives."""

    link: str
    tool: str
    nodes: int = 1


def read_collectives(folder: Path, notes: Notes) -> tuple[ProfileSet, ...]:
    """One population per link and tool; rows that are not used are counted in the notes."""
    if not is_there(folder / FILE, notes):
        return ()
    found: dict[tuple[str, str], list[LinkSample]] = {}
    labels: dict[tuple[str, str], str] = {}
    for row in published(folder):
        source = _source(row, notes)
        if isinstance(source, str):
            notes.unused[f"collectives.csv: {source}"] += 1
            continue
        sample = _sample(row, source, notes)
        if sample is not None:
            key = (source.link, source.tool)
            found.setdefault(key, []).append(sample)
            labels[key] = row.device
    # Times by size come before averages over sizes of the same link.
    order = sorted(found, key=lambda key: key[1] == _AVERAGES)
    return tuple(_population(key, labels[key], _without_copies(found[key], notes)) for key in order)


def _source(row: CollectiveRow, notes: Notes) -> _Source | str:
    """Where the row was measured, or why it is not used."""
    words = row.source
    if words.startswith("vTrain"):
        link = VTRAIN_A100_NODE if row.device == "A100" else VTRAIN_V100_NODE
        return _Source(link=link, tool="nccl-tests (vTrain)")
    if words.startswith("Sailor Aceso"):
        kind = notes.kind(row.device)
        if row.scope != "inter":
            return _Source(link=node_link(kind), tool="Aceso's profiler (eth-easl/sailor)")
        notes.words[_ON_A_CURVE] = None
        return _Source(link=nodes_link(kind), tool="sailor network curve", nodes=2)
    if words.startswith("SimAI"):
        return _NIC_RATIO if "nic_ratio" in words else _OTHER_RATIO
    if words.startswith("Galvatron sp_time"):
        return _Source(link=GALVATRON_NODE, tool="galvatron")
    if words.startswith("Galvatron p2p"):
        if ranks_of(row) != 2:
            return "Galvatron's chains of sends among more than two ranks"
        crosses = row.scope.startswith("2x")
        link = GALVATRON_NODES if crosses else GALVATRON_NODE
        return _Source(link=link, tool=_AVERAGES, nodes=2 if crosses else 1)
    group = averaged_group(row)
    if group is None:
        return f"{words[:60]}, a source that is not known"
    # Consecutive ranks fill a node first: with 8 to a node only 16 of them need two.
    crosses = group.nodes == 2 and (not group.consecutive or ranks_of(row) == 16)
    link = GALVATRON_NODES if crosses else GALVATRON_NODE
    return _Source(link=link, tool=_AVERAGES, nodes=2 if crosses else 1)


_NIC_RATIO = (
    "SimAI's ratios to the cards' bandwidth, as samples of a link; the law between nodes of links "
    "without samples was learned from them (predict/link/prior.py)"
)
_OTHER_RATIO = "SimAI's ratios to a fabric's bandwidth that is not named"
_ON_A_CURVE = (
    "collectives.csv: send_recv between nodes (scope inter) are values of Sailor's fitted "
    "polynomial, not single measurements"
)


def _sample(row: CollectiveRow, source: _Source, notes: Notes) -> LinkSample | None:
    operation, ranks, mark = operation_of(row), ranks_of(row), failure_of(row)
    if operation is None or ranks < 2:
        notes.unused["collectives.csv: an operation or a number of ranks that is not known"] += 1
        return None
    if mark:
        notes.unused[f"collectives.csv: {mark} us, the mark of a failure"] += 1
        return None
    size = row.size_bytes
    if size is None and source.tool == _AVERAGES:
        notes.words[_NO_SIZE] = None
        size = float(AVERAGED_BYTES)
    seconds = seconds_of(row, size)
    if size is None or size < 1 or seconds is None or seconds <= 0:
        notes.unused["collectives.csv: no size, no time or no bandwidth"] += 1
        return None
    if operation is LinkOperation.ALL_GATHER:
        size *= ranks
    return LinkSample(
        link=source.link,
        operation=operation.value,
        backend="nccl",
        group_size=ranks,
        message_bytes=int(size),
        median_seconds=seconds,
        p10_seconds=seconds,
        p90_seconds=seconds,
        repeats=1,
        outliers=0,
        nodes=source.nodes,
    )


_NO_SIZE = (
    "collectives.csv: Galvatron's average bandwidths have no size: taken as that of 64 MiB, the "
    "middle of what its scripts measure; one group at a time"
)


def _without_copies(samples: list[LinkSample], notes: Notes) -> tuple[LinkSample, ...]:
    """Equal to the last digit under several models: one measurement."""
    kept = tuple(dict.fromkeys(samples))
    if len(kept) < len(samples):
        reason = "collectives.csv: the same measurement under another model"
        notes.unused[reason] += len(samples) - len(kept)
    return kept


def _population(key: tuple[str, str], label: str, samples: tuple[LinkSample, ...]) -> ProfileSet:
    link, tool = key
    words = "one time per message, whose spread is not said"
    if tool.startswith("Aceso"):
        words += "; all_gather and all_to_all as torch runs them, with the copies of their lists"
    device = link.removesuffix(" intra-node").removesuffix(" inter-node")
    return population(device, label, tool=tool, file=FILE, words=words, links=samples)
