"""What a plan file keeps of other questions: why devices are idle, what changes are worth, and the
best device kind alone.

`hetplan plan` asks about kinds alone, after it has written the plan; all else takes as long as some
searches, and is asked for a report (`hetplan report --what-if`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from hetplan.deadline import check_time
from hetplan.errors import OutOfTimeError
from hetplan.predict.predictor import Predictor
from hetplan.search.result import NO_TIME, BestAlone, SearchResult
from hetplan.whatif.baselines import homogeneous_sum, strongest_alone
from hetplan.whatif.idle import idle_reasons
from hetplan.whatif.shadow_prices import changes, shadow_prices
from hetplan.whatif.smaller_questions import Answers, usable_kinds

Told = Callable[[int, int, str], None]
"""Told (number, of how many, what is asked)."""


def with_what_ifs(
    result: SearchResult, predictor: Predictor, progress: Told | None = None
) -> Iterator[SearchResult]:
    """The result with one answer more at a time, until none is missing; none of a given layout.

    OutOfTimeError where time is over (`hetplan.deadline`) before one of them is whole.
    """
    if result.certificate is None:
        return
    if not result.idle:
        idle = idle_reasons(result, predictor, progress=progress)
        check_time()
        if idle:
            result = replace(result, idle=idle)
            yield result
    if result.alone is None:
        alone = best_alone(result, Answers(predictor))
        if alone is not None:
            result = replace(result, alone=alone)
            yield result
    if not result.prices:
        asked = tuple(changes(result.inputs))

        def show(number: int, words: str) -> None:
            if progress is not None:
                progress(number, len(asked), words)

        prices = shadow_prices(result, predictor, asked=asked, progress=show)
        check_time()
        yield replace(result, prices=prices)


def best_alone(result: SearchResult, answers: Answers) -> BestAlone | None:
    """The best device kind by itself; None where there is one kind, or none has a plan alone.

    OutOfTimeError where there is no time for one of them.
    """
    if len(usable_kinds(result.inputs)) < 2:
        return None
    figure = homogeneous_sum(result, answers)
    if any(kind.reason == NO_TIME for kind in figure.kinds):
        raise OutOfTimeError
    return strongest_alone(result, figure, answers)
