"""Tables of `hetplan bench`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from evaluation.cost.run import CostBench
from evaluation.output import table_of
from hetplan.units import format_bytes, format_seconds, format_share


def cost_tables(bench: CostBench) -> Iterator[Table]:
    """The tables that have rows."""
    yield table_of(
        "One replay, CPU time, warm",
        ("replay", "schedule", "sends"),
        ("stages", "virtual stages", "microbatches", "time"),
        (
            (
                each.what, each.schedule, _sends(each.rendezvous), each.stages,
                each.virtual_stages, each.microbatches, format_seconds(each.cpu_seconds),
            )
            for each in bench.replays
        ),
    )  # fmt: skip
    yield table_of(
        "One estimate, CPU time",
        ("estimate",),
        ("stages", "microbatches", "plans", "time of one"),
        (
            (
                each.what, each.stages, each.microbatches, each.plans,
                format_seconds(each.cpu_seconds),
            )
            for each in bench.estimates
        ),
    )  # fmt: skip
    for title, rows in (("eager", bench.bounds), ("rendezvous", bench.rendezvous_bounds)):
        yield table_of(
            f"Replay over its lower bound less 1, {title} sends",
            ("schedule", "transfers"),
            ("cases", "mean", "p99", "worst", "bound above replay"),
            (
                (
                    each.schedule, each.transfers, each.cases, format_share(each.mean),
                    format_share(each.p99), format_share(each.worst), each.violations,
                )
                for each in rows
            ),
        )  # fmt: skip
    yield table_of(
        "Steps that a faster shared wire makes slower",
        ("sends",),
        ("wires", "pipelines", "cases", "slower", "worst", "worst of the bound"),
        (
            (
                _sends(each.rendezvous), each.wires, each.pipelines, each.cases,
                f"{each.share:.1%}", f"{each.worst_excess:.2%}", f"{each.worst_of_bound:.1%}",
            )
            for each in bench.anomalies
        ),
    )  # fmt: skip
    yield from _reference_tables(bench)


def _reference_tables(bench: CostBench) -> Iterator[Table]:
    """Those that stand on published measurements."""
    if bench.memory:
        yield table_of(
            "Memory against published runs",
            ("runs",),
            ("rows", "suspect", "mean error", "worst", "constant"),
            (
                (
                    each.group, each.rows, each.suspect_rows, f"{each.mean_error:.2%}",
                    f"{each.worst_error:.2%}",
                    format_bytes(each.constant_bytes) if each.constant_bytes else "none",
                )
                for each in bench.memory
            ),
        )  # fmt: skip
    yield from _link_tables(bench)


def _link_tables(bench: CostBench) -> Iterator[Table]:
    if bench.collectives:
        yield table_of(
            "Collectives from figures alone against published measurements",
            ("source", "group", "algorithm"),
            ("rows", "mean error", "predicted over measured"),
            (
                (
                    each.source, each.group, each.algorithm, each.rows,
                    f"{each.mean_error:.1%}", f"{each.median_ratio:.3f}",
                )
                for each in bench.collectives
            ),
        )  # fmt: skip
    if bench.collective_laws:
        yield table_of(
            "Laws of links without samples, one source or number of nodes left out in turn",
            ("law", "left out"),
            ("rows", "mean error", "median", "largest"),
            (
                (
                    each.law, each.left_out, each.rows, f"{each.mean_error:.1%}",
                    f"{each.median_error:.1%}", f"{each.worst_error:.0%}",
                )
                for each in bench.collective_laws
            ),
        )  # fmt: skip
    if bench.long_links:
        yield table_of(
            "Long links, every pair of cities left out in turn",
            ("model",),
            ("pairs", "mean error", "median", "largest", "inside the interval"),
            (
                (
                    each.model.value, each.pairs, f"{each.mean:.1%}", f"{each.median:.1%}",
                    f"{each.largest:.1%}", f"{each.covered:.0%}",
                )
                for each in bench.long_links
            ),
        )  # fmt: skip


def _sends(rendezvous: bool) -> str:
    return "rendezvous" if rendezvous else "eager"
