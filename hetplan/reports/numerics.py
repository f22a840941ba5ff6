"""What `hetplan launch check-numerics` prints: a table per device kind, and the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from hetplan.reports.terminal import new_table, print_table

if TYPE_CHECKING:
    from hetplan.launchers.numerics import KindNumerics, Numerics


def show_numerics(numerics: Numerics, *, passed: bool, verbose: bool) -> None:
    """The results of all kinds; `passed`: nothing is wrong and none is missing."""
    setup = numerics.setup
    degrees = ", ".join(str(tp) for tp in setup.tensor_parallel)
    print(
        f"{setup.model}: {setup.microbatch_size} x {setup.sequence_length} tokens in "
        f"{setup.precision.value}, tp {degrees}, seed {setup.seed}"
    )
    for kind in numerics.kinds:
        if verbose:
            print_table(_table(kind))
            continue
        for worst in sorted(kind.results, key=lambda result: -result.share)[:1]:
            print(
                f"{kind.kind}: {len(kind.results)} results; the worst has {worst.share:.0%} of "
                f"the deviation allowed ({worst.operator}, {worst.tensor})"
            )
    if passed:
        kinds = " and ".join(kind.kind for kind in numerics.kinds)
        print(f"{kinds}: every result is as exact as its number format allows")


def _table(kind: KindNumerics) -> Table:
    title = escape(
        f"{kind.kind}: {kind.device_name}, {kind.driver}, torch {kind.torch_version}; of each "
        "operator the result that uses most of what is allowed"
    )
    columns = "operator | results | worst | >rms | >allowed | >largest | >allowed | >used"
    table = new_table(columns, title=title)
    for operator, results in kind.by_operator.items():
        worst = results[0]
        table.add_row(
            escape(operator),
            str(len(results)),
            escape(worst.tensor),
            f"{worst.rms_deviation:.1e}",
            f"{worst.allowed.rms:.1e}",
            f"{worst.largest_deviation:.1e}",
            f"{worst.allowed.largest:.1e}",
            f"{worst.share:.0%}" if worst.share <= 1.0 else f"{worst.share:.3g} times",
        )
    return table
