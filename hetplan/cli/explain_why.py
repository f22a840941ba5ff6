"""`hetplan explain PLAN`: what limits the plan, what a change is worth, why not another plan."""

from __future__ import annotations

from pathlib import Path

from hetplan.cli.options import emit, read_predictor


def explain_why(
    plan: Path,
    *,
    against: Path | None,
    shadow_prices: bool,
    time_limit: str | None,
    predictor: Path | None,
    store: list[Path] | None,
    as_json: bool,
) -> None:
    """Answer what was asked of one plan file, tables and words or JSON."""
    from hetplan.cli.progress import ProgressLine
    from hetplan.files.encoding import encode
    from hetplan.reports.explained import (
        EXPLAIN_SCHEMA,
        Explained,
        against_lines,
        choice_table,
        difference_table,
        limit_lines,
        price_table,
    )
    from hetplan.reports.terminal import print_table
    from hetplan.search.explained.against import against as set_against
    from hetplan.search.explained.changes import changes
    from hetplan.search.explained.limits import limits
    from hetplan.search.explained.shadow_prices import shadow_prices as prices_of
    from hetplan.search.files import load_legal_plan, load_plan
    from hetplan.units import Dimension, parse_quantity

    result = load_legal_plan(plan)
    other = None if against is None else load_plan(against)
    seconds = None if time_limit is None else parse_quantity(time_limit, Dimension.TIME)
    predict, _ = read_predictor(predictor, store)
    explained = Explained(
        limits=limits(result, predict),
        against=None if other is None else set_against(result, other, predict),
    )
    if shadow_prices:
        asked = tuple(changes(result.inputs.cluster, result.inputs.job))
        with ProgressLine("planning with one change at a time") as line:
            prices = prices_of(
                result,
                predict,
                asked=asked,
                time_limit_seconds=seconds,
                progress=lambda number, words: line.show(number, len(asked), None, words),
            )
        explained = Explained(
            limits=explained.limits, against=explained.against, shadow_prices=prices
        )
    if as_json:
        emit(encode(explained, schema=EXPLAIN_SCHEMA))
        return
    if explained.against is not None:
        for text in against_lines(explained.against):
            emit(text)
        for table in (choice_table(explained.against), difference_table(explained.against)):
            if table.row_count:
                print_table(table)
    else:
        for text in limit_lines(explained.limits):
            emit(text)
    if shadow_prices:
        print_table(price_table(explained.shadow_prices))
