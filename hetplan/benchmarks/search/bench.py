"""What `hetplan bench search` measures: peer cases beside other planners, and speed by size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetplan.benchmarks.search.cases import USUAL_FILE, check_cases, read_cases
from hetplan.benchmarks.search.peers import PeerTable, compare
from hetplan.benchmarks.search.scaling import ScalingRow, instances_of, scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchBench:
    """Both tables."""

    peers: PeerTable | None
    scaling: tuple[ScalingRow, ...]
    missing: tuple[str, ...]
    """What was left out, and why."""


def search_bench(
    reference: Path | None,
    cases: Path | None,
    *,
    sizes: Sequence[int] | None,
    targets: Sequence[str],
    time_limit_seconds: float,
    progress: Callable[[str], None],
) -> SearchBench:
    """`sizes` None: all of the table; empty: no scaling. Peer cases need the folder `reference`."""
    missing = []
    peers = None
    if reference is None:
        missing.append("peer cases: no reference folder found; give --reference DIR")
    else:
        asked = read_cases(reference / USUAL_FILE if cases is None else cases)
        check_cases(asked)
        peers = compare(asked, reference)
    rows: tuple[ScalingRow, ...] = ()
    if sizes is None or sizes:
        chosen = instances_of(() if sizes is None else sizes)
        rows = scaling(chosen, targets, time_limit_seconds=time_limit_seconds, progress=progress)
    return SearchBench(peers=peers, scaling=rows, missing=tuple(missing))
