"""`hetplan bench hethub`: one plan over unlike accelerators against the sum of its kinds alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hetplan.cli.options import emit, say

if TYPE_CHECKING:
    from rich.table import Table

    from hetplan.benchmarks.hethub import HethubBench, MixRow


def bench_hethub(
    *, targets: str | None, time_limit: str | None, as_json: bool, schema: str
) -> None:
    """Plan, print the table and what its figures mean."""
    from hetplan.benchmarks.hethub import TARGETS, hethub_bench
    from hetplan.errors import InputError
    from hetplan.files.encoding import encode
    from hetplan.plans.targets import target
    from hetplan.reports.terminal import print_table
    from hetplan.units import Dimension, parse_quantity

    named = tuple(part.strip() for part in (targets or "").split(",") if part.strip())
    wanted = tuple(target(name).name for name in named) or TARGETS
    limit = None
    if time_limit is not None:
        try:
            limit = parse_quantity(time_limit, Dimension.TIME)
        except InputError as error:
            raise InputError(f"--time-limit: {error}") from None
    found = hethub_bench(targets=wanted, time_limit_seconds=limit, progress=say)
    if as_json:
        emit(encode(found, schema=schema))
        return
    print_table(hethub_table(found))
    for line in hethub_lines(found):
        emit(line)


def hethub_table(found: HethubBench) -> Table:
    """One row per mix and target; every figure predicted."""
    from hetplan.cli.bench_tables import table_of
    from hetplan.units import format_seconds, format_share

    def plan(row: MixRow) -> tuple[object, ...]:
        if row.reason:
            return ("no plan",) + ("-",) * 6 + (f"{row.plan_cpu_seconds:.1f} s",)
        return (
            format_seconds(row.step_seconds),
            f"{row.gap:.1%}",
            format_share(row.homogeneous_sum_ratio),
            format_share(row.roofline_ratio),
            f"{row.idle_fraction:.1%}",
            f"{row.busy_fraction:.1%}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.plan_cpu_seconds:.1f} s",
        )

    return table_of(
        "One plan over two kinds against its kinds alone, all predicted",
        ("mix", "target"),
        (
            "step", "gap", "homogeneous_sum_ratio", "roofline_ratio", "idle", "busy", "tokens/s",
            "CPU",
        ),
        ((row.mix, row.target, *plan(row)) for row in found.rows),
    )  # fmt: skip


def hethub_lines(found: HethubBench) -> Iterator[str]:
    """What the columns are, and why HETHUB's own figure is not one of them."""
    yield (
        "homogeneous_sum_ratio: tokens/s of the plan over the sum of what each of its kinds would "
        "reach alone with the best plan for the same model, batch, sequence and target (gap at "
        "most 1 %); a kind that cannot hold the model alone counts with its roofline"
    )
    yield (
        "roofline_ratio: tokens/s of the plan over the sum over all devices of peak rate over "
        "operations per token (without recomputation)"
    )
    yield (
        "gap: proven distance to the best plan of the target. idle: devices that the plan leaves "
        "out. busy: part of the step in which the others compute; the rest is bubble, transfers, "
        "reduction and update. CPU: of the mix's search alone"
    )
    yield (
        f"HETHUB (arXiv 2405.16256) reports {found.measured_by_hethub:.2%} of its own upper bound: "
        "measured on accelerators and defined otherwise, so it is not to be set beside these "
        "predicted ratios"
    )
    for row in found.rows:
        if row.reason:
            yield f"{row.mix} for {row.target}: {row.reason}"
