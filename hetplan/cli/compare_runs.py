"""Which runs `hetplan compare` was asked about, and each beside its plan, priced again or not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.cli.options import say
from hetplan.launchers.compare_runs import RunFiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hetplan.launchers.compare_steps import ChosenSteps
    from hetplan.launchers.compare_values import Comparison
    from hetplan.predict.fit import FittedPredictor
    from hetplan.predict.predictor import Predictor
    from hetplan.search.result import SearchResult

Changes = tuple["Path | None", "Path | None", "Path | None"]
"""Model, cluster and job file over the plan's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One run: what it was asked to do, what it logged, and how they compare."""

    files: RunFiles
    result: SearchResult
    chosen: ChosenSteps
    comparison: Comparison
    doubts: tuple[str, ...]
    """What makes this run's step mean less: its log's notes and those on its steps."""


def asked_runs(
    logs: list[Path] | None, plan: Path | None, runs: Path | None
) -> tuple[RunFiles, ...]:
    """The run of the arguments, or those of the list."""
    from hetplan.errors import InputError
    from hetplan.launchers.compare_runs import load_runs

    if runs is not None:
        if logs or plan is not None:
            raise InputError(f"{runs} names logs and plans; leave LOGS and --plan out")
        return load_runs(runs)
    if not logs:
        raise InputError("name the run's log files, or --runs with a list of several runs")
    if plan is None:
        raise InputError("give --plan: the plan file that the run ran")
    return (RunFiles(logs=tuple(logs), plan=plan),)


def predictor_to_price_by(
    predictor: Path | None, stores: list[Path] | None, calibrate: Path | None
) -> FittedPredictor:
    """The predictor of the file or the stores; to calibrate it, without earlier factors."""
    from hetplan.cli.options import read_predictor
    from hetplan.errors import InputError
    from hetplan.predict.fit import FittedPredictor

    found, _ = read_predictor(predictor, stores)
    if not isinstance(found, FittedPredictor):
        raise InputError("only a fitted predictor can price a plan again")
    if calibrate is None or found.laws.calibration is None:
        return found
    runs = found.laws.calibration.runs
    say(f"the predictor's calibration by {runs} runs is left out; these runs replace it")
    return FittedPredictor(replace(found.laws, calibration=None))


def compared(
    asked: Sequence[RunFiles],
    changes: Changes,
    predictor: FittedPredictor | None,
    *,
    trainer: str | None,
    warmup_steps: int | None,
) -> list[ComparedRun]:
    """Every run beside its plan, priced again by the predictor, or by its file's own estimate.

    An InputError with the faults of all runs.
    """
    from hetplan.errors import Fault, InputError

    found: list[ComparedRun] = []
    faults: list[Fault | str] = []
    for files in asked:
        try:
            found.append(_compared(files, changes, predictor, trainer, warmup_steps))
        except InputError as error:
            faults += [fault for fault in error.faults if fault not in faults]
    if faults:
        raise InputError(*faults)
    return found


def _compared(
    files: RunFiles,
    changes: Changes,
    predictor: FittedPredictor | None,
    trainer: str | None,
    warmup_steps: int | None,
) -> ComparedRun:
    from hetplan.launchers.compare import chosen_steps, compare_steps, read_log
    from hetplan.search.files import load_legal_plan

    result = load_legal_plan(files.plan)
    # A run log names the plan file that it ran: it is looked up before the estimate changes.
    log = read_log(files.logs, result, trainer)
    if predictor is not None:
        result = priced_again(files.plan, result, changes, predictor)
    chosen = chosen_steps(log, result, warmup_steps)
    comparison = compare_steps(log, result, chosen)
    return ComparedRun(
        files=files,
        result=result,
        chosen=chosen,
        comparison=comparison,
        doubts=(*log.notes, *chosen.notes),
    )


def priced_again(
    plan: Path,
    result: SearchResult,
    changes: Changes,
    predictor: Predictor,
) -> SearchResult:
    """The plan with the estimate of this predictor, on the inputs that were given over its own."""
    from hetplan.cli.compare import note_repricing
    from hetplan.cluster.load import load_cluster
    from hetplan.cost.estimate import estimate
    from hetplan.errors import InputError
    from hetplan.job.check import check_job_against
    from hetplan.job.load import load_job
    from hetplan.model.load import load_model
    from hetplan.plans.check import check_plan

    model, cluster, job = changes
    inputs = replace(
        result.inputs,
        model=result.inputs.model if model is None else load_model(model),
        cluster=result.inputs.cluster if cluster is None else load_cluster(cluster),
        job=result.inputs.job if job is None else load_job(job),
    )
    three = (inputs.model, inputs.cluster, inputs.job)
    faults = [
        *check_job_against(inputs.job, inputs.model, inputs.cluster, searched=False),
        *check_plan(result.plan, *three),
    ]
    if faults:
        raise InputError(*faults)
    before = result.estimate.step_seconds
    found = replace(result, inputs=inputs, estimate=estimate(result.plan, *three, predictor))
    note_repricing(plan, found, before)
    return found
