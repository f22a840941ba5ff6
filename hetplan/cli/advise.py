"""`hetplan advise`: what each node, link or swap that could be had would bring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import (
    AsJson,
    PredictorFile,
    Stores,
    TimeLimit,
    emit,
    emit_lines,
    moment_of,
    quantity,
    read_predictor,
    say_left_out,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hetplan.whatif.advise import Advised, Fewest

ADVICE_SCHEMA = "hetplan.advice/1"
_SHOWN = 6


def advise(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file of today.")],
    candidates: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Offers and prices (YAML, docs/days.md)."),
    ],
    budget: Annotated[
        str | None,
        typer.Option(metavar="PRICE", help="Of one candidate at most, as in '50 USD/h'."),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Find the fewest nodes that meet it too."),
    ] = None,
    time_limit: TimeLimit = None,
    predictor: PredictorFile = None,
    store: Stores = None,
    as_json: AsJson = False,
) -> None:
    """Rank what could be bought: plan again with each.

    A plan that was found makes the first figure, and no plan makes more than the second.
    """
    from hetplan.kernels import loading

    with loading:
        from hetplan.deadline import ends_by
        from hetplan.drafting.candidates import load_candidates
        from hetplan.errors import InputError, OutOfTimeError
        from hetplan.files.encoding import encode
        from hetplan.reports.terminal import ProgressLine
        from hetplan.search.files import load_legal_plan
        from hetplan.units import Dimension
        from hetplan.whatif.advise import Advice, affordable, fewest
        from hetplan.whatif.advise import advise as advised

    end, until = moment_of(time_limit), quantity("--deadline", deadline, Dimension.TIME)
    usd, result = quantity("--budget", budget, Dimension.HOURLY_PRICE), load_legal_plan(plan)
    asked = load_candidates(candidates, result.inputs.cluster)
    if until is not None and result.inputs.job.total_tokens is None:
        raise InputError("--deadline: the job has no total_tokens, which it needs")
    least: list[Fewest] = []
    left_out: list[str] = []
    with ends_by(end), ProgressLine("planning with one candidate at a time") as line:
        predict, _ = read_predictor(predictor, store)
        found = advised(
            result,
            predict,
            asked,
            usd_per_hour=usd,
            progress=lambda at, words: line.show(at, len(asked), None, words),
        )
        known, within = {each.worth.words for each in found}, affordable(asked, usd)
        left_out += [each.words for each in within if each.words not in known]
        for each in within:
            if until is not None and each.more is not None:
                try:
                    least.append(fewest(result, predict, each, deadline_seconds=until))
                except OutOfTimeError:
                    left_out.append(f"the fewest of {each.words}")
    say_left_out(*left_out)
    if as_json:
        emit(encode(Advice(candidates=found, fewest=tuple(least)), schema=ADVICE_SCHEMA))
    else:
        emit_lines((*_lines(found), *(_fewest_line(each, deadline or "") for each in least)))


def _lines(found: tuple[Advised, ...]) -> Iterator[str]:
    from hetplan.reports.explained import worth_words
    from hetplan.units import counted

    yield "tokens/s with one candidate at a time, planned again: found, and most possible"
    for each in found[:_SHOWN]:
        price = "" if each.usd_per_hour is None else f", {each.usd_per_hour:g} USD/h"
        said = f"no plan: {each.worth.note}" if each.worth.note else worth_words(each.worth)
        yield f"  {said}: {each.worth.words}{price}"
    if len(found) > _SHOWN:
        yield f"  and {counted(len(found) - _SHOWN, 'more')} that bring less (--json)"


def _fewest_line(found: Fewest, deadline: str) -> str:
    from hetplan.units import format_brief
    from hetplan.whatif.advise import MOST_TIMES

    proof = ""
    if found.none_with >= 0:
        fewer = f"with {found.none_with} of them" if found.none_with else "without it"
        proof = f"; no plan {fewer} does"
    if found.times is None:
        return f"{deadline}: {MOST_TIMES} times {found.words} do not meet it{proof}"
    if found.times == 0:
        return f"{deadline}: met without {found.words}"
    took = format_brief(found.seconds or 0.0)
    return f"{deadline}: met with {found.times} times {found.words} ({took}){proof}"
