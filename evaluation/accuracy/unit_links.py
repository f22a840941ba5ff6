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

import math
import re
from pathlib import Path

from evaluation.accuracy.unit_data import MICROSECOND, Notes, Row, each_row, population, read_rows
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
# Nodes of the run, and whether neighbouring ranks form the group, which fill a node first;
# otherwise they are as far apart as there are groups.
_AVERAGED = re.compile(r"allreduce_bandwidth_(\d+)nodes_\d+gpus_per_node \(consec=([01])\)")
_AVERAGES = "galvatron, averages over sizes"
_ACESO = "Aceso's profiler (eth-easl/sailor)"


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

_Source = tuple[str, str, int]
"""Link, tool and nodes of what one row gives."""


def read_collectives(folder: Path, notes: Notes) -> tuple[ProfileSet, ...]:
    """One population per link and tool; rows that are not used are counted in the notes."""
    words = ("source", "gpu", "op", "ranks", "scope")
    others = ("size_bytes", "time_us", "busbw_GBps")
    found: dict[tuple[str, str], list[LinkSample]] = {}
    labels: dict[tuple[str, str], str] = {}
    for row in each_row(read_rows(folder / FILE, notes, words=words, others=others)):
        ranks = int(row.ranks) if row.ranks.isdecimal() else 0
        source = _source(row, ranks, notes)
        if isinstance(source, str):
            notes.unused[f"collectives.csv: {source}"] += 1
            continue
        sample = _sample(row, ranks, source, notes)
        if sample is not None:
            key = source[:2]
            found.setdefault(key, []).append(sample)
            labels[key] = row.gpu
    # Times by size come before averages over sizes of the same link.
    order = sorted(found, key=lambda key: key[1] == _AVERAGES)
    return tuple(_population(key, labels[key], found[key], notes) for key in order)


def _source(row: Row, ranks: int, notes: Notes) -> _Source | str:
    """Where the row was measured, or why it is not used."""
    words = row.source
    if words.startswith("vTrain"):
        link = VTRAIN_A100_NODE if row.gpu == "A100" else VTRAIN_V100_NODE
        return link, "nccl-tests (vTrain)", 1
    if words.startswith("Sailor Aceso"):
        kind = notes.kind(row.gpu)
        if row.scope != "inter":
            return node_link(kind), _ACESO, 1
        notes.words[_ON_A_CURVE] = None
        return nodes_link(kind), "sailor network curve", 2
    if words.startswith("SimAI"):
        return "SimAI's ratios to a bandwidth that is not named"
    if words.startswith("Galvatron sp_time"):
        return GALVATRON_NODE, "galvatron", 1
    averaged = _AVERAGED.search(words)
    if words.startswith("Galvatron p2p"):
        if ranks != 2:
            return "Galvatron's chains of sends among more than two ranks"
        crosses = row.scope.startswith("2x")
    elif averaged is None:
        return f"{words[:60]}, a source that is not known"
    else:
        # Consecutive ranks fill a node first: with 8 to a node only 16 of them need two.
        crosses = averaged[1] == "2" and (averaged[2] == "0" or ranks == 16)
    return (GALVATRON_NODES, _AVERAGES, 2) if crosses else (GALVATRON_NODE, _AVERAGES, 1)


_ON_A_CURVE = (
    "collectives.csv: send_recv between nodes (scope inter) are values of Sailor's fitted "
    "polynomial, not single measurements"
)


def _sample(row: Row, ranks: int, source: _Source, notes: Notes) -> LinkSample | None:
    link, tool, nodes = source
    operation, size, seconds = _OPERATIONS.get(row.op), row.size_bytes, row.time_us * MICROSECOND
    if operation is None or ranks < 2:
        notes.unused["collectives.csv: an operation or a number of ranks that is not known"] += 1
        return None
    for mark, least in _FAILED_SECONDS:
        if seconds >= least:
            notes.unused[f"collectives.csv: {mark} us, the mark of a failure"] += 1
            return None
    if math.isnan(size) and tool == _AVERAGES:
        notes.words[_NO_SIZE] = None
        size = float(AVERAGED_BYTES)
    if math.isnan(seconds) and row.busbw_GBps > 0:
        # Bus bandwidth to time (doc/PERFORMANCE.md of nccl-tests): only these come without a time.
        if operation is LinkOperation.ALL_REDUCE:
            seconds = 2.0 * (ranks - 1) / ranks * size / (row.busbw_GBps * 1e9)
        elif operation is LinkOperation.SEND_RECV:
            seconds = size / (row.busbw_GBps * 1e9)
    if not (size >= 1 and seconds > 0):
        notes.unused["collectives.csv: no size, no time or no bandwidth"] += 1
        return None
    if operation is LinkOperation.ALL_GATHER:
        size *= ranks
    return LinkSample(
        link=link,
        operation=operation.value,
        backend="nccl",
        group_size=ranks,
        message_bytes=int(size),
        median_seconds=seconds,
        p10_seconds=seconds,
        p90_seconds=seconds,
        repeats=1,
        outliers=0,
        nodes=nodes,
    )


_NO_SIZE = (
    "collectives.csv: Galvatron's average bandwidths have no size: taken as that of 64 MiB, the "
    "middle of what its scripts measure; one group at a time"
)


def _population(
    key: tuple[str, str], label: str, samples: list[LinkSample], notes: Notes
) -> ProfileSet:
    link, tool = key
    # Equal to the last digit under several models: one measurement.
    kept = tuple(dict.fromkeys(samples))
    if len(kept) < len(samples):
        reason = "collectives.csv: the same measurement under another model"
        notes.unused[reason] += len(samples) - len(kept)
    words = "one time per message, whose spread is not said"
    if tool == _ACESO:
        words += "; all_gather and all_to_all as torch runs them, with the copies of their lists"
    device = link.removesuffix(" intra-node").removesuffix(" inter-node")
    return population(device, label, tool=tool, file=FILE, words=words, links=kept)
