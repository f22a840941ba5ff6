"""`hetplan bench search`: plans beside those of other planners, and the search's speed by size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.cli.options import emit, say

if TYPE_CHECKING:
    from rich.table import Table

    from hetplan.benchmarks.search.bench import SearchBench
    from hetplan.benchmarks.search.peers import PeerTable
    from hetplan.benchmarks.search.scaling import ScalingRow

USUAL_LIMIT_SECONDS = 180.0
"""Longest search of one row of the scaling table, unless the caller says otherwise."""


def bench_search(
    reference: Path | None,
    cases: Path | None,
    *,
    sizes: str | None,
    targets: str | None,
    time_limit: str | None,
    plot: Path | None,
    as_json: bool,
    schema: str,
) -> None:
    """Measure, print, and draw where a plot is asked for."""
    from hetplan.benchmarks.search.bench import search_bench
    from hetplan.benchmarks.search.scaling import TARGETS
    from hetplan.files.encoding import encode
    from hetplan.plans.targets import target
    from hetplan.reports.terminal import print_table

    limit = _limit(time_limit)
    wanted = tuple(target(name).name for name in _listed(targets)) or TARGETS
    found = search_bench(
        reference,
        cases,
        sizes=None if sizes is None else _sizes(sizes),
        targets=wanted,
        time_limit_seconds=limit,
        progress=say,
    )
    if plot is not None:
        from hetplan.benchmarks.search.plot import draw

        draw(found.scaling, plot)
    if as_json:
        emit(encode(found, schema=schema))
    else:
        for table in _tables(found):
            print_table(table)
        for line in _lines(found):
            say(line)


def _limit(text: str | None) -> float:
    from hetplan.errors import InputError
    from hetplan.units import Dimension, parse_quantity

    if text is None:
        return USUAL_LIMIT_SECONDS
    try:
        return parse_quantity(text, Dimension.TIME)
    except InputError as error:
        raise InputError(f"--time-limit: {error}") from None


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _sizes(text: str) -> tuple[int, ...]:
    from hetplan.errors import InputError

    if text.strip() == "none":
        return ()
    try:
        found = tuple(int(part.replace("_", "")) for part in _listed(text))
    except ValueError:
        found = ()
    if not found:
        raise InputError(f"--sizes is {text!a}; numbers of devices with commas between, or none")
    return found


def _tables(found: SearchBench) -> Iterator[Table]:
    from hetplan.cli.bench_tables import table_of

    if found.peers is not None:
        yield table_of(
            "Steps by Sailor's simulator, CPU time with construction",
            ("case", "best peer"),
            (
                "hetplan", "found by", "peer", "hetplan / peer", "CPU", "CPU of the peer",
                "bound by work", "plans scored",
            ),
            (
                (
                    row.case, row.best_peer, _or_dash(row.step_seconds, "{:.4f} s"), row.found_by,
                    _or_dash(row.best_peer_seconds, "{:.4f} s"), _or_dash(row.ratio, "{:.3f}"),
                    f"{row.cpu_seconds:.2f} s", _or_dash(row.best_peer_cpu_seconds, "{:.2f} s"),
                    f"{row.bound_seconds:.3f} s", row.scored,
                )
                for row in found.peers.rows
            ),
        )  # fmt: skip
        yield _answers(found.peers)
        yield _peer_plans(found.peers)
    if found.scaling:
        yield _scaling(found.scaling)


def _answers(peers: PeerTable) -> Table:
    from hetplan.cli.bench_tables import table_of

    return table_of(
        "Who found what (own cost: hetplan's; the bound is by the cost that led the search)",
        ("case", "by"),
        (
            "step by Sailor", "hetplan / peer", "own cost", "bound", "full microbatches", "CPU",
            "of it proofs",
        ),
        (
            (
                row.case, each.by, _or_dash(each.step_seconds, "{:.4f} s"),
                _or_dash(each.ratio, "{:.3f}"), _or_dash(each.own_seconds, "{:.4f} s"),
                _or_dash(each.bound_seconds, "{:.4f} s"),
                "-" if each.step_seconds is None else "yes" if each.batch_divided else "no",
                f"{each.cpu_seconds:.2f} s", f"{each.proof_cpu_seconds:.2f} s",
            )
            for row in peers.rows
            for each in row.answers
        ),
    )  # fmt: skip


def _peer_plans(peers: PeerTable) -> Table:
    from hetplan.cli.bench_tables import table_of

    return table_of(
        "Peers' plans by the rebuilt formula",
        ("case", "planner"),
        ("as the file says", "rebuilt", "CPU", "note"),
        (
            (
                row.case, peer.planner, f"{peer.step_seconds:.4f} s",
                _or_dash(peer.rebuilt_seconds, "{:.4f} s"), f"{peer.cpu_seconds:.2f} s", peer.note,
            )
            for row in peers.rows
            for peer in row.peers
        ),
    )  # fmt: skip


def _scaling(rows: Sequence[ScalingRow]) -> Table:
    from hetplan.cli.bench_tables import table_of
    from hetplan.units import format_bytes

    return table_of(
        "The search by size, each in a process of its own",
        ("model", "target"),
        (
            "devices", "islands", "kinds", "regions", "CPU", "whole process", "peak memory",
            "gap", "status", "families", "searched", "programs", "replays",
        ),
        (
            (
                row.model, row.target, f"{row.devices:,}", row.islands, row.kinds, row.regions,
                f"{row.seconds:.2f} s", f"{row.cold_seconds:.1f} s",
                format_bytes(row.peak_memory_bytes), _or_dash(row.gap, "{:.2%}"), row.status,
                row.families, row.searched, row.programs, row.replays,
            )
            for row in rows
        ),
    )  # fmt: skip


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _lines(found: SearchBench) -> Iterator[str]:
    peers = found.peers
    if peers is not None:
        for row in peers.rows:
            yield f"{row.case}: {row.plan}"
        if peers.geometric_mean_ratio is not None:
            yield (
                f"geometric mean of hetplan / best peer: {peers.geometric_mean_ratio:.4f} "
                f"({1 / peers.geometric_mean_ratio - 1:.1%} faster)"
            )
        if peers.geometric_mean_ratios:
            means = [f"{by} {ratio:.4f}" for by, ratio in peers.geometric_mean_ratios]
            yield f"the same by who found it: {', '.join(means)}"
        yield peers.chosen_by
        yield f"first case before kernels were loaded: {peers.cold_cpu_seconds:.1f} s CPU"
    for line in found.missing:
        yield f"left out: {line}"
