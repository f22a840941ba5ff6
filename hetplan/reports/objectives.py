"""What a person sees of a plan that was chosen by another aim, and of its alternatives."""

from __future__ import annotations

from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from hetplan.search.objectives.layout import layout_words
from hetplan.search.result import SearchResult
from hetplan.units import format_seconds


def alternatives_table(result: SearchResult) -> Table | None:
    """One row per alternative; None where there is none."""
    if not result.alternatives:
        return None
    quantile = result.alternatives[0].quantile
    table = Table(title="Other plans, none beaten by another in every column", title_justify="left")
    table.add_column("best", overflow="fold")
    for name in ("step", f"p{quantile * 100:g}", "USD per step", "devices"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("layout", overflow="fold")
    for each in result.alternatives:
        price = "-" if each.usd_per_step is None else f"{each.usd_per_step:.4g}"
        table.add_row(
            escape(each.why),
            format_seconds(each.step_seconds),
            format_seconds(each.quantile_seconds),
            price,
            f"{each.devices:,}",
            layout_words(each.plan),
        )
    return table


def objective_lines(result: SearchResult) -> Iterator[str]:
    """What the plan was chosen by, where that is not the shortest step."""
    if result.objective:
        yield f"chosen by {result.objective}"
