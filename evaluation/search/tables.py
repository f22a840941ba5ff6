"""Tables and drawing of `python -m evaluation search`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from evaluation.output import save_drawing, table_of
from evaluation.search.peers import PeerTable, SearchBench
from evaluation.search.scaling import ScalingRow
from hetplan.errors import InputError
from hetplan.units import format_bytes


def search_tables(found: SearchBench) -> Iterator[Table]:
    """Peer cases, then the scaling table."""
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


def search_lines(found: SearchBench) -> Iterator[str]:
    """The plans in words, and the mean ratios."""
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


def draw(rows: Sequence[ScalingRow], path: Path) -> None:
    """Write the drawing as SVG; an InputError without matplotlib, rows or a folder to write to."""
    planned = [row for row in rows if row.gap is not None]
    if not planned:
        raise InputError(f"no instance was planned, so there is nothing to draw into {path}")

    def fill(figure: Any) -> None:
        above, below = figure.subplots(2, sharex=True)
        _fill(above, planned, [row.seconds for row in planned], "CPU time (s)")
        # A gap of 0 has no place on a logarithmic axis.
        _fill(below, planned, [100 * max(row.gap or 0.0, 1e-5) for row in planned], "gap (%)")
        below.set_xlabel("devices")
        above.legend(loc="upper left", fontsize=8, frameon=False)

    save_drawing(path, fill)


def _fill(axes: Any, rows: Sequence[ScalingRow], values: Sequence[float], label: str) -> None:
    for at, target in enumerate(dict.fromkeys(row.target for row in rows)):
        for model in ("dense", "moe"):
            points = sorted(
                (row.devices, value)
                for row, value in zip(rows, values, strict=True)
                if (row.target, row.model) == (target, model)
            )
            if points:
                axes.plot(
                    [devices for devices, _ in points],
                    [value for _, value in points],
                    color=f"C{at}",
                    marker="o",
                    markersize=5,
                    linestyle="-" if model == "dense" else ":",
                    markerfacecolor=f"C{at}" if model == "dense" else "none",
                    label=target if model == "dense" else f"{target}, experts",
                )
    axes.set(xscale="log", yscale="log", ylabel=label)
