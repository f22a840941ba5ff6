"""The search's plans beside those of other planners, by Sailor's simulator.

Every case is planned in four ways (`CHOSEN_BY`); each way's plan is placed, checked, written in
Sailor's form (`evaluation.search.sailor`), read back and scored; every peer plan is scored
beside it by the same formula and compared with what the file of cases says of it. CPU seconds of
hetplan hold reading Sailor's files and whatever led to its best plan, with imports done and kernels
compiled; those of a peer its construction and search as the file of cases has them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from evaluation.output import save_drawing, table_of
from evaluation.search.cases import USUAL_FILE, Case, PeerPlan, case_inputs, read_cases
from evaluation.search.rows import Row, Rows, row_chosen, row_inputs
from evaluation.search.sailor import (
    SailorFiles,
    SailorPlan,
    read_plan,
    read_sailor,
    sailor_text,
    score,
)
from evaluation.search.sailor_search import own_search, sailor_search
from evaluation.search.sailor_tables import Tables
from evaluation.search.scaling import ScalingRow, instances_of, scaling
from hetplan.errors import HetplanError, InfeasibleError, InputError
from hetplan.plans.build import plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import ChosenPlan
from hetplan.search.result import Inputs
from hetplan.units import format_bytes

CHOSEN_BY = (
    "own: hetplan's search under its own cost of Sailor's profiles. chosen: Sailor's formula "
    "(evaluation.search.sailor) chooses among that search's candidates. searched: "
    "hetplan's families, local search and proofs with Sailor's formula as the cost. rows: rows of "
    "stages laid out for this comparison and cut by Sailor's formula, where they are faster than "
    "what was searched; D may leave the last microbatch not full, as in Sailor's own plans"
)
WAYS = ("own", "chosen", "searched", "rows")
_LEADS = ("searched", "rows", "chosen", "own")
"""Of equal plans the first of these counts."""
NO_PLAN = "no plan of one pipeline in Sailor's form fits in memory"
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
class Answer:
    """What one way to plan a case gives."""

    by: str
    """`own`, `chosen`, `searched` or `rows`; see `CHOSEN_BY`."""
    step_seconds: float | None
    """By Sailor's formula; None where this way has no plan."""
    ratio: float | None
    """Over the best peer."""
    cpu_seconds: float
    """Of this way alone; reading files and describing the case, in `CaseRow.cpu_seconds`, is left
    out. `chosen` takes what `own` takes."""
    proof_cpu_seconds: float
    """Of these, after the last family was searched."""
    own_seconds: float | None
    """By hetplan's own cost, where that led the search."""
    bound_seconds: float | None
    """No plan of the families is faster, by the cost that led the search."""
    batch_divided: bool
    """Every microbatch is full."""
    plan: str
    """In words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRow:
    """One case."""

    case: str
    step_seconds: float | None
    """hetplan's best plan by Sailor's formula; None: no plan fits."""
    found_by: str
    """Which answer that is."""
    best_peer: str
    """Empty where the case names no peer."""
    best_peer_seconds: float | None
    ratio: float | None
    """hetplan over the best peer; below 1 hetplan is faster."""
    cpu_seconds: float
    """Until the best plan was placed: files, tables, `searched` and `rows`, and `own` if it won."""
    best_peer_cpu_seconds: float | None
    plan: str
    """In words."""
    bound_seconds: float
    """No plan of one pipeline in Sailor's form is below it (`rows.Rows.bound`), D free."""
    families: int
    searched: int
    scored: int
    """Plans that Sailor's formula looked at."""
    answers: tuple[Answer, ...]
    peers: tuple[PeerRow, ...]
    emitted: str
    """The plan in Sailor's form; empty without a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTable:
    """All cases."""

    rows: tuple[CaseRow, ...]
    geometric_mean_ratio: float | None
    """Over the cases that name a peer."""
    geometric_mean_ratios: tuple[tuple[str, float], ...]
    """The same of every way that has a plan for all of them."""
    cold_cpu_seconds: float
    """Of the first case before kernels were loaded."""
    chosen_by: str = CHOSEN_BY


def compare(cases: Sequence[Case], reference: Path) -> PeerTable:
    """Plan and score every case.

    An InputError for what the files lack; an InfeasibleError where no case has a plan.
    """
    begin = time.process_time()
    _planned(cases[0], reference)
    cold = time.process_time() - begin
    rows = tuple(_row(case, reference) for case in cases)
    if all(row.step_seconds is None for row in rows):
        raise InfeasibleError([f"case {row.case}: {NO_PLAN}" for row in rows])
    return PeerTable(
        rows=rows,
        geometric_mean_ratio=_mean([row.ratio for row in rows if row.best_peer]),
        geometric_mean_ratios=tuple(_means([row for row in rows if row.best_peer])),
        cold_cpu_seconds=cold,
    )


def _means(rows: Sequence[CaseRow]) -> Iterator[tuple[str, float]]:
    for by in WAYS:
        ratios = [answer.ratio for row in rows for answer in row.answers if answer.by == by]
        mean = _mean(ratios) if len(ratios) == len(rows) else None
        if mean is not None:
            yield by, mean


def _mean(ratios: Sequence[float | None]) -> float | None:
    known = [each for each in ratios if each is not None]
    if not known or len(known) < len(ratios):
        return None
    return math.exp(sum(map(math.log, known)) / len(known))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """An answer before it is beside a peer's."""

    by: str
    cpu_seconds: float
    proof_cpu_seconds: float = 0.0
    own_seconds: float | None = None
    bound_seconds: float | None = None
    text: str = ""
    """The plan in Sailor's form; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    ways: tuple[_Way, ...]
    bound_seconds: float
    cpu_seconds: float
    families: int
    searched: int
    scored: int


def _planned(case: Case, reference: Path) -> _Planned:
    begin = time.process_time()
    files = files_of(case, reference)
    inputs = case_inputs(case, files)
    rows = Rows(case=case, files=files)
    every = [rows.table(size) for size in rows.sizes]
    ready = time.process_time()
    wide = replace(inputs, job=replace(inputs.job, target="any"))
    found = sailor_search(wide, files, every)
    ways = [
        _Way(
            by="searched",
            cpu_seconds=time.process_time() - ready,
            proof_cpu_seconds=found.proof_cpu_seconds if found else 0.0,
            bound_seconds=found.bound_seconds if found else None,
            text=_text(found.chosen, wide, case) if found else "",
        )
    ]
    laid = time.process_time()
    below = found.score.step_seconds if found else math.inf
    row = _best_row(rows.best(below), case, files)
    text = ""
    if row is not None and row.step_seconds < below:
        text = _text(row_chosen(row), row_inputs(case, files, row), case)
    ways.append(_Way(by="rows", cpu_seconds=time.process_time() - laid, text=text))
    done = time.process_time()
    ways = [*_own(case, inputs, files, every), *ways]
    return _Planned(
        ways=tuple(ways),
        bound_seconds=rows.bound(),
        cpu_seconds=done - begin,
        families=found.families if found else 0,
        searched=found.searched if found else 0,
        scored=rows.cuts + (found.scored if found else 0),
    )


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


def _own(case: Case, inputs: Inputs, files: SailorFiles, every: list[Tables]) -> Iterator[_Way]:
    begin = time.process_time()
    found = own_search(inputs, files, every)
    spent = time.process_time() - begin
    for by, candidate in (("own", found and found.own), ("chosen", found and found.chosen)):
        yield _Way(
            by=by,
            cpu_seconds=spent,
            proof_cpu_seconds=found.proof_cpu_seconds if found else 0.0,
            own_seconds=candidate.own_seconds if candidate else None,
            bound_seconds=found.bound_seconds if found else None,
            text=_text(candidate.chosen, inputs, case) if candidate else "",
        )


def _text(chosen: ChosenPlan, inputs: Inputs, case: Case) -> str:
    """The plan placed, checked and in Sailor's form."""
    plan = plan_of(inputs.model, inputs.cluster, inputs.job, chosen)
    broken = check_plan(plan, inputs.model, inputs.cluster, inputs.job)
    if broken:
        raise HetplanError(f"case {case.name}: the search built an illegal plan: {broken[0]}")
    return sailor_text(plan, inputs.cluster, inputs.job)


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
    files = files_of(case, reference)
    peers = tuple(_peer(each, case, files) for each in case.peers)
    peer = min(peers, key=lambda each: each.step_seconds, default=None)
    texts = {way.by: way.text for way in planned.ways}
    answers = tuple(_answer(way, case, files, peer) for way in planned.ways)
    best: Answer | None = None
    for each in sorted(answers, key=lambda answer: _LEADS.index(answer.by)):
        if each.step_seconds is not None and (
            best is None or best.step_seconds is None or each.step_seconds < best.step_seconds
        ):
            best = each
    own = best.cpu_seconds if best and best.by in ("own", "chosen") else 0.0
    return CaseRow(
        case=case.name,
        step_seconds=best.step_seconds if best else None,
        found_by=best.by if best else "",
        best_peer=peer.planner if peer else "",
        best_peer_seconds=peer.step_seconds if peer else None,
        ratio=best.ratio if best else None,
        cpu_seconds=planned.cpu_seconds + own,
        best_peer_cpu_seconds=peer.cpu_seconds if peer else None,
        plan=best.plan if best else NO_PLAN,
        bound_seconds=planned.bound_seconds,
        families=planned.families,
        searched=planned.searched,
        scored=planned.scored,
        answers=answers,
        peers=peers,
        emitted=texts[best.by] if best else "",
    )


def _answer(way: _Way, case: Case, files: SailorFiles, peer: PeerRow | None) -> Answer:
    plan = read_plan(way.text) if way.text else None
    step = score(plan, files, case.global_batch_size).step_seconds if plan else None
    tick = plan.microbatch_size * plan.dp(0) if plan else 1
    return Answer(
        by=way.by,
        step_seconds=step,
        ratio=step / peer.step_seconds if step is not None and peer else None,
        cpu_seconds=way.cpu_seconds,
        proof_cpu_seconds=way.proof_cpu_seconds,
        own_seconds=way.own_seconds,
        bound_seconds=way.bound_seconds,
        batch_divided=case.global_batch_size % tick == 0,
        plan=plan_words(plan) if plan else "",
    )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchBench:
    """Both tables."""

    peers: PeerTable | None
    scaling: tuple[ScalingRow, ...]
    missing: tuple[str, ...]
    """What was left out, and why."""


def search_bench(
    reference: Path | None,
    cases: Path | None,
    *,
    sizes: Sequence[int] | None,
    targets: Sequence[str],
    time_limit_seconds: float,
    progress: Callable[[str], None],
) -> SearchBench:
    """`sizes` None: all of the table; empty: no scaling. Peer cases need the folder `reference`."""
    missing = []
    peers = None
    if reference is None:
        missing.append("peer cases: no reference folder found; give --reference DIR")
    else:
        asked = read_cases(reference / USUAL_FILE if cases is None else cases)
        peers = compare(asked, reference)
    rows: tuple[ScalingRow, ...] = ()
    if sizes is None or sizes:
        chosen = instances_of(() if sizes is None else sizes)
        rows = scaling(chosen, targets, time_limit_seconds=time_limit_seconds, progress=progress)
    return SearchBench(peers=peers, scaling=rows, missing=tuple(missing))


def search_tables(found: SearchBench) -> Iterator[Table]:
    """Peer cases, then the scaling table."""
    if found.peers is not None:
        yield table_of(
            "Steps by Sailor's simulator, CPU time with construction",
            ("case", "best peer"),
            (
                "hetplan", "found by", "peer", "hetplan / peer", "CPU", "CPU of the peer",
                "bound by work", "plans scored",
            ),
            (
                (
                    row.case, row.best_peer, _or_dash(row.step_seconds, "{:.4f} s"), row.found_by,
                    _or_dash(row.best_peer_seconds, "{:.4f} s"), _or_dash(row.ratio, "{:.3f}"),
                    f"{row.cpu_seconds:.2f} s", _or_dash(row.best_peer_cpu_seconds, "{:.2f} s"),
                    f"{row.bound_seconds:.3f} s", row.scored,
                )
                for row in found.peers.rows
            ),
        )  # fmt: skip
        yield _answers(found.peers)
        yield _peer_plans(found.peers)
    if found.scaling:
        yield _scaling(found.scaling)


def _answers(peers: PeerTable) -> Table:
    return table_of(
        "Who found what (own cost: hetplan's; the bound is by the cost that led the search)",
        ("case", "by"),
        (
            "step by Sailor", "hetplan / peer", "own cost", "bound", "full microbatches", "CPU",
            "of it proofs",
        ),
        (
            (
                row.case, each.by, _or_dash(each.step_seconds, "{:.4f} s"),
                _or_dash(each.ratio, "{:.3f}"), _or_dash(each.own_seconds, "{:.4f} s"),
                _or_dash(each.bound_seconds, "{:.4f} s"),
                "-" if each.step_seconds is None else "yes" if each.batch_divided else "no",
                f"{each.cpu_seconds:.2f} s", f"{each.proof_cpu_seconds:.2f} s",
            )
            for row in peers.rows
            for each in row.answers
        ),
    )  # fmt: skip


def _peer_plans(peers: PeerTable) -> Table:
    return table_of(
        "Peers' plans by the rebuilt formula",
        ("case", "planner"),
        ("as the file says", "rebuilt", "CPU", "note"),
        (
            (
                row.case, peer.planner, f"{peer.step_seconds:.4f} s",
                _or_dash(peer.rebuilt_seconds, "{:.4f} s"), f"{peer.cpu_seconds:.2f} s", peer.note,
            )
            for row in peers.rows
            for peer in row.peers
        ),
    )  # fmt: skip


def _scaling(rows: Sequence[ScalingRow]) -> Table:
    return table_of(
        "The search by size, each in a process of its own",
        ("model", "target"),
        (
            "devices", "islands", "kinds", "regions", "CPU", "whole process", "peak memory",
            "gap", "status", "families", "searched", "programs", "replays",
        ),
        (
            (
                row.model, row.target, f"{row.devices:,}", row.islands, row.kinds, row.regions,
                f"{row.seconds:.2f} s", f"{row.cold_seconds:.1f} s",
                format_bytes(row.peak_memory_bytes), _or_dash(row.gap, "{:.2%}"), row.status,
                row.families, row.searched, row.programs, row.replays,
            )
            for row in rows
        ),
    )  # fmt: skip


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def search_lines(found: SearchBench) -> Iterator[str]:
    """The plans in words, and the mean ratios."""
    peers = found.peers
    if peers is not None:
        for row in peers.rows:
            yield f"{row.case}: {row.plan}"
        if peers.geometric_mean_ratio is not None:
            yield (
                f"geometric mean of hetplan / best peer: {peers.geometric_mean_ratio:.4f} "
                f"({1 / peers.geometric_mean_ratio - 1:.1%} faster)"
            )
        if peers.geometric_mean_ratios:
            means = [f"{by} {ratio:.4f}" for by, ratio in peers.geometric_mean_ratios]
            yield f"the same by who found it: {', '.join(means)}"
        yield peers.chosen_by
        yield f"first case before kernels were loaded: {peers.cold_cpu_seconds:.1f} s CPU"
    for line in found.missing:
        yield f"left out: {line}"


def draw(rows: Sequence[ScalingRow], path: Path) -> None:
    """Write the drawing as SVG; an InputError without matplotlib, rows or a folder to write to."""
    planned = [row for row in rows if row.gap is not None]
    if not planned:
        raise InputError(f"no instance was planned, so there is nothing to draw into {path}")

    def fill(figure: Any) -> None:
        above, below = figure.subplots(2, sharex=True)
        _fill(above, planned, [row.seconds for row in planned], "CPU time (s)")
        # A gap of 0 has no place on a logarithmic axis.
        _fill(below, planned, [100 * max(row.gap or 0.0, 1e-5) for row in planned], "gap (%)")
        below.set_xlabel("devices")
        above.legend(loc="upper left", fontsize=8, frameon=False)

    save_drawing(path, fill)


def _fill(axes: Any, rows: Sequence[ScalingRow], values: Sequence[float], label: str) -> None:
    for at, target in enumerate(dict.fromkeys(row.target for row in rows)):
        for model in ("dense", "moe"):
            points = sorted(
                (row.devices, value)
                for row, value in zip(rows, values, strict=True)
                if (row.target, row.model) == (target, model)
            )
            if points:
                axes.plot(
                    [devices for devices, _ in points],
                    [value for _, value in points],
                    color=f"C{at}",
                    marker="o",
                    markersize=5,
                    linestyle="-" if model == "dense" else ":",
                    markerfacecolor=f"C{at}" if model == "dense" else "none",
                    label=target if model == "dense" else f"{target}, experts",
                )
    axes.set(xscale="log", yscale="log", ylabel=label)
