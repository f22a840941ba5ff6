"""A question is never slower than a smaller one: targets, islands, pins, links, on random jobs."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from search_jobs import cluster, island, job, model

from hetplan.cluster.spec import Cluster
from hetplan.deadline import ends_by
from hetplan.errors import HetplanError, LimitError
from hetplan.job.spec import Pins
from hetplan.kernels import clock
from hetplan.predict.fit import FittedPredictor
from hetplan.search.final_pricing import priced_start
from hetplan.search.result import Question, SearchResult
from hetplan.search.search import none_below, search
from hetplan.search.table_maker import TableMaker
from hetplan.whatif import smaller_questions as room
from hetplan.whatif.ask import NO_ANSWER, ask
from hetplan.whatif.smaller_questions import Answers, best_plan, smaller_questions

PREDICTOR = FittedPredictor.datasheet_only()
SAME = 1.0 + 1e-9


def _cluster(random: Random, *, tiny: bool) -> Cluster:
    kinds = [("old", 40.0), ("new", 120.0)]
    islands = []
    for at in range(2 if tiny else random.choice((1, 2, 2, 3))):
        kind, teraflops = random.choice(kinds)
        islands.append(
            island(
                "abc"[at],
                kind=kind,
                teraflops=teraflops,
                gigabytes=random.choice((2.0, 16.0)),
                nodes=1 if tiny else random.choice((1, 2)),
                per_node=1 if tiny else random.choice((1, 1, 2)),
            )
        )
    return cluster(*islands, gigabytes_per_second=random.choice((0.2, 2.0, 20.0)))


def drawn(seed: int, *, tiny: bool) -> Question:
    """A job of 2 to 4 layers on 1 to 3 islands, with a gap that leaves room for being beaten; tiny:
    on two devices.
    """
    random = Random(seed)
    targets = ("megatron", "flagscale", "torchtitan", "native", "any")
    target, batch = random.choice(targets), random.choice((1, 2) if tiny else (2, 4, 6))
    asked = job(batch, target=target, gap=random.choice((0.01, 0.2)))
    layers = random.choice((2, 3) if tiny else (2, 3, 4))
    return Question(model=model(layers), cluster=_cluster(random, tiny=tiny), job=asked)


def answer(question: Question) -> SearchResult | None:
    """As `hetplan plan` asks it; None where there is no plan."""
    try:
        return best_plan(question, Answers(PREDICTOR))
    except HetplanError:
        return None


def price(question: Question, found: SearchResult) -> float | None:
    """Of another question's plan for this one; None where it does not allow it."""
    offer = priced_start(found.plan, TableMaker.of(question, PREDICTOR).evaluator)
    return None if offer is None else offer.seconds


def test_a_plan_that_has_not_what_a_job_pins_is_no_start_of_its_search() -> None:
    question = Question(model=model(4), cluster=cluster(island("a", nodes=4)), job=job(8, gap=0.1))
    found = ask(question, PREDICTOR)
    (size,) = {replica.microbatch_size for replica in found.plan.replicas}
    for pinned in (1, 2, 4):
        asked = question.with_job(pin=Pins(microbatch_size=pinned))
        offer = priced_start(found.plan, TableMaker.of(asked, PREDICTOR).evaluator)
        assert (offer is not None) == (pinned == size)
        again = search(asked.model, asked.cluster, asked.job, PREDICTOR, start=[found.plan])
        assert {each.microbatch_size for each in again.plan.replicas} == {pinned}


def never_slower(question: Question) -> int:
    """Check it against all of its smaller questions; how many it was compared with."""
    whole, compared = answer(question), 0
    for name, smaller in smaller_questions(question):
        part = answer(smaller)
        if part is None:
            continue
        here, own = price(question, part), part.estimate.step_seconds
        if here is not None and here <= own * SAME:
            assert whole is not None, name
            assert whole.estimate.step_seconds <= own * SAME, (name, question.job.target)
            compared += 1
    return compared


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=pytest.mark.slow) if s in (38, 163) else s for s in range(302)]
)
def test_no_job_is_slower_than_a_smaller_one(seed: int) -> None:
    never_slower(drawn(seed, tiny=True))


def test_enough_of_them_are_compared() -> None:
    assert sum(never_slower(drawn(seed, tiny=True)) for seed in range(4)) > 5


@pytest.mark.slow
def test_no_larger_job_is_slower_than_a_smaller_one() -> None:
    assert sum(never_slower(drawn(seed, tiny=False)) for seed in range(40)) > 40


def test_a_short_proof_never_denies_a_plan() -> None:
    shown = 0
    for seed in range(12):
        question = drawn(seed, tiny=True)
        try:
            least = ask(question.with_job(gap=0.0), PREDICTOR).estimate.step_seconds
        except NO_ANSWER:
            continue
        assert not none_below(question, PREDICTOR, least * (1.0 + 1e-6))
        shown += none_below(question, PREDICTOR, 0.5 * least)
    assert shown >= 5


def test_a_relaxed_pin_is_never_slower() -> None:
    for seed in range(8):
        free = drawn(seed, tiny=True)
        pinned = replace(free, job=replace(free.job, pin=Pins(pp=1 + seed % 2, dp=1)))
        found = answer(pinned)
        if found is not None:
            relaxed = ask(free, PREDICTOR, known_plans=(found.plan,))
            assert relaxed.estimate.step_seconds <= found.estimate.step_seconds * SAME


def test_without_time_the_smaller_questions_are_left_out() -> None:
    question = drawn(2, tiny=True)
    answers = Answers(PREDICTOR)
    with ends_by(clock() + 0.4):  # too little to begin a search
        assert answers.start(question) == ()
        for name, smaller in smaller_questions(question):
            assert answers.answer(name, smaller) is None


def test_a_part_of_a_part_that_was_answered_in_time_is_a_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = cluster(island("a"), island("b"))
    question = Question(model=model(2), cluster=there, job=job(2, target="any"))
    part = question.with_job(target="megatron").without_islands("b")
    plan = best_plan(part, Answers(PREDICTOR)).plan
    given: list[object] = []
    whole = room.searched

    def heard(*asked: object, start: tuple[object, ...], **more: object) -> SearchResult:
        given.extend(start)
        return whole(*asked, start=start, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(room, "searched", heard)
    best_plan(question.with_job(time_limit_seconds=1.0), Answers(PREDICTOR, plans=[plan]))
    assert given == [plan]


def test_an_interrupt_before_there_is_a_plan_is_no_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there, asked = cluster(island("a"), island("b")), job(2, target="flagscale")
    question = Question(model=model(2), cluster=there, job=asked)
    plan = best_plan(question.with_job(target="megatron"), Answers(PREDICTOR)).plan

    def once(name: str) -> None:
        if name != question.job.target:
            raise KeyboardInterrupt

    def none_in_time(*_: object, **__: object) -> SearchResult:
        raise LimitError("no plan in time")

    monkeypatch.setattr(room, "searched", none_in_time)
    with pytest.raises(KeyboardInterrupt):
        best_plan(question, Answers(PREDICTOR, shown=once, plans=[plan]))
    with pytest.raises(LimitError):
        best_plan(question, Answers(PREDICTOR))
