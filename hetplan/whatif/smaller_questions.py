"""The best plan of a question, never slower than that of a smaller question.

A search to a gap may end with any plan within that gap: a search over more plans can end with a
slower one. So a question starts from the plans of its smaller questions:

    target any          every real target
    native, flagscale   megatron, whose plans they run where the degrees allow it
    up to four islands  the same question without each of them, and so every set of islands
    more islands        each device kind alone

They are answered in the same way, so a smaller question has one answer, whoever asks it. Most of
them cannot matter: where a short proof shows that no plan of one is faster than a plan that is
known (`none_below`), it is not searched.

Claim: answer(q) <= answer(s) for every smaller question s whose plan q allows at no higher price,
unless a time limit ended a search. Proof: either s was searched, and its plan, priced for q, is a
start of q; or it was left out because answer(s) >= the step of another start. No search ends with a
plan slower than its starts. A proof about s is one about the smaller questions of s, too, where its
families hold theirs: not for stages of two kinds on three islands, so there each is proven.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hetplan.cluster.spec import Island
from hetplan.deadline import ends_by, moment_in, seconds_left
from hetplan.errors import HetplanError, InputError, LimitError, OutOfTimeError
from hetplan.job.spec import Job
from hetplan.job.trainer import trainer_faults
from hetplan.kernels import clock
from hetplan.plans.plan import Plan
from hetplan.plans.targets import TARGETS, target
from hetplan.predict.predictor import Predictor
from hetplan.search.final_pricing import priced_start
from hetplan.search.journal import JournalFile
from hetplan.search.result import Question, SearchResult
from hetplan.search.search import check_question, none_below
from hetplan.search.solver import Progress
from hetplan.search.space.allowed import allowed_cluster
from hetplan.search.space.plan_evaluator import PlanEvaluator
from hetplan.search.table_maker import TableMaker
from hetplan.whatif.ask import NO_ANSWER, is_interrupted, legal_on_parts, searched, step_seconds
from hetplan.whatif.objectives import interrupted

_FEW_ISLANDS = 4
"""Up to here every set of islands is a smaller question, 15 sets at most."""

_SHARE = 0.5
"""Of a time limit, for all smaller questions together; the rest is the question's own."""

_LEAST_SECONDS = 1.0
"""With less time left a smaller question is not begun: few searches have a plan by then."""


def best_plan(
    question: Question,
    answers: Answers,
    *,
    known_plans: Sequence[Plan] = (),
    journal: JournalFile | None = None,
    end: float = math.inf,
) -> SearchResult:
    """The best plan of the question; its search starts from the answers of smaller ones, and from
    the known plans.

    All searches together end by the moment `end`, and within the job's time limit. Ctrl-C ends
    them with the best plan so far. Errors as `search`.
    """
    job, stopped = question.job, False
    end = min(end, moment_in(job.time_limit_seconds))
    try:
        with ends_by(clock() + _SHARE * (end - clock())):
            start = (*answers.start(question), *known_plans)
            if seconds_left() < _LEAST_SECONDS:  # a part of a part may have been answered alone
                start = (*start, *answers.plans)
    except OutOfTimeError:
        start = (*answers.plans, *known_plans)
    except KeyboardInterrupt:
        start, stopped = (*answers.plans, *known_plans), True
        if not start:
            raise
    if end < math.inf or stopped:
        left = max(0.0, end - clock())
        job = replace(job, time_limit_seconds=0.0 if stopped else left)
    try:
        found = searched(
            replace(question, job=job),
            answers.predictor,
            start=start,
            progress=answers.shown(job.target),
            journal=journal,
        )
    except LimitError:
        if stopped:  # the plans of smaller questions are none of this one
            raise KeyboardInterrupt from None
        raise
    found = replace(found, inputs=replace(found.inputs, job=question.job))
    return interrupted(found) if stopped else found


def smaller_questions(question: Question) -> Iterator[tuple[str, Question]]:
    """(name, question) of every question whose plans are plans of this one, likeliest best first.

    Those of smaller questions of these are left out.
    """
    for name in _targets_within(question.job):
        yield name, question.with_job(target=name)
    yield from _with_fewer_islands(question)


def _targets_within(job: Job) -> tuple[str, ...]:
    """Targets whose plans this one can run, as far as they have what the job asks of them."""
    names: tuple[str, ...] = ()
    if job.target == "any":
        names = ("megatron", *(name for name in TARGETS if name not in ("any", "megatron")))
    elif job.target in ("native", "flagscale"):
        names = ("megatron",)
    return tuple(each for each in names if not any(trainer_faults(replace(job, target=each))))


def _with_fewer_islands(question: Question) -> Iterator[tuple[str, Question]]:
    """The weakest island is left out first."""
    islands, kinds = usable_islands(question), usable_kinds(question)
    if 1 < len(islands) <= _FEW_ISLANDS:
        for island in sorted(islands, key=lambda each: each.num_usable_devices * _peak(each)):
            name = f"{question.job.target} without {island.name}"
            yield name, question.without_islands(island.name)
    elif len(kinds) > 1:
        for kind in kinds:
            yield f"{question.job.target} on {kind} alone", alone(question, kind)


def usable_islands(question: Question) -> list[Island]:
    """Islands with nodes that are neither out nor forbidden."""
    cluster = allowed_cluster(question.cluster, question.job)
    return [each for each in cluster.islands if each.num_usable_devices]


def usable_kinds(question: Question) -> tuple[str, ...]:
    """Device kinds of these islands."""
    return tuple(dict.fromkeys(each.device.kind for each in usable_islands(question)))


def _peak(island: Island) -> float:
    return max((rate for _, rate in island.device.peak_flops_per_second), default=0.0)


def alone(question: Question, kind: str) -> Question:
    """The question for the devices of one kind."""
    others = (each.name for each in usable_islands(question) if each.device.kind != kind)
    return question.without_islands(*others)


def _unheard(name: str) -> None:
    """No listener."""


@dataclass(slots=True)
class Answers:
    """Answers of the smaller questions of one question, each made once.

    KeyboardInterrupt after Ctrl-C; the answers that are there by then are kept.
    """

    predictor: Predictor
    shown: Callable[[str], Callable[[Progress], None] | None] = _unheard
    """The listener of the search of this name."""
    _found: dict[Job, SearchResult | HetplanError] = field(default_factory=dict)
    """By job without its time limit; an error where there is no plan."""
    plans: list[Plan] = field(default_factory=list)
    """Every plan that a search has ended with, or was interrupted with."""

    def start(self, question: Question) -> tuple[Plan, ...]:
        """The fastest plan of the smaller questions, by its price for this one; none or one."""
        fastest, known = tuple[Plan, ...](), math.inf
        if seconds_left() < _LEAST_SECONDS:
            return fastest
        evaluator = self._evaluator(question)
        if evaluator is None:
            return fastest  # what has no plan has none in a part of it
        for name, smaller in smaller_questions(question):
            if seconds_left() < _LEAST_SECONDS:
                break
            if self._unknown(smaller) and self.none_below(smaller, known):
                continue
            found = self.answer(name, smaller)
            if found is None or found.estimate.step_seconds >= known:
                continue
            offer = priced_start(found.plan, evaluator)
            seconds = math.inf if offer is None else offer.seconds
            if offer is None and legal_on_parts(found.plan, question):
                seconds = step_seconds(found.plan, question, self.predictor)
            if seconds < known:
                known, fastest = seconds, (found.plan,)
        return fastest

    def answer(self, name: str, question: Question) -> SearchResult | None:
        """The answer of a smaller question, from its own ones; None: no plan, or no time."""
        job = _timeless(question.job)
        if job not in self._found:
            start, left = self.start(question), seconds_left()
            if left < _LEAST_SECONDS:
                return None
            limit = None if left == math.inf else left
            asked = replace(job, time_limit_seconds=limit)
            try:
                self._found[job] = self._searched(name, question.changed(job=asked), start)
            except NO_ANSWER as error:
                self._found[job] = error
        found = self._found[job]
        return found if isinstance(found, SearchResult) else None

    def _searched(self, name: str, question: Question, start: tuple[Plan, ...]) -> SearchResult:
        found = searched(question, self.predictor, start=start, progress=self.shown(name))
        self.plans.append(found.plan)
        if is_interrupted(found):
            raise KeyboardInterrupt
        return found

    def error(self, question: Question) -> HetplanError | None:
        """Why a question that was asked has no plan."""
        found = self._found.get(_timeless(question.job))
        return found if isinstance(found, HetplanError) else None

    def of_real_target(self, name: str, question: Question) -> SearchResult | None:
        """The answer of a question; of target any the fastest that is known of a real target."""
        if question.job.target != "any":
            return self.answer(name, question)
        real = [question.with_job(target=each) for each in _targets_within(question.job)]
        known = [self.answer(name, each) for each in real if not self._unknown(each)]
        found = [each for each in known if each is not None]
        if found:
            return min(found, key=lambda each: each.estimate.step_seconds)
        asked = (self.answer(name, each) for each in real)
        return next((each for each in asked if each is not None), None)

    def none_below(self, question: Question, seconds: float) -> bool:
        """Whether a short proof shows that no answer is faster."""
        left = seconds_left()
        if seconds == math.inf or left < _LEAST_SECONDS:
            return False
        try:
            if not none_below(question, self.predictor, seconds, left):
                return False
        except InputError:
            return True  # it has no plan
        fewer = [each for _, each in _with_fewer_islands(question)]
        mixed = target(question.job.target).mixed_stages and len(fewer) > 2
        return not mixed or all(self.none_below(each, seconds) for each in fewer)

    def _evaluator(self, question: Question) -> PlanEvaluator | None:
        """Prices plans of the question; None where it has none."""
        try:
            check_question(question)
            maker = TableMaker.of(question, self.predictor)
            return maker.evaluator if len(maker.with_room()) > 0 else None
        except InputError:
            return None

    def _unknown(self, question: Question) -> bool:
        return _timeless(question.job) not in self._found


def _timeless(job: Job) -> Job:
    return replace(job, time_limit_seconds=None)
