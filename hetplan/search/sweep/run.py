"""A sweep is planned: questions to workers, rows to the table as they come back.

Workers are processes of this machine (joblib's loky), or those of a Dask or Ray cluster through
joblib's backend of that name. A question that fails is a row with its reason, not the end of the
sweep. What is in the table is not asked again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetplan.errors import HetplanError, InfeasibleError, InputError, LimitError
from hetplan.files.shipped import default_stores
from hetplan.plans.plan import Plan, Replica
from hetplan.predict.fit import fit_stores
from hetplan.predict.predictor import Predictor
from hetplan.search.files import save_result
from hetplan.search.result import SearchResult
from hetplan.search.search import search
from hetplan.search.sweep.form import Point, Sweep, question
from hetplan.search.sweep.table import Row, Table
from hetplan.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a worker needs beside the question."""

    predictor: Predictor | None
    """None: fitted from the usual stores by each worker."""
    plans: str | None
    """Folder for plan files; None: only the table."""


def run_sweep(
    sweep: Sweep,
    table: Path,
    *,
    resume: bool = False,
    predictor: Predictor | None = None,
    plans: Path | None = None,
    progress: Callable[[int, int, Row], None] | None = None,
) -> int:
    """Plan every question that is not in the table yet; how many were planned.

    InputError where the table is of something else, or where the backend that is named is not
    installed. Ctrl-C ends it with the rows that are done.
    """
    asked = Asked(predictor=predictor, plans=None if plans is None else str(plans))
    if plans is not None:
        plans.mkdir(parents=True, exist_ok=True)
    with Table(table, fresh=not resume) as out:
        left = [point for point in sweep.points if point.key not in out.done]
        for number, row in enumerate(_rows(sweep, left, asked)):
            out.add(row)
            if progress is not None:
                progress(number + 1, len(left), row)
    return len(left)


def _rows(sweep: Sweep, points: Sequence[Point], asked: Asked) -> Iterator[Row]:
    from joblib import Parallel, delayed

    workers = sweep.workers or os.cpu_count() or 1
    with _backend(sweep):
        # On a cluster of workers their number is the cluster's.
        jobs = min(workers, len(points)) if sweep.backend == "processes" else -1
        if jobs == 1 or len(points) < 2:
            yield from (answer(point, asked) for point in points)
            return
        parallel = Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1)
        yield from parallel(delayed(answer)(point, asked) for point in points)


def _backend(sweep: Sweep) -> AbstractContextManager[Any]:
    if sweep.backend == "processes":
        return nullcontext()
    from joblib import parallel_config

    try:
        if sweep.backend == "dask":
            from distributed import Client, get_client

            try:
                get_client()
            except ValueError:
                # No client of the caller's: the scheduler that DASK_SCHEDULER_ADDRESS names, else
                # workers of this machine.
                Client(
                    address=os.environ.get("DASK_SCHEDULER_ADDRESS"),
                    **({} if sweep.workers is None else {"n_workers": sweep.workers}),
                )
        else:
            from ray.util.joblib import register_ray

            register_ray()
    except ImportError as error:
        raise InputError(
            f"backend: {sweep.backend} is not installed ({error}); pip install "
            f"{'distributed' if sweep.backend == 'dask' else 'ray'}, or use backend: processes"
        ) from None
    found: AbstractContextManager[Any] = parallel_config(backend=sweep.backend)
    return found


def answer(point: Point, asked: Asked) -> Row:
    """The row of one question."""
    row = Row(
        key=point.key,
        model=Path(point.model).name,
        cluster=Path(point.cluster).name,
        job=Path(point.job).name,
        target=point.target or "",
        global_batch_size=point.global_batch_size or 0,
        sequence_length=point.sequence_length or 0,
        links="; ".join(_link_words(point)),
        nodes="; ".join(f"{name} {count}" for name, count in point.nodes),
        status="error",
    )
    try:
        found = question(point)
        row = replace(
            row,
            target=found.job.target,
            global_batch_size=found.job.global_batch_size,
            sequence_length=found.job.sequence_length,
        )
        predictor = asked.predictor
        if predictor is None:
            predictor, _ = fit_stores(*default_stores())
        result = search(found.model, found.cluster, found.job, predictor, reasons=False)
    except (InfeasibleError, LimitError) as error:
        return replace(row, status="infeasible", reason=_first_line(error))
    except (HetplanError, InputError) as error:
        return replace(row, reason=_first_line(error))
    if asked.plans is not None:
        save_result(result, Path(asked.plans) / f"{point.key}.json")
    return _filled(row, result)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _link_words(point: Point) -> Iterator[str]:
    for change in point.links:
        words = f"{change.between[0]}-{change.between[1]}"
        if change.bandwidth_bytes_per_second is not None:
            words += f" {format_bytes(change.bandwidth_bytes_per_second)}/s"
        if change.round_trip_seconds is not None:
            words += f" {format_seconds(change.round_trip_seconds)}"
        yield words


def _filled(row: Row, result: SearchResult) -> Row:
    certificate = result.certificate
    return replace(
        row,
        status="limit" if certificate is None else certificate.status,
        step_seconds=repr(result.estimate.step_seconds),
        tokens_per_second=repr(result.estimate.tokens_per_second),
        gap="" if certificate is None else repr(certificate.gap),
        lower_bound_seconds="" if certificate is None else repr(certificate.lower_bound_seconds),
        devices_in_use=str(sum(replica.num_devices for replica in _replicas(result.plan))),
        layout=_layout(result.plan),
    )


def _replicas(plan: Plan) -> list[Replica]:
    return [
        replica
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for replica in stage.replicas
    ]


def _layout(plan: Plan) -> str:
    """As in `tp 4 dp 16 pp 11 mbs 1`."""
    replicas = _replicas(plan)

    def some(values: Iterator[int]) -> str:
        return "/".join(dict.fromkeys(str(value) for value in values))

    return (
        f"tp {some(each.tp for each in replicas)} dp {some(each.dp for each in replicas)} "
        f"pp {some(len(each.stages) for each in plan.pipelines)} "
        f"mbs {some(each.microbatch_size for each in replicas)}"
    )
