"""What does a run log say of the phases of an elastic run?

One line for each phase that finished a step, with the phase itself beside what a run has. A phase
that a fault ended has no report of its ranks: its line has the steps alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.files.encoding import to_plain
from hetplan.launchers.elastic_values import SCHEMA as ELASTIC_SCHEMA
from hetplan.launchers.elastic_values import History, Phase
from hetplan.launchers.machine import Machine, torch_backend
from hetplan.launchers.run_log import LossCheck, RunLog, append_run, run_of
from hetplan.runtime.measured import StepRecord
from hetplan.runtime.placement import place_ranks
from hetplan.search.result import SearchResult
from hetplan.version import __version__

if TYPE_CHECKING:
    from hetplan.launchers.elastic_runs import RunSettings


def unfinished_run(
    result: SearchResult,
    settings: RunSettings,
    steps: Sequence[StepRecord],
    *,
    started: datetime,
    machine: Machine,
    emulated: bool,
) -> RunLog | None:
    """The run that a fault or a person ended after these steps; None where it finished none."""
    if not steps:
        return None
    cluster = result.inputs.cluster
    kinds = [
        cluster.island_of_device(place.device).device.kind for place in place_ranks(result.plan)
    ]
    played = [] if settings.pace is None else [kind.device for kind in settings.pace.kinds]
    return run_of(
        result,
        started=started,
        machine=machine,
        # An emulated device is a core of this machine, paced or not.
        device_type=torch_backend(kinds, kinds if emulated else played),
        paced=tuple(sorted(set(played) & set(kinds))),
        steps=steps,
        warmup_steps=settings.warmup_steps,
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
