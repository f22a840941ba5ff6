"""The next plan when nodes go or come: what wins, what is counted, and what is refused."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import run
from search_jobs import cluster, island, job, model

import hetplan
from hetplan.cluster.hosts import part_left
from hetplan.cluster.spec import Cluster
from hetplan.cost.goodput.run import goodput
from hetplan.cost.moving import STORAGE, Moving
from hetplan.drafting.changed import with_gained
from hetplan.errors import InfeasibleError, InputError
from hetplan.job.run import Run
from hetplan.job.spec import Job, Pins
from hetplan.plans.check import check_plan
from hetplan.predict.fit import FittedPredictor
from hetplan.search.files import load_legal_plan, save_result
from hetplan.search.result import SearchResult
from hetplan.search.search import search
from hetplan.whatif.replan import Option, Replanned, Source, Terms, replan

PREDICTOR = FittedPredictor.datasheet_only()
EIGHT = Pins(cp=1, virtual_stages=1, recompute=False, pipelines=1)


def asked(batch: int = 24, **changes: object) -> Job:
    return replace(job(batch, gap=0.02), **({"pin": EIGHT} | changes))  # type: ignore[arg-type]


def eight_nodes(**changes: object) -> Cluster:
    return cluster(replace(island("a", nodes=8, per_node=2), **changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def before() -> SearchResult:
    """On 8 nodes of 2 devices, optimizer states not shared: each has a copy elsewhere."""
    pins = replace(EIGHT, sharded_optimizer=False)
    return search(model(6), eight_nodes(), asked(pin=pins), PREDICTOR)


def terms(**changes: object) -> Terms:
    """With so much time that a search ends by itself on any machine."""
    return Terms(**({"search_seconds": 600.0} | changes))  # type: ignore[arg-type]


def again(before: SearchResult, left: Cluster, terms: Terms, **changes: object) -> Replanned:
    found = replan(before, left, PREDICTOR, terms, **changes)  # type: ignore[arg-type]
    inputs = found.result.inputs
    assert inputs.cluster == left
    assert not check_plan(found.result.plan, inputs.model, left, inputs.job)
    assert found.result.plan == found.best.plan
    assert found.result.estimate.step_seconds == pytest.approx(found.best.step_seconds, rel=1e-9)
    assert found.result.certificate is not None
    assert found.result.certificate.lower_bound_seconds <= found.best.step_seconds
    least = found.best.seconds(found.steps)
    assert all(least <= other.seconds(found.steps) for other in found.others)
    moving = found.best.moving
    assert sum(each.bytes for each in found.transfers) == pytest.approx(moving.needed_bytes)
    from_storage = sum(each.bytes for each in found.transfers if each.source == STORAGE)
    assert from_storage == pytest.approx(moving.read_bytes)
    return found


def option(step: float, still: float) -> Option:
    nothing = Moving(
        needed_bytes=0.0, held_bytes=0.0, read_bytes=0.0, links=(), send_seconds=0.0,
        read_seconds=0.0,
    )  # fmt: skip
    return Option(
        words="", plan=None, step_seconds=step, start_seconds=still, moving=nothing,
        steps_again=0.0,
    )  # type: ignore[arg-type]  # fmt: skip


def test_a_faster_plan_pays_once_it_has_made_up_for_the_time_that_it_stood_still() -> None:
    fast, cheap = option(1.0, 100.0), option(1.25, 40.0)
    after = fast.pays_after_seconds(cheap)
    assert after == pytest.approx(340.0)
    assert (340.0 - 100.0) / 1.0 == (340.0 - 40.0) / 1.25
    assert cheap.pays_after_seconds(fast) is None
    assert fast.pays_after_seconds(option(2.0, 100.0)) == 0.0
    # Where work is counted from the change on, the better of the two changes at that moment.
    steps = 240.0
    assert fast.seconds(steps) == pytest.approx(cheap.seconds(steps))
    assert fast.seconds(steps + 1) < cheap.seconds(steps + 1)


def test_a_cheap_move_wins_over_a_short_horizon_and_the_fast_step_over_a_long_one(
    before: SearchResult,
) -> None:
    left = part_left(before.inputs.cluster, {"a-7"})
    found = {
        seconds: again(before, left, terms(horizon_seconds=seconds, source=Source.PEERS,
                                           start_seconds=0.0), sudden=True)
        for seconds in (0.1, 1e5)
    }  # fmt: skip
    short, long = found[0.1].best, found[1e5].best
    assert short.step_seconds > long.step_seconds
    assert short.moving.seconds < long.moving.seconds
    step = min(each.step_seconds for each in (long, *found[1e5].others))
    assert (
        long.step_seconds
        == step
        == search(model(6), left, before.inputs.job, PREDICTOR).estimate.step_seconds
    )
    assert long.pays_after_seconds(short) > 0


def test_the_old_plan_goes_on_until_new_nodes_are_worth_a_start(before: SearchResult) -> None:
    more = with_gained(eight_nodes(), [])
    grown = more.with_island(replace(more.islands[0], nodes=12))
    short = again(before, grown, terms(horizon_seconds=60.0, start_seconds=69.0))
    assert short.best.words == "the old plan goes on"
    assert (short.best.still_seconds, short.best.moving.sent_bytes) == (0.0, 0.0)
    assert short.best.step_seconds == pytest.approx(before.estimate.step_seconds)
    long = again(before, grown, terms(horizon_seconds=1e6, start_seconds=69.0))
    assert long.best.step_seconds < before.estimate.step_seconds
    assert long.best.start_seconds == 69.0
    after = long.best.pays_after_seconds(short.best)
    assert after is not None
    assert 60.0 < after < 1e6


def test_the_batch_stays_unless_another_is_asked(before: SearchResult) -> None:
    left = part_left(before.inputs.cluster, {"a-0", "a-5"})
    found = again(before, left, terms(horizon_seconds=1e4))
    trained = sum(
        pipeline.num_microbatches * part.dp * part.microbatch_size
        for pipeline in found.result.plan.pipelines
        for part in pipeline.stages[0].replicas
    )
    assert trained == before.inputs.job.global_batch_size
    other = replace(before.inputs.job, global_batch_size=12)
    less = again(before, left, terms(horizon_tokens=1e9), job=other)
    assert less.result.inputs.job.global_batch_size == 12
    assert less.steps == pytest.approx(1e9 / (12 * 1024))


def test_what_has_no_copy_sends_a_run_back_to_its_checkpoint() -> None:
    shares = asked(pin=replace(EIGHT, sharded_optimizer=True), checkpoint_interval_steps=100)
    before = search(model(6), eight_nodes(), shares, PREDICTOR)
    left = part_left(before.inputs.cluster, {"a-3"})
    asked_terms = terms(horizon_seconds=1e5, source=Source.PEERS, storage_bytes_per_second=1e9)
    sudden = again(before, left, asked_terms, sudden=True)
    assert sudden.state_is_lost
    assert sudden.best.steps_again == 50.0
    moving = sudden.best.moving
    assert (moving.held_bytes, moving.read_seconds) == (0.0, moving.read_bytes / 1e9)
    # Announced: it is saved, or sends what it holds before it goes, and nothing is trained twice.
    saved = again(before, left, replace(asked_terms, source=Source.CHECKPOINT)).best
    assert (saved.steps_again, saved.moving.read_seconds) == (0.0, moving.read_seconds)
    sent = again(before, left, asked_terms).best
    assert (sent.steps_again, sent.moving.read_bytes) == (0.0, 0.0)
    assert sent.moving.sent_bytes > 0


def test_the_move_counts_what_the_days_of_the_run_count(before: SearchResult) -> None:
    def lost(job: Job, seconds: float | None = None) -> Option:
        old = replace(before, inputs=replace(before.inputs, job=job))
        left = part_left(before.inputs.cluster, {"a-2"})
        asked_terms = terms(horizon_seconds=1e5, start_seconds=seconds)
        return again(old, left, asked_terms, sudden=True).best

    rare = replace(before.inputs.job, total_tokens=10**12)
    inputs = before.inputs
    days = goodput(before.plan, before.estimate, inputs.model, inputs.cluster, rare)
    assert lost(rare).steps_again == days.interval_steps / 2 > 0.0
    assert lost(before.inputs.job).steps_again is None
    said = replace(rare, run=Run(start_up_seconds=5.0, storage_bytes_per_second=1e9))
    option = lost(said)
    assert option.start_seconds == 5.0
    assert option.moving.read_seconds == option.moving.read_bytes / 1e9
    assert lost(said, 7.0).start_seconds == 7.0


def test_devices_that_keep_their_state_receive_less(before: SearchResult) -> None:
    left = part_left(before.inputs.cluster, {"a-2"})
    own = again(before, left, terms(horizon_seconds=1e5, source=Source.PEERS), sudden=True)
    assert not own.state_is_lost
    assert own.best.moving.held_bytes > 0
    assert (own.best.moving.read_bytes, own.best.steps_again) == (0.0, 0.0)
    read = again(before, left, terms(horizon_seconds=1e5), sudden=True)
    assert read.best.moving.read_bytes > 0


def test_a_job_moves_to_another_region_from_its_checkpoint(before: SearchResult) -> None:
    there = cluster(replace(island("b", nodes=8, per_node=2), region="elsewhere"))
    asked_terms = terms(horizon_seconds=1e5, storage_bytes_per_second=1e9, source=Source.PEERS)
    found = again(before, there, asked_terms)
    assert found.lost_devices == before.plan.pipelines[0].stages[0].replicas[0].num_devices * len(
        before.plan.stages
    )
    whole = model(6).parameter_count * (2 + 12)
    assert found.best.moving.read_bytes == pytest.approx(whole, rel=1e-9)
    assert found.best.moving.read_seconds == pytest.approx(whole / 1e9)


def test_where_time_is_over_one_known_plan_is_priced_and_no_more(before: SearchResult) -> None:
    left = replace(before.inputs.cluster.islands[0], nodes_out=(7,))
    smaller = replace(before.inputs.cluster, islands=(left,))
    found = again(before, smaller, terms(search_seconds=0.0))
    assert found.ranked == 1
    assert not found.others
    assert again(before, smaller, terms()).ranked > 1


def test_equal_questions_have_equal_answers(before: SearchResult) -> None:
    left = part_left(before.inputs.cluster, {"a-1"})
    asked_terms = terms(horizon_seconds=1e4, source=Source.PEERS)
    assert again(before, left, asked_terms) == again(before, left, asked_terms)


def test_pipelines_that_lost_nothing_take_the_microbatches_of_those_that_did() -> None:
    two = cluster(island("a", nodes=2), island("b", kind="other", nodes=2))
    pins = Pins(cp=1, virtual_stages=1, recompute=False, pipelines=2, tp=1, dp=2, pp=1)
    before = search(model(6), two, replace(job(12, target="native", gap=0.2), pin=pins), PREDICTOR)
    names = {two.island_of_device(p.stages[0].devices[0].start).name for p in before.plan.pipelines}
    assert names == {"a", "b"}
    free = replace(before.inputs.job, pin=replace(pins, pipelines=None))
    found = again(before, part_left(two, {"a-0"}), terms(horizon_seconds=1e4), job=free)
    words = [each.words for each in (found.best, *found.others)]
    assert "the old layout with 1 of 2 pipelines" in words


# ---- words, the library and the command line


def test_the_words_of_gained_nodes_say_where_they_go() -> None:
    of = hetplan.Cluster.from_nodes("4x8 h100 @A", "4x8 a100 @B", between="A B 10Gbit 30ms")
    more = with_gained(of, ["2x8 h100 @A"])
    assert [each.nodes for each in more.islands] == [6, 4]
    near = replace(of, within_region=of.links[0].link if of.links else of.region_links[0].link)
    new = with_gained(near, ["2x8 h100 @B"])
    assert [(each.region, each.nodes) for each in new.islands][2:] == [("B", 2)]
    out = part_left(of, {"h100-2"})
    assert with_gained(out, ["h100-2"]) == of
    for words, message in (
        ("2x8 h100 @C", "say the region"),
        ("2x8 h100 @B", "no link between islands h100-2 and a100: give --cluster"),
        ("many", "write nodes x devices"),
        ("2x8 mi300x", "say the region"),
    ):
        with pytest.raises(InputError, match=f"--gained.*{re.escape(message)}"):
            with_gained(of, [words])


def test_the_library_takes_names_and_says_ten_lines(before: SearchResult) -> None:
    found = hetplan.replan(before, lost="a-1", predictor=PREDICTOR, horizon="2h")
    lines = found.summary().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("lost: 2 of the plan's ")
    assert any(line.startswith("stands still ") for line in lines)
    assert isinstance(found.result, hetplan.Result)
    assert found.best.seconds(found.steps) == pytest.approx(7200)
    assert all(each.steps_in(7200) <= found.steps for each in found.others)
    for keywords, message in (
        ({"lost": "a-9"}, "unknown host"),
        ({}, "say what changes"),
        ({"lost": "a-1", "cluster": eight_nodes()}, "all that there is"),
        ({"lost": "a-1", "horizon": "soon"}, "500B"),
        ({"lost": "a-1", "source": "air"}, "one of checkpoint, peers"),
        ({"lost": "a-1", "startseconds": 3}, "unknown; known: horizon"),
        ({"lost": "a-1", "start_seconds": "69 s"}, "start_seconds"),
        ({"lost": "a-1", "search_seconds": math.nan}, "search_seconds"),
        ({"lost": "a-1", "horizon": 5}, "horizon"),
        ({"lost": 5}, "lost"),
        ({"lost": "a-1", "batch": 3.5}, "batch: found 3.5"),
    ):
        with pytest.raises(InputError, match=message):
            hetplan.replan(before, predictor=PREDICTOR, **keywords)


def test_a_tight_job_has_no_next_plan_and_says_why(before: SearchResult) -> None:
    left = part_left(before.inputs.cluster, {f"a-{at}" for at in range(1, 8)})
    big = replace(before, inputs=replace(before.inputs, job=asked(pin=replace(EIGHT, dp=8))))
    with pytest.raises(InfeasibleError):
        replan(big, left, PREDICTOR, terms())


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_times_that_are_none_are_refused(seconds: float) -> None:
    with pytest.raises(InputError, match="start_seconds"):
        Terms(start_seconds=seconds)
    with pytest.raises(InputError, match="horizon_seconds"):
        Terms(horizon_seconds=seconds)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--lost", "a-9"), "--lost: test: unknown host 'a-9'; nearest: a-7"),
        (("--lost", ",".join(f"a-{at}" for at in range(8))), "all nodes of the cluster are lost"),
        (("--lost", "a-1,,"), "an empty name"),
        ((), "say what changes"),
        (("--lost", "a-1", "--cluster", "none.yaml"), "leave out --lost and --gained"),
        (("--cluster", "none.yaml"), "none.yaml"),
        (("--lost", "a-1", "--from", "air"), "--from: 'air'; it is one of checkpoint, peers"),
        (("--lost", "a-1", "--horizon", "0 s"), "write tokens as in 500B, or a time as in 6h"),
        (("--lost", "a-1", "--start", "soon"), "--start"),
        (("--gained", "many"), "--gained 'many': write nodes"),
    ],
)
def test_bad_input_is_one_clear_line(
    before: SearchResult, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    file = tmp_path / "plan.json"
    save_result(before, file)
    outcome = run("replan", str(file), *words)
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert message in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


def test_the_command_writes_a_plan_file(before: SearchResult, tmp_path: Path) -> None:
    file, out = tmp_path / "plan.json", tmp_path / "next.json"
    save_result(before, file)
    outcome = run("replan", str(file), "--lost", "a-1", "--horizon", "6h", "--out", str(out))
    assert outcome.exit_code == 0, outcome.stderr
    assert "lost: 2 of the plan's 16 devices" in outcome.stdout
    assert load_legal_plan(out).inputs.cluster == part_left(before.inputs.cluster, {"a-1"})
    machine = run("replan", str(file), "--lost", "a-1", "--horizon", "6h", "--json")
    assert '"schema": "hetplan.replanned/1"' in machine.stdout
