"""How do the search's plans compare with those of other planners, by Sailor's simulator?

Every case is planned by hetplan (`candidates`), placed, checked, written in Sailor's form
(`hetplan.emitters.sailor`), read back and scored; every peer plan is scored beside it by the same
formula and compared with what the file of cases says of it. CPU seconds of hetplan hold reading
Sailor's files, the predictor, the search and the choice by Sailor's cost, with imports done and
kernels compiled; those of a peer its construction and search as the file of cases has them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetplan.benchmarks.search.candidates import Found, best_plan
from hetplan.benchmarks.search.case_inputs import case_inputs
from hetplan.benchmarks.search.cases import Case, PeerPlan
from hetplan.benchmarks.search.sailor_cost import SailorPlan, read_plan, score
from hetplan.benchmarks.search.sailor_files import read_sailor
from hetplan.benchmarks.search.sailor_predictor import ProfilePredictor
from hetplan.emitters.sailor import sailor_text
from hetplan.errors import HetplanError, InputError
from hetplan.plans.build import plan_of
from hetplan.plans.check import check_plan

CHOSEN_BY = (
    "Sailor's cost, rebuilt in hetplan.benchmarks.search.sailor_cost, chose among the search's "
    "plans and moved layers between their stages"
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
    found: Found
    text: str
    cpu_seconds: float


def _planned(case: Case, reference: Path) -> _Planned:
    begin = time.process_time()
    files = read_sailor(reference, case.model, case.gpus, case.zones)
    inputs = case_inputs(case, files)
    found = best_plan(inputs, ProfilePredictor(files=files), files)
    plan = plan_of(inputs.model, inputs.cluster, inputs.job, found.chosen)
    spent = time.process_time() - begin
    broken = check_plan(plan, inputs.model, inputs.cluster, inputs.job)
    if broken:
        raise HetplanError(f"case {case.name}: the search built an illegal plan: {broken[0]}")
    return _Planned(
        found=found, text=sailor_text(plan, inputs.cluster, inputs.job), cpu_seconds=spent
    )


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
        parts=planned.found.families,
        searched=planned.found.searched,
        scored=planned.found.scored,
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
