"""Why islands are idle, from where they pay, and that worths of changes agree with a sweep."""

from __future__ import annotations

from dataclasses import replace

import pytest
from search_jobs import cluster, island, job, model

from hetplan.job.spec import Pins
from hetplan.plans.pieces import islands_in_use
from hetplan.predict.fit import FittedPredictor
from hetplan.reports.explained import idle_lines
from hetplan.search.result import BreakEven, IdleCause, IdleReason, Question, SearchResult
from hetplan.search.search import search
from hetplan.whatif.ask import ask, nearer, wider
from hetplan.whatif.idle import busy_shares, idle_reasons
from hetplan.whatif.shadow_prices import changes, shadow_prices

_PREDICTOR = FittedPredictor.datasheet_only()
_PAIR = (("a", "b"),)


def asked(*, gbit: float = 80.0, gigabytes: float = 16.0, slow: float = 5.0) -> Question:
    """Two devices, and one of another kind behind a link, to gap 0."""
    of = cluster(
        island("a", teraflops=5.0, nodes=1, per_node=2),
        island("b", kind="other", teraflops=slow, gigabytes=gigabytes, nodes=1),
        gigabytes_per_second=gbit / 8,
    )
    pins = Pins(cp=1, virtual_stages=1, tp=1, microbatch_size=1)
    chosen = replace(job(8, target="flagscale"), pin=pins)
    return Question(model=model(4), cluster=of, job=chosen)


def planned(question: Question) -> SearchResult:
    return search(question.model, question.cluster, question.job, _PREDICTOR)


def reason_of(question: Question) -> IdleReason:
    (reason,) = idle_reasons(planned(question), _PREDICTOR)
    assert reason.island == "b"
    return reason


def even_of(reason: IdleReason) -> BreakEven:
    assert reason.break_even is not None
    return reason.break_even


def uses_b(question: Question) -> bool:
    return "b" in islands_in_use(planned(question).plan, question.cluster)


def test_bandwidth_from_which_an_island_pays_is_where_a_dense_sweep_turns() -> None:
    question = asked(gbit=0.2)
    reason = reason_of(question)
    assert reason.causes == (IdleCause.BANDWIDTH,)
    assert (reason.other, reason.idle_devices, reason.usable_devices) == ("a", 1, 1)
    even = even_of(reason)
    assert (even.name, even.unit) == ("bandwidth", "bytes/s")
    assert even.today == pytest.approx(0.2e9 / 8)
    assert even.lower < even.value == even.upper <= even.lower * 1.011
    assert even.gap <= 1e-8
    factor = even.value / even.today
    sweep = [0.5, 0.9, 0.97, 0.989, 1.001, 1.03, 1.1, 4.0]
    turns = [uses_b(wider(question, _PAIR, factor * each)) for each in sweep]
    assert turns == [each > 1 for each in sweep]
    assert reason.seconds_with_it is not None
    assert reason.seconds_with_it > planned(question).estimate.step_seconds


def test_round_trip_up_to_which_an_island_pays() -> None:
    question = nearer(asked(), _PAIR, 2000.0)  # 0.4 s
    reason = reason_of(question)
    assert reason.causes == (IdleCause.ROUND_TRIP,)
    even = even_of(reason)
    assert even.value == even.lower < even.upper < even.today == pytest.approx(0.4)
    assert uses_b(nearer(question, _PAIR, even.value / even.today))
    assert not uses_b(nearer(question, _PAIR, even.upper / even.today))


def test_memory_from_which_an_island_pays() -> None:
    question = asked(gigabytes=0.25)
    reason = reason_of(question)
    assert reason.causes == (IdleCause.MEMORY,)
    even = even_of(reason)
    of = question.cluster.island("b")
    for value, wanted in ((even.value, True), (even.lower, False)):
        assert uses_b(question.with_island(replace(of, memory_bytes=value))) is wanted


def test_an_island_that_is_too_slow_has_no_cause_and_what_it_costs() -> None:
    reason = reason_of(asked(slow=0.05))
    assert reason.causes == ()
    assert reason.break_even is None
    assert reason.seconds_with_it is not None


def test_of_a_plan_whose_search_was_ended_no_reason_is_made_up() -> None:
    found = planned(asked(gbit=0.2))
    assert found.certificate is not None
    ended = replace(found, certificate=replace(found.certificate, status="limit", gap=1.0))
    (reason,) = idle_reasons(ended, _PREDICTOR)
    assert (reason.island, reason.idle_devices, reason.causes) == ("b", 1, ())
    (line,) = idle_lines((reason,), ended)
    assert "left 100% open" in line
    assert "for flagscale or megatron" not in line
    several = replace(
        ended, inputs=replace(ended.inputs, job=replace(found.inputs.job, target="any"))
    )
    assert "for flagscale or megatron" in next(idle_lines((reason,), several))
    assert "too slow" not in line


def test_an_open_search_of_any_is_explained_among_plans_of_a_target_that_closes() -> None:
    question = asked(gbit=0.2).with_job(target="any")
    closed = planned(question.with_job(target="flagscale"))
    found = planned(question)
    assert found.certificate is not None
    ended = replace(found, certificate=replace(found.certificate, status="limit", gap=0.5))
    (reason,) = idle_reasons(ended, _PREDICTOR)
    (known,) = idle_reasons(closed, _PREDICTOR)
    assert reason.causes == known.causes == (IdleCause.BANDWIDTH,)
    assert even_of(reason).value == pytest.approx(even_of(known).value, rel=0.05)
    (line,) = idle_lines((reason,), ended)
    assert "it pays from" in line
    assert "shown for plans of flagscale; 50% of this search is open" in line


def test_a_library_is_a_cause_by_itself_or_beside_a_link() -> None:
    for gbit, causes in (
        (80.0, (IdleCause.LIBRARY,)),
        (0.2, (IdleCause.LIBRARY, IdleCause.BANDWIDTH)),
    ):
        question = asked(gbit=gbit).with_job(target="megatron")
        of = question.cluster.island("b")
        foreign = replace(of, device=replace(of.device, vendor="amd"))
        assert reason_of(question.with_island(foreign)).causes == causes


def _of_two(a: int, b: int, slow: float, layers: int, batch: int) -> Question:
    of = cluster(
        island("a", teraflops=5.0, nodes=1, per_node=a),
        island("b", kind="other", teraflops=slow, nodes=1, per_node=b),
        gigabytes_per_second=10,
    )
    chosen = replace(job(batch), pin=Pins(cp=1, virtual_stages=1, tp=1))
    return Question(model=model(layers), cluster=of, job=chosen)


def test_batch_from_which_an_island_pays() -> None:
    """Two sequences keep two of three devices busy, so the other island's two are as good."""
    question = _of_two(3, 2, 5.0, layers=1, batch=2)
    (reason,) = idle_reasons(planned(question), _PREDICTOR)
    assert (reason.island, reason.causes) == ("a", (IdleCause.BATCH,))
    even = even_of(reason)
    assert (even.name, even.today, even.value, even.lower) == ("global_batch_size", 2, 3, 2)
    larger = question.with_job(global_batch_size=3)
    assert islands_in_use(planned(larger).plan, question.cluster) == ("a",)
    assert islands_in_use(planned(question).plan, question.cluster) == ("b",)


def test_degrees_that_stages_must_share_leave_an_island_idle() -> None:
    """A stage on four devices and one on a single fast device need degrees of their own."""
    question = _of_two(4, 1, 20.0, layers=2, batch=8)
    (reason,) = idle_reasons(planned(question), _PREDICTOR)
    assert (reason.island, reason.causes) == ("b", (IdleCause.DEGREES,))
    assert (reason.other, reason.break_even) == ("flagscale", None)
    assert uses_b(question.with_job(target="flagscale"))


def test_known_plans_that_break_a_pin_are_no_start() -> None:
    question = asked()
    plan = planned(question).plan
    pinned = question.with_pins(embedding_on="b", head_on="b")
    found = ask(pinned, _PREDICTOR, known_plans=(plan,)).plan
    assert found.pipelines == planned(pinned).plan.pipelines
    assert islands_in_use(found, question.cluster) == ("b",)


def test_an_island_in_use_is_busy_and_all_used_ones_have_no_reason() -> None:
    question = asked()
    found = planned(question)
    assert idle_reasons(found, _PREDICTOR) == ()
    shares = busy_shares(found)
    assert set(shares) == {"a", "b"}
    assert all(0.0 < share <= 1.0 for share in shares.values())
    assert idle_reasons(replace(found, certificate=None), _PREDICTOR) == ()


@pytest.mark.parametrize(("gbit", "gap"), [(0.2, 0.0), (1.6, 0.03)])
def test_worths_of_changes_are_those_of_a_sweep(gbit: float, gap: float) -> None:
    """The sweep asks every question anew, to gap 0: groups and known plans do not show."""
    question = asked(gbit=gbit).with_job(gap=gap)
    found = planned(question)
    every = list(changes(question))
    prices = {each.words: each for each in shadow_prices(found, _PREDICTOR, asked=every)}
    assert len(prices) == len(every)
    for change in every:
        swept = planned(change.question.with_job(gap=0.0))
        gain = swept.estimate.tokens_per_second / found.estimate.tokens_per_second - 1.0
        price = prices[change.words]
        assert price.least_gain - 1e-8 <= gain <= price.most_gain + 1e-8, change.words
        if gap == 0:
            assert price.most_gain - price.least_gain <= 1e-8
    best = max(price.least_gain for price in prices.values())
    assert best > 0.01
