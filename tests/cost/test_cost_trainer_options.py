"""Trainer options in the price of a step, each by hand or against a second writing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from cost_fakes import LinearPredictor
from estimate_plans import CLUSTER, FREE, SHAPE, plan_of, seconds_of
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_cases import Shape, even_times, one_pipeline, plain_times
from rule_names import rule_of

from hetplan.cluster.devices import DeviceKind
from hetplan.cost.estimate import estimate
from hetplan.cost.estimate_values import Component
from hetplan.cost.network.segments import TrafficClass
from hetplan.cost.replay.ends import step_ends
from hetplan.cost.replay.step import replay_step
from hetplan.cost.replay.times import Exchange, PipelineTimes
from hetplan.cost.step_model.hops import Hop, hop_between
from hetplan.cost.traffic import ledger
from hetplan.errors import InputError
from hetplan.job.spec import Job, TrainerOptions
from hetplan.model.operators import DEFAULT_KERNELS, Kernels
from hetplan.model.spec import LayerKind
from hetplan.plans.check import check_plan
from hetplan.plans.plan import OverlapSettings
from hetplan.plans.rules import Rule
from hetplan.predict.predictor import LayerQuery, Prediction

INSIDE, BETWEEN = 100e9, 10e9
HIDDEN = 128 * 256 * 4  # one sequence of 128 tokens, float32


def with_options(asked: Job = FREE, **options: object) -> Job:
    return replace(asked, trainer=TrainerOptions(**options))  # type: ignore[arg-type]


# ---- kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(LinearPredictor):
    """Remembers which kernels it was asked for."""

    kernels: set[tuple[LayerKind, Kernels]] = field(default_factory=set)

    def layer(self, device: DeviceKind, query: LayerQuery) -> Prediction:
        self.kernels.add((query.layer, query.kernels))
        return LinearPredictor.layer(self, device, query)


def test_the_predictor_is_asked_for_the_trainers_kernels() -> None:
    predictor = Asked()
    asked = with_options(fused_attention=False, hidden_dropout=True, fused_loss=True)
    estimate(plan_of(asked=asked), SHAPE, CLUSTER, asked, predictor)
    assert predictor.kernels == {
        (LayerKind.EMBEDDING, Kernels(hidden_dropout=True)),
        (LayerKind.TRANSFORMER, Kernels(fused_attention=False, hidden_dropout=True)),
        (LayerKind.HEAD, DEFAULT_KERNELS),
    }


# ---- scattered sends


def hop(asked: Job, **replica: object) -> Hop:
    left, right = plan_of(asked=asked, **replica).pipelines[0].stages
    return hop_between(CLUSTER, SHAPE, asked, left.replicas, right.replicas, LinearPredictor())


def test_scattered_sends_carry_a_part_and_gather_it_at_the_receiver() -> None:
    whole, part = hop(FREE, tp=4), hop(with_options(scattered_sends=True), tp=4)
    assert (whole.forward_bytes, part.forward_bytes) == (HIDDEN, HIDDEN / 4)
    assert part.send_forward_seconds == pytest.approx(whole.send_forward_seconds / 4)
    gathered = 3 / 4 * HIDDEN / INSIDE
    assert part.wire_latency_seconds == pytest.approx(whole.wire_latency_seconds + gathered)


def test_nothing_is_scattered_where_there_is_one_slice_or_a_sequence_is_cut() -> None:
    asked = with_options(scattered_sends=True)
    for replica in ({"tp": 1}, {"tp": 4, "sequence_parallel": True}):
        assert hop(asked, **replica) == hop(FREE, **replica)


# ---- blocking sends


def times(
    forward: Sequence[float], backward: Sequence[float], send: Sequence[float], m: int
) -> PipelineTimes:
    none = [0.0] * len(send)
    back = [1.5 * each for each in send]
    depths = range(len(forward), 0, -1)
    rows = (forward, backward, send, back, none, none)
    one = one_pipeline(plain_times(*rows, warmup=depths, microbatches=m))
    return replace(one, exchange=Exchange.DEEPSPEED)


def step_by_step(one: PipelineTimes) -> list[float]:
    """DeepSpeed's steps: in each, a stage going forward exchanges with the one before it."""
    stages, m = one.num_stages, one.num_microbatches
    now = [0.0] * stages
    last = [-1] * stages
    for step in range(2 * (m + stages - 1)):
        ids = []
        for s in range(stages):
            forward = (step + s) % 2 == 0
            ids.append((step - s) // 2 if forward else (step + s + 1) // 2 - stages)
        for s in range(1, stages):
            if (step + s) % 2:
                continue
            moved = 0.0
            if 0 <= last[s] < m:
                moved += one.send_backward[s - 1]
            if 0 <= ids[s] < m:
                moved += one.send_forward[s - 1]
            if moved:
                now[s - 1] = now[s] = max(now[s - 1], now[s]) + moved
        for s in range(stages):
            if 0 <= ids[s] < m:
                now[s] += float((one.forward if (step + s) % 2 == 0 else one.backward)[s, 0])
        last = ids
    return now


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(*[st.floats(0.1, 1.0)] * 2, st.floats(0.01, 0.6)), min_size=2, max_size=6),
    st.integers(1, 12),
)
def test_blocking_sends_follow_deepspeeds_steps(
    rows: list[tuple[float, float, float]], m: int
) -> None:
    one = times([row[0] for row in rows], [row[1] for row in rows],
                [row[2] for row in rows[1:]], m)  # fmt: skip
    ends = step_ends((one,), rendezvous=True)[0]
    assert ends == pytest.approx(step_by_step(one))
    watched = replay_step((one,), rendezvous=True).pipelines[0]
    assert [stage.end_seconds for stage in watched.stages] == pytest.approx(list(ends))
    both = step_ends((replace(one, exchange=Exchange.TORCH),), rendezvous=True)[0]
    assert max(ends) >= max(both) * (1 - 1e-9)


def test_blocking_sends_go_with_plain_1f1b_only() -> None:
    asked = with_options(blocking_sends=True)
    plan = plan_of((1, 1), asked=asked, schedule="gpipe")
    (fault,) = check_plan(plan, SHAPE, CLUSTER, replace(asked, global_batch_size=4))
    assert rule_of(fault) is Rule.TARGET
    assert "blocking_sends goes with 1f1b" in fault.message
    with pytest.raises(InputError, match="gpipe with blocking sends"):
        estimate(plan, SHAPE, CLUSTER, asked, LinearPredictor())
    deep = times([1] * 3, [2] * 3, [0.1] * 2, 8)
    with pytest.raises(InputError, match=r"\[4, 2, 1\]; with blocking sends they are \[3, 2, 1\]"):
        step_ends((replace(deep, warmup=(4, 2, 1)),), rendezvous=True)


# ---- context parallelism


def test_heads_are_exchanged_instead_of_sent_round_a_ring() -> None:
    asked = with_options(context_exchange=True)
    plan = plan_of((4,), asked=asked, cp=4, microbatches=2)
    found = estimate(plan, SHAPE, CLUSTER, asked, LinearPredictor())
    # Queries, keys, values and result of a quarter of the tokens, 3/4 of it to others, both ways.
    tokens, widths = 128 / 4, (256, 128, 128, 256)
    each = sum(3 / 4 * tokens * width * 4 / INSIDE for width in widths)
    assert seconds_of(found, Component.CONTEXT_PARALLEL) == pytest.approx(2 * 8 * 2 * each)
    sent = ledger(plan, SHAPE, CLUSTER, asked).of_class(TrafficClass.CONTEXT_PARALLEL)
    assert sent == pytest.approx(2 * 8 * 2 * each * INSIDE * 4)


# ---- gradients


# ---- selective recomputation


# ---- interleaving


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("groups", [2, 5])
def test_megatrons_interleaving_pays_one_exchange_per_pair_of_passes(
    stages: int, chunks: int, groups: int
) -> None:
    def step(send: float) -> float:
        m = groups * stages
        shape = Shape(schedule="interleaved-1f1b", stages=stages, microbatches=m, chunks=chunks)
        one = even_times(shape, 1.0 / chunks, 2.0 / chunks, send=send)
        one = replace(one, exchange=Exchange.MEGATRON)
        ends = step_ends((one,), rendezvous=True)[0]
        watched = replay_step((one,), rendezvous=True).pipelines[0]
        assert [stage.end_seconds for stage in watched.stages] == pytest.approx(list(ends))
        return float(max(ends))

    # arXiv 2104.04473, section 2.2.2: the bubble is (p - 1) (forward + backward) / v.
    assert step(0.0) == pytest.approx(3 * (groups * stages + (stages - 1) / chunks))
    # In the steady state every pair of passes ends with one exchange, all ways at once; two stages
    # send activations and gradients the same way, one behind the other.
    send = 0.01 if stages > 2 else 0.005
    pairs, each = groups * stages * chunks, send * (1 if stages > 2 else 2)
    assert pairs * each * 0.7 < step(send) - step(0.0) < (pairs + 4 * stages * chunks) * each


def test_overlap_of_single_products_leaves_what_follows_sums_of_several() -> None:
    """Of ten exchanges of a layer's two passes two scatters and two gatherings stay as they are."""
    times = {}
    for name, tensor, summed in (
        ("none", False, True),
        ("single", True, False),
        ("all", True, True),
    ):
        asked = with_options(summed_overlap=summed)
        overlap = OverlapSettings(tensor_parallel=tensor)
        found = plan_of((4,), asked=asked, tp=4, sequence_parallel=True, overlap=overlap)
        estimated = estimate(found, SHAPE, CLUSTER, asked, LinearPredictor())
        times[name] = seconds_of(estimated, Component.TENSOR_PARALLEL)
    assert times["all"] < times["single"] < times["none"]
    # All messages are equal here; nothing but the four is left where compute is long.
    assert times["single"] - times["all"] == pytest.approx(0.4 * (times["none"]), rel=0.35)
