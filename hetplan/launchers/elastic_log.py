"""What does a run log say of the phases of an elastic run?

One line for each phase that finished a step, with the phase itself beside what a run has. A phase
that a fault ended has no report of its ranks: its line has the steps alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.files.encoding import to_plain
from hetplan.launchers.elastic_values import SCHEMA as ELASTIC_SCHEMA
from hetplan.launchers.elastic_values import History, Phase, median_seconds
from hetplan.launchers.machine import this_machine, torch_backend
from hetplan.launchers.run_log import SCHEMA, LossCheck, RunLog, append_run
from hetplan.runtime.measured import StepRecord
from hetplan.runtime.placement import place_ranks
from hetplan.search.files import result_text
from hetplan.search.result import SearchResult
from hetplan.version import __version__

if TYPE_CHECKING:
    from hetplan.launchers.elastic_runs import RunSettings


def unfinished_run(
    result: SearchResult,
    settings: RunSettings,
    steps: Sequence[StepRecord],
    started: datetime,
    *,
    emulated: bool,
) -> RunLog | None:
    """The run that a fault or a person ended after these steps; None where it finished none."""
    median = median_seconds(tuple(steps))
    if median is None:
        return None
    cluster, paced = result.inputs.cluster, settings.pace.kinds if settings.pace is not None else ()
    kinds = [
        cluster.island_of_device(place.device).device.kind for place in place_ranks(result.plan)
    ]
    played = [kind.device for kind in paced]
    device = torch_backend(kinds, kinds if emulated else played)
    return RunLog(
        schema=SCHEMA,
        hetplan_version=__version__,
        plan_sha256=hashlib.sha256(result_text(result).encode()).hexdigest(),
        started=started.isoformat(timespec="seconds"),
        model=result.inputs.model.name,
        cluster=result.inputs.cluster.name,
        job=result.inputs.job.name,
        target=result.plan.target,
        backend="nccl" if device == "cuda" else "gloo",
        ranks=(),
        steps=tuple(steps),
        warmup_steps=min(settings.warmup_steps, len(steps) - 1),
        median_step_seconds=median,
        predicted_step_seconds=result.estimate.step_seconds,
        predicted_interval=result.estimate.interval,
        paced=tuple(sorted(set(played) & set(kinds))),
        machine=this_machine(),
        plan=result.plan,
    )


def report_text(history: History, loss_check: LossCheck | None) -> str:
    """An elastic run as JSON, schema `hetplan.elastic/1`: phases, steps by number, loss check."""
    data = {
        "schema": ELASTIC_SCHEMA,
        "hetplan_version": __version__,
        "phases": to_plain(history.phases),
        "steps": to_plain(history.steps),
        "loss_check": None if loss_check is None else to_plain(loss_check),
    }
    return json.dumps(data, sort_keys=True, ensure_ascii=False, allow_nan=False)


def log_phase(path: Path, run: RunLog, phase: Phase) -> None:
    """Add the phase to the run log."""
    append_run(path, replace(run, phase=phase))
