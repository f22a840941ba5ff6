"""From a job to the fastest plan with a proof of how good it is: the driver of the search.

1. families of plans of the job's target (`space`), each a solver of its own; one more solver for
   plans of several pipelines (`solvers`);
2. an order-free bound and an estimate for each; plans first, then proofs (`scheduler`);
3. the best plans are placed, checked and priced (`final_pricing`); the least bound over all solvers
   is the certificate.

The search prices every boundary as if it had its links for itself; where several of a plan share a
link's capacity its estimate is higher. The bound holds for that too, and the gap counts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Floats
from hetplan.deadline import LATE_SECONDS, ends_by, moment, moment_in
from hetplan.errors import InfeasibleError, InputError, LimitError, OutOfTimeError
from hetplan.files.locks import Lock
from hetplan.interrupts import interrupts_wait
from hetplan.job.spec import Job
from hetplan.kernels import clock
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import check_model
from hetplan.plans.check_job import check_job_against
from hetplan.plans.chosen import ChosenPlan
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Predictor
from hetplan.search.descriptions import describe_space
from hetplan.search.evidence import proof_of
from hetplan.search.files import SCHEMA
from hetplan.search.final_pricing import (
    AGREEMENT,
    FinalPlan,
    WrongOfferError,
    final_plan,
    least_pricing_seconds,
    nearest,
    offer_starts,
    pricing_seconds,
)
from hetplan.search.journal import (
    Journal,
    JournalFile,
    digests,
    header_of,
    read_journal,
    resumable,
)
from hetplan.search.result import Certificate, CoursePoint, Inputs, Question, SearchResult
from hetplan.search.scheduler import Scheduler
from hetplan.search.solver import Best, Offer, Progress, Solver
from hetplan.search.solvers import solvers_of
from hetplan.search.space.allowed import apart
from hetplan.search.space.family import FamilyTable, table_of
from hetplan.search.table_maker import TableMaker
from hetplan.version import __version__

__all__ = ["Progress", "check_question", "none_below", "search", "search_with_rivals"]

_MAX_ROUNDS = 3
"""Proofs again for a plan whose whole price is above what the search had."""

_LITTLE_SECONDS = 10.0
"""Time limits below it, on up to `_FEW_ISLANDS`: a plan is looked for before every family has been
looked at. More islands have more shapes to look at."""

_HALF = 0.5
"""Of a time limit: the most that is kept back for the last pricing of the plan, and by which a
first plan may be late."""

_FEW_ISLANDS = 8

_SAMPLED = 32
"""Families that are looked at for such a first plan."""

_MANY_FAMILIES = 300_000
"""From so many on a plan is looked for first, too, in a family of every size of tick: most of the
others then end by the bound that they share with all that are alike."""

_TICKS = 6
"""Such families that are improved, the likeliest ones: each takes about 0.1 s."""


@dataclass(slots=True)
class _Run:
    """One search while it runs."""

    job: Job
    maker: TableMaker
    best: Best
    book: Journal
    families: FamilyTable = field(default_factory=lambda: table_of(()))
    solvers: Sequence[Solver] = ()
    order_free_seconds: Floats | None = None
    """Of all families; None before they are known."""
    candidates: int = 0
    """Solvers that may have plans, by the order-free bounds; all of them before those are known."""
    improved: set[int] = field(default_factory=set)
    proven: set[int] = field(default_factory=set)
    status: str = "optimal"
    settled: FinalPlan | None = None
    """Of the offers that `_close_priced` has seen last."""
    settled_offers: tuple[Offer, ...] = ()
    """All offers that were known then."""


def search(
    model: ModelSpec,
    cluster: Cluster,
    job: Job,
    predictor: Predictor,
    *,
    sha256: tuple[tuple[str, str], ...] = (),
    progress: Callable[[Progress], None] | None = None,
    journal: JournalFile | None = None,
    start: Sequence[Plan] = (),
) -> SearchResult:
    """The fastest plan found, its estimate, and a certificate of its distance to the best.

    Stops when that distance is within `job.gap` or at `job.time_limit_seconds`. Ctrl-C ends it
    with the best plan so far (certificate status `interrupted`); without one KeyboardInterrupt
    goes on. InfeasibleError where no plan exists (`hetplan.whatif.no_plan` says why); LimitError
    where the limit came before any plan.

    `journal` is written while the search runs; one to resume goes on from what is there.
    Legal plans in `start` are known from the beginning.
    """
    inputs = Inputs(model=model, cluster=cluster, job=job, sha256=sha256)
    return _searched(inputs, predictor, progress, journal, start)[0]


def search_with_rivals(
    question: Question,
    predictor: Predictor,
    *,
    start: Sequence[Plan] = (),
    progress: Callable[[Progress], None] | None = None,
    journal: JournalFile | None = None,
) -> tuple[SearchResult, tuple[ChosenPlan, ...]]:
    """What `search` ends with, and the best plan that each solver has found, best first.

    These are choices: they need not have room, or be legal, once they are placed.
    """
    sha256 = question.sha256 if isinstance(question, Inputs) else ()
    model, cluster, job = question.model, question.cluster, question.job
    inputs = Inputs(model=model, cluster=cluster, job=job, sha256=sha256)
    found, run = _searched(inputs, predictor, progress, journal, start)
    return found, tuple(offer.chosen for offer in nearest(run.best))


def _searched(
    inputs: Inputs,
    predictor: Predictor,
    progress: Callable[[Progress], None] | None,
    journal: JournalFile | None,
    start: Sequence[Plan],
) -> tuple[SearchResult, _Run]:
    check_question(inputs)
    job = inputs.job
    best = _nothing_yet(inputs, progress)
    asked = digests(inputs.model, inputs.cluster, job, inputs.sha256)
    with nullcontext() if journal is None else Lock(journal.path).take():
        run = _Run(
            job=job,
            maker=TableMaker.of(inputs, predictor, best.check_time),
            best=best,
            book=_journal(journal, best, asked, job.gap),
        )
        return _answered(run, inputs, start), run


def _answered(run: _Run, inputs: Inputs, start: Sequence[Plan]) -> SearchResult:
    """The answer; InfeasibleError or LimitError where there is none."""
    try:
        with interrupts_wait():
            return _answer(run, inputs, start)
    except _NoPlanError:
        if run.status == "optimal":
            line = (
                f"no plan of {inputs.model.name} for {run.job.target} fits the devices and the pins"
            )
            raise InfeasibleError([line]) from None
        raise LimitError(
            "the time limit was reached before any plan was found; raise time_limit or pin degrees"
        ) from None


def check_question(question: Question) -> None:
    """InputError where the question contradicts itself, or asks too much of its target."""
    faults = check_job_against(question.job, question.model, question.cluster)
    if faults:
        raise InputError(*faults)
    check_model(question.model, question.job)


_FEW_OPEN = 64
"""Families that `none_below` looks at: a search that is far above has a handful left."""


def none_below(
    question: Question,
    predictor: Predictor,
    seconds: float,
    time_limit_seconds: float | None = None,
) -> bool:
    """Whether a short proof shows that no plan of the question takes less than `seconds`.

    False where it does not: a plan was found, a family stayed open, too many were left, or the time
    was over. The proof is the search's own with `seconds` for the step of its best plan and a gap
    of 0; nothing is improved, and no family is proven twice. InputError as `search`.
    """
    check_question(question)
    end = min(moment(), moment_in(time_limit_seconds))
    best = Best(bounds=[], deadline=end, first_plan_by=end, seed=question.job.seed)
    maker = TableMaker.of(question, predictor, best.check_time)
    try:
        with ends_by(best.deadline):
            return _none_below(maker, best, seconds)
    except OutOfTimeError:
        return False


def _none_below(maker: TableMaker, best: Best, seconds: float) -> bool:
    solvers = solvers_of(maker)
    best.bounds, best.seconds = [0.0] * len(solvers), seconds
    _note_order_free(maker, solvers, best)
    left = sorted((bound, at) for at, bound in enumerate(best.bounds) if best.open(at))
    # The proof of several pipelines takes longest.
    left.sort(key=lambda each: each[1] >= len(maker.families))
    if len(left) > _FEW_OPEN:
        return False
    for _, at in left:
        best.check_time()
        solvers[at].sharpen(best)
        if best.open(at):
            solvers[at].prove(best)
        if best.chosen is not None or best.open(at):
            return False
    return True


class _NoPlanError(Exception):
    """A search ended without one."""


def _answer(run: _Run, inputs: Inputs, start: Sequence[Plan]) -> SearchResult:
    """Search, and settle what was found; a Ctrl-C at any moment ends it with the best plan."""
    best, book = run.best, run.book
    try:
        _search(run, start)
        found = _result(run, inputs, _settled(run))
        book.close(run.status if found.certificate is None else found.certificate.status)
        return found
    except KeyboardInterrupt:
        book.use_reserve()
        best.straighten()
        if best.chosen is None:
            raise
        run.status = "interrupted"
        return _result(run, inputs, _settled(run))
    finally:
        if not book.closed:
            book.close(run.status if best.chosen is not None else "no plan")


def _nothing_yet(question: Question, progress: Callable[[Progress], None] | None) -> Best:
    """The best plan of a search that begins now."""
    job, around = question.job, moment()
    end = min(around, moment_in(job.time_limit_seconds))
    half = _HALF * max(0.0, end - clock())
    # Not so late that its price breaks the limit, nor in the time of another search.
    pricing = min(least_pricing_seconds(question.cluster), half)
    late = min(LATE_SECONDS, half, max(0.0, 2 * LATE_SECONDS - pricing))
    return Best(
        gap=job.gap,
        bounds=[],
        deadline=end,
        deadline_with=lambda chosen: end - min(pricing_seconds(chosen), half),
        first_plan_by=end + (late if around == math.inf else 0.0),
        progress=progress,
        seed=job.seed,
    )


def _settled(run: _Run) -> FinalPlan:
    """The answer so far; priced again only where plans have been offered since.

    InputError where a plan on record is not what the journal says of it.
    """
    offered = (*run.best.offers, *run.best.own.values())
    if run.settled is None or run.settled_offers != offered:
        try:
            run.settled = final_plan(run.best, run.maker.evaluator)
        except WrongOfferError as error:
            wrong = run.book.wrong(error.offer, str(error))
            if wrong is None:
                raise
            raise wrong from error
        run.settled_offers = offered
    return run.settled


def _journal(
    file: JournalFile | None, best: Best, inputs: tuple[tuple[str, str], ...], gap: float
) -> Journal:
    """The journal of this search, with what is on record; not yet open."""
    path = None if file is None else file.path
    book = Journal(path=path, started=best.started, best=best)
    header = header_of(inputs, gap)
    record = book.record = read_journal(file.path) if file and file.resume else None
    if record is not None and path is not None:
        if resumable(record, header, path):
            book.steps = record.steps
            book.reserve = record.reserve
        else:
            book.reserve = (*(e for step in record.steps for e in step.events), *record.reserve)
            book.from_start = True
    whole_bytes = 0 if record is None else record.whole_bytes
    book.begin(header, whole_bytes, resume=file is not None and file.resume)
    best.on_event = book.on_event
    return book


def _search(run: _Run, start: Sequence[Plan]) -> None:
    """Fill `run`: solvers, bounds, the best plan, and how it ended.

    _NoPlanError where there is no plan in the end.
    """
    best, book = run.best, run.book
    try:
        # The alarm leaves time for a first plan; who has one looks at the clock before.
        with ends_by(max(best.deadline, best.first_plan_by - LATE_SECONDS)):
            # First: what is known stays known, however long the others take to be listed.
            offer_starts(start, best, run.maker.evaluator)
            run.families = run.maker.families
            run.solvers = book.solvers = solvers_of(run.maker)
            run.candidates = len(run.solvers)
            best.bounds = [0.0] * len(run.solvers)
            _drive(run)
    except (OutOfTimeError, MemoryError) as error:
        if isinstance(error, MemoryError) and best.chosen is None:
            raise
        run.status = "limit"
        best.straighten()
        book.use_reserve()
    if best.chosen is None:
        raise _NoPlanError


def _drive(run: _Run) -> None:
    """Plans and proofs; OutOfTimeError at the deadline."""
    drive = Scheduler(
        best=run.best,
        journal=run.book,
        solvers=run.solvers,
        ticks=run.families.samples(),
        near=run.families.near,
        improved=run.improved,
        proven=run.proven,
    )
    limit = run.job.time_limit_seconds
    little = _LITTLE_SECONDS * max(1.0, len(run.maker.cluster.islands) / _FEW_ISLANDS)
    many = len(run.families) > _MANY_FAMILIES
    if many or (limit is not None and limit < little):
        some = run.families.plain()
        drive.first_plan({at: _estimate(run, at) for at in some[:: 1 + len(some) // _SAMPLED]})
    if many:
        drive.first_plan(run.maker.likeliest(), _TICKS)
    drive.estimates = _order_free(run)
    if run.book.from_start:
        run.book.use_reserve()
    drive.run()
    _close_priced(run, drive)


def _estimate(run: _Run, at: int) -> float:
    run.best.check_time()
    return run.solvers[at].order_free.estimate_seconds


def _order_free(run: _Run) -> list[float]:
    """Note the order-free bounds of all solvers; their estimates."""
    best = run.best
    run.order_free_seconds, estimates = _note_order_free(run.maker, run.solvers, best)
    empty = np.flatnonzero(np.array(best.bounds) == np.inf).tolist()
    best.empty = sum(at not in run.improved for at in empty)
    run.candidates = len(run.solvers) - best.empty
    return estimates


def _note_order_free(
    maker: TableMaker, solvers: Sequence[Solver], best: Best
) -> tuple[Floats, list[float]]:
    """Raise all bounds to the order-free ones; those of families, and all estimates."""
    families = maker.families
    found = maker.order_free_bounds(best.target)
    others = [solvers[at].order_free for at in range(len(families), len(solvers))]
    bounds = [*found.bounds.tolist(), *(each.bound_seconds for each in others)]
    best.bounds = list(map(max, best.bounds, bounds))
    return found.bounds, [*found.estimates.tolist(), *(each.estimate_seconds for each in others)]


def _close_priced(run: _Run, drive: Scheduler) -> None:
    """Where the priced plan is slower than the search has it, look at plans in between, and raise
    the bounds to match.
    """
    best, job = run.best, run.job
    for turn in range(_MAX_ROUNDS):
        if best.chosen is None:
            return
        if turn == 0:
            drive.improve_below(_settled(run).estimate.step_seconds)
        step = _settled(run).estimate.step_seconds
        wanted = step * (1.0 - job.gap)
        if best.lower_bound >= wanted * (1.0 - AGREEMENT) or wanted >= best.seconds:
            return
        if wanted <= best.target * (1.0 + AGREEMENT):
            return  # all was proven for this target: what is open was left open
        best.gap = 1.0 - wanted / best.seconds
        drive.prove_again()


def _course(best: Best, step: float, lower: float) -> tuple[CoursePoint, ...]:
    """The course, ended with the plan's whole price and the certificate's bound."""
    end = CoursePoint(steps=best.steps, best_seconds=step, lower_bound_seconds=lower)
    before = (each for each in best.course if each.steps < best.steps)
    return (
        *(replace(e, lower_bound_seconds=min(lower, e.lower_bound_seconds)) for e in before),
        end,
    )


def _result(run: _Run, inputs: Inputs, settled: FinalPlan) -> SearchResult:
    best, job = run.best, run.job
    step = settled.estimate.step_seconds
    lower = min(best.lower_bound, step)
    gap = 1.0 - lower / step
    status = run.status
    if status == "optimal" and gap > job.gap + AGREEMENT:
        # Bounds that no program could raise, or stages and boundaries that share links.
        status = "open"
    searched = {*run.improved, *run.proven}
    still_open = best.open_ones()
    closed = sum(not best.open(index) for index in searched)
    listed = min(best.listed, closed)  # proofs for a higher target may list a family again
    return SearchResult(
        schema=SCHEMA,
        hetplan_version=__version__,
        seed=job.seed,
        inputs=inputs,
        plan=settled.plan,
        estimate=settled.estimate,
        certificate=Certificate(
            lower_bound_seconds=lower,
            gap=gap,
            status=status,
            space=describe_space(
                run.families,
                job,
                several=len(run.solvers) > len(run.families),
                one_library=bool(apart(run.maker.cluster, job)),
            ),
            candidates=run.candidates,
            pruned_by_bound=run.candidates - len(searched.union(still_open)),
            searched=len(searched),
            replays=best.replays,
            closed_by_program=closed - listed,
            closed_by_listing=listed,
            left_open=len(still_open),
            explored=best.explored,
            course=_course(best, step, lower),
            proof=None
            if run.order_free_seconds is None
            else proof_of(run.families, run.order_free_seconds, best, lower),
        ),
    )
