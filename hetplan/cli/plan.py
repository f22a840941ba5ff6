"""`hetplan plan`: the fastest plan for a job, with a proof of how good it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import (
    AsJson,
    ClusterFile,
    JobFile,
    ModelFile,
    PredictorFile,
    Stores,
    TargetName,
    emit,
    read_inputs,
    read_predictor,
    say,
)

if TYPE_CHECKING:
    from hetplan.job.spec import Job
    from hetplan.predict.predictor import Predictor
    from hetplan.search.explore import Progress
    from hetplan.search.result import SearchResult

_INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
_SECONDS_BETWEEN_LINES = 2.0
_SECONDS_BETWEEN_UPDATES = 0.1


def plan(
    model: ModelFile,
    cluster: ClusterFile,
    job: JobFile,
    predictor: PredictorFile = None,
    store: Stores = None,
    target: TargetName = None,
    gap: Annotated[
        float | None,
        typer.Option(help="Proven distance to the best plan at which to stop, over the job's."),
    ] = None,
    time_limit: Annotated[
        str | None, typer.Option(help="Longest search, as in '60 s' or '5 min', over the job's.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Plan file to write (JSON).")] = Path("plan.json"),
    as_json: AsJson = False,
) -> None:
    """Find the fastest plan for a model, a cluster and a job.

    Ctrl-C ends the search, writes the best plan so far and exits with 130.
    """
    from hetplan.search.search import search

    inputs = read_inputs(model, cluster, job, target)
    asked = _overridden(inputs.job, gap, time_limit)
    predict, digest = read_predictor(predictor, store)
    progress = _ProgressLine("plan")
    try:
        result = search(
            inputs.model,
            inputs.cluster,
            asked,
            predict,
            sha256=(*inputs.sha256, ("predictor", digest)),
            progress=progress.show,
        )
    finally:
        progress.close()
    from hetplan.search.files import result_text, save_result

    save_result(result, out)
    say(f"wrote {out}")
    if as_json:
        emit(result_text(result))
    else:
        _show(result)
    if result.certificate is not None and result.certificate.status == "interrupted":
        raise typer.Exit(_INTERRUPTED)
    if not as_json:
        _show_homogeneous(result, predict)


def _overridden(job: Job, gap: float | None, time_limit: str | None) -> Job:
    """The job with what the command line says instead."""
    from dataclasses import replace

    from hetplan.units import Dimension, parse_quantity

    if gap is not None:
        job = replace(job, gap=gap)
    if time_limit is not None:
        job = replace(job, time_limit_seconds=parse_quantity(time_limit, Dimension.TIME))
    return job


def _show(result: SearchResult) -> None:
    from hetplan.reports.plans import result_lines, stage_table
    from hetplan.reports.terminal import print_table

    print_table(stage_table(result.inputs.model, result.plan, result.estimate))
    for line in result_lines(result):
        emit(line)


def _show_homogeneous(result: SearchResult, predictor: Predictor) -> None:
    """The figure of merit, where the cluster mixes kinds."""
    from hetplan.reports.plans import homogeneous_lines
    from hetplan.search.homogeneous import homogeneous_sum

    if len({island.device.kind for island in result.inputs.cluster.islands}) < 2:
        return
    progress = _ProgressLine("each kind alone")
    try:
        figure = homogeneous_sum(
            result,
            predictor,
            time_limit_seconds=result.inputs.job.time_limit_seconds,
            progress=progress.show,
        )
    finally:
        progress.close()
    for line in homogeneous_lines(figure):
        emit(line)


class _ProgressLine:
    """Best, bound and gap on stderr; on a terminal one line that changes."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._live = sys.stderr.isatty()
        self._shown = float("-inf")

    def show(self, progress: Progress) -> None:
        """Say where the search stands, unless that was said just now."""
        wait = _SECONDS_BETWEEN_UPDATES if self._live else _SECONDS_BETWEEN_LINES
        if progress.elapsed_seconds - self._shown < wait:
            return
        self._shown = progress.elapsed_seconds
        found = (
            "no plan yet"
            if progress.best_seconds == float("inf")
            else f"best {progress.best_seconds:.4g} s, bound {progress.lower_bound_seconds:.4g} s, "
            f"gap {progress.gap:.2%}"
        )
        text = (
            f"{self._verb}: {found}; {progress.candidates_done} of {progress.candidates} "
            f"candidates closed, {progress.elapsed_seconds:.1f} s"
        )
        if self._live:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
        else:
            say(text)

    def close(self) -> None:
        """Clear the changing line."""
        if self._live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
