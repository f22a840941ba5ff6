"""The search's plans beside those of other planners, by Sailor's simulator.

hetplan searches every case under its own cost (`evaluation.search.own_search`). Sailor's formula
(`evaluation.search.sailor`) scores the search's best plan, and the best plan of each family
(`WAYS`). Plans are placed, checked and written in Sailor's form. Peers' plans are scored by the
same formula and compared with what the file of cases says of them. CPU seconds of hetplan hold
reading Sailor's files and the search, with imports done and kernels compiled; those of a peer its
construction and search as the file of cases has them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas

from evaluation.output import WORDS, Answer, Section, frame_of
from evaluation.search.cases import Case, PeerPlan, case_inputs
from evaluation.search.own_search import own_search
from evaluation.search.sailor import (
    SailorFiles,
    SailorPlan,
    read_sailor,
    sailor_document,
    sailor_form,
    score,
)
from hetplan.errors import HetplanError, InfeasibleError, InputError
from hetplan.plans.build import plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import ChosenPlan
from hetplan.search.result import Inputs

WAYS = {
    "own": "the best plan of hetplan's search under its own cost of Sailor's profiles",
    "chosen": "of the families' best plans in that search, the fastest by Sailor's formula",
}
"""Of equal plans the first of these counts."""
NO_PLAN = "no plan of one pipeline in Sailor's form fits in memory"
_AGREES = 1e-4
"""The file of cases has four digits after the point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WayRow:
    """What one way to plan a case found."""

    case: str
    by: str
    """One of `WAYS`."""
    step_seconds: float | None
    """By Sailor's formula; None where this way has no plan."""
    ratio: float | None
    """Over the best peer; below 1 hetplan is faster."""
    own_seconds: float | None
    """By hetplan's own cost."""
    bound_seconds: float | None
    """No plan of the families is faster by that cost; of the search's best plan."""
    cpu_seconds: float
    """With reading Sailor's files."""
    families: int
    searched: int
    """Families."""
    scored: int
    """Plans that Sailor's formula scored."""
    plan: str
    """In words."""
    emitted: dict[str, Any] | None
    """As Sailor's planner writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    """One peer's plan of a case."""

    case: str
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
class Comparison:
    """All cases."""

    ways: tuple[WayRow, ...]
    peers: tuple[PeerRow, ...]
    cold_cpu_seconds: float
    """Of the first case before kernels were loaded."""

    def best(self, case: str) -> WayRow:
        """Hetplan's best plan of a case."""
        mine = [way for way in self.ways if way.case == case]
        return min(mine, key=lambda way: math.inf if way.step_seconds is None else way.step_seconds)

    def best_peer(self, case: str) -> PeerRow | None:
        """Of a case; None where it names no peer."""
        mine = [peer for peer in self.peers if peer.case == case]
        return min(mine, key=lambda peer: peer.step_seconds, default=None)


def compare(cases: Sequence[Case], reference: Path) -> Comparison:
    """Plan and score every case.

    An InputError for what the files lack; an InfeasibleError where no case has a plan.
    """
    begin = time.process_time()
    tuple(_planned(cases[0], reference, None))
    cold = time.process_time() - begin
    ways: list[WayRow] = []
    peers: list[PeerRow] = []
    for case in cases:
        files = files_of(case, reference)
        mine = [_peer(each, case, files) for each in case.peers]
        least = min((peer.step_seconds for peer in mine), default=None)
        ways += _planned(case, reference, least)
        peers += mine
    if all(way.step_seconds is None for way in ways):
        raise InfeasibleError([f"case {case.name}: {NO_PLAN}" for case in cases])
    return Comparison(ways=tuple(ways), peers=tuple(peers), cold_cpu_seconds=cold)


def _planned(case: Case, reference: Path, peer_seconds: float | None) -> Iterator[WayRow]:
    """In the order of `WAYS`."""
    begin = time.process_time()
    files = files_of(case, reference)
    inputs = case_inputs(case, files)
    searched = own_search(inputs, files)
    best = searched.best
    offers = sorted(best.own.values(), key=lambda offer: offer.seconds)
    scored = [(_seconds(each.chosen, inputs, files), each) for each in offers]
    for by in WAYS:
        ranked = scored[:1] if by == "own" else sorted(scored, key=lambda pair: pair[0])
        step, offer = ranked[0] if ranked else (math.inf, None)
        plan = _checked(offer.chosen, inputs, case) if offer and step < math.inf else None
        yield WayRow(
            case=case.name,
            by=by,
            step_seconds=step if plan else None,
            ratio=step / peer_seconds if plan and peer_seconds else None,
            own_seconds=offer.seconds if plan and offer else None,
            bound_seconds=best.lower_bound if plan and by == "own" else None,
            cpu_seconds=time.process_time() - begin,
            families=searched.families,
            searched=searched.searched,
            scored=1 if by == "own" else len(scored),
            plan=plan_words(plan) if plan else NO_PLAN,
            emitted=sailor_document(plan, case.global_batch_size) if plan else None,
        )


def _seconds(chosen: ChosenPlan, inputs: Inputs, files: SailorFiles) -> float:
    """By Sailor's formula; infinite where the plan is disqualified or does not fit."""
    try:
        found = score(sailor_form(chosen, inputs.cluster), files, inputs.job.global_batch_size)
    except InputError:
        return math.inf
    return found.step_seconds if found.fits else math.inf


def files_of(case: Case, reference: Path) -> SailorFiles:
    """What Sailor's files say of a case; an InputError where they do not agree with it."""
    try:
        files = read_sailor(reference, case.model, case.gpus, case.zones)
    except InputError as error:
        faults = [replace(e, message=f"case {case.name}: {e.message}") for e in error.faults]
        raise InputError(*faults) from None
    if files.num_layers != case.num_layers:
        raise InputError(
            f"case {case.name}: model_layers is {case.num_layers}; the profiles of {case.model} "
            f"have {files.num_layers}"
        )
    return files


def _checked(chosen: ChosenPlan, inputs: Inputs, case: Case) -> SailorPlan:
    """The plan in Sailor's form, when it was placed and found legal."""
    plan = plan_of(inputs.model, inputs.cluster, inputs.job, chosen)
    broken = check_plan(plan, inputs.model, inputs.cluster, inputs.job)
    if broken:
        raise HetplanError(f"case {case.name}: the search built an illegal plan: {broken[0]}")
    return sailor_form(chosen, inputs.cluster)


def _peer(peer: PeerPlan, case: Case, files: SailorFiles) -> PeerRow:
    note, rebuilt = "", None
    try:
        rebuilt = score(peer.plan, files, case.global_batch_size).step_seconds
    except InputError as error:
        note = str(error)
    if rebuilt is not None and abs(rebuilt / peer.stated_seconds - 1.0) > _AGREES:
        note = (
            "one of several pipelines, of which the file holds the first"
            if rebuilt > peer.stated_seconds
            else "the rebuilt formula does not agree"
        )
    return PeerRow(
        case=case.name,
        planner=peer.planner,
        step_seconds=peer.stated_seconds,
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


def mean_ratios(ways: pandas.DataFrame) -> dict[str, float]:
    """Geometric mean over the cases that name a peer, of every way that has a plan for them all."""
    found = {}
    for by, ratios in ways.groupby("by", sort=False)["ratio"]:
        if ratios.notna().all():
            found[str(by)] = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return found


def peer_answer(found: Comparison) -> Answer:
    """The best plans beside the best peers', the ways to choose them, and the peers' plans."""
    cases = dict.fromkeys(way.case for way in found.ways)
    best = [found.best(case) for case in cases]
    rows = []
    for way in best:
        peer = found.best_peer(way.case)
        rows.append(
            {
                "case": way.case,
                "best_peer": peer.planner if peer else None,
                "step_seconds": way.step_seconds,
                "found_by": way.by if way.emitted else None,
                "best_peer_seconds": peer.step_seconds if peer else None,
                "ratio": way.ratio,
                "cpu_seconds": way.cpu_seconds,
                "best_peer_cpu_seconds": peer.cpu_seconds if peer else None,
                "scored": way.scored,
                "plan": way.plan,
            }
        )
    ways = frame_of(found.ways)
    named = ways[ways["case"].isin({peer.case for peer in found.peers})]
    means = mean_ratios(named)
    whole = mean_ratios(frame_of(rows).dropna(subset=["best_peer"]).assign(by="best"))
    lines = [f"{way.case}: {way.plan}" for way in best]
    for mean in whole.values():
        lines.append(
            f"geometric mean of hetplan / best peer: {mean:.4f} ({1 / mean - 1:.1%} faster)"
        )
    if means:
        shown = ", ".join(f"{by} {means[by]:.4f}" for by in WAYS if by in means)
        lines.append(f"the same by who found it: {shown}")
    lines += [f"{by}: {what}" for by, what in WAYS.items()]
    lines.append(f"first case before kernels were loaded: {found.cold_cpu_seconds:.1f} s CPU")
    step = "{:.4f} s"
    return Answer(
        sections=(
            Section(
                name="cases",
                title="Steps by Sailor's simulator, CPU time with construction",
                frame=frame_of(rows),
                columns={
                    "case": ("case", WORDS),
                    "best peer": ("best_peer", WORDS),
                    "hetplan": ("step_seconds", step),
                    "found by": ("found_by", WORDS),
                    "peer": ("best_peer_seconds", step),
                    "hetplan / peer": ("ratio", "{:.3f}"),
                    "CPU": ("cpu_seconds", "{:.2f} s"),
                    "CPU of the peer": ("best_peer_cpu_seconds", "{:.2f} s"),
                    "plans scored": ("scored", "{:d}"),
                },
            ),
            Section(
                name="ways",
                title="Which plan of hetplan's search (own cost and bound: hetplan's)",
                frame=ways,
                columns={
                    "case": ("case", WORDS),
                    "by": ("by", WORDS),
                    "step by Sailor": ("step_seconds", step),
                    "hetplan / peer": ("ratio", "{:.3f}"),
                    "own cost": ("own_seconds", step),
                    "bound": ("bound_seconds", step),
                    "CPU": ("cpu_seconds", "{:.2f} s"),
                },
            ),
            Section(
                name="peers",
                title="Peers' plans by the rebuilt formula",
                frame=frame_of(found.peers),
                columns={
                    "case": ("case", WORDS),
                    "planner": ("planner", WORDS),
                    "as the file says": ("step_seconds", step),
                    "rebuilt": ("rebuilt_seconds", step),
                    "CPU": ("cpu_seconds", "{:.2f} s"),
                    "note": ("note", WORDS),
                },
            ),
        ),
        lines=tuple(lines),
        values={"mean_ratio": next(iter(whole.values()), None), "mean_ratios": means},
    )
