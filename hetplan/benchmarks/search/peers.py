"""How do the search's plans compare with those of other planners, by Sailor's simulator?

Every case is planned by hetplan (`rows`, `candidates`), placed, checked, written in Sailor's form
(`hetplan.emitters.sailor`), read back and scored; every peer plan is scored beside it by the same
formula and compared with what the file of cases says of it. CPU seconds of hetplan hold reading
Sailor's files, the predictor, the search and the choice by Sailor's cost, with imports done and
kernels compiled; those of a peer its construction and search as the file of cases has them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetplan.benchmarks.search.candidates import best_plan
from hetplan.benchmarks.search.case_inputs import case_inputs
from hetplan.benchmarks.search.cases import Case, PeerPlan
from hetplan.benchmarks.search.row_plans import row_chosen, row_inputs
from hetplan.benchmarks.search.rows import Row, Rows
from hetplan.benchmarks.search.sailor_cost import SailorPlan, read_plan, score
from hetplan.benchmarks.search.sailor_files import SailorFiles, read_sailor
from hetplan.benchmarks.search.sailor_predictor import ProfilePredictor
from hetplan.emitters.sailor import sailor_text
from hetplan.errors import HetplanError, InfeasibleError, InputError
from hetplan.plans.build import plan_of
from hetplan.plans.check import check_plan

CHOSEN_BY = (
    "Sailor's cost, rebuilt in hetplan.benchmarks.search.sailor_cost, chose the plan and cut its "
    "layers: among plans of the search and among rows of stages laid out for this comparison"
)
_AGREES = 1e-4
"""The file of cases has four digits after the point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    """One peer's plan."""

    planner: str
    step_seconds: float
    """By Sailor's simulator, as the file of cases says."""
    rebuilt_seconds: float | None
    """By the rebuilt formula; None where the plan is disqualified."""
    cpu_seconds: float
    """Construction and search."""
    note: str
    """Empty, or why the two differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRow:
    """One case."""

    case: str
    step_seconds: float
    """hetplan's plan by Sailor's formula."""
    best_peer: str
    """Empty where the case names no peer."""
    best_peer_seconds: float | None
    ratio: float | None
    """hetplan over the best peer; below 1 hetplan is faster."""
    cpu_seconds: float
    best_peer_cpu_seconds: float | None
    plan: str
    """In words."""
    bound_seconds: float
    """No plan of one pipeline in Sailor's form is below it (`rows.Rows.bound`)."""
    parts: int
    """Parts of families in Sailor's form."""
    searched: int
    scored: int
    """Plans that Sailor's cost looked at."""
    peers: tuple[PeerRow, ...]
    emitted: str
    """The plan in Sailor's form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTable:
    """All cases."""

    rows: tuple[CaseRow, ...]
    geometric_mean_ratio: float | None
    """Over the cases that name a peer."""
    cold_cpu_seconds: float
    """Of the first case before kernels were loaded."""
    chosen_by: str = CHOSEN_BY


def compare(cases: Sequence[Case], reference: Path) -> PeerTable:
    """Plan and score every case; an InputError for what the files lack."""
    begin = time.process_time()
    _planned(cases[0], reference)
    cold = time.process_time() - begin
    rows = tuple(_row(case, reference) for case in cases)
    ratios = [row.ratio for row in rows if row.ratio is not None]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
    return PeerTable(rows=rows, geometric_mean_ratio=mean, cold_cpu_seconds=cold)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    text: str
    bound_seconds: float
    cpu_seconds: float
    parts: int
    searched: int
    scored: int


def _planned(case: Case, reference: Path) -> _Planned:
    begin = time.process_time()
    files = read_sailor(reference, case.model, case.gpus, case.zones)
    if files.num_layers != case.num_layers:
        raise InputError(
            f"case {case.name}: model_layers is {case.num_layers}; the profiles of {case.model} "
            f"have {files.num_layers}"
        )
    inputs = case_inputs(case, files)
    rows = Rows(case=case, files=files)
    row = _best_row(rows.best(), case, files)
    found = best_plan(
        inputs, ProfilePredictor(files=files), files, math.inf if row is None else row.step_seconds
    )
    if row is not None and (found is None or row.step_seconds <= found.score.step_seconds):
        inputs, chosen = row_inputs(case, files, row), row_chosen(row)
    elif found is not None:
        chosen = found.chosen
    else:
        raise InfeasibleError([f"case {case.name}: no plan in Sailor's form fits"])
    plan = plan_of(inputs.model, inputs.cluster, inputs.job, chosen)
    spent = time.process_time() - begin
    broken = check_plan(plan, inputs.model, inputs.cluster, inputs.job)
    if broken:
        raise HetplanError(f"case {case.name}: the search built an illegal plan: {broken[0]}")
    return _Planned(
        text=sailor_text(plan, inputs.cluster, inputs.job),
        bound_seconds=rows.bound(),
        cpu_seconds=spent,
        parts=found.families if found else 0,
        searched=found.searched if found else 0,
        scored=rows.cuts + (found.scored if found else 0),
    )


def _best_row(rows: Sequence[Row], case: Case, files: SailorFiles) -> Row | None:
    """By the formula itself, which knows the update and what is disqualified."""
    scored = []
    for at, row in enumerate(rows):
        try:
            found = score(row.plan, files, case.global_batch_size)
        except InputError:
            continue
        if found.fits:
            scored.append((found.step_seconds, at, replace(row, step_seconds=found.step_seconds)))
    return min(scored, key=lambda each: each[:2])[2] if scored else None


def _row(case: Case, reference: Path) -> CaseRow:
    planned = _planned(case, reference)
    files = read_sailor(reference, case.model, case.gpus, case.zones)
    emitted = read_plan(planned.text)
    step = score(emitted, files, case.global_batch_size).step_seconds
    peers = tuple(_peer(each, case, reference) for each in case.peers)
    best = min(peers, key=lambda peer: peer.step_seconds, default=None)
    return CaseRow(
        case=case.name,
        step_seconds=step,
        best_peer=best.planner if best else "",
        best_peer_seconds=best.step_seconds if best else None,
        ratio=step / best.step_seconds if best else None,
        cpu_seconds=planned.cpu_seconds,
        best_peer_cpu_seconds=best.cpu_seconds if best else None,
        plan=plan_words(emitted),
        bound_seconds=planned.bound_seconds,
        parts=planned.parts,
        searched=planned.searched,
        scored=planned.scored,
        peers=peers,
        emitted=planned.text,
    )


def _peer(peer: PeerPlan, case: Case, reference: Path) -> PeerRow:
    files = read_sailor(reference, case.model, case.gpus, case.zones)
    note, rebuilt = "", None
    try:
        rebuilt = score(peer.plan, files, case.global_batch_size).step_seconds
    except InputError as error:
        note = str(error)
    if rebuilt is not None and abs(rebuilt / peer.said_seconds - 1.0) > _AGREES:
        note = (
            "one of several pipelines, of which the file holds the first"
            if rebuilt > peer.said_seconds
            else "the rebuilt formula does not agree"
        )
    return PeerRow(
        planner=peer.planner,
        step_seconds=peer.said_seconds,
        rebuilt_seconds=rebuilt,
        cpu_seconds=peer.cpu_seconds,
        note=note,
    )


def plan_words(plan: SailorPlan) -> str:
    """A plan in one line: layers and replicas of every stage."""
    stages = [
        f"{layers}: "
        + " + ".join(f"{each.count} x {each.gpu} tp{each.tp} {each.zone}" for each in replicas)
        for layers, replicas in zip(plan.layers, plan.stages, strict=True)
    ]
    return f"microbatch {plan.microbatch_size}; " + " | ".join(stages)
