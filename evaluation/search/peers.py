"""The search's plans beside those of other planners, by Sailor's simulator.

Every case is planned in two ways (`WAYS`); each way's plan is placed, checked, written in
Sailor's form (`evaluation.search.sailor`) and scored; every peer plan is scored
beside it by the same formula and compared with what the file of cases says of it. CPU seconds of
hetplan hold reading Sailor's files and the search, with imports done and kernels compiled; those of
a peer its construction and search as the file of cases has them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from evaluation.output import WORDS, Answer, Section
from evaluation.search.cases import Case, PeerPlan, case_inputs
from evaluation.search.sailor import (
    SailorFiles,
    SailorPlan,
    read_sailor,
    sailor_form,
    score,
)
from evaluation.search.sailor_search import own_search, sailor_search
from evaluation.search.sailor_tables import tables_of
from hetplan.errors import HetplanError, InfeasibleError, InputError
from hetplan.plans.build import plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import ChosenPlan
from hetplan.search.result import Inputs

WAYS = {
    "searched": "hetplan's families, local search and proofs with Sailor's formula as the cost",
    "own": "hetplan's search under its own cost of Sailor's profiles",
}
"""Of equal plans the first of these counts."""
NO_PLAN = "no plan of one pipeline in Sailor's form fits in memory"
_AGREES = 1e-4
"""The file of cases has four digits after the point."""


Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All cases."""

    ways: pandas.DataFrame
    """Case by case what each of `WAYS` found: steps by Sailor's formula, seconds by the cost that
    led the search, bounds by it, work, the plan in words."""
    peers: pandas.DataFrame
    """Plans of the file of cases: steps as it says, and by the rebuilt formula."""
    cold_cpu_seconds: float
    """Of the first case before kernels were loaded."""


def compare(cases: Sequence[Case], reference: Path) -> Comparison:
    """Plan and score every case.

    An InputError for what the files lack; an InfeasibleError where no case has a plan.
    """
    begin = time.process_time()
    tuple(_planned(cases[0], reference, None))
    cold = time.process_time() - begin
    ways: list[Row] = []
    peers: list[Row] = []
    for case in cases:
        files = files_of(case, reference)
        mine = [_peer(each, case, files) for each in case.planners]
        least = min((peer["step_seconds"] for peer in mine), default=None)
        ways += _planned(case, reference, least)
        peers += mine
    if all(way["step_seconds"] is None for way in ways):
        raise InfeasibleError([f"case {case.name}: {NO_PLAN}" for case in cases])
    names = ["case", "planner", "step_seconds", "rebuilt_seconds", "cpu_seconds", "note"]
    return Comparison(
        ways=pandas.DataFrame(ways),
        peers=pandas.DataFrame(peers, columns=names),
        cold_cpu_seconds=cold,
    )


def _planned(case: Case, reference: Path, peer_seconds: float | None) -> Iterator[Row]:
    """In the order of `WAYS`."""
    begin = time.process_time()
    files = files_of(case, reference)
    inputs = case_inputs(case, files)
    every = tables_of(case, files)
    wide = replace(inputs, job=replace(inputs.job, target="any"))
    ready = time.process_time()

    for by, search in (("searched", sailor_search), ("own", own_search)):
        start = time.process_time()
        asked = wide if by == "searched" else inputs
        found = search(asked, files, every)
        plan = _checked(found.chosen, asked, case) if found else None
        step = score(plan, files, case.global_batch_size).step_seconds if plan else None
        yield {
            "case": case.name,
            "by": by,
            "step_seconds": step,
            "ratio": step / peer_seconds if step is not None and peer_seconds else None,
            "own_seconds": found.seconds if found and by == "own" else None,
            "bound_seconds": found.bound_seconds if found else None,
            "cpu_seconds": time.process_time() - start + ready - begin,
            "proof_cpu_seconds": found.proof_cpu_seconds if found else 0.0,
            "families": found.families if found else 0,
            "searched": found.searched if found else 0,
            "scored": found.scored if found else 0,
            "plan": plan_words(plan) if plan else NO_PLAN,
        }


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


def _peer(peer: PeerPlan, case: Case, files: SailorFiles) -> Row:
    note, rebuilt, stated = "", None, peer.step_seconds_by_sailor_simulator
    try:
        rebuilt = score(peer.sailor_plan(case), files, case.global_batch_size).step_seconds
    except InputError as error:
        note = str(error)
    if rebuilt is not None and abs(rebuilt / stated - 1.0) > _AGREES:
        note = (
            "one of several pipelines, of which the file holds the first"
            if rebuilt > stated
            else "the rebuilt formula does not agree"
        )
    return {
        "case": case.name,
        "planner": peer.planner,
        "step_seconds": stated,
        "rebuilt_seconds": rebuilt,
        "cpu_seconds": peer.cpu_seconds,
        "note": note,
    }


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
    means = ways.groupby("by", sort=False)["ratio"].agg(
        lambda r: np.exp(np.log(r).mean(skipna=False))
    )
    return {str(by): float(mean) for by, mean in means.dropna().items()}


def peer_answer(found: Comparison) -> Answer:
    """The best plans beside the best peers', who found what, and the peers' plans."""
    # Of equal plans the first way counts, as WAYS says.
    ways = found.ways.astype({"step_seconds": float, "ratio": float})
    order = ways.sort_values("step_seconds", kind="stable").drop_duplicates("case").sort_index()
    peers = found.peers.sort_values("step_seconds", kind="stable").drop_duplicates("case")
    peers = peers.rename(
        columns={
            "planner": "best_peer",
            "step_seconds": "best_peer_seconds",
            "cpu_seconds": "best_peer_cpu_seconds",
        }
    )
    best = order.rename(columns={"by": "found_by"}).merge(
        peers.drop(columns=["rebuilt_seconds", "note"]), how="left", on="case"
    )
    means = mean_ratios(ways[ways["case"].isin(found.peers["case"])])
    whole = mean_ratios(best[best["best_peer"].notna()].assign(by="best"))
    lines = [f"{way.case}: {way.plan}" for way in best.itertuples()]
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
                frame=best,
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
                title="Who found what (own cost: hetplan's; the bound is by the cost that led the "
                "search)",
                frame=ways,
                columns={
                    "case": ("case", WORDS),
                    "by": ("by", WORDS),
                    "step by Sailor": ("step_seconds", step),
                    "hetplan / peer": ("ratio", "{:.3f}"),
                    "own cost": ("own_seconds", step),
                    "bound": ("bound_seconds", step),
                    "CPU": ("cpu_seconds", "{:.2f} s"),
                    "of it proofs": ("proof_cpu_seconds", "{:.2f} s"),
                },
            ),
            Section(
                name="peers",
                title="Peers' plans by the rebuilt formula",
                frame=found.peers,
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
