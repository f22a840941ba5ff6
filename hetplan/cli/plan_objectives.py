"""`hetplan plan --quantile, --objective, --top`: other aims than the shortest step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hetplan.cli.options import emit

if TYPE_CHECKING:
    from hetplan.job.spec import Job
    from hetplan.predict.predictor import Predictor
    from hetplan.search.result import SearchResult

MAX_ALTERNATIVES = 50


def with_aim(job: Job, quantile: float | None, objective: str | None) -> Job:
    """The job with what the command line says instead."""
    from hetplan.errors import InputError
    from hetplan.job.spec import Objective

    if quantile is not None:
        try:
            job = replace(job, quantile=quantile)
        except InputError as error:
            raise InputError(f"--quantile: {error}") from None
    if objective is not None:
        if objective not in list(Objective):
            known = ", ".join(Objective)
            raise InputError(f"--objective {objective!a}: there is no such aim; known: {known}")
        job = replace(job, objective=Objective(objective))
    return job


def by_aim(result: SearchResult, predictor: Predictor, top: int) -> SearchResult:
    """The plan for the job's aim and its alternatives, with a line of progress."""
    from hetplan.cli.progress import ProgressLine
    from hetplan.search.objectives.answer import by_objective, has_other_aim
    from hetplan.search.objectives.pool import nearby

    if not has_other_aim(result.inputs.job, top):
        return result
    count = sum(1 for _ in nearby(result))
    with ProgressLine("planning nearby questions") as line:
        return by_objective(
            result,
            predictor,
            top=top,
            progress=lambda number, words: line.show(number, count, None, words),
        )


def show_aim(result: SearchResult) -> None:
    """What the plan was chosen by, and the other plans."""
    from hetplan.reports.objectives import alternatives_table, objective_lines
    from hetplan.reports.terminal import print_table

    for line in objective_lines(result):
        emit(line)
    table = alternatives_table(result)
    if table is not None:
        print_table(table)
