"""How a search result is kept: one JSON file that holds the plan and everything behind it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hetplan.errors import Fault, InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.job.check import check_job_against
from hetplan.plans.check import check_plan
from hetplan.plans.targets import TARGETS
from hetplan.search.result import SearchResult

SCHEMA = "hetplan.plan/2"


def result_text(result: SearchResult) -> str:
    """Canonical JSON text of a result; equal results give equal bytes."""
    return encode(result, schema=SCHEMA)


def save_result(result: SearchResult, path: Path) -> None:
    """Write the result; the file is whole or, after a fault, as it was before."""
    write_atomically(path, result_text(result))


def load_plan(path: str | Path) -> SearchResult:
    """The result of a file written by `save_result`; an InputError lists what is wrong in it.

    Whether the plan is legal for its inputs is another question: `check_plan`, or
    `load_legal_plan`.
    """
    result = decode(read_document(Path(path)), SearchResult, schema=SCHEMA)
    # What an older number lacks has its default now, so that the value can be saved again.
    return replace(result, schema=SCHEMA)


def load_legal_plan(path: str | Path) -> SearchResult:
    """The same, and its parts agree: an InputError lists every rule that a plan edited by hand
    breaks.
    """
    result = load_plan(path)
    inputs = result.inputs
    faults = [
        *(("inputs.job", fault) for fault in _job_faults(result)),
        *(
            ("plan", fault)
            for fault in check_plan(result.plan, inputs.model, inputs.cluster, inputs.job)
        ),
    ]
    if not faults:
        faults = [("estimate", fault) for fault in _estimate_faults(result)]
    if faults:
        raise InputError(
            *(
                replace(fault, file=str(path), field=f"{part}.{fault.field}")
                for part, fault in faults
            )
        )
    return result


def _job_faults(result: SearchResult) -> Iterator[Fault]:
    inputs = result.inputs
    yield from check_job_against(inputs.job, inputs.model, inputs.cluster)
    if inputs.job.target not in TARGETS:
        known = ", ".join(sorted(TARGETS))
        yield Fault(field="target", message=f"{inputs.job.target!a}; known targets: {known}")


def _estimate_faults(result: SearchResult) -> Iterator[Fault]:
    """What a run is compared with must be of this plan and be a time."""
    estimate = result.estimate
    stages = sum(len(pipeline.stages) for pipeline in result.plan.pipelines)
    if len(estimate.stages) != stages:
        yield Fault(
            field="stages", message=f"has {len(estimate.stages)} entries, the plan {stages} stages"
        )
    if not 0 < estimate.step_seconds < math.inf:
        yield Fault(
            field="step_seconds",
            message=f"{estimate.step_seconds}; a step takes more than 0 seconds; price the plan "
            "again with hetplan estimate",
        )
